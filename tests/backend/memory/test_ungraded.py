"""Graphs that run without gradients in a step: a teacher, a frozen judge of outputs, an encoder."""

from __future__ import annotations

import copy
import functools
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import optpass

ROWS, WIDTH, WIDE = 128, 32, 640


@pytest.fixture(autouse=True)
def _collected(forgotten: None) -> None:
    """What graphs without gradients of earlier tests were given may be in cycles, and counts as long as it is there."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def network(width: int = WIDTH, layers: int = 4) -> nn.Sequential:
    made = (m for _ in range(layers) for m in (nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, WIDTH)))
    return nn.Sequential(*made)


def judged(call):
    """A frozen net runs on outputs, which need a gradient, and on targets, which do not; before it a part of the loss
    has saved something."""
    model, judge, given, target = network(), network(WIDE, 1), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    compiled, judging = call(model), call(judge.requires_grad_(False))

    def step():
        out = compiled(given)
        (F.l1_loss(out, target) + F.mse_loss(judging(out), judging(target).detach())).backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    return step, (model, judge), (given, target)


def taught(call):
    """A wide teacher runs between the forward of its student and the loss."""
    model, teacher, given = network(), network(WIDE).eval(), torch.randn(ROWS, WIDTH)
    compiled, teaching = call(model), call(teacher)

    def step():
        out = compiled(given)
        with torch.no_grad():
            target = teaching(given)
        F.mse_loss(out, target).backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    return step, (model, teacher), (given,)


def preferred(call):
    """A frozen copy is read behind the forward as the model was, by operators that allocate: scores of what is given
    but for the last, which are copied for the softmax."""
    model = nn.Sequential(*network(WIDE), nn.Linear(WIDTH, WIDE))
    reference = copy.deepcopy(model).requires_grad_(False)
    given, chosen = torch.randn(16, 9, WIDTH), torch.randint(WIDE, (16, 8, 1))
    compiled, referring = call(model), call(reference)

    def score(net):
        return net(given)[:, :-1].log_softmax(-1).gather(-1, chosen).sum(dim=(1, 2))

    def step():
        mine = score(compiled)
        with torch.no_grad():
            theirs = score(referring)
        F.softplus(theirs - mine).sum().backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    return step, (model, reference), (given, chosen)


def averaged(call):
    """The teacher, which is compiled, is an average of the student's weights that the program keeps by hand."""
    model, given = network(layers=12), torch.randn(8 * ROWS, WIDTH)
    teacher = copy.deepcopy(model).requires_grad_(False)
    compiled, teaching = call(model), call(teacher)

    def step():
        with torch.no_grad():
            target = teaching(given)
        F.mse_loss(compiled(given), target.sign()).backward()
        found = [p.grad for p in model.parameters()]
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                theirs.sub_(theirs.grad, alpha=0.1)
                mine.mul_(0.9).add_(theirs, alpha=0.1)
        model.zero_grad()
        return found

    return step, (model, teacher), (given,)


def taught_first(call):
    """A wide teacher runs before the forward of its student, and needs more than the step behind it."""
    model, teacher, given = network(), network(2 * WIDE).eval(), torch.randn(4 * ROWS, WIDTH)
    compiled, teaching = call(model), call(teacher)

    def step():
        with torch.no_grad():
            target = teaching(given)
        F.l1_loss(compiled(given), target).backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    return step, (model, teacher), (given,)


def encoded(call):
    """A frozen encoder runs on a batch of its own; what it returns is what the graph is given."""
    model, encoder, batch = network(), network(2 * WIDE).eval(), torch.randn(4 * ROWS, WIDTH)
    compiled, encoding = call(model), call(encoder)

    def step():
        with torch.no_grad():
            given = encoding(batch)
        compiled(given).square().mean().backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    return step, (model, encoder), (batch,)


def cached(call, count=6):
    """A loss of all pairs is taken of embeddings that were made without gradients, and each part of the batch runs
    again for its part of what that gave."""
    model, batch = network(), torch.randn(6 * ROWS, WIDTH)
    compiled = call(model)

    def step():
        parts = batch.chunk(count)
        with torch.no_grad():
            embedded = [compiled(part) for part in parts]
        embedded = torch.cat(embedded) if count > 1 else embedded[0]  # which the graph has returned
        unit = F.normalize(embedded.requires_grad_(), dim=-1)
        F.cross_entropy(5 * unit @ unit.T, torch.arange(len(batch))).backward()
        for part, gradient in zip(parts, embedded.grad.chunk(count), strict=True):
            (compiled(part) * gradient).sum().backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    return step, (model,), (batch,)


def evaluated(call, of_the_same=False):
    """Between two steps the model is evaluated on more than it is trained on, which is no part of a step."""
    model, more = network(), torch.randn(64 * ROWS, WIDTH)
    given = more[:ROWS] if of_the_same else torch.randn(ROWS, WIDTH)
    compiled, evaluating = call(model), call(copy.deepcopy(model).eval())

    def step():
        compiled(given).square().mean().backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        with torch.no_grad():
            evaluating(more).mean().item()
        return found

    return step, (model,), (given,)


@pytest.mark.slow
@pytest.mark.by_turns
@pytest.mark.parametrize("program", [encoded, taught_first])
def test_what_runs_ahead_of_a_step_is_part_of_it(program, steps):
    """Of no plan's choosing: a budget below it is refused, in the first step where it has run before."""
    peak, results, predicted, _ = steps.measured(program, 10**10)
    assert abs(predicted - peak) <= 0.001 * peak
    least, same, predicted, _ = steps.measured(program, int(1.001 * peak))
    assert abs(least - peak) <= 0.001 * peak and abs(predicted - peak) <= 0.001 * peak
    for mine, theirs in zip(results, same, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    with pytest.raises(optpass.BudgetInfeasibleError) as refused:
        steps.measured(program, int(0.99 * peak), steps=1)
    assert refused.value.floor_bytes == pytest.approx(peak, rel=0.001)
    del refused  # its frames hold the step
    gc.collect()


@pytest.mark.parametrize("count", [6, 1])
def test_what_eager_code_makes_ahead_of_a_step_is_part_of_it(count, steps):
    program = functools.partial(cached, count=count)
    peak, _, predicted, _ = steps.measured(program, 10**10)
    assert abs(predicted - peak) <= 0.005 * peak
    steps.measured(program, int(1.01 * predicted))
    with pytest.raises(optpass.BudgetInfeasibleError) as refused:
        steps.measured(program, int(0.98 * predicted))
    assert refused.value.floor_bytes == pytest.approx(peak, rel=0.005)
    del refused
    gc.collect()


@pytest.mark.slow
@pytest.mark.by_turns
@pytest.mark.parametrize("program", [evaluated, functools.partial(evaluated, of_the_same=True)], ids=["other", "all"])
def test_an_evaluation_between_steps_is_no_part_of_one(program, steps):
    _, _, predicted, held = steps.measured(program, 10**10)
    assert predicted < 1.5 * 64 * ROWS * WIDTH * 4 + held  # its batch is there
    steps.measured(program, int(1.01 * predicted))


@pytest.mark.slow
@pytest.mark.by_turns
@pytest.mark.parametrize("program", [taught, judged, preferred, averaged])
def test_what_runs_between_counts_too(program, steps):
    peak, results, predicted, held = steps.measured(program, 10**10)
    assert abs(predicted - peak) <= 0.001 * peak
    budget = int(held + 0.85 * (peak - held))
    less, same, predicted, _ = steps.measured(program, budget)
    assert less <= budget
    assert abs(predicted - less) <= 0.001 * less
    for mine, theirs in zip(results, same, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
