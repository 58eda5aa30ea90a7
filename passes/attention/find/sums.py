"""What is added to scores: biases, numbers, a row's own maximum; and other products, which `joined` makes one of both.

Rules of `scores.Reader` for sums. Whether a bias is a mask to a kernel `terms` and `masking` say.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from optpass.passes.attention.axes import Dims, broadcast
from optpass.passes.attention.find import fills, joined
from optpass.passes.attention.find.fills import not_floored, not_rounded_off, not_topped, unknown
from optpass.passes.attention.find.operands import fixed, is_of_one_row, row_maximum_values, same_shape, shifts_rows
from optpass.passes.attention.program.ir import Value, ancestors, arg
from optpass.passes.attention.site import Bias, Blocked, Operand, Scores

if TYPE_CHECKING:
    from optpass.passes.attention.find.scores import Reader

#: How many values above a bias are looked at for NaN.
_LOOK = 32


def add(reader: Reader, value: Value, dims: Dims) -> Scores:
    """`a · left + b · right`, where one side leads to the product and the other is a number or a tensor."""
    alpha = arg(value, "alpha")
    alpha = 1.0 if alpha is None else alpha
    if not isinstance(alpha, (int, float)):
        raise Blocked("an addition with a symbolic alpha", value)
    a, b = {"add": (1.0, alpha), "sub": (1.0, -alpha), "rsub": (-alpha, 1.0)}[value.name]
    left, right = value.args[0], value.args[1]
    if not isinstance(left, Value):
        raise Blocked(unknown(value), value)
    if not isinstance(right, Value):
        scores = reader.read(left, dims)
        _times(reader, scores, a, value)
        _shifted(scores, right, b, value)
        return scores
    if value.name == "sub" and alpha == 1 and shifts_rows(right, left, dims, reader.keys):
        scores = _from_the_top(reader.read(left, dims), right, left)
        scores.centred = is_of_one_row(right, left)  # that of more leaves rows of large negative numbers far below
        scores.fills = [replace(f, lifted=True) for f in scores.fills]
        return scores
    if value.name == "sub" and shifts_rows(left, right, dims, reader.keys):
        scores = reader.read(right, dims)  # the other way round: the least score of a row gets the largest weight
        _times(reader, scores, b, value)
        return _from_the_top(scores, left, right)
    try:
        scores, other, swapped = reader.either(value, dims)
    except Blocked:
        multiplied = fills.multiplied_by_mask(reader, value, dims, (a, b))
        if multiplied is None:
            raise
        return multiplied
    own, others = (b, a) if swapped else (a, b)
    _times(reader, scores, own, value)
    if reader.join and joined.join(reader, scores, other, others, dims):
        return scores
    _biased_by(scores, other, others, value.dtype)
    return scores


def addcmul(reader: Reader, value: Value, dims: Dims) -> Scores:
    """`x + number · a · b`, where one of a and b leads to the product and the other is one number."""
    bias, a, b, number = value.args
    for source, other in ((a, b), (b, a)):
        c = reader.constant(other)
        if c is None or not isinstance(number, (int, float)) or not c * number or not same_shape(source, value):
            continue
        scores = reader.read(source, dims)
        reader.scaled_by(scores, float(c) * float(number), value)
        _biased_by(scores, Operand(bias, broadcast(dims, bias.shape)), 1.0, value.dtype)
        return scores
    raise Blocked(unknown(value), value)


def with_input(reader: Reader, scores: Scores, value: Value, dims: Dims) -> None:
    """`beta · input + alpha · product`; with beta = 0 the input is not even read."""
    beta, alpha = (fixed(arg(value, name), scores.contraction) for name in ("beta", "alpha"))
    if beta is None or not alpha:
        raise Blocked(f"{value.name} with a beta or alpha that is not a number", value)
    scores.scale *= float(alpha)
    scores.steps.append(("times", float(alpha)))
    source = value.args[0]
    if not beta:
        scores.unread.append(source)
    else:
        _biased_by(scores, Operand(source, broadcast(dims, source.shape)), float(beta), value.dtype)


def _from_the_top(scores: Scores, top: Value, source: Value) -> Scores:
    """Scores with `top`, a row's own maximum in `source`, taken off: a softmax does not change by that."""
    scores.shifted, scores.offset = True, 0.0
    scores.topped = bool(scores.fills or scores.biases)
    scores.shifts.extend(row_maximum_values(top, source))
    scores.values.extend(scores.shifts)
    return scores


def _times(reader: Reader, scores: Scores, number: float, value: Value) -> None:
    if not number or not math.isfinite(number):
        raise Blocked(f"scores are multiplied by {number:g}", value)
    if number != 1.0:
        reader.scaled_by(scores, float(number), value)


def _shifted(scores: Scores, number: Any, times: float, value: Value) -> None:
    """A number that is added to every score of a row changes nothing, unless scores are lost beside it."""
    if not isinstance(number, (int, float)) or not math.isfinite(number * times):
        raise Blocked("scores are shifted by something that is not a finite number", value)
    masked = [fill.fill for fill in scores.fills] + ([torch.finfo(value.dtype).min] if scores.biases else [])
    if any(math.isinf(fills.rounded(one + number * times, value.dtype)) and math.isfinite(one) for one in masked):
        raise Blocked(f"{number * times:g} is added to masked scores, which become minus infinity by that", value)
    scores.shifted = True
    scores.offset += number * times
    not_rounded_off(scores, value)


def _biased_by(scores: Scores, operand: Operand, coefficient: float, dtype: torch.dtype) -> None:
    not_floored(scores, operand.value)
    not_topped(scores, operand.value)
    if _writes_nan(operand.value):
        raise Blocked("NaN is added to the scores", operand.value)
    scores.added_in.append(dtype)
    scores.centred = False
    scores.biases.append(Bias(operand, coefficient, written=coefficient, after=(rounding(dtype),)))
    scores.fills = [replace(f, late=f.late + 1, written=f.written if f.late else f.fill) for f in scores.fills]


def _writes_nan(value: Value) -> bool:
    """Whether an operation not far above fills in NaN: rows of it pass other gradients than any mask's."""
    above = itertools.islice(ancestors(value), _LOOK)
    return any(isinstance(a, float) and math.isnan(a) for item in above for a in item.args)


def then(scores: Scores, *steps: str) -> None:
    """What is done to a sum with a bias."""
    last = scores.biases[-1]
    if last.after is not None:
        scores.biases[-1] = replace(last, after=(*last.after, *steps))


def rounding(dtype: torch.dtype) -> str:
    """The step of a user's program that rounds to `dtype`, as `exact` reads it."""
    return f"round {str(dtype).removeprefix('torch.')}"
