"""A budget in steps that are more than one graph called once: graphs that run several times, sizes that change, and
what eager code around the graphs holds."""

from __future__ import annotations

import gc
import weakref
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import optpass
from optpass.backend.compat import memory_autograd as autograd
from optpass.backend.compat.memory_autograd import running_backward
from optpass.backend.compat.memory_backward import held_by_nodes, watch_backwards
from optpass.backend.memory.eager.part import loss_of
from optpass.backend.memory.measure import measure_peak, storage_bytes
from optpass.backend.memory.plans import allot
from optpass.backend.memory.plans.allot import Around, above, choices_of, select
from optpass.backend.memory.plans.bounds import Bound, Choice, excess
from optpass.passes.memory.search.known import Known
from optpass.passes.memory.search.search import Search

ENGINE = torch.autograd._engine_run_backward


class Blocks(nn.Module):
    """Blocks that are compiled one by one, between an eager embedding and an eager head."""

    def __init__(self, programs, count: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.blocks = nn.ModuleList(programs.Block(32, 2, 0.1) for _ in range(count))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


@pytest.mark.slow
def test_a_graph_that_runs_several_times_is_budgeted(programs):
    ids, target = torch.randint(0, 50, (2, 32)), torch.randint(0, 50, (64,))

    def trained(budget):
        torch._dynamo.reset()
        optpass.reset_report()
        torch.manual_seed(0)
        model = Blocks(programs, 5)
        for block in model.blocks:
            block.compile(
                backend="optpass", options={"inner": "aot_eager", "optimizer": "none", "memory_budget": budget}
            )

        def step():
            torch.manual_seed(1)
            F.cross_entropy(model(ids).view(-1, 50), target).backward()

        peaks = []
        for _ in range(4):
            clear(model)
            peaks.append(storage_bytes([*model.parameters(), ids, target]) + measure_peak(step).bytes_above_start)
        return peaks, [p.grad for p in model.parameters()]

    (*_, peak), gradients = trained(10**9)
    assert not optpass.report().warnings
    budget = int(0.6 * peak)
    less, same = trained(budget)
    assert max(less) <= budget  # in the first step, too: its caller calls it in a loop
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))


@pytest.mark.slow
def test_marked_sizes_and_micro_batches(steps, programs):
    torch.manual_seed(0)
    model = programs.Stack(1, 32, 2)
    reference = steps.run(model, [torch.randn(4, 32, 32)])
    budget = int(1.2 * reference.peak)
    call = torch.compile(
        model, backend="optpass", options={"inner": "aot_eager", "optimizer": "none", "memory_budget": budget}
    )
    for length in (32, 48):  # half as much again does not fit the plan of the first
        batches = [torch.randn(4, length, 32) for _ in range(2)]
        for batch in batches:
            torch._dynamo.mark_dynamic(batch, 1)

        def step(batches=batches):
            for batch in batches:
                call(batch).backward()

        step()
        got = [p.grad for p in model.parameters()]
        clear(model)
        for batch in batches:
            model(batch).backward()
        for mine, eager in zip(got, [p.grad for p in model.parameters()], strict=True):
            torch.testing.assert_close(mine, eager)
        clear(model)
        step()
        clear(model)
        peak = storage_bytes([*model.parameters(), batches[0]]) + measure_peak(step).bytes_above_start
        assert peak <= budget
        clear(model)


def test_gradients_of_the_step_before_are_there_until_they_are_cleared():
    """Many loops clear them between forward and backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(128, 128), nn.GELU())))
    x = torch.randn(256, 128)

    def trained(budget):
        torch._dynamo.reset()
        optpass.reset_report()
        options = {"inner": "aot_eager", "optimizer": "none", "memory_budget": budget}
        call = torch.compile(lambda x: model(x).square().mean(), backend="optpass", options=options)

        def step():
            loss = call(x)
            clear(model)
            loss.backward()

        for _ in range(4):
            step()
        clear(model)
        peak = storage_bytes([*model.parameters(), x]) + measure_peak(lambda: (step(), step())).bytes_above_start
        clear(model)
        return peak

    peak = trained(10**9)
    for budget in (10**9, int(0.9 * peak)):
        peak = trained(budget)
        assert peak <= budget
        sites = [*optpass.report().sites("memory budget"), *optpass.report().declined("memory budget")]
        assert max(site.cost["predicted_peak_bytes"] for site in sites) == pytest.approx(peak, rel=0.005)


def eager_bytes(loss, read=False, dtype=torch.float32):
    """What is made of the loss of 1000 x 40 outputs, in units of their bytes; `read`: nodes are read before."""
    outputs = torch.randn(1000, 40, dtype=dtype, requires_grad=True) * 1  # stands for what a compiled graph returns
    value = loss(outputs)
    found, known = [], {}

    def ours(node):
        return node is outputs.grad_fn

    outputs.grad_fn.register_prehook(lambda *_: found.append(loss_of([value.grad_fn], ours, known=known)))
    end = watch_backwards(
        lambda roots: (
            known.update(held_by_nodes(n for n in autograd.walk(roots, ours) if not ours(n))) if read else None
        )
    )
    try:
        value.backward()
    finally:
        end()
    assert torch.autograd._engine_run_backward is ENGINE
    return found[0], outputs.nbytes


def test_of_several_outputs_a_loss_reads_the_one_that_it_is_of():
    small, _ = (torch.randn(1000, 40, requires_grad=True) * 1).split([10, 990])
    loss = F.smooth_l1_loss(small, torch.randn(10, 40))
    found = loss_of([loss.grad_fn], lambda node: node is small.grad_fn)
    assert found.forward_bytes == pytest.approx(3 * small.numel() * 4, rel=0.01)  # and the target, which it has saved


@pytest.mark.parametrize(
    ("loss", "forward", "backward"),
    [
        (lambda o: F.cross_entropy(o, torch.zeros(1000, dtype=torch.long)), 1, 3),
        (lambda o: F.cross_entropy(o.view(10, 100, 40).reshape(-1, 40), torch.zeros(1000, dtype=torch.long)), 1, 3),
        (lambda o: F.nll_loss(F.log_softmax(o, -1), torch.zeros(1000, dtype=torch.long)), 1, 3),
        (lambda o: F.mse_loss(o, torch.zeros(1000, 40)), 3, 2),
        (lambda o: (o - 1).square().mean(), 2, 5),
        (lambda o: F.binary_cross_entropy_with_logits(o, torch.zeros(1000, 40)), 3, 2),
        (lambda o: o.sum(), 0, 0),  # its gradient is one number, seen as many
    ],
)
def test_what_a_loss_needs_is_seen_in_its_backward(loss, forward, backward):
    found, size = eager_bytes(loss)
    assert forward * size <= found.forward_bytes <= (forward + 0.2) * size
    assert backward * size <= found.backward_bytes <= (backward + 0.2) * size


@pytest.mark.parametrize(
    "loss",
    [
        lambda o: (o**3).mean(),
        lambda o: (o - 1).abs().mean(),
        lambda o: (o.exp() / (1 + o.exp())).mean(),
        lambda o: F.normalize(o, dim=1).sum(1).std(),
        lambda o: F.softplus(o).logsumexp(1).mean(),
        lambda o: torch.where(o > 0, o * o, -o).mean(),
        lambda o: (o.clamp(0, 1) + 1e-6).sqrt().mean(),
        lambda o: F.cross_entropy(F.normalize(o) @ F.normalize(o).mT, torch.arange(1000)),
    ],
)
def test_what_a_loss_needs_is_not_taken_for_less(loss):
    """Against measurement; what operators allocate inside their backward is known, or bounded."""
    found, size = eager_bytes(loss)
    outputs = (torch.randn(1000, 40, requires_grad=True) * 1).detach().requires_grad_()
    peak = measure_peak(lambda: loss(outputs).backward()).bytes_above_start
    assert peak <= max(found.forward_bytes, found.backward_bytes) + 0.05 * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "loss",
    [
        lambda o: o.mean(),
        lambda o: F.mse_loss(o, torch.rand_like(o)),
        lambda o: F.mse_loss(o, torch.rand_like(o), reduction="sum"),
        lambda o: F.smooth_l1_loss(o, torch.rand_like(o)),
        lambda o: F.huber_loss(o, torch.rand_like(o)),
        lambda o: F.binary_cross_entropy(o.sigmoid(), torch.rand_like(o)),
        lambda o: F.binary_cross_entropy_with_logits(o, torch.rand_like(o)),
        lambda o: F.soft_margin_loss(o, torch.rand_like(o)),
    ],
)
def test_what_a_loss_needs_forward(loss, dtype):
    """With its target; half precision is averaged in a float copy."""
    found, size = eager_bytes(loss, dtype=dtype)
    outputs = (torch.randn(1000, 40, dtype=dtype, requires_grad=True) * 1).detach().requires_grad_()
    held = []
    needed = measure_peak(lambda: held.append(loss(outputs))).bytes_above_start
    assert -64 <= found.forward_bytes - needed <= 0.1 * size, (found.forward_bytes / size, needed / size)


HEAD = nn.Sequential(nn.Linear(40, 160), nn.GELU(), nn.Dropout(0.2), nn.Linear(160, 10))


@pytest.mark.parametrize(
    ("loss", "held"),
    [
        (lambda o: F.mse_loss(o, torch.randn(1000, 40)), 1),  # the target
        (lambda o: F.kl_div(o.log_softmax(-1), torch.randn(1000, 40).softmax(-1), reduction="sum"), 2),
        (lambda o: (o.sigmoid() * (torch.randn(1000, 40) > 0) * o.tanh()).mean(), 3.25),  # the mask is of bytes
        (
            lambda o: F.cross_entropy(HEAD(o), torch.zeros(1000, dtype=torch.long)),
            12.3,
        ),  # three of the hidden size, scores, classes
    ],
)
def test_what_nodes_hold_is_read_before_a_backward_releases_it(loss, held):
    found, size = eager_bytes(loss, read=True)
    assert held * size <= found.held_bytes <= (held + 0.01) * size


def test_what_others_hold_is_not_the_losss():
    target = torch.randn(1000, 40)
    found, size = eager_bytes(lambda o: F.mse_loss(o, target), read=True)
    assert found.held_bytes == 0 and found.backward_bytes <= 1.01 * size


def test_what_a_checkpoint_has_packed_is_not_unpacked_to_look_at_it():
    calls = []

    def part(x):
        calls.append(1)
        return x.sigmoid() * x.tanh()

    outputs = torch.randn(100, 40, requires_grad=True)
    value = checkpoint(part, outputs, use_reentrant=False).mean()
    held_by_nodes(autograd.walk([value.grad_fn], lambda _: False))
    assert len(calls) == 1


def test_looking_at_a_backward_keeps_nothing_alive():
    outputs = torch.randn(1000, requires_grad=True).exp()
    seen, gradient = [], []

    def look(gradients):
        running = running_backward()
        seen.append((len(running.roots), running.keeps))
        gradient.append(weakref.ref(gradients[0].untyped_storage()))

    outputs.grad_fn.register_prehook(look)
    gc.disable()  # what a cycle holds would live on until it is collected
    try:
        (outputs * 2).sum().backward(retain_graph=True)
        assert seen == [(1, True)] and gradient[0]() is None
    finally:
        gc.enable()
    assert running_backward() is None


def test_plans_are_selected_together():
    slow, fast = Choice(peak=10, held=2, seconds=3.0), Choice(peak=20, held=10, seconds=0.0)
    bounds = [Bound(0, (), 0, 100), Bound(0, ((0, 9),), 0, 60), Bound(1, ((0, 10),), 0, 60)]
    chosen = select([[slow, fast], [slow, fast]], [10, 1], bounds)
    assert chosen == [slow, fast]  # ten runs of the fast plan would hold 90
    assert excess(chosen, bounds) <= 0
    assert select([[slow, fast], [slow, fast]], [10, 1], [Bound(0, ((0, 9),), 0, 200)]) == [fast, fast]
    assert excess(select([[fast], [fast]], [10, 1], bounds), bounds) == 60


def test_two_plans_are_exchanged_at_once_and_the_next_is_known():
    """The best plan for its bytes leaves no room for another one, which saves more."""
    slow = Choice(0, 0, 9.0, 0, 0)
    choices = [[slow, Choice(0, 6, 3.0, 0, 0)], [slow, Choice(0, 9, 2.0, 0, 0)]]
    bounds = [Bound(0, ((0, 1), (1, 1)), 0, 10)]
    chosen = select(choices, [1, 1], bounds)
    assert [c.held for c in chosen] == [0, 9]
    assert above(chosen, choices, [1, 1], bounds) == 5
    assert above([plans[1] for plans in choices], choices, [1, 1], bounds) is None


def test_what_a_lone_graph_holds_is_not_searched_for(programs, monkeypatch):
    problem = programs.problem_of(programs.joint_of(programs.Chain(), torch.randn(16, 8)))
    known, searched = Search(problem), []
    monkeypatch.setattr(allot, "CHOICES", Known())
    monkeypatch.setattr(allot, "Search", lambda problem, **how: searched.append(problem.tail) or Search(problem, **how))
    alone = choices_of(known, problem.tail, waits=False)
    assert not searched  # the plan's own search says all
    among = choices_of(known, problem.tail)
    assert len(searched) == len(allot.PRESSURES) - 1
    assert min(c.peak for c in alone) == min(c.peak for c in among)
    changed = choices_of(known, 100, waits=False)
    assert searched[-1] == 100 and problem.tail == 100 and not known.holds
    assert min(c.peak for c in changed) >= min(c.peak for c in alone)


def test_plans_of_equal_graphs_are_looked_for_once(programs, monkeypatch):
    """A model that is split between equal layers is one of many equal graphs."""
    monkeypatch.setattr(allot, "CHOICES", Known())
    monkeypatch.setattr(allot, "_choices_of", (looked := Mock(wraps=allot._choices_of)))
    one, other = (Search(programs.problem_of(programs.joint_of(programs.Chain(), torch.randn(16, 8)))) for _ in "ab")
    found = choices_of(one, one.problem.tail)
    assert choices_of(other, other.problem.tail) == found and looked.call_count == 1
    choices_of(other, other.problem.tail, Around(released=8))
    choices_of(other, other.problem.tail + 8)
    choices_of(other, other.problem.tail + 8, waits=False)
    choices_of(other, other.problem.tail + 8, effort=0.5)
    assert looked.call_count == 5


def test_with_less_effort_fewer_plans_are_tried_and_none_is_remembered(programs):
    problem = programs.problem_of(programs.joint_of(programs.Chain(), torch.randn(16, 8)))
    search, ran = Search(problem), []
    run = search.schedule.run
    search.schedule.run = lambda state: ran.append(state) or run(state)
    search.refilled(0.01)
    few, search.schedule.run = len(ran), lambda state: ran.append(state) or run(state)
    everything = search.refilled()
    assert 0 < few < len(ran) - few
    assert search.refilled(0.01) is everything
