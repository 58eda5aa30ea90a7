"""Where a part of a tensor is that is written to (`scores[..., n:] = -inf`): a mask of its places.

The part is a view by slices and single places of some dims, or of a diagonal. A tensor that has the same elements in
another shape is a view of what was written. What the whole becomes is `part_values`.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import torch

from optpass.passes.attention.program import calls
from optpass.passes.attention.program.ir import Value

Size = int | torch.SymInt

#: What leads from a tensor to a part of it, or changes nothing.
_STEPS = frozenset({"slice", "select", "diagonal", "alias", "detach"})


@dataclass(frozen=True)
class Part:
    """Places from `first` up to `last` along some dims of `whole`, and all of the others; sizes may be symbolic.

    Attributes:
        places: (dim, first, last).
        steps: of dims of which every so many-th place from the first on is one.
        diagonal: (offset, rows, columns): the places are those of a diagonal of two dims, and none of the above.
        dims: of the whole, in the order in which the view has them.
    """

    whole: Value
    places: tuple[tuple[int, Size, Size], ...] = ()
    steps: tuple[tuple[int, int], ...] = ()
    diagonal: tuple[int, int, int] | None = None
    dims: tuple[int, ...] = ()


def part_of(view: Value) -> Part | None:
    """What a view is a part of, as far as nothing was written to in between; None where it is no such part."""
    steps, whole = [], view
    while whole.name in _STEPS and isinstance(source := whole.args[0], Value) and source.storage == whole.storage:
        if source.version != view.version or source.tensor.dtype != view.tensor.dtype:
            return None
        steps.append((whole, source))
        whole = source
    made = [(part, source) for part, source in reversed(steps) if part.name not in ("alias", "detach")]
    if made and made[0][0].name == "diagonal":
        _, offset, rows, columns = made[0][0].args
        return Part(whole, diagonal=(offset, rows % whole.dim, columns % whole.dim)) if len(made) == 1 else None
    return _by_places(whole, made)


def _by_places(whole: Value, made: list[tuple[Value, Value]]) -> Part | None:
    left: dict[int, tuple[Size, Size]] = {dim: (0, size) for dim, size in enumerate(whole.shape)}
    every: dict[int, int] = {}
    order = list(left)
    for view, source in made:
        dim = (int(view.args[1]) if len(view.args) > 1 else 0) % source.dim
        at, step = order[dim], source.tensor.stride()[dim]
        if view.name == "diagonal" or at in every or _same(step, 0):
            return None
        # Where it begins says the offset, whatever the numbers of a slice are cut to.
        offset = view.tensor.storage_offset() - source.tensor.storage_offset()
        first = left[at][0] + (offset if _same(step, 1) else 0 if _same(offset, 0) else offset // step)
        if view.name == "select":
            left[at] = first, first + 1
            del order[dim]
        elif _same(view.tensor.stride()[dim], step):
            left[at] = first, first + view.shape[dim]
        elif isinstance(number := view.args[4], int) and number > 1:
            left[at], every[at] = (first, first + (view.shape[dim] - 1) * number + 1), number
        else:
            return None
    found = ((d, first, last) for d, (first, last) in left.items())
    places = tuple(
        one for one in found if one[0] in every or not (_same(one[1], 0) and _same(one[2], whole.shape[one[0]]))
    )
    return Part(whole, places, tuple(every.items()), dims=tuple(order)) if places else None


def inside(part: Part) -> torch.Tensor:
    """True at the places of a part; broadcasts to the whole."""
    whole = part.whole

    def places(dim: int) -> torch.Tensor:
        at = torch.arange(whole.shape[dim], device=whole.tensor.device)
        return at.view([-1 if d == dim else 1 for d in range(whole.dim)])

    if part.diagonal is not None:
        offset, rows, columns = part.diagonal
        return places(rows) + offset == places(columns)
    steps, found = dict(part.steps), list[Any]()
    for dim, first, last in part.places:
        at: Any = places(dim)
        found += [] if _same(first, 0) else [at >= first]
        found += [] if _same(last, whole.shape[dim]) else [at < last]
        found += [(at - first) % steps[dim] == 0] if dim in steps else []
    mask: torch.Tensor = functools.reduce(operator.and_, found)  # there is one at least
    return mask


def same_part(one: Part | None, other: Part) -> bool:
    """Whether two parts are of the same places of one tensor, asking for no guard."""
    return (
        one is not None
        and one.whole is other.whole
        and str((one.places, one.steps, one.diagonal, one.dims))
        == str((other.places, other.steps, other.diagonal, other.dims))
    )


def number_written(op: Any, arguments: Any) -> Any:
    """What `fill_`, or `copy_` of a tensor without dims, writes; None for other operations."""
    name = op._schema.name.rpartition("::")[2]
    given = arguments[1] if name in ("fill_", "copy_") else None
    if isinstance(given, Value):
        return given if given.dim == 0 else None
    return given


def same_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same memory, from end to end, in shapes of their own."""
    if calls.storage_of(one) != calls.storage_of(other) or one.dtype != other.dtype:
        return False
    same = _same(one.numel(), other.numel()) and _same(one.storage_offset(), other.storage_offset())
    return same and _dense(one) and _dense(other)


def _dense(tensor: torch.Tensor) -> bool:
    step: Size = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not _same(size, 1) and not _same(stride, step):
            return False
        step = step * size
    return True


def _same(one: Size, other: Size) -> bool:
    """Whether two sizes are, whatever their symbols stand for; asks for no guard."""
    return str(one) == str(other)
