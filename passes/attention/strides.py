"""Strides of tensors whose sizes may be symbolic."""

from __future__ import annotations

import math
from typing import Any

import sympy
import torch

from optpass.passes.attention.axes import Size, equal, expression, is_one


def same_strides(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape have the same strides, but for dims of size 1."""
    pairs = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(equal_strides(a, b) or is_one(size) for size, a, b in pairs)


def equal_strides(a: Size, b: Size) -> bool:
    """Whether two strides are the same wherever their tensor has elements: a size in `Max(1, size)` is at least 1."""
    one, other = (_of_elements(expression(stride)) for stride in (a, b))
    return equal(one, other)


def has_gaps(tensor: torch.Tensor) -> bool:
    """Whether memory between its elements is not its own, as in a part of a tensor; of what is expanded, one copy."""
    dims = [(expression(n), expression(s)) for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    dims = [(size, stride) for size, stride in dims if not is_one(size) and stride != 0]
    whole = math.prod(size for size, _ in dims)
    return bool(dims) and not any(equal_strides(size * stride, whole) for size, stride in dims)


def _of_elements(stride: Any) -> Any:
    return stride.replace(_is_at_least_one, _size) if isinstance(stride, sympy.Expr) else stride


def _is_at_least_one(expr: Any) -> bool:
    return type(expr).__name__ == "Max" and len(expr.args) == 2 and sympy.S.One in expr.args


def _size(expr: Any) -> Any:
    return next(arg for arg in expr.args if arg != 1)
