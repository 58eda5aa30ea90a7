"""Runs small programs for real: their breaks, the diffs proposed for them, what they compute with the diffs made."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from optpass.auditing.fixes import patch, rewrite
from optpass.backend.audit.recording import Recording
from optpass.reporting.audit.model import Break

_FLAGS = {"capture_scalar_outputs": False, "capture_dynamic_output_shape_ops": False, "trace_numpy": True}


@dataclass
class Ran:
    """One run: breaks that follow from no other, and what was computed, the gradient of its sum included."""

    breaks: list[Break]
    values: list[Any]


@dataclass
class Fixed:
    """A program, its breaks, and the same with the diffs of all of them."""

    text: str
    breaks: list[Break]
    diff: str
    after: Ran
    reference: list[Any]

    def first_rewrites(self) -> set[str]:
        """Names of the rewrites proposed first, for the breaks in the program's own lines."""
        placed = [b for b in self.breaks if b.owner == "user" or b.user_line is not None]
        return {found[0].rewrite for b in placed if (found := rewrite.proposals(b, self.text))}

    def rewrites(self) -> set[str]:
        """Names of all rewrites that apply to any break."""
        return {p.rewrite for b in self.breaks for p in rewrite.proposals(b, self.text)}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ran]]:
    """Write a program to a file, and call its `f` on random numbers, compiled or not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("some words")
    level = logging.getLogger("torch").level
    logging.getLogger("torch").setLevel(logging.CRITICAL)

    def run_one(text: str, name: str = "program.py", *, compiled: bool = True, grad: bool = False) -> Ran:
        path = tmp_path / name
        path.write_bytes(text.encode())
        torch._dynamo.reset()
        quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        with torch._dynamo.config.patch(_FLAGS), warnings.catch_warnings(), quiet[0], quiet[1]:
            warnings.simplefilter("ignore")
            module = ModuleType("program")
            module.__file__ = str(path)
            monkeypatch.setitem(sys.modules, "program", module)  # Dynamo looks modules up by name
            scope = module.__dict__
            exec(compile(path.read_bytes(), str(path), "exec"), scope)
            torch.manual_seed(0)
            x = torch.randn(3, 3, requires_grad=grad)
            function = torch.compile(scope["f"], backend="eager") if compiled else scope["f"]
            with Recording(user_roots=(tmp_path,)) as recording:
                values = list(_leaves(function(x)))
            tensors = [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]
            if tensors:
                values += torch.autograd.grad(sum(t.sum() for t in tensors), x, allow_unused=True)
        return Ran([b for b in recording.result().breaks if b.caused_by is None], values)

    yield run_one
    torch._dynamo.reset()
    logging.getLogger("torch").setLevel(level)


@pytest.fixture
def fix(run: Callable[..., Ran], tmp_path: Path) -> Callable[..., Fixed]:
    """Run a program, make every proposed change to it, and run it again."""

    def fix_one(text: str, *, grad: bool = False) -> Fixed:
        text = text if "torch-free" in text else f"import torch\n{text}"
        reference = run(text, compiled=False, grad=grad).values
        before = run(text, grad=grad)
        path = str(tmp_path / "program.py")
        diff = rewrite.propose_all(before.breaks, {path: text}).get(path, "")
        after = run(patch.applied(diff, text), "program.py", grad=grad) if diff else before
        return Fixed(text, before.breaks, diff, after, reference)

    return fix_one


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for part in value:
            yield from _leaves(part)
    else:
        yield value
