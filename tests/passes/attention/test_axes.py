"""Reshapes of symbolic sizes: what is followed, and what is not guessed."""

from __future__ import annotations

from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv

from optpass.passes.attention.axes import Axis, atoms, quotient, regroup

BATCH, LENGTH = sympy.symbols("s0 s1", integer=True, positive=True)
CHUNKS = FloorDiv(LENGTH, 4)


def _sizes(groups: Any) -> list[list[Any]]:
    return [[axis.size for axis in atoms(group)] for group in groups]


def test_a_quotient_with_a_rounded_division() -> None:
    assert quotient(8 * BATCH * CHUNKS, 4 * CHUNKS) == 2 * BATCH
    assert quotient(8 * CHUNKS, BATCH) is None
    assert quotient(LENGTH, CHUNKS) is None  # 4 only where the length is a multiple of 4


def test_a_product_with_a_rounded_division_is_split() -> None:
    dims = ((Axis(4 * BATCH * CHUNKS),), (Axis(4),))
    assert _sizes(regroup(dims, (BATCH, 4, CHUNKS, 4))) == [[BATCH], [4], [CHUNKS], [4]]


def test_what_is_left_in_the_middle_is_one_dim() -> None:
    """Both sides hold as many elements: chunks of a length are that length again."""
    dims = ((Axis(BATCH),), (Axis(CHUNKS),), (Axis(4),), (Axis(8),))
    assert _sizes(regroup(dims, (BATCH, LENGTH, 8))) == [[BATCH], [CHUNKS, 4], [8]]


def test_two_dims_in_the_middle_are_not_told_apart() -> None:
    dims = ((Axis(BATCH),), (Axis(CHUNKS),), (Axis(4),), (Axis(8),))
    assert regroup(dims, (BATCH, 2, FloorDiv(LENGTH, 2), 8)) is None


def test_a_reshape_that_cuts_across_is_not_followed() -> None:
    assert regroup(((Axis(6),), (Axis(4),)), (4, 6)) is None
