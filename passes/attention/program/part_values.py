"""What a tensor becomes of which a part was written to, as operations on the whole of it.

A number is filled in (`scores[..., n:] = -inf`, `scores[:, :, i, j] = -inf`); what is added to a part is added to the
whole, with zeros beside it (`scores[:, :, 1:, 1:] += bias`, as MViT adds relative positions to all but a class token).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from optpass.passes.attention.program import calls
from optpass.passes.attention.program.ir import Value, arg
from optpass.passes.attention.program.part_writes import Part, inside, number_written, part_of, same_part

#: Gives the Value that stands for a tensor now.
Current = Callable[[Tensor], Value]
#: An operation, and its arguments behind the first.
Change = tuple[Any, tuple[Any, ...]]

_RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"})
_MOVES = frozenset({"permute", "transpose"})
_SAME = frozenset({"clone", "alias", "contiguous"})
_FILLS = frozenset({"copy", "index_put", "index_fill"})


def changes(part: Part, op: Any, arguments: Sequence[Any], current: Current) -> list[Change]:
    """What makes of the whole, one after another, what it is now; none where it is not known.

    Args:
        op, arguments: the write. What is computed here is told to whoever records operations.
        current: see `Current`.
    """
    number = number_written(op, arguments)
    if number is not None:
        return [_fill(current(inside(part)), number)]
    name = op._schema.name.rpartition("::")[2]
    if name == "copy_" and isinstance(written := arguments[1], Value):
        view = arguments[0]
        if calls.same_place(written.tensor, view.tensor):  # `scores[..., n:] += bias` ends so
            return [(torch.ops.aten.clone.default, (None,))]
        added = _added(written, view, part, current)
    elif name in ("add_", "sub_"):
        view, other, alpha = arguments
        term = _term(other, alpha, name == "sub_", view, current)
        added = [] if term is None else [term]
    else:
        return []
    if not added or view.dim != part.whole.dim or part.steps or any(t.tensor.dtype != view.dtype for t in added):
        return []
    return [(torch.ops.aten.add.Tensor, (current(_beside(part, t.tensor, view)), t.alpha)) for t in added]


def fills(op: Any) -> bool:
    """Whether `filled` may see something else in an operation."""
    return op._schema.name.rpartition("::")[2] in _FILLS


def filled(op: Any, arguments: tuple[Any, ...], current: Current) -> Change:
    """`scores[:, :, i, j] = number` for integers i and j as a fill at a mask, a copy over all of a tensor as what is
    copied; any other operation as it is."""
    name = op._schema.name.rpartition("::")[2]
    if name == "copy" and isinstance(made := arguments[1], Value):
        alike = made.dtype == arguments[0].dtype and str(made.shape) == str(arguments[0].shape)
        return (torch.ops.aten.clone.default, (made, None)) if alike else (op, arguments)
    fill = _at_indices(name, arguments, current) if name in _FILLS else None
    return (op, arguments) if fill is None else (fill[0], (arguments[0], *fill[1]))


def _at_indices(name: str, arguments: tuple[Any, ...], current: Current) -> Change | None:
    whole = arguments[0]
    if whole.dtype == torch.bool:  # a mask itself
        return None
    if name == "index_put":
        _, indices, number, accumulate = arguments
        if accumulate:
            return None
    else:
        _, dim, index, number = arguments
        indices = [None] * (dim % whole.dim) + [index]
    given = [index for index in indices if index is not None]
    integers = all(index.dtype in (torch.int64, torch.int32) for index in given)
    one = number.dim == 0 if isinstance(number, Value) else True
    if not given or not integers or not one or not all(_is_current(index, current) for index in given):
        return None
    at = [index is not None for index in indices] + [False] * (whole.dim - len(indices))
    mask = torch.zeros(
        [size if here else 1 for size, here in zip(whole.shape, at, strict=True)],
        dtype=torch.bool, device=whole.tensor.device,
    )  # fmt: skip
    true = torch.ones((), dtype=torch.bool, device=whole.tensor.device)
    places = [None if index is None else index.tensor for index in indices]
    return _fill(current(torch.ops.aten.index_put.default(mask, places, true)), number)


@dataclass(frozen=True)
class _Term:
    """`alpha · tensor`, added to a part."""

    tensor: Tensor
    alpha: float


def _term(other: Any, alpha: Any, less: bool, like: Value, current: Current) -> _Term | None:
    """`other`, added to `like` or taken off it; None where its tensor holds something else by now."""
    if not isinstance(alpha, (int, float)):
        return None
    alpha = -alpha if less else alpha
    if isinstance(other, Value):
        return _Term(other.tensor, alpha) if _is_current(other, current) else None
    if not isinstance(other, (int, float)):
        return None
    return _Term(torch.full([1] * like.dim, float(other), dtype=like.dtype, device=like.tensor.device), alpha)


def _fill(mask: Value, number: Any) -> Change:
    form = torch.ops.aten.masked_fill
    return (form.Tensor if isinstance(number, Value) else form.Scalar), (mask, number)


def _is_current(value: Value, current: Current) -> bool:
    """Whether a value's tensor still holds it."""
    return current(value.tensor) is value


def _added(value: Value, view: Value, part: Part, current: Current) -> list[_Term] | None:
    """What `value` is more than the part that is written to was, in the shape of `value`; None where it is no sum."""
    if value.version == view.version and value.storage == view.storage and same_part(part_of(value), part):
        return []
    source = value.args[0] if value.args and isinstance(value.args[0], Value) else None
    if source is None or source.dtype != value.dtype:
        return None
    if value.name in _RESHAPES | _MOVES | _SAME:
        inner = _added(source, view, part, current)
        return None if inner is None else [_Term(_laid_out(t.tensor, value, source), t.alpha) for t in inner]
    if value.name not in ("add", "sub"):
        return None
    alpha, less = arg(value, "alpha"), value.name == "sub"
    for side, other in ((source, value.args[1]), (value.args[1], source)):
        if not isinstance(side, Value) or side.dtype != value.dtype or str(side.shape) != str(value.shape):
            continue
        if side is not source and (less or alpha != 1):
            continue
        inner, term = _added(side, view, part, current), _term(other, alpha, less, value, current)
        if inner is not None and term is not None:
            return [*inner, term]
    return None


def _laid_out(tensor: Tensor, value: Value, source: Value) -> Tensor:
    """What is added to `source`, as it is added to `value`, which lays the same elements out differently."""
    if value.name in _SAME:
        return tensor
    tensor = tensor.expand(source.shape)
    if value.name in _RESHAPES:
        return tensor.reshape(value.shape)
    moved: Tensor = value.op(tensor, *value.args[1:])
    return moved


def _beside(part: Part, tensor: Tensor, view: Value) -> Tensor:
    """In the shape of the whole, with zeros beside the part."""
    bounds = {dim: (first, part.whole.shape[dim] - last) for dim, first, last in part.places}
    pads = [pad for dim in reversed(range(part.whole.dim)) for pad in bounds.get(dim, (0, 0))]
    return F.pad(tensor.expand(view.shape), pads)  # type: ignore[arg-type]  # sizes may be symbolic
