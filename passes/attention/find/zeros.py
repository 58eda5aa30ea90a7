"""Weights that are set to zero behind the softmax: of masked keys, of whole rows, or where they are not numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from optpass.passes.attention.axes import same_sizes
from optpass.passes.attention.program.ir import Value, same

MULTIPLIED = "weights are multiplied by a tensor over the keys after the softmax"
_NOT = frozenset({"logical_not", "bitwise_not"})


@dataclass(frozen=True)
class Zeros:
    """`source`, with zeros where `mask` is `hides`."""

    source: Value
    mask: Value
    hides: bool

    def of_nan(self) -> list[Value]:
        """The values that the mask is made of, where it tells numbers of `source` from NaN; [] where it does not."""
        mask, hides, made = bare(self.mask, self.hides)
        both = mask.name == ("ne" if hides else "eq") and mask.args[1] is self.source
        tells = (both or (mask.name == "isnan" and hides)) and mask.args[0] is self.source
        return made if tells else []


def bare(mask: Value, truth: bool) -> tuple[Value, bool, list[Value]]:
    """What a mask is the negation of, however often; what that is where the mask is `truth`; and all on the way."""
    made = [mask]
    while mask.name in _NOT:
        mask, truth = mask.args[0], not truth
        made.append(mask)
    return mask, truth, made


def alike(mask: Value, truth: bool, other: Value, hides: bool) -> bool:
    """Whether one mask is `truth` where the other one is `hides`."""
    (one, first, _), (two, second, _) = bare(mask, truth), bare(other, hides)
    return first is second and same(one, two)


def factor(value: Value) -> Value | None:
    """The boolean mask that a factor is, in whatever dtype; None where it is none."""
    while value.dtype != torch.bool and value.name == "_to_copy":
        value = value.args[0]
    return value if value.dtype == torch.bool else None


def read(value: Value, number: Callable[[Any], Any]) -> Zeros | None:
    """What `masked_fill` or `where` sets to zero; `number`: the one number that all elements of a value are."""
    if value.name == "masked_fill":
        candidates = [(value.args[0], value.args[2], True)]
    elif value.name == "where" and len(value.args) == 3:
        candidates = [(value.args[1], value.args[2], False), (value.args[2], value.args[1], True)]
    else:
        return None
    mask = value.args[1 if value.name == "masked_fill" else 0]
    for source, fill, hides in candidates:
        whole = isinstance(source, Value) and source.dtype == value.dtype and same_sizes(source.shape, value.shape)
        if whole and number(fill) == 0 and number(source) is None:
            return Zeros(source, mask, hides)
    return None
