"""Random numbers that are drawn again in the backward: equal to the bit, and no mask is kept where memory is short."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import optpass
from optpass.backend.memory.measure import measure_peak, storage_bytes
from optpass.passes.memory import redraw
from optpass.passes.memory.workspace.workspace import SAVES_STATE, WITH_STATE

ROWS, WIDTH = 512, 48


def sdpa(x: Tensor) -> Tensor:
    q = x.view(4, -1, 3, 16).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.2).transpose(1, 2).reshape(x.shape)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(F.gelu(x), 0.3),
    "noise": lambda x: x.tanh() + 0.1 * torch.randn_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x.detach())),
    "alpha dropout": lambda x: F.alpha_dropout(F.selu(x), 0.2),
    "of no tensor": lambda x: x.tanh() * torch.rand(WIDTH),
    "permuted": lambda x: x.tanh()[torch.randperm(ROWS)],
    "written in place": lambda x: x.tanh() + torch.empty_like(x).uniform_(),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "attention": sdpa,
}


class Noisy(torch.autograd.Function):
    """Draws in its backward too, which is to draw once."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1.5

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 1.5 + 0.01 * torch.randn_like(x) + F.dropout(g, 0.2)


DRAWS["in the backward"] = lambda x: Noisy.apply(F.dropout(F.gelu(x), 0.3))


class Drawing(nn.Module):
    """Layers with a draw behind each."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.draw = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6)), draw

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.draw(layer(x))
        return x


@pytest.mark.parametrize("name", DRAWS)
def test_a_budget_changes_no_number(name, steps):
    torch.manual_seed(0)
    model, inputs = steps.WithLoss(Drawing(DRAWS[name])), [torch.randn(ROWS, WIDTH)]
    free = steps.run(model, inputs)
    for budget in steps.budgets(free, [0.02, 0.5]):
        tight = steps.run(model, inputs, budget)
        assert tight.recomputed and tight.peak <= budget
        assert tight.error <= 0.001
        assert steps.equal(free, tight)  # gradients, and the generator's state


def by_hand(model: nn.Module, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = checkpoint(lambda x, layer=layer: model.draw(layer(x)), x, use_reentrant=False)
    return x


def test_the_smallest_peak_with_dropout_is_below_checkpointing_by_hand(steps):
    """The mask of a dropout behind a wide layer is most of what would be kept."""
    torch.manual_seed(0)
    model, x = steps.WithLoss(Drawing(lambda x: F.dropout(x.repeat(1, 8), 0.1)[:, :WIDTH])), torch.randn(ROWS, WIDTH)
    free = steps.run(model, [x])
    call = lambda x: steps.loss_of(by_hand(model.model, x))  # noqa: E731
    peaks = []
    for _ in range(2):
        peaks.append(measured(call, x, model))
        model.zero_grad()
    assert free.figure("floor_bytes") <= peaks[-1]


def measured(call: Callable[[Tensor], Tensor], x: Tensor, model: nn.Module) -> int:
    return storage_bytes([x, *model.parameters()]) + measure_peak(lambda: call(x).backward()).bytes_above_start


def test_what_is_drawn_once_is_drawn_as_before():
    """A forward that keeps no state calls the operator itself."""
    graph, mode = fx.Graph(), torch._subclasses.FakeTensorMode()
    with mode:
        value = torch.empty(4)
    x = graph.placeholder("x")
    x.meta["val"] = value
    drawn = graph.call_function(torch.ops.aten.rand_like.default, (x,))
    drawn.meta |= {"val": value, "partitioner_tag": "is_forward"}
    graph.output((drawn,))
    redraw.split(graph)
    assert [n.target for n in graph.nodes if n.target in (SAVES_STATE, WITH_STATE)] == [SAVES_STATE, WITH_STATE]
    assert redraw.drawn_by(next(n for n in graph.nodes if n.target is WITH_STATE)) is drawn.target
    redraw.settle(graph)
    graph.lint()
    assert [(n.name, n.target) for n in graph.nodes if n.op == "call_function"] == [(drawn.name, drawn.target)]


def test_the_report_names_what_is_drawn_again(steps):
    torch.manual_seed(0)
    model, inputs = steps.WithLoss(Drawing(DRAWS["dropout"])), [torch.randn(ROWS, WIDTH)]
    free = steps.run(model, inputs)
    steps.run(model, inputs, next(steps.budgets(free, [0.02])))
    assert not [site for site in optpass.report().sites() if "rng_state" in f"{site.node} {site.before} {site.reason}"]
