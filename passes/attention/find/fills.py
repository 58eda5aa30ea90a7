"""What replaces scores: fills, in every spelling, and floors; with the numbers that stand for minus infinity.

Rules of `scores.Reader` for the operations that write other numbers where scores were. What a mask then is to a kernel
is `masking`'s.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from optpass.passes.attention.axes import Dims, broadcast
from optpass.passes.attention.find.operands import before_casts, complement, is_binary, not_zero, same_shape
from optpass.passes.attention.find.unseen import is_parameter
from optpass.passes.attention.program import nodes
from optpass.passes.attention.program.ir import Value, arg
from optpass.passes.attention.site import Blocked, Fill, Floor, Operand, Scores

if TYPE_CHECKING:
    from optpass.passes.attention.find.scores import Reader

#: Fills at or below this number stand for minus infinity, and so does the lowest number of the scores' dtype. A score
#: can be as low as -1e4, and then what replaces others counts beside it.
MINUS_INFINITY = -9e8
#: Fills above it are no masks.
LEAST = -9e2
#: The exponential of a number below it is 0 in every dtype.
NO_WEIGHT = -1e3
#: The largest mask value of a row without a key: scores that are added to it, in the dtype of the sum, are lost.
NO_KEY = {torch.float16: -3e4, torch.bfloat16: -4e3, torch.float32: -1e8, torch.float64: -1e17}


def masked_fill(reader: Reader, value: Value, dims: Dims) -> Scores:
    """`scores.masked_fill(mask, number)`."""
    source, mask, fill = value.args[0], value.args[1], value.args[2]
    return filled(reader, value, dims, source, mask, fill, keep_when=False)


def where(reader: Reader, value: Value, dims: Dims) -> Scores:
    """`where(mask, scores, number)`, either way round."""
    mask, yes, no = value.args[0], value.args[1], value.args[2]
    if number_of(reader, no)[0] is not None:
        return filled(reader, value, dims, yes, mask, no, keep_when=True)
    if number_of(reader, yes)[0] is not None:
        return filled(reader, value, dims, no, mask, yes, keep_when=False)
    raise Blocked("masked scores are replaced by a tensor that is not one number", value)


def index_put(reader: Reader, value: Value, dims: Dims) -> Scores:
    """`scores[mask] = number`, and `scores[:, :, mask] = number`."""
    source, indices, fill = value.args[0], value.args[1], value.args[2]
    masks = [(at, index) for at, index in enumerate(indices) if index is not None]
    at, mask = masks[0] if len(masks) == 1 else (0, None)
    if not isinstance(mask, Value) or mask.dtype != torch.bool or arg(value, "accumulate"):
        raise Blocked("scores are written at indices", value)
    over = tuple(dims[at : at + mask.dim])  # no dim of an index broadcasts
    return filled(reader, value, dims, source, mask, fill, keep_when=False, over=over)


def filled(
    reader: Reader, value: Value, dims: Dims, source: Any, mask: Value, fill: Any, *, keep_when: bool,
    over: Dims | None = None,
) -> Scores:  # fmt: skip
    """Scores of `source` with `fill` where `mask` says so; raises `Blocked` where a score can be as low.

    Args:
        over: what the mask's dims run over; None where it broadcasts.
    """
    number, held = number_of(reader, fill)
    if not isinstance(number, (int, float)):
        raise Blocked("masked scores are replaced by a tensor that is not one number", value)
    if not isinstance(source, Value) or len(source.shape) != len(value.shape):
        raise Blocked("the mask has more dims than the scores", value)
    if not same_shape(source, value):
        raise Blocked("scores are repeated where they are masked", value)
    scores = reader.read(source, dims)
    not_floored(scores, value)
    not_topped(scores, value)
    number = rounded(float(number), value.dtype)
    if math.isnan(number) or number > LEAST:
        raise Blocked(f"masked scores become {number:g}, which a score can be as low as: it is not -inf", value)
    if mask.dtype != torch.bool:
        raise Blocked("the mask is not boolean", value)
    lowest = torch.finfo(value.dtype).min
    near = number > max(MINUS_INFINITY, lowest)
    if scores.offset and number > lowest and (near or number - scores.offset > MINUS_INFINITY):
        reason = f"masked scores become {number:g} where {scores.offset:g} was added to all, and can be as low as that"
        raise Blocked(reason, value)
    scores.fills.append(Fill(Operand(mask, over or broadcast(dims, mask.shape)), keep_when, number, near=near))
    scores.held += held
    scores.centred = False
    return scores


def number_of(reader: Reader, item: Any) -> tuple[bool | int | float | None, tuple[Value, ...]]:
    """The number that a fill is, and what must go on holding it: GPT-J keeps its own in a buffer."""
    return reader.now(item) if isinstance(item, Value) else (item, ())


def multiplied_by_mask(reader: Reader, value: Value, dims: Dims, times: tuple[float, float]) -> Scores | None:
    """`s · m + c · (1 - m)`, which replaces scores by c where m is 0, if m holds nothing but 0 and 1."""
    left, right = value.args[0], value.args[1]
    for product, own, rest, number in ((left, times[0], right, times[1]), (right, times[1], left, times[0])):
        hidden = complement(rest, reader.constant) if product.name == "mul" and own == 1.0 else None
        if hidden is None:
            continue
        for source, mask in (product.args[:2], product.args[1::-1]):
            both = before_casts(mask, hidden[1]) if isinstance(source, Value) and isinstance(mask, Value) else None
            if both is not None:
                if mask.dim > len(dims):
                    return None
                if math.isinf(rounded(hidden[0] * number, value.dtype)):
                    raise Blocked("minus infinity is added to scores that are multiplied by 0", value)
                # What is neither 0 nor 1 is so in one dtype, and another number, or 1, in the other.
                proved = () if is_binary(both) else (Operand(both, broadcast(dims, both.shape)),)
                keep = mask if mask.dtype == torch.bool else not_zero(mask)
                scores = filled(reader, value, dims, source, keep, hidden[0] * number, keep_when=True)
                if any(math.isinf(fill.fill) for fill in scores.fills[:-1]):
                    raise Blocked("scores that were masked with minus infinity are multiplied by 0", value)
                scores.fills[-1] = replace(scores.fills[-1], product=True)
                scores.binary += proved
                scores.values.append(product)
                return scores
    return None


def maximum(reader: Reader, value: Value, dims: Dims) -> Scores:
    """`maximum(scores, finfo.min)`: what two masks add up to stays finite."""
    for source, other in ((value.args[0], value.args[1]), (value.args[1], value.args[0])):
        number = reader.constant(other)
        if isinstance(number, (int, float)) and same_shape(source, value):
            return floored(reader, value, dims, source, float(number), tie=0.5)
    raise Blocked(unknown(value), value)


def clamp(reader: Reader, value: Value, dims: Dims) -> Scores:
    """`scores.clamp(min=number)`, and any clamp of scores that the maximum of their row was taken off."""
    least, most = arg(value, "min"), arg(value, "max")
    if not all(bound is None or isinstance(bound, (int, float)) for bound in (least, most)):
        raise Blocked(unknown(value), value)
    if most is None and least is not None and least <= torch.finfo(value.dtype).min:
        return floored(reader, value, dims, value.args[0], float(least), tie=1.0)
    if (least is not None and not least <= NO_WEIGHT) or (most is not None and not most >= 0.0):
        raise Blocked(unknown(value), value)
    scores = reader.read(value.args[0], dims)
    if not scores.centred or scores.offset:
        raise Blocked("scores are clamped that the maximum of each row was not taken off: a row may be beyond", value)
    if scores.topped or scores.floor is not None:  # no gradient of a row that is NaN passes
        raise Blocked("masked or biased scores are clamped", value)
    scores.bounded = True
    return scores


def floored(reader: Reader, value: Value, dims: Dims, source: Value, number: float, *, tie: float) -> Scores:
    """Scores of `source` that are not let below `number`; `tie`: what passes of a gradient where they are equal."""
    lowest = torch.finfo(value.dtype).min
    if source.dtype != value.dtype or not number <= lowest:
        raise Blocked(unknown(value), value)
    scores = reader.read(source, dims)
    not_floored(scores, value)
    if rounded(number, value.dtype) >= lowest:
        scores.floor = Floor(lowest, tie)
        scores.fills = [replace(f, fill=max(f.fill, lowest)) for f in scores.fills]
    return scores


def not_floored(scores: Scores, value: Value) -> None:
    """What clamping made of the scores is what the softmax reads, but for casts that hold it and shifts of rows."""
    if scores.floor is not None or scores.bounded:
        raise Blocked(f"scores that were clamped go on to {value.name or 'an addition'} before the softmax", value)


def not_topped(scores: Scores, value: Value) -> None:
    """Rows without a key are near 0 once their maximum is taken off, and what comes then is not lost beside them."""
    if scores.topped:
        raise Blocked("the maximum of masked or biased scores is taken off before more is masked or added", value)


def not_rounded_off(scores: Scores, value: Value) -> None:
    """A number that was added to all scores takes nothing of them away in the dtype of `value`."""
    if abs(scores.offset) * torch.finfo(value.dtype).eps >= 1.0:
        raise Blocked(f"scores are shifted by {scores.offset:g}, beside which they are rounded off", value)


def rounded(number: float, dtype: torch.dtype) -> float:
    """`number` as a tensor of `dtype` holds it: finfo(float32).min is minus infinity in bfloat16."""
    return float(torch.tensor(number, dtype=torch.float64).to(dtype))


def unknown(value: Value) -> str:
    if value.leaf == "opaque" and value.version:
        return "scores are written to in place, through a view or another name, before the softmax"
    if value.op is not None:
        return f"between the product and the softmax stands {value.name}, which is no step of attention that is known"
    if value.leaf == "input" and not is_parameter(value):
        return "the softmax is of what the graph is given: its scores, if it has any, come from before a graph break"
    name = nodes.method_name(value.node) if value.node is not None and value.node.op.startswith("call_") else ""
    if name in nodes.CLOSED or (name and value.leaf == "opaque"):
        return f"the softmax is of what {name} returns, which is not looked into"
    return "the softmax is not over scores: no product of queries and keys leads to it"
