"""Where the report says that an attention stands, and where what keeps it from being swapped."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

import optpass
from optpass.reporting.terminal_sites import render_sites

pytestmark = pytest.mark.usefixtures("clean", "seeded")


def gated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    scores = q @ k.mT
    weights = scores.softmax(-1)
    weights = weights * gate
    return weights @ v


def test_a_declined_site_and_what_stands_in_its_way() -> None:
    inputs = [*torch.randn(3, 2, 3, 6, 8), torch.rand(6, 6)]
    options = {"inner": "eager", "attention": "always"}
    torch.compile(gated, backend="optpass", options=options)(*inputs)
    report = optpass.report()
    (declined,) = report.declined("attention")
    first = gated.__code__.co_firstlineno
    assert (declined.file, declined.line) == (__file__, first + 4)
    assert (declined.node_file, declined.node_line) == (__file__, first + 3)
    printed = io.StringIO()
    render_sites(report, Console(file=printed, width=300), top=10)
    assert f"{Path(__file__).name}:{first + 4} at node {declined.node} (" in printed.getvalue()
    assert f"{Path(__file__).name}:{first + 3})" in printed.getvalue()


def test_one_place_is_said_once() -> None:
    inputs = [*torch.randn(3, 2, 3, 6, 8)]
    options = {"inner": "eager", "attention": "always"}
    torch.compile(lambda q, k, v: (q @ k.mT).softmax(-2) @ v, backend="optpass", options=options)(*inputs)
    (declined,) = optpass.report().declined("attention")
    assert declined.line and declined.node_file is declined.node_line is None


def test_a_hook_on_scores_is_named() -> None:
    def hooked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        scores.register_hook(lambda grad: grad * 2)
        return scores.softmax(-1) @ v

    inputs = [torch.randn(2, 3, 6, 8, requires_grad=True) for _ in range(3)]
    options = {"inner": "aot_eager", "attention": "always"}
    torch.compile(hooked, backend="optpass", options=options)(*inputs)
    (declined,) = optpass.report().declined("attention")
    assert "register_hook" in declined.reason and declined.node_line == hooked.__code__.co_firstlineno + 2
