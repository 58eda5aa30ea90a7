"""Every Python block of the documents runs exactly as it is printed.

The comment above a block, `<!-- test: KEY=VALUE ... -->`, is the environment of its test; `<!-- file: PATH -->` marks
the parts of the example pass, which `test_example_pass` runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Runs every block of one document, each in a namespace of its own, with tracebacks that name document and line.
_RUNNER = """
import json, linecache, os, pathlib, sys, types
for position, (path, line, text, environment) in enumerate(json.load(sys.stdin)):
    pathlib.Path(f"block{position}.py").write_text("\\n" * (line - 1) + text)
    code = compile("\\n" * (line - 1) + text, str(pathlib.Path(f"block{position}.py").absolute()), "exec")
    os.environ.update(environment)
    module = types.ModuleType(f"block{position}")
    sys.modules[module.__name__] = module
    print(f"-- {path}:{line}", flush=True)
    exec(code, module.__dict__)
    for key in environment:
        del os.environ[key]
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README.md", "docs/attention.md", "docs/memory.md"])
def test_blocks_run(name: str, blocks: Callable[..., list[Any]], tmp_path: Path) -> None:
    import json

    found = blocks(ROOT / name, "python")
    assert found
    todo = []
    for block in found:
        kind, _, settings = block.note.partition(":")
        assert kind == "test", f"{name}:{block.line}: a block needs '<!-- test: KEY=VALUE ... -->' above it"
        todo.append((name, block.line, block.text, dict(pair.split("=", 1) for pair in settings.split())))
    done = subprocess.run(
        [sys.executable, "-c", _RUNNER], input=json.dumps(todo), cwd=tmp_path, capture_output=True, text=True,
        timeout=240, check=False, env={**os.environ, "OPTPASS_CACHE_DIR": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("-- ") == len(todo)
    if name == "README.md":
        assert "M, N, K" in done.stdout  # the analysis found what the text says it finds
        assert (tmp_path / "report.html").is_file()
    elif name == "docs/memory.md":
        assert "without a budget" in done.stdout and "ahead.py" not in done.stdout
    else:
        assert "-> SDPA" in done.stdout


def test_no_document_has_blocks_that_nothing_runs(documents: list[Path], blocks: Callable[..., list[Any]]) -> None:
    with_blocks = {path.name for path in documents if blocks(path, "python")}
    assert with_blocks == {"README.md", "CONTRIBUTING.md", "attention.md", "memory.md"}
