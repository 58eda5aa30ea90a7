"""The spellings of a softmax: what it reads, over which dim, and what its author did to exponentials and their sum.

Values alone; what a site makes of them is `core`'s. A quotient may have what a softmax has not: factors 0 and 1 of the
exponentials, which hide keys as minus infinity does, and a term of the sum that is no key's, a sink.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from optpass.passes.attention.axes import is_one, same_sizes
from optpass.passes.attention.find.operands import Constant, detached
from optpass.passes.attention.program.ir import Value, arg, same

_EXPONENTIALS = {"exp": 1.0, "exp2": math.log(2.0)}
_SUM_LAYOUT = ("expand", "alias", "unsqueeze")


@dataclass(frozen=True)
class Hidden:
    """What exponentials are multiplied by: `keep_when` of a bool mask; None for numbers, which must be 0 and 1."""

    mask: Value
    keep_when: bool | None


@dataclass
class Softmax:
    """What a value is that normalises scores over `dim`.

    Attributes:
        logits: what the exponentials are of; a shift that the quotient takes back is left out.
        dim: that the sum runs over.
        values: between the logits and the value.
        hidden: masks of the exponentials.
        sink: logit of what is added to the sum, or what is added itself if `sink_added`; None without one.
        scale: of the logits: exponentials are to the base e to this power.
    """

    logits: Value
    dim: int
    values: list[Value] = field(default_factory=list)
    hidden: list[Hidden] = field(default_factory=list)
    sink: Value | float | None = None
    sink_added: bool = False
    scale: float = 1.0


def read(value: Value, constant: Constant) -> Softmax | None:
    """The softmax that `value` is, in any spelling; None if it is none."""
    if value.name == "_softmax":
        return Softmax(value.args[0], value.args[1])
    if value.name == "exp" and value.args[0].name == "_log_softmax":
        return Softmax(value.args[0].args[0], value.args[0].args[1], [value.args[0]])
    if value.name == "exp" and value.args[0].name == "sub":
        return _minus_logsumexp(value.args[0])
    quotients = (_quotient(*parts, constant) for parts in _divisions(value) if same_sizes(parts[0].shape, value.shape))
    return next(filter(None, quotients), None)


def exponential(value: Value) -> bool:
    """Whether softmaxes by hand are made of this."""
    return value.name in _EXPONENTIALS


def made_of_exponentials(value: Value, constant: Constant) -> bool:
    """Whether `value` is exponentials, some of them perhaps set to zero, that are not normalised."""
    found = _exponentials(value, constant)
    return found is not None and exponential(found[0])


def unfinished(value: Value, dim: int, constant: Constant) -> Softmax | None:
    """The softmax that exponentials are once they are divided by their sum over `dim`."""
    found = _exponentials(value, constant)
    if found is None or not exponential(found[0]):
        return None
    source, inside, hidden = found
    return Softmax(source.args[0], dim, inside, hidden, scale=_EXPONENTIALS[source.name])


def _minus_logsumexp(shifted: Value) -> Softmax | None:
    x, norm = shifted.args[0], shifted.args[1]
    found = reduced(norm, "logsumexp", x) if isinstance(norm, Value) and shifted.args[2] == 1 else None
    return None if found is None else Softmax(x, found[0], [shifted, *found[1]])


def reduced(value: Value, name: str, source: Value) -> tuple[int, list[Value]] | None:
    """(dim, values) where `value` is `source` reduced by an operation over one dim, with a place left for that dim."""
    passed, put_back = [value], None
    while value.name in _SUM_LAYOUT:
        if value.name == "unsqueeze":
            if put_back is not None:
                return None
            put_back = value.args[1] % value.dim
        value = value.args[0]
        passed.append(value)
    if value.name != name or value.args[0] is not source or value.dtype != source.dtype:
        return None
    over = list(arg(value, "dim") or ())
    if len(over) != 1 or bool(arg(value, "keepdim")) is not (put_back is None):
        return None
    dim = over[0] % source.dim
    return (dim, passed) if put_back in (None, dim) else None


# ---- quotients ----------------------------------------------------------------------------------------------------


def _divisions(value: Value) -> Iterator[tuple[Value, Value, list[Value]]]:
    """(dividend, divisor, values between) for each way in which `value` is a quotient."""
    if value.name not in ("div", "mul") or (value.name == "div" and arg(value, "rounding_mode")):
        return
    left, right = value.args[0], value.args[1]
    if not isinstance(left, Value) or not isinstance(right, Value):
        return
    if value.name == "div":
        yield left, right, []
        return
    for top, factor in ((left, right), (right, left)):
        passed = []
        while factor.name in _SUM_LAYOUT or (factor.name == "mul" and factor.args[1] == 1.0):  # `1.0 / sum`
            passed.append(factor)
            factor = factor.args[0]
        if factor.name == "reciprocal":
            yield top, factor.args[0], [*passed, factor]


def _quotient(top: Value, bottom: Value, passed: list[Value], constant: Constant) -> Softmax | None:
    """`exp(x) / exp(x).sum(dim, keepdim=True)`, with masks of the exponentials and a term of the sum."""
    found = _exponentials(top, constant)
    if found is None:
        return None
    source, inside, hidden = found
    divisor = _divisor(top, source, bottom, plain=not hidden)
    if divisor is None:
        return None
    dim, below, logits, sink = divisor
    inside = [*passed, top, *inside, *below]
    if source.name == "_softmax":
        renormalised = source.args[1] % source.dim == dim and sink is None
        return Softmax(source.args[0], dim, [*inside, source], hidden) if renormalised else None
    added = logits is source.args[0]  # no shift was taken off it
    return Softmax(logits, dim, inside, hidden, sink, added, _EXPONENTIALS[source.name])


def _exponentials(value: Value, constant: Constant) -> tuple[Value, list[Value], list[Hidden]] | None:
    """(the exponentials or softmax, values between, masks) where `value` is exponentials with some set to zero."""
    passed: list[Value] = []
    hidden: list[Hidden] = []
    while value.name not in _EXPONENTIALS and value.name != "_softmax":
        found = _masked(value, constant)
        if found is None or found[0].dtype != value.dtype or not same_sizes(found[0].shape, value.shape):
            return None
        passed.append(value)
        hidden.append(found[1])
        value = found[0]
    return value, [*passed, value], hidden


def _masked(value: Value, constant: Constant) -> tuple[Value, Hidden] | None:
    if value.name == "masked_fill" and _zero(value.args[2], constant):
        return value.args[0], Hidden(value.args[1], False)
    if value.name in ("tril", "triu"):
        return value.args[0], Hidden(_triangle(value), True)
    if value.name == "where":
        mask, yes, no = value.args[:3]
        if _zero(no, constant) and isinstance(yes, Value):
            return yes, Hidden(mask, True)
        return (no, Hidden(mask, False)) if _zero(yes, constant) and isinstance(no, Value) else None
    if value.name != "mul":
        return None
    for one, other in ((value.args[0], value.args[1]), (value.args[1], value.args[0])):
        if not isinstance(one, Value) or not isinstance(other, Value):
            continue
        if one.name in (*_EXPONENTIALS, "_softmax", "masked_fill", "where", "mul") and _exponentials(one, constant):
            return one, Hidden(other, True if other.dtype == torch.bool else None)
    return None


def _triangle(value: Value) -> Value:
    """What `tril` and `triu` leave of a tensor, as a mask that no node of the graph computes."""
    shape = value.shape[-2:]
    made = replace(value, tensor=value.tensor.new_empty(shape, dtype=torch.bool))
    whole = (list(shape), True, torch.bool, torch.strided, value.tensor.device, False)
    return replace(made, args=(replace(made, op=torch.ops.aten.full.default, args=whole), value.args[1]))


def _zero(item: object, constant: Constant) -> bool:
    number = constant(item) if isinstance(item, Value) else item
    return isinstance(number, (int, float)) and number == 0


def _divisor(
    top: Value, source: Value, bottom: Value, *, plain: bool
) -> tuple[int, list[Value], Value, Value | float | None] | None:
    """(dim, values, logits, sink) where `bottom` is the sum of `top`, and perhaps of one term besides."""
    logits = source.args[0]
    found = reduced(bottom, "sum", top)
    if found is not None:
        return (*found, logits, None)
    passed = []
    while bottom.name in ("expand", "alias"):
        passed.append(bottom)
        bottom = bottom.args[0]
    if bottom.name in ("clamp", "clamp_min"):
        found = reduced(bottom.args[0], "sum", top) or _length(bottom.args[0], top)
        small = arg(bottom, "max") is None if bottom.name == "clamp" else True
        least = bottom.args[1]
        if found is None or not small or not isinstance(least, (int, float)) or least > 1.0:
            return None
        at_least_1 = plain and _largest_is_zero(source, found[0])
        return (found[0], [*passed, bottom, *found[1]], logits, None) if at_least_1 else None
    if bottom.name != "add" or arg(bottom, "alpha") not in (None, 1):
        return None
    for own, extra in ((bottom.args[0], bottom.args[1]), (bottom.args[1], bottom.args[0])):
        found = reduced(own, "sum", top) if isinstance(own, Value) else None
        if found is None:
            continue
        passed = [*passed, bottom, *found[1]]
        tiny = isinstance(extra, (int, float)) and 0 <= extra <= torch.finfo(top.dtype).eps / 2
        if tiny and plain and _largest_is_zero(source, found[0]):  # beside a sum of at least 1 it is rounded away
            return found[0], passed, logits, None
        one_for_all = bottom.dim == top.dim and is_one(bottom.shape[found[0]])
        term = None if source.name != "exp" or not one_for_all else _term(logits, extra, passed)
        return None if term is None else (found[0], passed, *term)
    return None


def _length(value: Value, top: Value) -> tuple[int, list[Value]] | None:
    """As `reduced`, of what `F.normalize(p=1)` divides by: exponentials are not negative."""
    found = reduced(value, "linalg_vector_norm", top)
    return found if found is not None and arg(found[1][-1], "ord") == 1 else None


def _largest_is_zero(exponentials: Value, dim: int) -> bool:
    """Whether the maximum of each row along `dim` was taken off, so that the sum is at least 1."""
    shifted = exponentials.args[0]
    if exponentials.name == "_softmax" or shifted.name != "sub" or shifted.args[2] != 1:
        return False
    source, top = shifted.args[0], shifted.args[1]
    while isinstance(top, Value) and top.name in ("detach", "alias", "unsqueeze", "expand"):
        top = top.args[0]
    if not isinstance(top, Value) or top.name not in ("amax", "max") or detached(top.args[0], source) is not source:
        return False
    over = top.args[1] if len(top.args) > 1 else None
    over = [over] if isinstance(over, int) else over
    return isinstance(over, (list, tuple)) and [d % shifted.dim for d in over] == [dim]


def _term(logits: Value, extra: object, passed: list[Value]) -> tuple[Value, Value | float] | None:
    """(logits, sink): `extra` is `exp(sink - shift)` where the logits are shifted by the same, or a number."""
    if isinstance(extra, (int, float)):
        return (logits, extra) if extra > 0 else None
    if not isinstance(extra, Value):
        return None
    if extra.name != "exp":
        return logits, extra
    inside = extra.args[0]
    if logits.name == "sub" and logits.args[2] == 1 and isinstance(logits.args[1], Value):
        x, shift = logits.args[0], logits.args[1]
        if inside.name == "neg" and same(inside.args[0], shift):
            passed.extend((extra, logits, inside, *_between(shift, x), *_between(inside.args[0], x)))
            return x, 0.0
        shifted = inside.name == "sub" and inside.args[2] == 1 and isinstance(inside.args[1], Value)
        if shifted and same(inside.args[1], shift):
            passed.extend((extra, logits, inside, *_between(shift, x), *_between(inside.args[1], x)))
            return x, inside.args[0]
    return logits, extra


def _between(value: Value, source: Value, depth: int = 8) -> list[Value]:
    """The values on the way from `source` to `value`, which is among them; [] where there is no short way."""
    if not depth or value is source:
        return []
    found = []
    for one in value.inputs():
        way = _between(one, source, depth - 1)
        if way or one is source:
            found += [*way, value]
    return list(dict.fromkeys(found))
