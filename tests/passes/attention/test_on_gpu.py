"""Every form through Inductor on a GPU: the kernels that it has there, and results and gradients against float64.

Runs where `--device cuda` says so. One process runs them one after another, as they come: what a library keeps of one
program must not change the next.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
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


@pytest.fixture(autouse=True)
def on_gpu(pytestconfig: pytest.Config) -> Iterator[None]:
    """Inputs are there; a program that makes tensors says where. A default device is a mode that Dynamo traces, too."""
    torch.set_default_device(None)
    yield
    torch.set_default_device(pytestconfig.option.device)


def test_form(
    form: Any, dtype: torch.dtype, training: bool, compiled: Any, harness: Any, exact: Any, seeded: int,
    pytestconfig: pytest.Config,
) -> None:  # fmt: skip
    with torch.device(pytestconfig.option.device):
        program, inputs = form.build(dtype, training)
    with torch.set_grad_enabled(training):
        try:
            reference, eager = exact(program, inputs), harness.run(program, inputs)
        except RuntimeError as error:
            pytest.skip(f"not a program for this device: {str(error).splitlines()[0]}")
        ours = harness.run(program, inputs, compiled(program, inner="inductor"))
    if not form.dropout and all(t.dim() for t in eager.outputs):  # Inductor draws other numbers than eager does
        _forms().assert_as_exact(reference, ours, eager)
    target = form.train if training else form.target
    if target in ("sdpa", "flex", "fused"):
        assert len(optpass.report().sites("attention")) == form.sites


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    scores = q @ k.mT / 8
    if causal:
        later = torch.ones(512, 512, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("causal", (False, True))
def test_cudnn_is_called_without_python(causal: bool, pytestconfig: pytest.Config) -> None:
    from torch._inductor.utils import run_and_get_code

    device = pytestconfig.option.device

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _attention(q, k, v, causal).transpose(1, 2).flatten(2).sin()

    operands = [
        torch.randn(2, 4, 512, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]  # fmt: skip

    def step() -> tuple[torch.Tensor, ...]:
        call = torch.compile(program, backend="optpass", options={"attention": "always"})
        return torch.autograd.grad(call(*operands).sum(), operands)

    ours, codes = run_and_get_code(step)
    assert re.search(r"torch\.ops\.optpass\.\w+\.default\(", "".join(codes)) is None
    exact = [t.detach().double().requires_grad_() for t in operands]
    for got, wanted in zip(ours, torch.autograd.grad(program(*exact).sum(), exact), strict=True):
        assert float((got - wanted).abs().max()) <= 0.02 * float(wanted.abs().max())


@pytest.mark.parametrize("causal", (False, True))
def test_results_are_not_copied(causal: bool, pytestconfig: pytest.Config) -> None:
    """In float32 the kernel writes another order of dims than the program returns."""
    from torch._inductor.utils import run_and_get_code

    device = pytestconfig.option.device

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _attention(q, k, v, causal)

    operands = [torch.randn(2, 4, 512, 64, device=device) for _ in range(3)]
    with torch.no_grad():
        call = torch.compile(program, backend="optpass", options={"attention": "always"})
        ours, codes = run_and_get_code(call, *operands)
    assert "_attention" in codes[-1] and "triton_poi" not in codes[-1]
    assert ours.is_contiguous()
    wanted = program(*(t.double() for t in operands))
    assert float((ours - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
