"""Timing swapped sites on request: every swapped site gets figures, and the report shows them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import optpass
from optpass.backend.measured_attention import measure
from optpass.passes.attention.problem import Problem


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / 4, -1) @ v


def test_sites_are_timed_when_asked() -> None:
    torch._dynamo.reset()
    optpass.reset_report()
    compiled = torch.compile(attention, backend="optpass", options={"inner": "eager", "attention": "always"})
    compiled(*torch.randn(3, 1, 2, 32, 16))
    (site,) = optpass.report().sites("attention")
    assert "measured_gain" not in site.cost
    (site,) = optpass.report(measure=True).sites("attention")
    cost = site.cost
    assert cost["measured_gain"] == pytest.approx(cost["measured_unfused_us"] / cost["measured_fused_us"])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("mask", "numel"), [("none", 0), ("causal", 0), ("bool", 16 * 24), ("float", 2 * 24)])
def test_every_kind_of_problem_runs(training: bool, mask: str, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, backend: function)
    problem = Problem(
        "cpu",
        torch.float32,
        2,
        4,
        2,
        16,
        24,
        8,
        8,
        mask=mask,
        mask_numel=numel,
        training=training,  # type: ignore[arg-type]
    )
    assert all(figure > 0 for figure in measure(problem))
