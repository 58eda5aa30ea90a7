"""Sizes of tensor-like arguments, shared by all rules.

Here: element counts, broadcasting, complex factors. Not here: anything that knows an op.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Protocol, TypeGuard


class TensorLike(Protocol):
    """What a rule needs of a tensor: fake tensors, meta tensors and plain records have it."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> Any: ...


def is_tensor(value: object) -> TypeGuard[TensorLike]:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def tensors(value: object) -> Iterator[TensorLike]:
    """All tensors in nested tuples, lists and dicts, in order."""
    if is_tensor(value):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))


def shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape)


def numel(value: object) -> int:
    """Elements of all tensors in `value`; 0 if there is none."""
    return sum(prod(t.shape) for t in tensors(value))


def first_numel(value: object) -> int:
    """Elements of the first tensor in `value`; 0 if there is none."""
    return next((prod(t.shape) for t in tensors(value)), 0)


def broadcast_numel(value: object) -> int:
    """Elements of the broadcast of all tensors in `value`; 0 if there is none."""
    shapes = [shape(t) for t in tensors(value)]
    if not shapes:
        return 0
    rank = max(len(s) for s in shapes)
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    return prod(0 if 0 in sizes else max(sizes) for sizes in zip(*padded, strict=True))


def is_complex(value: object) -> bool:
    return any(getattr(t.dtype, "is_complex", False) for t in tensors(value))


def mac_factor(value: object) -> int:
    """4 where complex numbers are multiplied and added (8 real operations instead of 2), else 1."""
    return 4 if is_complex(value) else 1


def wrap_dims(dims: object, rank: int) -> tuple[int, ...]:
    """Reduced dims as non-negative ints; None and an empty list mean all, as in ATen."""
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return tuple(range(rank))
    listed: Sequence[int] = [dims] if isinstance(dims, int) else dims  # type: ignore[assignment]
    return tuple(d % rank for d in listed) if rank else ()


def pair(value: Any, rank: int) -> tuple[int, ...]:
    """A kernel size or stride spelled as one int or one-element list, for `rank` spatial dims."""
    listed = (value,) if isinstance(value, int) else tuple(value)
    return listed * rank if len(listed) == 1 else listed
