"""What may run again: a gather, though its operator's size can depend on data; never what a mask selects."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from optpass.passes.memory.purity import why_not_recomputed

Function = Callable[..., torch.Tensor]


def last_call(function: Function, *args: torch.Tensor) -> fx.Node:
    """The call that makes the result of `function`, traced with sizes that data may decide."""
    graph = make_fx(function, tracing_mode="symbolic")(*args).graph
    output = next(n for n in graph.nodes if n.op == "output").args[0]
    assert isinstance(output, fx.Node)
    return output


ROWS, INDEX, MASK, COUNTS = torch.randn(6, 4), torch.tensor([0, 5, 2]), torch.rand(6) > 0.5, torch.tensor([2, 1] * 3)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda x, i: x[i], (ROWS, INDEX)),
        (lambda x, i: x[i, i + 0], (torch.randn(6, 6), INDEX)),
        (lambda x, i: x[:, i.int()], (torch.randn(3, 6), INDEX)),
        (lambda x, n: torch.repeat_interleave(n, output_size=9), (ROWS, COUNTS)),
    ],
)
def test_what_is_as_large_as_its_arguments_say_runs_again(function: Function, args: tuple[torch.Tensor, ...]) -> None:
    assert why_not_recomputed(last_call(function, *args)) == ""


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda x, m: x[m], (ROWS, MASK)),
        (lambda x, m: torch.nonzero(m), (ROWS, MASK)),
        (lambda x, m: torch.masked_select(x, m[:, None]), (ROWS, MASK)),
        (lambda x, n: torch.repeat_interleave(n), (ROWS, COUNTS)),
    ],
)
def test_what_data_sizes_runs_once(function: Function, args: tuple[torch.Tensor, ...]) -> None:
    assert why_not_recomputed(last_call(function, *args)) == "the size of its result depends on data"
