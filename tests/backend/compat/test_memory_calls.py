"""How often a caller calls the same thing again before a backward, as its bytecode has it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optpass.backend.compat.memory_calls import LOOP, calls_compiled, calls_to_come

FOUND: list[int] = []


def _in_torch(found):
    """A function that counts as torch's: none is asked that is."""
    space = {"__name__": "torch.here", "calls_to_come": calls_to_come, "found": found, "torch": torch}
    exec("def call(*_):\n    found.append(calls_to_come())\n    return torch.ones(1, requires_grad=True)", space)
    return space["call"]


net = _in_torch(FOUND)


class Pair:
    def __init__(self):
        self.left = self.right = net
        self.both = [net, net]

    def same(self, x):
        return self.left(x) + torch.relu(self.left(x))

    def other(self, x):
        return self.left(x) + self.right(x)

    def by_place(self, x):
        return self.both[0](x) + self.both[1](x)


def once():
    net(1).sum().backward()


def twice():
    a = net(1)
    b = net(
        2,
    )
    (a + b).backward()


def three_times():
    (net(1) + net(2) + net(3)).backward()


def one_of_two(flag=True):
    loss = net(1) if flag else net(2)
    loss.backward()


def backward_between():
    net(1).backward()
    net(2).backward()


def micro_batches():
    for _ in range(2):
        loss = net(1) / 2
        loss.backward()


def gradients_asked_for():
    for _ in range(2):
        torch.autograd.grad(net(1), [], allow_unused=True)


def unrolled():
    state = torch.zeros(1)
    for _ in range(2):
        state = net(state)
    state.backward()


def listed():
    sum(net(i) for i in range(2)).backward()


def helper(x):
    return torch.tanh(net(x))


def through_a_helper():
    (helper(1) + helper(2)).backward()


def through_a_helper_once():
    helper(1).backward()


def whole_step(x):
    def backward(loss):
        loss.backward()

    step = backward
    step(net(x))


def whole_steps():
    whole_step(1)
    whole_step(2)


def asked_for_elsewhere():
    for i in range(2):
        loss = net(i)
        _end(loss)


def _end(loss):
    loss.backward()


CASES = [
    (once, [0]), (twice, [1, 0]), (three_times, [2, 1, 0]), (one_of_two, [0]), (backward_between, [0, 0]),
    (micro_batches, [0, 0]), (gradients_asked_for, [0, 0]), (unrolled, [LOOP, LOOP]), (listed, [LOOP, LOOP]),
    (through_a_helper, [1, 0]), (through_a_helper_once, [0]), (lambda: Pair().same(1).backward(), [1, 0]),
    (whole_steps, [0, 0]), (asked_for_elsewhere, [0, 0]), (lambda: Pair().other(1).backward(), [0, 0]),
    (lambda: Pair().by_place(1).backward(), [0, 0]),
]  # fmt: skip


@pytest.mark.parametrize(("program", "expected"), CASES)
def test_calls_that_may_follow_before_a_backward(program, expected):
    FOUND.clear()
    try:
        program()
    except RuntimeError as error:  # nothing is asked of `grad`
        assert program is gradients_asked_for, error
    assert expected[: len(FOUND)] == FOUND and FOUND


class Judge(nn.Module):
    """As it is when `Module.compile` was called."""

    def __init__(self, compiled=True):
        super().__init__()
        self._compiled_call_impl = self.forward if compiled else None

    def forward(self, x):
        return x


def asked(*_):
    BESIDE.append(calls_compiled())
    return torch.ones(1, requires_grad=True)


BESIDE: list[bool] = []
judge, plain = Judge(), Judge(compiled=False)


class Trained:
    def __init__(self, judge):
        self.net, self.judge = asked, judge

    def step(self):
        self.judge(self.net(1)).sum().backward()

    def afterwards(self):
        self.net(1).sum().backward()
        self.judge(self.net(1))


def in_a_function():
    fake = asked(1)
    judge(fake).sum().backward()


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (in_a_function, [True]),
        (Trained(judge).step, [True]),
        (Trained(plain).step, [False]),
        (Trained(judge).afterwards, [False, False]),
    ],
)
def test_whether_another_compiled_module_is_called_before_the_backward(program, expected):
    BESIDE.clear()
    program()
    assert expected == BESIDE
