"""What a function holds of a compiled call's result, as its bytecode has it."""

from __future__ import annotations

import pytest
import torch

from optpass.backend.compat.memory_calls import holds_result

FOUND: list[bool | None] = []


def _in_torch(found):
    """A compiled call as Dynamo's wrapper has it, around a frame of the program's own."""
    space = {"__name__": "torch._dynamo.eval_frame", "forward": _compiled(found)}
    exec("def call(*_):\n    return forward()", space)
    return space["call"]


def _compiled(found):
    space = {"__name__": "torch.here", "holds_result": holds_result, "found": found, "Output": Output}
    exec("def compile():\n    found.append(holds_result())\n    return Output()", space)

    def forward():
        return space["compile"]()

    return forward


class Output(dict):
    @property
    def loss(self):
        return torch.ones(1, requires_grad=True)

    scores = loss

    def __getitem__(self, key):
        return self.loss

    def __iter__(self):
        yield from (self.loss, self.loss)

    def backward(self):
        self.loss.backward()


net = _in_torch(FOUND)


def attribute():
    net(1).loss.backward()


def attribute_in_a_variable():
    loss = net(1).loss
    loss.backward()


def by_name():
    (net(1)["loss"] / 2).backward()


def by_place():
    loss = net(1)[0]
    loss.backward()


def the_loss_itself():
    net(1).backward()


def not_asked_for():
    net(1)
    torch.ones(1, requires_grad=True).backward()


def held():
    out = net(1)
    out.loss.backward()


def unpacked():
    loss, _scores = net(1)
    loss.backward()


def other_attribute():
    scores = net(1).scores
    scores.sum().backward()


def given_to_a_loss():
    sum(net(1)).backward()


def deleted():
    loss, scores = net(1)
    del scores
    loss.backward()


def helper():
    return net(1).loss


def helped():
    helper().backward()


CASES = [
    (attribute, False), (attribute_in_a_variable, False), (by_name, False), (by_place, False),
    (the_loss_itself, False), (not_asked_for, False), (held, True), (unpacked, True), (other_attribute, None),
    (given_to_a_loss, None), (deleted, None), (helped, None),
]  # fmt: skip


@pytest.mark.parametrize(("program", "expected"), CASES)
def test_whether_more_than_the_loss_is_held(program, expected):
    FOUND.clear()
    program()
    assert [expected] == FOUND
