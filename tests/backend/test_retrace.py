"""Graphs with a `torch.autograd.Function` are traced by Dynamo once more, whole, and stay what they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import optpass
from optpass.backend import entry
from optpass.backend.memory.measure import measure_peak, storage_bytes
from optpass.backend.retrace import retraceable
from optpass.options import Options

Tensor = torch.Tensor


class Swish(torch.autograd.Function):
    """Its gradient is not that of its forward, so that one which autograd found by itself would be seen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * gradient * torch.sigmoid(x)


class Scaled(torch.autograd.Function):
    """A number among its arguments, a tensor that is only an attribute, and one that is saved between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, weight: Tensor) -> Tensor:
        ctx.kept, ctx.factor = x.exp(), factor
        ctx.save_for_backward(weight, x)
        ctx.rows = x.shape[0]
        return x * factor @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        weight, x = ctx.saved_tensors
        return gradient @ weight.t() * ctx.factor + ctx.kept, None, x.t() @ gradient / ctx.rows


class Largest(torch.autograd.Function):
    """Two outputs, of which one is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.max(-1)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        ctx.width = x.shape[-1]
        return values, places

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        (places,) = ctx.saved_tensors
        return nn.functional.one_hot(places, ctx.width) * gradient[..., None] * 2.0


class Doubled(torch.autograd.Function):
    """Written in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 5 * gradient


def one(x: Tensor, w: Tensor) -> Tensor:
    return Swish.apply(x @ w).sin()


def several(x: Tensor, w: Tensor) -> Tensor:
    return Swish.apply(Scaled.apply(x, 0.5, w)) + Scaled.apply(Swish.apply(x), 2.0, w.t())


def largest(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    values, places = Largest.apply(x @ w)
    return values.exp(), places


def doubled(x: Tensor, w: Tensor) -> Tensor:
    return Doubled.apply(x @ w) * 3


def checkpointed(x: Tensor, w: Tensor) -> Tensor:
    result: Tensor = checkpoint(one, x, w, use_reentrant=False)
    return result + one(w, x)


def written_to(x: Tensor, w: Tensor) -> Tensor:
    """Dynamo's call for `.data` is one that it does not take."""
    hidden = x @ w
    hidden.data.clamp_(-0.5, 0.5)
    return hidden.sin() * hidden.data


def traced_twice(graphs: list[fx.GraphModule]) -> Callable[..., Any]:
    """A backend that hands Dynamo its own graph."""

    def last(gm: fx.GraphModule, _: Sequence[Any]) -> Any:
        graphs.append(gm)
        return gm.forward

    def backend(gm: fx.GraphModule, _: Sequence[Any]) -> Any:
        text, given = gm.print_readable(print_output=False), retraceable(gm)
        assert gm.print_readable(print_output=False) == text
        again = torch.compile(lambda *args: given(*args), backend=last, fullgraph=True)
        return lambda *args: again(*args)  # the outer Dynamo leaves alone what it is given

    return backend


@pytest.mark.parametrize("program", [one, several, largest, doubled, checkpointed, written_to])
@pytest.mark.parametrize("dynamic", [False, True])
def test_traced_once_more(program: Callable[..., Any], dynamic: bool, harness: Any) -> None:
    inputs = [torch.randn(8, 8, requires_grad=True) for _ in range(2)]
    graphs: list[fx.GraphModule] = []
    call = torch.compile(program, backend=traced_twice(graphs), fullgraph=True, dynamic=dynamic)
    ours, eager = harness.run(program, inputs, call=call), harness.run(program, inputs)
    assert len(graphs) == 1
    assert len(ours.outputs) == len(eager.outputs) and ours.grads.keys() == eager.grads.keys()
    for mine, theirs in zip(
        [*ours.outputs, *ours.grads.values()], [*eager.outputs, *eager.grads.values()], strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_a_graph_without_any_is_left_as_it_is() -> None:
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert retraceable(gm) is gm


@pytest.mark.slow
def test_a_step_that_is_planned_again_is_one_graph(hasty: None) -> None:
    """The optimizer has no state in the first step; the plan for the second one is made of the same graph."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.BatchNorm1d(32), nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(Swish.apply(self.up(self.norm(x))))

    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(*(Block() for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(300, 32), torch.randn(300, 32)

    def peaks(budget: int) -> list[int]:
        torch._dynamo.reset()
        optpass.reset_report()
        options = {"inner": "aot_eager", "memory_budget": budget, "strict": True}
        call, found = torch.compile(model, backend="optpass", options=options), []

        def step() -> None:
            (call(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            state = [t for of in optimizer.state.values() for t in of.values() if isinstance(t, Tensor)]
            held = storage_bytes([*model.parameters(), *model.buffers(), x, y, *state])
            found.append(held + measure_peak(step).bytes_above_start)
        return found

    top = max(peaks(10**11))
    budget = int(0.85 * top)
    assert max(peaks(budget)) <= budget
    assert not torch._dynamo.utils.counters["graph_break"]
    assert optpass.report().sites("recompute")


def test_inputs_are_numbered_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan says what it keeps by numbers, those of the graph's inputs among them."""
    graph = fx.Graph()
    weight, unread, x = (graph.placeholder(name) for name in ("weight", "unread", "x"))
    graph.output((graph.call_function(torch.nn.functional.embedding, (x, weight)),))
    found: list[list[torch.dtype]] = []

    def compiled(gm: fx.GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        found.append([value.dtype for value in inputs])
        return gm.forward

    monkeypatch.setattr(entry, "_compile", compiled)
    again = entry._compile_again(lambda: fx.GraphModule({}, graph), "again", Options(), None)
    given = torch.rand(3, 2), torch.rand(1), torch.tensor([2, 0])
    assert torch.equal(again(*given)[0], given[0][[2, 0]])
    assert found == [[torch.float32, torch.int64]]
    assert unread.users == {}
