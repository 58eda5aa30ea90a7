"""What is expected around a graph that has not run yet, from one of the same parameters that was seen in a step: the
same graph at other sizes, or as Dynamo compiled it for other ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optpass.backend.memory.eager.timeline import Resize, Shapes
from optpass.backend.memory.replay.graph_values import hint, ints
from optpass.backend.memory.replay.tail import Tail
from optpass.backend.memory.seen.leaves import Leaf
from optpass.backend.memory.seen.stores import Stores


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
    """

    tail: Tail | None = None
    beside: int = 0
    notes: tuple[str, ...] = ()
    crowded: bool = False
    elsewhere: Stores | None = None
    several: bool = False

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
    """From the sizes that a step with `leaf` was seen at to those of a call with `shapes`."""
    parameters = (tuple(p.shape) for r in leaf.known.values() if (p := r()) is not None)
    return Resize(leaf.seen_at, shapes, parameters)


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
        if leaf.seen and wanted and [id(r()) for r in leaf.own] == wanted and comparable(leaf.seen_at, shapes):
            return leaf
    return None


def _shape(value: Any) -> tuple[int, ...]:
    if isinstance(value, torch.Tensor):
        return tuple(ints(value.shape))
    return (int(hint(value)),) if isinstance(value, (int, torch.SymInt)) else ()
