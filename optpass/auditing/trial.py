"""A run of the user's program for comparison: some of its files replaced by texts of ours, what it computes kept.

Runs in the process of the program; see child.py. Replaced files stay as they are on disk: Python is given the other
text where it would read them. Standard library only until the program has loaded torch.
"""

from __future__ import annotations

import importlib.machinery
import json
import linecache
import os
import random
import sys
from pathlib import Path
from typing import Any

from optpass.auditing.imports import AfterImport

#: Both runs start from it, unless the program sets its own.
SEED = 0


class Trial:
    """What a run for comparison changes and keeps.

    Args:
        control: JSON file: `files`, the path of each replaced file and of the text in its place; `outputs`, where to
            put what compiled functions returned; `calls`, of how many calls.
    """

    def __init__(self, control: Path) -> None:
        settings = json.loads(control.read_text(encoding="utf-8"))
        self._texts = {os.path.realpath(file): Path(copy).read_bytes() for file, copy in settings["files"].items()}
        self._outputs, self._calls = Path(settings["outputs"]), int(settings["calls"])
        self._collector: Any = None

    def install(self) -> None:
        """Put the texts in place and set the seeds, now and as soon as torch and numpy are loaded."""
        _overlay(self._texts)
        random.seed(SEED)
        sys.meta_path.insert(0, AfterImport({"torch": _seed_torch, "numpy": _seed_numpy}))

    def begin(self) -> None:
        """The compiler is loaded: keep what compiled functions return."""
        from optpass.backend.audit.outputs import OutputCollector
        from optpass.backend.compat.reproducible import random_as_eager

        random_as_eager()
        self._collector = OutputCollector(self._calls)
        self._collector.install()

    def finish(self) -> None:
        """Write what was kept."""
        if self._collector is None:
            return
        import torch

        self._collector.uninstall()
        part = self._outputs.with_suffix(".part")
        torch.save({"calls": self._collector.calls, "problem": self._collector.problem}, part)
        part.replace(self._outputs)


def _overlay(texts: dict[str, bytes]) -> None:
    """Have Python's loader of source files read other texts for some; their compiled caches are passed over."""
    loader = importlib.machinery.SourceFileLoader
    get_data, path_stats = loader.get_data, loader.path_stats

    def other_data(self: Any, path: str) -> bytes:
        return texts[real] if (real := os.path.realpath(path)) in texts else get_data(self, path)

    def other_stats(self: Any, path: str) -> Any:
        if os.path.realpath(path) in texts:
            raise OSError("replaced for a trial: has no compiled cache")
        return path_stats(self, path)

    loader.get_data, loader.path_stats = other_data, other_stats  # type: ignore[method-assign]
    for path, data in texts.items():
        text = data.decode("utf-8-sig", errors="replace")
        # Without a time of change, `linecache` never looks at the file itself.
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)


def _seed_torch() -> None:
    sys.modules["torch"].manual_seed(SEED)


def _seed_numpy() -> None:
    sys.modules["numpy"].random.seed(SEED)
