"""Predictions where gradients are added up, terms of a loss too, and where they wait at tensors that are no parameters.

Whether autograd adds up in place is not for a program to say: it does where nothing else holds what is there.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import optpass

ROWS, WIDTH = 128, 48


def network(outputs=WIDTH):
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, outputs))


def gradients(*models):
    """What the parameters got, taken from them."""
    found = [p.grad for m in models for p in m.parameters()]
    for model in models:
        model.zero_grad()
    return found


def flattened(call):
    """The product of an output with itself: both gradients are views, and their sum is a third tensor."""
    net = network(8 * WIDTH)
    compiled, x = call(net), torch.randn(ROWS, WIDTH)

    def step():
        out = compiled(x).view(8, ROWS // 8, 8, WIDTH)
        (out.flatten(2) @ out.flatten(2).transpose(1, 2)).square().mean().backward()
        return gradients(net)

    return step, (net,), (x,)


def read_twice(call):
    """A layer outside of the graph whose weight gets two gradients, which are views of what was computed."""
    net, head = network(), nn.Linear(WIDTH, 4 * WIDTH)
    compiled, x = call(net), torch.randn(ROWS, WIDTH)

    def step():
        out = compiled(x)
        (head(out).square().mean() + head(out * 2).square().mean()).backward()
        return gradients(net, head)

    return step, (net, head), (x,)


def several_terms(call):
    """Each term is a number in a storage as large as what it was reduced from, and goes when it has been added."""
    net, head = network(), nn.Linear(WIDTH, 8 * WIDTH)
    compiled, x, target = call(net), torch.randn(ROWS, WIDTH), torch.randn(ROWS, 8 * WIDTH)

    def step():
        out = compiled(x)
        sum(F.mse_loss(head(h), target) for h in (out, out * 2)).backward()
        return gradients(net, head)

    return step, (net, head), (x, target)


def run_twice(call):
    """Two runs of a graph of large weights before one backward."""
    net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, 4 * WIDTH), nn.Tanh())
    compiled, views = call(net), [torch.randn(ROWS // 8, WIDTH) for _ in range(2)]

    def step():
        left, right = (compiled(x) for x in views)
        (left - right).square().mean().backward()
        return gradients(net)

    return step, (net,), views


def cut(call):
    """A trunk whose output is cut off, two heads with backwards of their own, and the trunk's from what these left."""
    trunk, heads = network(), [network(8) for _ in range(2)]
    compiled, calls, x = call(trunk), [call(head) for head in heads], torch.randn(ROWS, WIDTH)

    def step():
        out = compiled(x)
        inner = out.detach().requires_grad_()
        for one in calls:
            one(inner).square().mean().backward()
        out.backward(inner.grad)
        return gradients(trunk, *heads)

    return step, (trunk, *heads), (x,)


def looked_up(call):
    """A graph that saves nothing but what it was given, and a layer outside of it that is read a part at a time."""
    table, head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 8 * WIDTH)
    compiled, words = call(table), torch.randint(50, (ROWS,))

    def step():
        out = head(compiled(words))
        sum(out[i : i + ROWS // 4].square().mean() for i in range(0, ROWS, ROWS // 4)).backward()
        return gradients(table, head)

    return step, (table, head), (words,)


@pytest.mark.parametrize("program", [flattened, read_twice, several_terms, run_twice, cut, looked_up])
def test_sums_are_counted_where_they_are_made(steps, program):
    peak, _, predicted, _ = steps.measured(program, 10**10, steps=4)
    assert 0 <= predicted - peak <= 0.005 * peak


def test_an_optimizer_of_plain_tensors_is_found():
    """As functions are given them that have no state."""
    torch._dynamo.reset()
    optpass.reset_report()
    net, x = network(), torch.randn(ROWS, WIDTH)
    trained = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    optimizer = torch.optim.Adam(trained.values())

    @torch.compile(backend="optpass", options={"inner": "aot_eager", "memory_budget": 10**10})
    def loss(parameters, batch):
        return torch.func.functional_call(net, parameters, (batch,)).square().mean()

    loss(trained, x).backward()
    optimizer.step()
    (site,) = [s for s in (*optpass.report().sites(), *optpass.report().declined()) if s.kind == "memory budget"]
    assert "optimizer found: adam" in site.reason
