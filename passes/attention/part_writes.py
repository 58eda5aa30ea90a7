"""A number that is written to a part of a tensor (`scores[..., n:] = -inf`), as what the whole of it has become.

The part is a view by slices and single places of some dims: where it is follows from the places along these, so that
the whole is `masked_fill` of what it was. A tensor that has the same elements in another shape is a view of what was
written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from optpass.passes.attention import calls
from optpass.passes.attention.ir import Value

Size = int | torch.SymInt

#: What leads from a tensor to a part of it, or changes nothing.
_STEPS = frozenset({"slice", "select", "alias", "detach"})


@dataclass(frozen=True)
class Part:
    """Places from `first` up to `last` along some dims of `whole`, and all of the others; sizes may be symbolic.

    Attributes:
        places: (dim, first, last).
    """

    whole: Value
    places: tuple[tuple[int, Size, Size], ...]


def part_of(view: Value) -> Part | None:
    """What a view is a part of, as far as nothing was written to in between; None where it is no such part."""
    steps, whole = [], view
    while whole.name in _STEPS and isinstance(source := whole.args[0], Value) and source.storage == whole.storage:
        if source.version != view.version or source.tensor.dtype != view.tensor.dtype:
            return None
        steps.append((whole, source))
        whole = source
    left: dict[int, tuple[Size, Size]] = {dim: (0, size) for dim, size in enumerate(whole.shape)}
    order = list(left)
    for made, source in reversed(steps):
        if made.name not in ("slice", "select"):
            continue
        dim = (int(made.args[1]) if len(made.args) > 1 else 0) % source.dim
        if made.name == "slice" and not _same(made.tensor.stride()[dim], source.tensor.stride()[dim]):
            return None  # every second
        # Where it begins says the offset, whatever the numbers of a slice are cut to.
        offset, step = made.tensor.storage_offset() - source.tensor.storage_offset(), source.tensor.stride()[dim]
        if _same(step, 0):
            return None
        first = left[order[dim]][0] + (offset if _same(step, 1) else 0 if _same(offset, 0) else offset // step)
        size = made.shape[dim] if made.name == "slice" else 1
        left[order[dim]] = first, first + size
        if made.name == "select":
            del order[dim]
    found = ((d, first, last) for d, (first, last) in left.items())
    places = tuple(one for one in found if not (_same(one[1], 0) and _same(one[2], whole.shape[one[0]])))
    return Part(whole, places) if places else None


def inside(part: Part) -> torch.Tensor:
    """True at the places of a part; broadcasts to the whole."""
    found: torch.Tensor | None = None
    for dim, first, last in part.places:
        size = part.whole.shape[dim]
        at = torch.arange(size, device=part.whole.tensor.device)
        below: Any = None if _same(last, size) else at < last
        above: Any = None if _same(first, 0) else at >= first
        here = above if below is None else below if above is None else above & below
        assert here is not None  # else it is all of the dim
        here = here.view([size if d == dim else 1 for d in range(part.whole.dim)])
        found = here if found is None else found & here
    assert found is not None  # there is one place at least
    return found


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
