"""Scores times a number or a tensor: what becomes of their scale, of biases, and of numbers that were filled in."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from optpass.passes.attention.axes import Dims, above, atoms, broadcast, flat
from optpass.passes.attention.find import sums
from optpass.passes.attention.find.fills import LEAST, not_floored, not_rounded_off, rounded
from optpass.passes.attention.find.operands import fixed, scaled
from optpass.passes.attention.find.unseen import is_parameter
from optpass.passes.attention.program.ir import Value, ancestors, arg
from optpass.passes.attention.site import Blocked, Factor, Number, Operand, Scores

if TYPE_CHECKING:
    from optpass.passes.attention.find.scores import Reader


def scale(reader: Reader, value: Value, dims: Dims) -> Scores:
    number, source = scaled(value, reader.constant)
    if number is None or source is None:
        return _masked_and_scaled(reader, value, dims) or _factor(reader, value, dims)
    scores = reader.read(source, dims)
    scaled_by(scores, number, value)
    return scores


def _masked_and_scaled(reader: Reader, value: Value, dims: Dims) -> Scores | None:
    """Masked scores times the number that a buffer holds now (GPT-J's `scale_attn`), which masked ones take too."""
    held: list[Value] = []

    def now(other: Value) -> bool | int | float | None:
        if other.dim == value.dim or any(v.learns or is_parameter(v) for v in ancestors(other) if v.leaf):
            return None
        number, kept = reader.now(other)
        held.extend(kept)
        return number

    number, source = scaled(value, now)
    if number is None or source is None:
        return None
    scores = reader.read(source, dims)
    if not scores.fills:
        return None
    scaled_by(scores, number, value)
    scores.held += tuple(held)
    return scores


def neg(reader: Reader, value: Value, dims: Dims) -> Scores:
    scores = reader.read(value.args[0], dims)
    scaled_by(scores, -1.0, value)
    return scores


def scaled_by(scores: Scores, number: Number, value: Value) -> None:
    """Scores as they are after `value`, which multiplies them by a number; changes `scores`."""
    not_floored(scores, value)
    if scores.fills or scores.biases or scores.offset or scores.softcaps:
        number = fixed(number, scores.contraction) or number  # times 0 a fill is NaN
    if isinstance(number, torch.SymFloat):
        if scores.fills or scores.biases or scores.offset:
            raise Blocked("masked or biased scores are scaled by a number that is not known when compiling", value)
        if scores.softcaps:
            raise Blocked("capped scores are scaled by a number that is not known when compiling", value)
        scores.steps.append(("times", number))
        scores.scale *= number
        return
    if scores.fills and number < 0:
        raise Blocked("masked scores change their sign", value)
    scores.scale *= number
    scores.offset *= number
    not_rounded_off(scores, value)
    scores.centred = scores.centred and number > 0
    scores.biases = [replace(b, coefficient=b.coefficient * number) for b in scores.biases]
    if scores.biases:
        sums.then(scores, f"times {number!r}", sums.rounding(value.dtype))
    else:
        scores.steps.append(("times", number))
    numbers = [rounded(f.fill * number, value.dtype) for f in scores.fills]
    scores.fills = [  # a number that is not low any more leaves weights, whatever the scores are
        replace(f, fill=n, near=f.near or n > LEAST) for f, n in zip(scores.fills, numbers, strict=True)
    ]


def _factor(reader: Reader, value: Value, dims: Dims) -> Scores:
    """Scores times a tensor; it may not run over queries and keys at once, which no kernel can fold away."""
    if value.name == "div" and arg(value, "rounding_mode"):
        raise Blocked("scores are divided with rounding", value)
    scores, other, swapped = reader.either(value, dims)
    not_floored(scores, value)
    if value.name == "div" and swapped:
        raise Blocked("the scores are a divisor", value)
    if scores.fills:
        raise Blocked("masked scores are multiplied by a tensor", value)
    factors = _separate(reader, other, scores, inverse=value.name == "div")
    if factors is None:
        raise Blocked("scores are multiplied by a tensor over queries and keys", value)
    if scores.softcaps:
        raise Blocked("capped scores are multiplied by a tensor", value)
    if scores.shifted and any(set(flat(f.operand.dims)) & set(reader.keys) for f in factors):
        raise Blocked("shifted scores are multiplied by a tensor over keys", value)
    scores.factors.extend(factors)
    scores.centred = False
    scores.biases = [replace(b, factors=(*b.factors, *factors), after=None) for b in scores.biases]
    return scores


def _separate(reader: Reader, operand: Operand, scores: Scores, *, inverse: bool) -> list[Factor] | None:
    """Factors that `operand` is the product of, none over queries and keys at once; None if there are none."""
    axes = set(flat(operand.dims))
    if not (axes & set(reader.keys) and axes & set(atoms(scores.rows))):
        return [Factor(operand, inverse=inverse)]
    value, dims = operand.value, operand.dims
    step = above(value, dims)
    if step is not None:
        return _separate(reader, Operand(*step), scores, inverse=inverse)
    if value.name not in ("mul", "div") or (value.name == "div" and arg(value, "rounding_mode")):
        return None
    found: list[Factor] = []
    for part, below in zip(value.args[:2], (False, value.name == "div"), strict=True):
        if not isinstance(part, Value) or part.dtype != value.dtype:
            return None
        factors = _separate(reader, Operand(part, broadcast(dims, part.shape)), scores, inverse=inverse is not below)
        if factors is None:
            return None
        found.extend(factors)
    return found
