"""What is asked of autograd's graph and of a backward's callers while a step runs."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from optpass.backend.compat.memory_autograd import tensors_of_callers


def backward_of(loss: torch.Tensor) -> list[bool]:
    """Whether the callers' tensors were found to hold the loss, as the backward began."""
    found: list[bool] = []
    assert loss.grad_fn is not None
    loss.grad_fn.register_prehook(lambda *_: found.append(any(t is loss for t in tensors_of_callers())))
    loss.backward()
    return found


def test_what_a_caller_held_goes_when_it_lets_go() -> None:
    """To ask a frame for its variables leaves a copy of them with it, up to Python 3.12."""
    outputs: Any = torch.ones(3, requires_grad=True) * 2
    held = weakref.ref(outputs)
    assert backward_of(outputs.sum()) == [True]
    outputs = None
    assert held() is None


def test_a_dictionary_that_a_caller_holds_is_left_to_it() -> None:
    outputs = torch.ones(3, requires_grad=True) * 2
    mine = locals()
    assert backward_of(outputs.sum()) == [True]
    assert mine["outputs"] is outputs
