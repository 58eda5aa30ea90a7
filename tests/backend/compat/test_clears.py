"""Whether a function clears gradients between a call and its backward is read from its bytecode."""

from __future__ import annotations

import itertools

import pytest

from optpass.backend.compat.memory_clears import to_come


class Nothing:
    def zero_grad(self, set_to_none=True):
        pass

    def backward(self, loss=None):
        pass


optimizer = loss = Nothing()


def model():
    return to_come()


def parts(found):
    """What is cleared before each backward that is to come."""
    places = (0, *found.backwards)
    return [[owner for at, owner in found.asked if first < at < last] for first, last in itertools.pairwise(places)]


def late():
    found = model()
    optimizer.zero_grad()
    loss.backward()
    return found


def through_a_helper():
    def forward():
        return model()

    found = forward()
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
    optimizer.backward(loss)
    return found


def early():
    optimizer.zero_grad()
    found = model()
    loss.backward()
    return found


def afterwards():
    found = model()
    loss.backward()
    optimizer.zero_grad()
    return found


def as_zeros():
    found = model()
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    return found


def never_asks():
    found = model()
    optimizer.zero_grad()
    return found


class Trainer:
    def __init__(self):
        self.first, self.second, self.asked = Nothing(), Nothing(), 0

    def of_two(self):
        found = model()
        self.second.zero_grad()
        loss.backward()
        self.first.zero_grad()
        loss.backward()
        self.second.zero_grad()
        return found

    def by_a_function(self):
        found = model()
        zero_grad_of(self.first, self.second)
        loss.backward()
        return found

    @property
    def third(self):
        self.asked += 1
        return self.first

    def by_a_property(self):
        found = model()
        self.third.zero_grad()
        loss.backward()
        return found


def zero_grad_of(*optimizers):
    pass


@pytest.mark.parametrize("program", [late, through_a_helper])
def test_what_is_cleared_between_is_found(program):
    assert parts(program()) == [[optimizer]]


@pytest.mark.parametrize("program", [early, afterwards])
def test_nothing_is_cleared_before_the_backward(program):
    assert parts(program()) == [[]]


def test_gradients_that_are_kept_as_zeros_are_not_cleared():
    assert parts(as_zeros()) == [[]]


def test_nothing_is_to_come_without_a_backward():
    assert never_asks() is None


def test_what_is_cleared_before_each_backward():
    trainer = Trainer()
    assert parts(trainer.of_two()) == [[trainer.second], [trainer.first]]


def test_what_cannot_be_told_without_running_anything():
    trainer = Trainer()
    assert parts(trainer.by_a_function()) == [[None]]
    assert parts(trainer.by_a_property()) == [[None]] and trainer.asked == 1
