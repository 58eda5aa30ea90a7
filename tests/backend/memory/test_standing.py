"""Several graphs of a step under Inductor: they run as they stand until the step was seen, and are compiled once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._inductor import compile_fx
from torch._inductor import config as inductor
from torch._inductor.graph import GraphLowering

import optpass
from optpass.backend.compat.memory_drawn import draw_as_generated
from optpass.backend.memory.measure import step_peak
from optpass.backend.memory.partition.standing import CANNOT_STAND, STANDS, can_stand
from optpass.backend.memory.together.together import STEPS

ATEN = torch.ops.aten


class Net(nn.Module):
    """An embedding, whose weight its graph reads before what it is given, and three layers with breaks between."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Dropout(dropout))
            for _ in range(3)
        )
        self.head = nn.Linear(32, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two, three = self.layers
        y = self.embedding(x)
        y = y + one(y)
        torch._dynamo.graph_break()
        y = y + two(y)
        torch._dynamo.graph_break()
        y = y + three(y)
        return F.cross_entropy(self.head(y), x)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Trains a `Net` for some steps: its losses, parameters, the peak of each step, and the code generated in each."""
    generated: list[int] = []
    codegen = GraphLowering.codegen

    def counted(graph: GraphLowering) -> Any:
        generated[-1] += 1
        return codegen(graph)

    def train(budget: int, *, dropout: float = 0.0, n: int = 3, compiled: bool = True) -> Any:
        torch.compiler.reset()
        optpass.reset_report()
        torch.manual_seed(0)
        generated.clear()
        net, x = Net(dropout), torch.randint(50, (1024,))
        optimizer = torch.optim.AdamW(net.parameters())
        options = {"memory_budget": budget, "strict": True}
        call = torch.compile(net, backend="optpass", options=options) if compiled else net
        losses, peaks = [], []

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            loss = call(x)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

        for _ in range(n):
            generated.append(0)
            peaks.append(step_peak(net, step, optimizer, [x]).total)
        return losses, list(net.parameters()), peaks, list(generated)

    monkeypatch.setattr(GraphLowering, "codegen", counted)
    with inductor.patch(force_disable_caches=True):
        yield train


def said() -> str:
    """What the report says of the budget."""
    sites = [*optpass.report().sites(), *optpass.report().declined()]
    return " ".join(site.reason or "" for site in sites if site.kind == "memory budget")


@pytest.mark.slow
@pytest.mark.by_turns
def test_graphs_are_compiled_once_their_step_was_seen(trained: Callable[..., Any]) -> None:
    _, _, free, _ = trained(10**9)
    budget = int(0.75 * free[-1])
    _, parameters, peaks, generated = trained(budget)
    assert "planned for the step as it was seen" in said()
    _, expected, _, _ = trained(0, compiled=False)
    torch.testing.assert_close(parameters, expected)
    assert max(peaks) <= budget
    assert min(peaks[1:]) >= 0.95 * budget
    assert generated[0] == 0  # nothing is lowered for a step whose plans do not last
    assert generated[1] > 0
    assert generated[2] == 0


@pytest.mark.slow
@pytest.mark.by_turns
def test_graphs_that_are_left_alone_are_compiled_at_once(trained: Callable[..., Any]) -> None:
    _, _, _, generated = trained(10**9)
    assert generated[0] > 0
    assert generated[1:] == [0, 0]


@pytest.mark.slow
@pytest.mark.by_turns
def test_dropout_is_that_of_generated_code(trained: Callable[..., Any]) -> None:
    expected, _, free, _ = trained(10**9, dropout=0.3, n=2)
    losses, _, peaks, generated = trained(budget := int(0.9 * free[-1]), dropout=0.3, n=2)
    assert generated[0] == 0
    assert max(peaks) <= budget
    torch.testing.assert_close(losses, expected)


@pytest.mark.slow
@pytest.mark.by_turns
def test_what_never_runs_backward_is_compiled_in_the_next_step(trained: Callable[..., Any]) -> None:
    """Nothing is seen of its steps, so that none is planned."""
    _, _, free, _ = trained(10**9, n=2)
    torch.compiler.reset()
    torch.manual_seed(0)
    net, x = Net(), torch.randint(50, (1024,))
    call = torch.compile(net, backend="optpass", options={"memory_budget": int(0.75 * free[-1]), "optimizer": "adamw"})
    expected = net(x)
    for _ in range(3):
        torch.testing.assert_close(call(x), expected)
    leaves = [leaf for leaf in STEPS._chains.leaves() if leaf.next is None and leaf.partitioner.as_it_stands]
    assert not leaves


@pytest.mark.slow
@pytest.mark.by_turns
def test_what_cannot_be_run_as_it_stands_is_compiled_at_once_and_says_why(
    trained: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, free, _ = trained(10**9, n=2)
    monkeypatch.setattr("optpass.backend.memory.partition.partitioner.can_stand", lambda graph: True)
    monkeypatch.setattr(
        "optpass.backend.memory.replay.replay.GraphRun", None
    )  # so that no replay of it comes to an end
    _, _, _, generated = trained(int(0.75 * free[-1]), n=1)
    assert generated[0] > 0
    assert STANDS not in said()
    assert f"{CANNOT_STAND}: TypeError" in said()


@pytest.mark.slow
@pytest.mark.by_turns
def test_what_does_not_fit_as_it_stands_is_compiled_at_once(trained: Callable[..., Any]) -> None:
    """What is generated for the same plans needs less: of the graphs of a step, from the first on that does not fit."""
    _, _, free, _ = trained(10**9, dropout=0.3, n=2)
    _, _, peaks, generated = trained(budget := int(0.75 * free[-1]), dropout=0.3, n=1)
    assert generated[0] > 0
    assert max(peaks) <= budget
    assert CANNOT_STAND not in said()


@pytest.mark.parametrize(
    ("target", "stands"),
    [
        (ATEN.mm.default, True),
        (ATEN.native_dropout.default, False),
        (torch.ops.prims.convert_element_type.default, True),
        (torch.ops.higher_order.cond, False),
    ],
)
def test_what_can_stand(target: Any, stands: bool) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(target, (x,)),))
    assert can_stand(graph) is stands


@pytest.mark.parametrize(("mode", "stands"), [("rand", True), ("randn", False)])
def test_what_generated_code_draws(mode: str, stands: bool) -> None:
    graph = fx.Graph()
    seeds = graph.call_function(torch.ops.prims.inductor_seeds.default, (1, torch.device("cpu")))
    seed = graph.call_function(torch.ops.prims.inductor_lookup_seed.default, (seeds, 0))
    drawn = graph.call_function(torch.ops.prims.inductor_random.default, ([4], seed, mode))
    for node, value in ((seeds, torch.zeros(1)), (seed, torch.zeros(())), (drawn, torch.zeros(4))):
        node.meta["val"] = value
    graph.output((drawn,))
    assert can_stand(graph) is stands
    drawn.meta["val"] = torch.zeros(4, device="meta")
    assert not can_stand(graph)


def test_numbers_are_those_of_generated_code() -> None:
    found: list[fx.GraphModule] = []

    def watched(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        found.append(copy.deepcopy(gm))
        return compile_fx.compile_fx_inner(gm, inputs, **kwargs)

    def drawn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand_like(x), F.dropout(x, 0.3)

    x = torch.ones(700, 100)
    compiled = torch.compile(drawn, backend=lambda gm, inputs: compile_fx.compile_fx(gm, inputs, inner_compile=watched))
    torch.manual_seed(3)
    expected, state = compiled(x), torch.get_rng_state()
    torch.manual_seed(3)
    numbers = draw_as_generated(found[0])(x)
    torch.testing.assert_close(list(numbers), list(expected), rtol=0, atol=1e-7)
    assert torch.equal(numbers[1] == 0, expected[1] == 0)
    assert torch.equal(torch.get_rng_state(), state)
