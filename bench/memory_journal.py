"""What a long measurement in a fresh process has found so far, in a file: for progress, and if it does not end.

The child writes the whole of its answer after each part; the parent reads it while it waits, and takes it for the
answer where the child fails. Nothing here measures.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optpass.bench.isolate import run_isolated
from optpass.bench.progress import Progress
from optpass.bench.result import BenchError

#: Seconds between two looks at the journal.
LOOK_S = 2.0

Run = Any


def write(path: str | None, label: str, answer: Mapping[str, Any]) -> None:
    """The child's side: `label` begins now, `answer` is what was found until now. None for no journal."""
    if path is None:
        return
    fresh = Path(f"{path}.new")
    fresh.write_text(json.dumps({"label": label, "answer": answer}), encoding="utf-8")
    fresh.replace(path)  # so that nobody reads half of it


def read(path: str | Path) -> tuple[str, dict[str, Any]]:
    """The last label and answer; empty ones where there is nothing yet."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError:
        return "", {}
    return found["label"], found["answer"]


def run_watched(
    target: str, arguments: Mapping[str, Any], progress: Progress, title: str, *, run: Run = run_isolated, **how: Any
) -> tuple[dict[str, Any], str]:
    """`run_isolated` of a function that takes `journal`, a path: its answer, and why it is not whole ('' if it is).

    Raises:
        BenchError: it failed before it found anything.
    """
    with tempfile.TemporaryDirectory(prefix="optpass-journal-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "journal.json"
        done = threading.Event()
        watcher = threading.Thread(target=_watch, args=(path, progress, title, done), daemon=True)
        watcher.start()
        try:
            return run(target, {**arguments, "journal": str(path)}, **how), ""
        except BenchError as error:
            _, answer = read(path)
            if not answer:
                raise
            return answer, str(error)
        finally:
            done.set()
            watcher.join()


def _watch(path: Path, progress: Progress, title: str, done: threading.Event) -> None:
    last = ""
    while not done.wait(LOOK_S):
        with contextlib.suppress(ValueError):
            label, _ = read(path)
            if label and label != last:
                last = label
                progress.step(f"{title}: {label}")
