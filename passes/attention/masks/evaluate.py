"""Values that follow from constants alone, computed for real: a proof for static shapes that needs no algebra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from optpass.passes.attention.program.ir import Value

#: Limits of what is computed: elements of any one tensor, and operations.
_MOST_ELEMENTS = 2**24
_MOST_OPERATIONS = 64
#: Their result does not follow from their arguments.
_NOT_A_FUNCTION = frozenset("empty empty_like new_empty empty_strided new_empty_strided empty_permuted".split())


def evaluate(value: Value) -> torch.Tensor | None:
    """The tensor on the CPU; None where it depends on anything but constants, on symbolic sizes, or is too large."""
    order = _operations(value)
    if order is None:
        return None
    made: dict[Value, Any] = {}
    with torch.no_grad(), _disable_current_modes():
        for item in order:
            if item.op is None:
                assert item.real is not None
                made[item] = item.real.detach().to("cpu")
                continue
            try:
                result = call(item.op, _real(item.args, made))
            except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
                return None  # what fails on the CPU is not a program that this can speak of
            made[item] = result if isinstance(result, torch.Tensor) else result[item.index]
    found: torch.Tensor = made[value]
    same = tuple(found.shape) == tuple(value.shape) and found.dtype == value.dtype
    return found if same else None


def _operations(value: Value) -> list[Value] | None:
    """Everything that `value` is computed from, in order; None where not all of it is constant and small."""
    order: dict[Value, None] = {}
    pending: list[tuple[Value, bool]] = [(value, False)]
    while pending:
        item, done = pending.pop()
        if done:
            order[item] = None
            continue
        if item in order:
            continue
        if not _constant(item) or len(order) + len(pending) > _MOST_OPERATIONS:
            return None
        pending.append((item, True))
        pending.extend((used, False) for used in item.inputs())
    return list(order)


def _constant(item: Value) -> bool:
    if not all(isinstance(s, int) for s in item.shape) or item.tensor.numel() > _MOST_ELEMENTS:
        return False
    if item.op is None:
        return item.leaf == "constant" and item.version == 0 and item.real is not None and plain(item.real, item)
    op = item.op
    if item.name in _NOT_A_FUNCTION or op.namespace not in ("aten", "prims") or op._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in op.tags or torch.Tag.dynamic_output_shape in op.tags:
        return False
    return not any(isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool)) for a in _flat(item.args))


def call(op: Any, args: Sequence[Any]) -> Any:
    """An operation on arguments in the order of its schema, those that only a keyword can give included."""
    names = op._schema.arguments
    plain_args = [a for a, s in zip(args, names, strict=True) if not s.kwarg_only]
    return op(*plain_args, **{s.name: a for a, s in zip(args, names, strict=True) if s.kwarg_only})


def plain(real: torch.Tensor, value: Value) -> bool:
    """True for a tensor with memory of its own (not one wrapped by torch.func) that fits the Value."""
    try:
        real.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return False
    if real.dtype != value.dtype or real.dim() != value.dim or real.device.type == "meta":
        return False
    return all(isinstance(s, int) and s == r for s, r in zip(value.shape, real.shape, strict=True))


def _flat(item: Any) -> list[Any]:
    return [x for inner in item for x in _flat(inner)] if isinstance(item, (tuple, list)) else [item]


def _real(item: Any, made: Mapping[Value, Any]) -> Any:
    if isinstance(item, Value):
        return made[item]
    if isinstance(item, (tuple, list)):
        return type(item)(_real(i, made) for i in item)
    return torch.device("cpu") if isinstance(item, torch.device) else item


def fold(value: Value, operands: Sequence[Any], args: Sequence[Any]) -> Any:
    """What a pointwise operation makes of single numbers: `operands` stand for the Values among `args`, in order."""
    rest = iter(operands)
    with torch.no_grad(), _disable_current_modes():
        real = [
            torch.full((1,) * min(a.dim, 1), next(rest), dtype=a.dtype, device="cpu") if isinstance(a, Value) else a
            for a in args
        ]
        try:
            result = call(value.op, real)
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return None
        return result.item() if isinstance(result, torch.Tensor) and result.dtype == value.dtype else None
