"""What a loss outside of the graph needs at sizes at which it was not seen, and plans that are made with that."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import sympy
import torch
from torch import nn
from torch.nn import functional as F

import optpass
from optpass.backend.compat import memory_autograd as autograd
from optpass.backend.compat.memory_backward import held_by_nodes, watch_backwards
from optpass.backend.memory.eager.part import loss_of
from optpass.backend.memory.eager.timeline import Resize
from optpass.backend.memory.measure import measure_peak, step_peak, storage_bytes
from optpass.backend.memory.partition.growth import Growth
from optpass.backend.memory.replay.tail import Tail
from optpass.backend.memory.seen.expected import resize, share_at
from optpass.backend.memory.seen.share import Share
from optpass.passes.memory.plan import Ledger


@pytest.mark.parametrize(
    ("before", "now", "extent", "expected"),
    [
        ((8, 64), (16, 64), ((8, 64), 4), 2),
        ((4, 24), (4, 48), ((96, 100), 4), 2),  # a product that is also of parameters
        ((8, 64), (16, 64), ((8, 8), 4), 4),  # pairs of samples
        ((4, 32), (4, 64), ((128, 100), 4), 2),  # batch and sequence in one dimension
        ((4, 32), (6, 64), ((128, 100), 4), 3),
        ((4, 32), (4, 64), ((4, 31, 100), 4), 63 / 31),  # all tokens but one
        ((4, 32), (4, 64), ((124,), 8), 4 * 63 / 124),
        ((4, 32), (4, 64), ((100, 48), 4), 1),  # of parameters
        ((64, 64), (128, 64), ((64, 64), 4), 2),  # one of two sizes that look alike
        ((64, 48), (128, 48), ((37, 48), 4), 2),  # unknown: as much as anything
        ((8, 64), (4, 64), ((8, 64), 4), 0.5),
    ],
)
def test_a_tensor_changes_with_the_sizes_of_a_call(before, now, extent, expected):
    sizes = Resize((before,), (now,), [(100, 48), (96, 48)])
    shape, itemsize = extent
    assert sizes.bytes(extent) == pytest.approx(torch.Size(shape).numel() * itemsize * expected, abs=itemsize)


LOSSES = {
    "classes": lambda o, t: F.cross_entropy(o, t),
    "squares": lambda o, t: (o - 1).square().mean(),
    "targets": lambda o, t: F.mse_loss(o, torch.ones_like(o)),
    "distances": lambda o, t: ((o @ o.mT).exp() + 1).log().mean(),
    "normalized": lambda o, t: F.cross_entropy(F.normalize(o) @ F.normalize(o).mT, torch.arange(len(o))),
    "parts": lambda o, t: sum(F.cross_entropy(a, b) for a, b in zip(o.chunk(2), t.chunk(2), strict=True)),
}


def seen(loss, rows):
    """What is seen of the loss of so many rows of 40 outputs."""
    outputs = torch.randn(rows, 40, requires_grad=True) * 1
    target, found, known = torch.zeros(rows, dtype=torch.long), [], {}

    def ours(node):
        return node is outputs.grad_fn

    value = loss(outputs, target)
    outputs.grad_fn.register_prehook(lambda *_: found.append(loss_of([value.grad_fn], ours, known=known)))
    end = watch_backwards(
        lambda roots: known.update(held_by_nodes(n for n in autograd.walk(roots, ours) if not ours(n)))
    )
    try:
        value.backward()
    finally:
        end()
    return found[0]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("rows", [32, 400])
def test_a_loss_is_known_at_sizes_at_which_it_was_not_seen(name, rows):
    small, other = seen(LOSSES[name], 128), seen(LOSSES[name], rows)
    scaled = small.at(Resize(((128, 40),), ((rows, 40),), [(40, 40)]))
    for mine, there in (
        (scaled.forward_bytes, other.forward_bytes),
        (scaled.backward_bytes, other.backward_bytes),
        (scaled.held_bytes, other.held_bytes),
    ):
        assert mine == pytest.approx(there, rel=0.01, abs=64)


class Tokens(nn.Module):
    """Embedding, blocks, scores."""

    def __init__(self, classes=100, width=48):
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width)) for _ in "ab")
        self.scores = nn.Linear(width, classes)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.scores(x)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, False, None])
def test_the_first_call_of_a_larger_size_holds(dynamic):
    """The loss needs seven times what the outputs do, which is more than what is assumed of any."""
    model = Tokens()

    def loss(scores, ids):
        return F.cross_entropy(scores.flatten(0, 1), ids.flatten()) + (scores.sigmoid() * scores.exp()).square().mean()

    def trained(budget):
        torch._dynamo.reset()
        optpass.reset_report()
        options = {"inner": "aot_eager", "optimizer": "none", "memory_budget": budget}
        call, peaks = torch.compile(model, backend="optpass", options=options, dynamic=dynamic), []
        for length in (24, 24, 40, 64):
            ids = torch.randint(0, 100, (4, length))
            model.zero_grad()

            def step(ids=ids):
                loss(call(ids), ids).backward()

            peaks.append(storage_bytes([*model.parameters(), ids]) + measure_peak(step).bytes_above_start)
        return peaks

    free = trained(10**9)
    said = [site.reason for site in optpass.report().declined("memory budget")]
    assert dynamic is not True or "at the largest sizes" in said[-1]
    held = storage_bytes(model.parameters())
    budget = held + int(0.9 * (free[-1] - held))
    peaks = trained(budget)
    assert peaks[-1] > 0.95 * budget
    assert max(peaks) <= budget
    report = optpass.report()
    predicted = [s.cost["predicted_peak_bytes"] for s in report.sites() if s.kind == "memory budget"]
    assert max(predicted) == pytest.approx(peaks[-1], rel=0.005)


def test_what_larger_sizes_need_is_not_known_where_the_caches_answered():
    rows = sympy.Symbol("s0", integer=True, positive=True)
    known, unknown = (Growth([(0, rows, 64)], sizes) for sizes in ([32 * rows], None))
    assert known.at([64]) == unknown.at([64]) == 1
    assert known.at([128]) == 2 and unknown.at([128]) == math.inf


def test_another_size_is_compiled_while_a_run_waits_for_its_backward():
    """To trace a graph of dynamic sizes is to differentiate it, which is no backward of the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh())
    batches = [torch.randn(rows, 32) for rows in (64, 48, 40)]
    sum(model(x).square().mean() for x in batches).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "optimizer": "none", "memory_budget": 10**10, "strict": True}
    call = torch.compile(model, backend="optpass", options=options)
    for _ in range(2):
        model.zero_grad()
        sum(call(x).square().mean() for x in batches).backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], expected)


def test_the_first_call_of_a_larger_size_leaves_room_for_others_of_its_step():
    """Crops of two sizes: the graph of the smaller ones, whose sizes are symbols, serves the larger ones from the
    second step on, of which there are several, too."""
    model = nn.Sequential(*(layer for _ in range(16) for layer in (nn.Linear(32, 32), nn.Sigmoid())))
    torch.manual_seed(0)
    crops = [torch.randn(rows, 32) for rows in (512, 512, 96, 96, 96, 96)]

    def trained(budget):
        torch._dynamo.reset()
        options = {"inner": "aot_eager", "optimizer": "none", "memory_budget": budget}
        call, peaks = torch.compile(model, backend="optpass", options=options), []

        def step():
            views = [call(crop).mean(0) for crop in crops]
            sum((a - b).square().mean() for a in views[:2] for b in views if a is not b).backward()

        for _ in range(4):
            model.zero_grad()
            peaks.append(storage_bytes([*model.parameters(), *crops]) + measure_peak(step).bytes_above_start)
        return peaks

    held = storage_bytes([*model.parameters(), *crops])
    budget = held + (max(trained(10**9)) - held) // 2
    peaks = trained(budget)
    assert max(peaks) <= budget
    assert peaks[-1] > 0.9 * budget


@pytest.mark.parametrize(
    ("shapes", "times"),
    [
        (((64,), (8, 64)), 1.0),
        (((96,), (8, 96)), 1.5),
        (((8, 96),), 1.5),  # compiled for this size alone
        (((4, 16), (8, 128)), 1.0),  # of another call
        (((32,), (8, 32)), 1.0),
    ],
)
@pytest.mark.parametrize("unread", [(), ((8,), (8,), ())])  # vectors that it turned out not to read
def test_what_a_graph_may_use_of_a_step_at_larger_sizes(shapes, times, unread):
    """Where a plan for a step that was seen is compiled when the graph is called at other sizes."""
    loss = seen(LOSSES["classes"], 512)
    leaf = SimpleNamespace(seen_at=((64,), *unread, (8, 64)), loss=loss, known={}, late=100)
    tail = Tail(True, loss.forward_bytes, 0, loss.backward_bytes, -8, early_bytes=100)
    share = Share(Ledger(parameters=10, inputs=4096), tail, follow=12)
    found = share_at(share, leaf, shapes)
    assert found.statics == Ledger(parameters=10, inputs=int(4096 * times))
    assert (found.tail.early_bytes, found.tail.kept_bytes, found.follow) == (100, -8, int(12 * times))
    for now, before in (
        (found.tail.forward_bytes, tail.forward_bytes),
        (found.tail.backward_bytes, tail.backward_bytes),
    ):
        assert now == pytest.approx(times * before, rel=0.01)


def test_a_loss_of_pairs_grows_with_their_number():
    loss = seen(LOSSES["distances"], 64)
    leaf = SimpleNamespace(seen_at=((64, 40),), loss=loss, known={}, late=0)
    share = Share(Ledger(), Tail(True, loss.forward_bytes, 0, loss.backward_bytes))
    found = share_at(share, leaf, ((128, 40),)).tail
    assert found.forward_bytes > 3 * loss.forward_bytes
    unknown = SimpleNamespace(seen_at=((64, 40),), loss=replace(loss, timeline=None), known={}, late=0)
    assert share_at(share, unknown, ((128, 40),)).tail.forward_bytes == 2 * loss.forward_bytes


@pytest.mark.parametrize("seen", [(), ((8, 64), (8, 64))])
def test_where_it_was_seen_nowhere_no_size_changes(seen):
    leaf = SimpleNamespace(seen_at=seen, known={})
    assert resize(leaf, ((72,), (8, 72))).most == 1.0


def test_sizes_that_change_from_step_to_step_hold():
    batches = [torch.randint(0, 400, (8, length)) for length in (48, 64, 64, 72)]

    def trained(budget):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers = [layer for _ in range(5) for layer in (nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU())]
        model = nn.Sequential(nn.Embedding(400, 128), *layers, nn.Linear(128, 400))
        optimizer = torch.optim.AdamW(model.parameters())
        options = {"inner": "aot_eager", "memory_budget": budget}
        compiled = torch.compile(model, backend="optpass", options=options)

        def step(x):
            F.cross_entropy(compiled(x).flatten(0, 1), x.flatten()).backward()
            optimizer.step()

        peaks = []
        for tokens in batches:
            optimizer.zero_grad()
            peaks.append(step_peak(model, lambda x=tokens: step(x), optimizer, [tokens]).total)
        return max(peaks)

    top = trained(10**9)
    for part in (0.6, 0.74):
        assert trained(int(part * top)) <= part * top
