"""What is expected around a graph that has not run yet, from one of the same parameters that was seen in a step: the
same graph at other sizes, or as Dynamo compiled it for other ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch

from optpass.backend.memory.eager.timeline import AS_SEEN, Resize, Shapes
from optpass.backend.memory.replay.graph_values import hint, ints
from optpass.backend.memory.replay.tail import Tail
from optpass.backend.memory.seen.leaves import Leaf
from optpass.backend.memory.seen.share import Share
from optpass.backend.memory.seen.stores import Stores

#: Inputs that are left out instead of taking one for another of another size.
CHANGED = 3


@dataclass(frozen=True)
class Expected:
    """Around one graph.

    Attributes:
        tail: what happens between its forward and its backward; None for what is assumed of any.
        beside: bytes that are there beside what it is given: targets.
        notes: what was assumed.
        elsewhere: what was seen to be there elsewhere, as in `Leaf`.
        several: runs of its step were seen to wait for their backward beside each other.
        crowded: it is planned anew since its own runs wait for their backward, and one more like them would not fit.
        parameters: of the step that it runs in.
    """

    tail: Tail | None = None
    beside: int = 0
    notes: tuple[str, ...] = ()
    crowded: bool = False
    elsewhere: Stores | None = None
    several: bool = False
    parameters: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, like: Leaf | None, shapes: Shapes | None) -> Expected:
        """From what was seen of `like`; at sizes of other calls that are `shapes`, else at the same."""
        if like is None:
            return cls()
        if shapes is None:
            return cls(like.tail(), like.beside, elsewhere=like.elsewhere, several=like.waits)
        if not like.seen:
            return cls()
        sizes = resize(like, shapes)
        note = "" if sizes.most == 1.0 else "the loss outside of the graph is taken to need what it did at other sizes"
        outside = note and like.loss.timeline is not None
        return cls(
            like.tail(sizes), int(like.beside * sizes.most), (note,) if outside else (), elsewhere=like.elsewhere,
            several=like.waits,
        )  # fmt: skip


#: Of a graph that is like none that was seen.
NOTHING_KNOWN = Expected()


def resize(leaf: Leaf, shapes: Shapes) -> Resize:
    """From the sizes that a step with `leaf` was seen at to those of a call with `shapes`; where it was seen at none,
    or in another call, nothing changes."""
    parameters = (tuple(p.shape) for r in leaf.known.values() if (p := r()) is not None)
    return Resize(leaf.seen_at, _as_seen(leaf.seen_at, shapes) or leaf.seen_at, parameters)


def share_at(share: Share, leaf: Leaf, shapes: Shapes) -> Share:
    """What a graph may use of a step that was seen, in a call with `shapes`. These may be larger than those that `leaf`
    was seen at, of which the share is: what the loss needs then counts, and what is given to the graph or held by
    others."""
    sizes = AS_SEEN if _as_seen(leaf.seen_at, shapes) is None else resize(leaf, shapes)
    if share.tail is None or sizes.most <= 1.0:
        return share
    tail, statics, most = share.tail, share.statics, sizes.most
    seen, now = leaf.loss, leaf.loss.at(sizes)

    def grown(size: int, before: int, after: int) -> int:
        return int(size * (after / before if before and seen.timeline is not None else most))

    old = tail.early_bytes - min(leaf.late, tail.early_bytes)
    tail = replace(
        tail,
        forward_bytes=grown(tail.forward_bytes, seen.forward_bytes, now.forward_bytes),
        backward_bytes=grown(tail.backward_bytes, seen.backward_bytes, now.backward_bytes),
        kept_bytes=max(tail.kept_bytes, int(tail.kept_bytes * most)),
        early_bytes=tail.early_bytes - old + int(old * most),
        gone=(),
    )
    inputs, activations = int(statics.inputs * most), int(statics.activations * most)
    statics = replace(statics, inputs=inputs, activations=activations)
    return replace(share, statics=statics, tail=tail, follow=int(share.follow * most))


def _as_seen(seen: Shapes, shapes: Shapes) -> Shapes | None:
    """`shapes`, one for each of `seen`, as few as can be of another size: a graph that is compiled again may be given
    sizes beside its tensors, or without some, and is not given vectors that it turns out not to read. None where they
    are those of another call."""
    if comparable(seen, shapes):
        return shapes
    if _is_part(shapes, seen):
        return seen
    rows, columns = len(seen), len(shapes)
    # Of what is left of both: what differs and is left out, and what comes first: 0 both, 1 of `seen`, 2 of `shapes`.
    best: list[list[tuple[float, int]]] = [[(inf, 0)] * (columns + 1) for _ in range(rows + 1)]
    best[rows][columns] = (0, 0)
    for i in range(rows, -1, -1):
        for j in range(columns, -1, -1):
            ways = [best[i][j]]
            if i < rows and j < columns and len(seen[i]) == len(shapes[j]):
                ways.append((best[i + 1][j + 1][0] + (CHANGED if seen[i] != shapes[j] else 0), 0))
            if i < rows and len(seen[i]) <= 1:
                ways.append((best[i + 1][j][0] + 1, 1))
            if j < columns and len(shapes[j]) <= 1:
                ways.append((best[i][j + 1][0] + 1, 2))
            best[i][j] = min(ways)
    if best[0][0][0] == inf:
        return None
    found: list[tuple[int, ...]] = []
    i = j = 0
    while i < rows or j < columns:
        way = best[i][j][1]
        if way < 2:
            found.append(seen[i] if way else shapes[j])
        i, j = i + (way < 2), j + (way != 1)
    return tuple(found)


def _is_part(shapes: Shapes, seen: Shapes) -> bool:
    """Whether `shapes` are those of `seen`, but for vectors and numbers that are left out."""
    number = 0
    for shape in seen:
        if number < len(shapes) and shapes[number] == shape:
            number += 1
        elif len(shape) > 1:
            return False
    return number == len(shapes)


def comparable(one: Shapes, other: Shapes) -> bool:
    """Whether two calls are given tensors of as many dimensions."""
    return [len(shape) for shape in one] == [len(shape) for shape in other]


def shapes_of(args: Sequence[Any], parameters: Collection[int]) -> Shapes:
    """Shapes of what a graph is called with, numbers as one size, without what is at the positions `parameters`."""
    return tuple(_shape(value) for i, value in enumerate(args) if i not in parameters)


def alike(leaves: Iterable[Leaf], parameters: Sequence[torch.Tensor], shapes: Shapes) -> Leaf | None:
    """The first of `leaves` that has the same parameters, was seen in a step, and is called alike."""
    wanted = [id(p) for p in parameters]
    for leaf in leaves:
        same = leaf.seen and wanted and [id(r()) for r in leaf.own] == wanted
        if same and _as_seen(leaf.seen_at, shapes) is not None:
            return leaf
    return None


def _shape(value: Any) -> tuple[int, ...]:
    if isinstance(value, torch.Tensor):
        return tuple(ints(value.shape))
    return (int(hint(value)),) if isinstance(value, (int, torch.SymInt)) else ()
