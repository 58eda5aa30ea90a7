"""Predictions where the caller keeps some of what a graph returns, and where something else holds it for a while."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from optpass.backend.memory.replay.graph_values import laid_out_anew
from optpass.errors import BudgetInfeasibleError

ROWS, WIDTH = 128, 32


def network(outputs):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, outputs))


def gradients(*models):
    """What the parameters got, taken from them."""
    found = [p.grad for m in models for p in m.parameters()]
    for model in models:
        model.zero_grad()
    return found


def partly(call):
    """The caller keeps one of two outputs; most is there when the other, saved at first, has been released."""
    body, head = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH)), network(48)

    def both(x):
        hidden = body(x)
        return hidden, head(hidden)

    compiled, x = call(both), torch.randn(ROWS, WIDTH)

    def step():
        scores = compiled(x)[1]
        scores.square().mean().backward()
        return gradients(body, head)

    return step, (body, head), (x,)


def test_what_the_caller_keeps_is_counted_and_nothing_else(steps):
    peak, _, predicted, _ = steps.measured(partly, 10**10)
    assert 0 <= predicted - peak <= 128


def looped(call):
    """A loop's variable holds what the call before returned while the next one runs, whose forward needs most."""
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5 * WIDTH)

    def both(x):
        hidden = first(x)
        with torch.no_grad():
            size = (hidden.repeat(1, 40).sin() * 2).cos().mean()
        return last(hidden * size)

    compiled, batches = call(both), [torch.randn(ROWS, WIDTH) for _ in range(3)]

    def step():
        for batch in batches:
            out = compiled(batch)
            out.square().mean().backward()
        return gradients(first, last)

    return step, (first, last), batches


def test_what_the_call_before_returned_is_there_in_the_next_forward(steps):
    peak, _, predicted, _ = steps.measured(looped, 10**10)
    assert 0 <= predicted - peak <= 128


def cached(call):
    """What a language model returns beside its loss: keys by heads, which the loss does not read."""
    table = nn.Embedding(10, 2 * WIDTH)

    def both(ids):
        return table.weight.square().mean(), table(ids).view(8, ROWS // 8, 2, WIDTH).transpose(1, 2)

    compiled, ids = call(both), torch.randint(0, 10, (8, ROWS // 8))

    def step():
        loss, keys = compiled(ids)
        loss.backward()
        return [*gradients(table), len(keys)]

    return step, (table,), (ids,)


def test_gradients_that_are_laid_out_anew_are_there_twice(steps):
    """Of what the loss does not read they are zeros, which AOTAutograd copies into the layout of the output."""
    peak, _, predicted, _ = steps.measured(cached, 10**10)
    assert 0 <= predicted - peak <= 128


def test_which_gradients_are_laid_out_anew():
    number, rows = torch.zeros(()), torch.zeros(4, 6)
    assert laid_out_anew([rows, rows.t()]) == 0  # they may come as the output is laid out
    assert laid_out_anew([number, rows]) == 0  # zeros
    assert laid_out_anew([number, rows.t()]) == rows.nbytes
    assert laid_out_anew([rows[:, :2]]) == rows.nbytes // 3  # with gaps


class Traced:
    """Holds a result and itself, as what Dynamo has traced does."""

    def __init__(self, result: torch.Tensor) -> None:
        self.result, self.itself = result, self


def test_what_was_traced_is_collected_once_before_what_is_there_counts():
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "optimizer": "none", "memory_budget": 10**10}
    call = torch.compile(network(8), backend="optpass", options=options)
    found = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            out = call(torch.randn(ROWS, WIDTH))
            traced = Traced(out)
            held = weakref.ref(traced)
            del traced
            out.square().mean().backward()
            found.append(held() is None)
    finally:
        gc.enable()
    assert found[0] and not found[-1]


def planned(call):
    """The same of a network that there are plans for."""
    blocks = [(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4)]
    body, head = nn.Sequential(*(layer for block in blocks for layer in block)), nn.Linear(WIDTH, 4 * WIDTH)

    def both(x):
        hidden = body(x)
        with torch.no_grad():
            size = (hidden.repeat(1, 40).sin() * 2).cos().mean()
        return head(hidden * size)

    compiled, batches = call(both), [torch.randn(ROWS, WIDTH) for _ in range(3)]

    def step():
        for batch in batches:
            out = compiled(batch)
            out.square().mean().backward()
        return gradients(body, head)

    return step, (body, head), batches


def test_plans_leave_room_in_the_next_forward_for_what_the_call_before_returned(steps):
    most = steps.measured(planned, 10**10)[0]
    for part in (0.84, 0.92):
        peak, _, predicted, _ = steps.measured(planned, int(part * most))
        assert peak <= part * most
        assert 0 <= predicted - peak <= 128


def supervised(call):
    """The loss's backward reads one of three outputs; the others have gone by then."""
    body, heads = network(WIDTH), nn.ModuleList(network(9 * WIDTH) for _ in range(2))

    def all_of_them(x):
        hidden = x + body(x)
        return [head(hidden) for head in heads], hidden

    compiled, x, targets = call(all_of_them), torch.randn(ROWS, WIDTH), torch.randint(0, 9 * WIDTH, (ROWS,))

    def step():
        scores, hidden = compiled(x)
        loss = sum(nn.functional.cross_entropy(s, targets) for s in scores) + hidden.square().mean()
        del scores, hidden
        loss.backward()
        return gradients(body, heads)

    return step, (body, heads), (x, targets)


def test_outputs_that_the_loss_does_not_read_again_are_gone(steps):
    peak, _, predicted, _ = steps.measured(supervised, 10**10)
    assert 0 <= predicted - peak <= 0.005 * peak


def inside(call):
    """The backward is asked for in the compiled function, which breaks there, and holds its loss: a number in a storage
    as large as what it is the mean of."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)))

    def trained(x, target):
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        return loss.detach()

    compiled, given = call(trained), [torch.randn(ROWS, WIDTH) for _ in range(2)]

    def step():
        compiled(*given)
        return gradients(model)

    return step, (model,), given


def test_a_loss_that_is_held_where_the_function_breaks_counts(steps):
    peak, _, predicted, _ = steps.measured(inside, 10**10)
    assert 0 <= predicted - peak <= 128
    with pytest.raises(BudgetInfeasibleError) as refused:
        steps.measured(inside, 1)
    least = refused.value.floor_bytes  # before it is seen that the function holds its loss
    with pytest.raises(BudgetInfeasibleError) as refused:
        steps.measured(inside, least)
    for budget in (refused.value.floor_bytes, (refused.value.floor_bytes + peak) // 2):
        less, _, predicted, _ = steps.measured(inside, budget)
        assert less <= budget and 0 <= predicted - less <= 128
