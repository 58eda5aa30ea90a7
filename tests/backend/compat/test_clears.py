"""Whether a function clears gradients between a call and its backward is read from its bytecode."""

from __future__ import annotations

import pytest

from optpass.backend.compat.memory_calls import clears_gradients


class Nothing:
    def zero_grad(self, set_to_none=True):
        pass

    def backward(self, loss=None):
        pass


optimizer = loss = Nothing()


def model():
    return clears_gradients()


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


def no_backward():
    found = model()
    optimizer.zero_grad()
    return found


@pytest.mark.parametrize("program", [late, through_a_helper])
def test_what_is_cleared_between_is_found(program):
    assert program()


@pytest.mark.parametrize("program", [early, afterwards, as_zeros, no_backward])
def test_what_is_not_is_none(program):
    assert not program()
