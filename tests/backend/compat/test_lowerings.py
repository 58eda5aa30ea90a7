"""Operators of ours in the code that Inductor makes: those of torch stand in their place."""

from __future__ import annotations

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

pytestmark = pytest.mark.usefixtures("fresh")


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.mT / 8**0.5, -1) @ v


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", (False, True))
def test_a_result_is_copied_without_python(dynamic: bool) -> None:
    call = torch.compile(written_out, backend="optpass", dynamic=dynamic, options={"attention": "always"})
    operands = [torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3)]
    result, codes = run_and_get_code(call, *operands)
    code = "".join(codes)
    assert "aten.clone.default(" in code and re.search(r"torch\.ops\.optpass\.\w+\.default\(", code) is None
    result.mul_(2.0)  # the kernel keeps its own
    ours = torch.autograd.grad(result.sum(), operands)
    exact = [t.detach().double().requires_grad_() for t in operands]
    for got, wanted in zip(ours, torch.autograd.grad(2.0 * written_out(*exact).sum(), exact), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)
