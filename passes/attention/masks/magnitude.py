"""Upper bounds of absolute values: what proves that an additive bias is finite."""

from __future__ import annotations

import math

import torch

from optpass.passes.attention.masks.bounds import range_of
from optpass.passes.attention.masks.elements import Elements
from optpass.passes.attention.masks.integers import Atom, Lin
from optpass.passes.attention.masks.numbers import DIGITS, RANGES
from optpass.passes.attention.masks.pieces import Expr, Where, leaves
from optpass.passes.attention.masks.predicates import Pred


def magnitude(engine: Elements, x: Expr, dtype: torch.dtype) -> float | None:
    """A number that |x| never exceeds, `x` being of `dtype`; None where it may be infinite or NaN, or is not known."""
    found = _magnitude(engine, x, {})
    limit = torch.finfo(dtype).max if dtype in DIGITS else 2.0**63
    return found if found is not None and found <= limit else None


#: What was found of parts already, by identity: sums of sums share theirs.
_Known = dict[int, float | None]


def _magnitude(engine: Elements, x: Expr, known: _Known) -> float | None:
    if id(x) not in known:
        known[id(x)] = _fresh(engine, x, known)
    return known[id(x)]


def _fresh(engine: Elements, x: Expr, known: _Known) -> float | None:
    if isinstance(x, (bool, Pred)):
        return 1.0
    if isinstance(x, (int, float)):
        return abs(float(x)) if math.isfinite(x) else None
    if isinstance(x, Where):
        each = [_magnitude(engine, leaf, known) for leaf in leaves(x)]
        return None if any(e is None for e in each) else max(e for e in each if e is not None)
    if isinstance(x, Lin):
        ends = range_of(x)
        return None if ends[0] is None or ends[1] is None else float(max(abs(ends[0]), abs(ends[1])))
    if x.kind == "elem":
        return _largest(engine, x)
    return _applied(engine, x, known) if x.kind == "apply" else None


def _largest(engine: Elements, atom: Atom) -> float | None:
    """Of all elements of a tensor whose contents are known."""
    data = engine.read(atom.args[0])
    if data is None or data.numel() == 0 or data.dtype not in DIGITS:
        return None
    found = float(data.detach().abs().amax())
    return found if math.isfinite(found) else None


def _applied(engine: Elements, atom: Atom, known: _Known) -> float | None:
    """Of an operation; its rounding may go up by half a unit in the last place, hence the slack."""
    function, dtype, _, *operands = atom.args
    if dtype not in DIGITS:
        return float(max(map(abs, RANGES[dtype]))) if dtype in RANGES else None
    if isinstance(function, tuple):
        return None  # also of tanh: what is NaN stays NaN
    sizes = [_magnitude(engine, x, known) for x in operands]
    if any(size is None for size in sizes):
        return None
    a, b = (*(size for size in sizes if size is not None), 0.0)[:2]
    if function == "to":
        found = a
    elif function in ("add", "sub"):
        found = a + b
    elif function == "mul":
        found = a * b
    elif function in ("maximum", "minimum"):
        found = max(a, b)
    elif function == "div" and isinstance(operands[1], float) and operands[1]:
        found = a / b
    elif function == "abs":
        found = a
    else:
        return None
    found *= 1.01
    return found if found <= torch.finfo(dtype).max else None
