"""Every form through Inductor on a GPU: the kernels that it has there, and results and gradients against float64.

Runs where `--device cuda` says so. `pytest --device cuda tests/passes/attention` runs the other tests there, too.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import optpass

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean", "seeded")]


def _forms() -> Any:
    """`test_forms.py`, whose comparison this is."""
    name = "attention_test_forms"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("test_forms.py"))
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def test_form(
    form: Any, dtype: torch.dtype, training: bool, compiled: Any, harness: Any, exact: Any, seeded: int
) -> None:
    comparison = _forms()

    def through(program: Any) -> Any:
        return compiled(program, inner="inductor")

    reference, ours, eager = comparison.both(form, dtype, training, through, harness, exact, seeded)
    if not form.dropout:  # Inductor draws other numbers than eager does
        comparison.assert_as_exact(reference, ours, eager)
    target = form.train if training else form.target
    if target in ("sdpa", "flex", "fused"):
        assert len(optpass.report().sites("attention")) == form.sites
