"""Programs shared by the tests of memory plans, each traced once."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="session")
def programs() -> ModuleType:
    """The module `programs` beside this file."""
    spec = importlib.util.spec_from_file_location("memory_programs", Path(__file__).with_name("programs.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def joints(programs):
    """Joint graphs by name, each with the model and its inputs."""
    torch.manual_seed(0)
    found = {}
    for name, model, shape in (
        ("stack", programs.Stack(4), (2, 24, 16)),
        ("outside", programs.Stack(3, loss=False), (2, 24, 16)),
        ("chain", programs.Chain(), (32, 8)),
        ("branches", programs.Branches(), (32, 8)),
    ):
        x = torch.randn(shape)
        found[name] = model, x, programs.joint_of(model, x)
    return found
