"""Steps under a budget for the tests of this folder."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from optpass.backend.compat import memory_known


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def steps() -> ModuleType:
    """The module `steps` beside this file."""
    return _load("optpass_test_memory_steps", Path(__file__).with_name("steps.py"))


@pytest.fixture(scope="session")
def programs() -> ModuleType:
    """The programs of `tests/passes/memory`."""
    path = Path(__file__).parents[2] / "passes" / "memory" / "programs.py"
    return _load("optpass_test_memory_programs", path)


@pytest.fixture(autouse=True)
def _hasty(hasty: None) -> None:
    """Whatever the search finds is to be carried out rightly."""


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What was there before the test is not looked through: each plan asks all living objects for its optimizer. And
    nothing is remembered of what Inductor generated."""
    memory_known.forget()
    gc.freeze()
    yield
    gc.unfreeze()
