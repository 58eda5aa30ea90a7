"""Programs written to a file of their own, so that lines are known; recordings of calls of compiled functions."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from optpass.backend.audit.recording import Recording
from optpass.backend.audit.silent import SilentCollector
from optpass.reporting.audit.model import Audit, SilentEager


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], ModuleType]:
    """Writes Python text to a file and imports it; a line is found by what stands in it with `line_of`."""

    def write(text: str, name: str = "program") -> ModuleType:
        path = tmp_path / f"{name}_{abs(hash(text)) % 10**8}.py"
        path.write_text("import torch\n" + textwrap.dedent(text), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module

    return write


def line_of(module: ModuleType, text: str) -> int:
    """The first line of a program that has `text` in it."""
    assert module.__file__ is not None
    lines = Path(module.__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.fixture
def line() -> Callable[[ModuleType, str], int]:
    """`line_of`."""
    return line_of


@pytest.fixture
def record(capsys: pytest.CaptureFixture[str]) -> Callable[..., Audit]:
    """Compiles a function with the eager backend, calls it, and gives what a recording saw; errors are swallowed."""

    def run(function: Callable[..., Any], *args: Any, calls: int = 1, **compile_args: Any) -> Audit:
        torch._dynamo.reset()
        with Recording() as recording:
            compiled = torch.compile(function, backend="eager", **compile_args)
            for _ in range(calls):
                with contextlib.suppress(RuntimeError):  # fullgraph=True raises the break
                    compiled(*args)
        return recording.result()

    return run


@pytest.fixture
def ledger() -> Iterator[Callable[[], list[SilentEager]]]:
    """What runs eager without a word, from here on."""
    torch._dynamo.reset()
    collector = SilentCollector()
    collector.install()
    try:
        yield collector.records
    finally:
        collector.uninstall()
        torch._dynamo.reset()
