"""Scores that are a sum of products: `a · q kᵀ + b · r sᵀ` is one product of longer vectors, `[a q, b r] [k, s]ᵀ`.

Content and position apart, as in latent attention, or two kinds of content. Read as a product and a bias, the second
product would be a mask of all queries and keys, with a gradient of that size.
"""

from __future__ import annotations

import math
from typing import Protocol

from optpass.passes.attention.axes import Dims, atoms, flat
from optpass.passes.attention.program.ir import Value
from optpass.passes.attention.site import Blocked, Operand, Part, Scores

#: Numbers of a query up to which kernels for GPUs go; beyond it a bias is computed.
_LONGEST = 256


class Reads(Protocol):
    """Reads score chains; see `scores.Reader`."""

    def read(self, value: Value, dims: Dims) -> Scores: ...


def join(reader: Reads, scores: Scores, other: Operand, times: float, dims: Dims) -> bool:
    """Make `times · other` a part of `scores`, which it is added to; False where it is not a product like it.

    `dims`: the axes of the sum.
    """
    whole = set(flat(other.dims)) == set(flat(dims))
    if not whole or not _plain(scores) or scores.biases or not _number(scores.scale) or not _number(times):
        return False
    try:
        found = reader.read(other.value, other.dims)
    except Blocked:
        return False
    rows = tuple(a for a in atoms(scores.rows) if a in atoms(found.rows))
    if not rows or found.dtypes != scores.dtypes or _length(scores, found) > _LONGEST:
        return False
    if not _plain(found) or found.biases or not _number(found.scale):
        return False
    ratio = times * found.scale / scores.scale
    scores.parts.append(Part(found.query, found.key, found.contraction, ratio))
    scores.parts.extend(Part(p.query, p.key, p.contraction, p.ratio * ratio) for p in found.parts)
    scores.values.extend(found.values)
    scores.unread.extend(found.unread)
    scores.rows = rows  # heads that share keys in one of them have their own in another
    return True


def _plain(scores: Scores) -> bool:
    """Nothing but products times a number so far."""
    changed = scores.factors or scores.fills or scores.softcaps or scores.binary or scores.held or scores.shifts
    return not changed and scores.floor is None and not scores.shifted


def _length(*scores: Scores) -> float:
    """Numbers of a query for all products; infinity where that is not known when compiling."""
    depths = [c for s in scores for c in (s.contraction, *(p.contraction for p in s.parts))]
    if not all(isinstance(axis.size, int) for depth in depths for axis in depth):
        return math.inf
    return float(sum(math.prod(axis.size for axis in depth) for depth in depths))


def _number(number: object) -> bool:
    return isinstance(number, (int, float)) and math.isfinite(number) and number != 0
