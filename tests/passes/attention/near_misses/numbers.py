"""Numbers that the user sets anew between calls, as a temperature that is annealed: compiled once for any of them.

After the first change Dynamo hands them over as symbols, like sizes; unlike sizes they may be zero or less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attention_near_misses.program import Suite, square
from torch import nn

suite = Suite("numbers")
FUTURE = torch.ones(6, 6).triu(1).bool()
SIGNS = (0.5, 0.3, -0.4, 0.0)
CAPS = (5.0, 2.0, -3.0)


def changed(numbers: Sequence[float], why: str) -> Callable[[Any], Any]:
    """Adds a program of (number, q, k, v) as a module whose number is another one at each call."""

    def add(program: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        class Set(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.calls, self.number = 0, numbers[0]

            def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                return program(self.number, q, k, v)

        def between(module: Any) -> None:
            module.calls += 1
            module.number = numbers[module.calls]

        suite.equal(make=Set, why=why, then=(square,) * (len(numbers) - 1), between=between)(program)
        return program

    return add


@changed(SIGNS, "No mask: a kernel takes any scale.")
def scaled(number, q, k, v):
    return (q @ k.mT * number).softmax(-1) @ v


@changed(SIGNS, "Kernels scale the minus infinities of their own causal mask: NaN for 0, and for less all is infinite.")
def scaled_and_causal(number, q, k, v):
    return (q @ k.mT * number).masked_fill(FUTURE, -torch.inf).softmax(-1) @ v


@changed(SIGNS, "The same, and the number scales queries.")
def queries_scaled_and_causal(number, q, k, v):
    return ((q * number) @ k.mT).masked_fill(FUTURE, -1e9).softmax(-1) @ v


@changed(SIGNS[:3], "A divisor: less than 0 is its inverse, too.")
def divided_and_causal(number, q, k, v):
    return (q @ k.mT / number).masked_fill(FUTURE, -torch.inf).softmax(-1) @ v


@changed(SIGNS, "Number minus one: of numbers that are positive, too, no sign is known.")
def scaled_by_a_difference(number, q, k, v):
    return (q @ k.mT * (number - 0.3)).masked_fill(FUTURE, -torch.inf).softmax(-1) @ v


@changed(SIGNS, "Masked before it is scaled: for less than 0 it is masked keys that are seen.")
def masked_then_scaled(number, q, k, v):
    return ((q @ k.mT).masked_fill(FUTURE, -1e9) * number).softmax(-1) @ v


@changed(SIGNS, "The weights are scaled.")
def weights_scaled(number, q, k, v):
    return ((q @ k.mT * 0.35).softmax(-1) * number) @ v


@changed(SIGNS, "Beside a column that is not scaled.")
def sink(number, q, k, v):
    column = torch.ones(2, 3, 6, 1, dtype=q.dtype)
    return torch.cat([q @ k.mT * number, column], -1).softmax(-1)[..., :-1] @ v


@changed(CAPS, "A cap, of which kernels take numbers alone.")
def capped(number, q, k, v):
    return (torch.tanh(q @ k.mT / number) * number).masked_fill(FUTURE, -torch.inf).softmax(-1) @ v


@changed((0.5, 0.2, -0.3), "What is capped is scaled.")
def scaled_and_capped(number, q, k, v):
    return (torch.tanh(q @ k.mT * number) * 4).masked_fill(FUTURE, -torch.inf).softmax(-1) @ v


@changed((-1e9, -1e4, -3.0, 2.0), "The number that replaces masked scores is no mask's any more.")
def filled(number, q, k, v):
    return (q @ k.mT * 0.35).masked_fill(FUTURE, number).softmax(-1) @ v


@changed((0.5, 0.2, -0.3, 0.0), "The slope of a distance.")
def slope(number, q, k, v):
    return (q @ k.mT * 0.35 - number * torch.arange(6, dtype=q.dtype)).softmax(-1) @ v


@changed((5.0, 3.0, 2.5, 0.3, -1.0), "A window whose width is no whole number, and then none at all.")
def window(number, q, k, v):
    i = torch.arange(6)
    return (q @ k.mT * 0.35).masked_fill((i[:, None] - i).abs() > number, -torch.inf).softmax(-1) @ v
