"""Which axes of a site are batch, heads, rows, keys, depth and width: the dims of the call that computes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optpass.passes.attention.axes import Axis, atoms, flat
from optpass.passes.attention.site import Blocked, Operand, Site


@dataclass(frozen=True)
class Frame:
    """Which axes the dims of the call run over: q is (batch, heads, rows, depth), v (batch, kv_heads, keys, width)."""

    batch: tuple[Axis, ...]
    heads: tuple[Axis, ...]
    groups: tuple[Axis, ...]  #: innermost part of `heads`: query heads that share one key and value head
    rows: tuple[Axis, ...]
    keys: tuple[Axis, ...]
    depth: tuple[Axis, ...]
    width: tuple[Axis, ...]
    depths: tuple[tuple[Axis, ...], ...] = ()  #: of further products that are added to the scores

    @property
    def vector(self) -> Any:
        """Numbers of a query: those of all products together."""
        return sum((size_of(depth) for depth in self.depths), size_of(self.depth))

    @property
    def kv_heads(self) -> tuple[Axis, ...]:
        """Heads of k and v."""
        return tuple(a for a in self.heads if a not in self.groups)


def size_of(axes: tuple[Axis, ...]) -> Any:
    """The product of the sizes: an int or an expression."""
    total: Any = 1
    for axis in axes:
        total = total * axis.size
    return total


def frame_of(site: Site) -> Frame:
    """The frame of `site`; raises `Blocked` where an operand has an axis that attention has no place for."""
    scores = site.scores
    depths = tuple(atoms(part.contraction) for part in scores.parts)
    added = {a for depth in depths for a in depth}
    in_query = {a for o in (scores.query, *(p.query for p in scores.parts)) for a in flat(o.dims)} - added
    in_key = {a for o in (scores.key, *(p.key for p in scores.parts)) for a in flat(o.dims)} - added
    in_value, out = set(flat(site.value.dims)), flat(site.out_dims)
    keys, depth = atoms(site.keys), atoms(scores.contraction)
    rows = tuple(a for a in out if a in atoms(scores.rows) and a in _row_dim(site))
    width = tuple(a for a in out if a not in in_query and a not in in_key and a in in_value and a not in keys)
    rest = [a for a in out if a not in rows and a not in width]
    if set(keys) - in_key or set(keys) - in_value:
        raise Blocked("keys and values do not both run over the axis of the softmax", site.output)
    if (in_query & set(keys)) or (in_value & set(depth)) or set(rows) & (in_key | in_value):
        raise Blocked("an axis of one operand appears in another where attention has none", site.output)
    unknown = (in_query | in_key | in_value) - {*rows, *keys, *depth, *width, *rest}
    if unknown or (in_query - set(depth)) - {*rows, *rest}:
        raise Blocked("an operand has an axis that the result lacks", site.output)
    groups = tuple(a for a in rest if a not in in_key and a not in in_value)
    shared = [a for a in rest if a not in groups]
    terms = [set(flat(o.dims)) for o in _mask_operands(site)]
    batch, heads = _split(shared, groups, terms)
    if not set(groups) <= set(heads):
        raise Blocked("query heads that share keys are not next to each other", site.output)
    return Frame(batch, heads, groups, rows, keys, depth, width, depths)


def _row_dim(site: Site) -> set[Axis]:
    """Atoms of the dim of the second product that is neither batch, nor keys, nor values."""
    return set(flat(site.sides))


def _split(
    shared: Sequence[Axis], groups: tuple[Axis, ...], terms: list[set[Axis]]
) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Batch and heads: the last shared axis is the heads, unless a mask would have to be copied for that."""

    def cost(at: int) -> int:
        parts = (set(shared[:at]), {*shared[at:], *groups})
        return sum(1 for t in terms for p in parts if p & t and not p <= t)

    if len(shared) == 1 and not groups:
        return tuple(shared), ()
    preferred = max(len(shared) - 1, 0)
    order = sorted(range(len(shared) + 1), key=lambda at: (cost(at), abs(at - preferred)))
    at = order[0]
    return tuple(shared[:at]), (*shared[at:], *groups)


def _mask_operands(site: Site) -> list[Operand]:
    return [*(f.mask for f in site.scores.fills), *(b.operand for b in site.scores.biases)]
