"""What operations do to single numbers of a dtype: casts, arithmetic and comparisons of leaves, exactly or not at all.

Each function gives the exact result, or None where it cannot be told without doubt (rounding that depends on the order
of operations, overflow, NaN); the caller then takes the result for unknown.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache

import torch

from optpass.passes.attention.masks.atoms import Atoms
from optpass.passes.attention.masks.bounds import within
from optpass.passes.attention.masks.integers import Atom, Int
from optpass.passes.attention.masks.pieces import Leaf
from optpass.passes.attention.masks.predicates import Bool, eq, ge, negate

#: Digits of the significand, hidden one included: integers up to 2**digits are exact.
DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
#: What integers each dtype holds.
RANGES = {
    dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
}


@lru_cache(maxsize=4096)
def rounded(x: float, dtype: torch.dtype) -> float | None:
    """`x` as `dtype` holds it, to nearest even, overflow to infinity; None for NaN or a dtype not known. 0 for -0."""
    if x != x or dtype not in DIGITS:
        return None
    if math.isinf(x) or dtype == torch.float64:
        return x + 0.0
    try:
        single = float(struct.unpack("<f", struct.pack("<f", x))[0])
        if dtype == torch.float16:  # torch, too, rounds a double to float32 on its way to 16 bits
            single = float(struct.unpack("<e", struct.pack("<e", single))[0])
    except OverflowError:
        return math.copysign(math.inf, x)
    if dtype == torch.bfloat16:
        bits = struct.unpack("<I", struct.pack("<f", single))[0]
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
        single = float(struct.unpack("<f", struct.pack("<I", bits))[0])
    return single + 0.0


def scalars(x: float, dtype: torch.dtype) -> list[float]:
    """What a kernel may take a Python number beside a tensor of `dtype` for: 16-bit ones round it sooner or later."""
    found = [rounded(x, dtype)]
    if dtype in (torch.float16, torch.bfloat16):
        found.append(rounded(x, torch.float32))
    return list(dict.fromkeys(value for value in found if value is not None))


def cast(x: Leaf, source: torch.dtype, target: torch.dtype) -> Leaf | None:
    """A number of dtype `source`, not bool, as `target`, not bool."""
    if isinstance(x, Atom):
        return x if source == target else None
    if target in RANGES:
        if isinstance(x, float):
            x = math.trunc(x) if math.isfinite(x) else None  # type: ignore[assignment]
        return x if x is not None and not isinstance(x, float) and within(x, *RANGES[target]) else None
    if target not in DIGITS:
        return None
    if isinstance(x, float):
        return rounded(x, target)
    if isinstance(x, int):
        return rounded(float(x), target) if abs(x) <= 2**53 else None
    return x if exact(x, target) else None


def exact(x: Int, dtype: torch.dtype) -> bool:
    """True where `dtype` holds every value of `x`."""
    limit = RANGES.get(dtype)
    if limit is None:
        digits = DIGITS.get(dtype, 0)
        limit = (-(2**digits), 2**digits)
    return within(x, *limit)


def tidy(x: Leaf) -> Leaf:
    """An integer of a float dtype as a float where it is constant."""
    return float(x) if isinstance(x, int) else x


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def arithmetic(name: str, x: Leaf, y: Leaf, dtype: torch.dtype, atoms: Atoms) -> Leaf | None:
    """add, sub, mul, div, maximum, minimum, floor_divide, remainder of numbers of `dtype`, in that dtype."""
    if isinstance(x, Atom) or isinstance(y, Atom):
        return _with_unknown(name, x, y)
    if dtype in RANGES:
        if isinstance(x, float) or isinstance(y, float):
            return None
        found = _integers(name, x, y, atoms)
        return found if found is not None and within(found, *RANGES[dtype]) else None
    if dtype not in DIGITS:
        return None
    if isinstance(x, float) and isinstance(y, float):
        result = _floats(name, x, y)
        return None if result is None else _round_result(result, dtype)
    return _mixed(name, x, y, dtype, atoms)


def _with_unknown(name: str, x: Leaf, y: Leaf) -> Leaf | None:
    """Only what holds for every float, NaN and infinity included."""
    if (name == "sub" and y == 0) or (name in ("mul", "div") and y == 1):
        return x
    return y if name == "mul" and x == 1 else None


def _integers(name: str, x: Int, y: Int, atoms: Atoms) -> Int | None:
    if name in ("add", "sub"):
        return x + y if name == "add" else x - y
    if name == "mul":
        return atoms.call("mul", x, y)
    if name in ("maximum", "minimum"):
        return atoms.call(name[:3], x, y)
    if name in ("floor_divide", "remainder"):
        if isinstance(y, int) and y == 0:
            return None
        if isinstance(x, int) and isinstance(y, int):
            return x // y if name == "floor_divide" else x % y
        if isinstance(y, int) and y > 0:
            return atoms.call("floordiv" if name == "floor_divide" else "mod", x, y)
    return None


def _floats(name: str, x: float, y: float) -> float | None:
    """In float64, which is wide enough for one rounding to float32 to be the float32 operation's own."""
    if name == "add":
        return x + y
    if name == "sub":
        return x - y
    if name == "mul":
        return x * y
    if name == "div":
        return x / y if y else None
    if name == "maximum":
        return max(x, y)
    return min(x, y) if name == "minimum" else None


def _round_result(x: float, dtype: torch.dtype) -> float | None:
    if dtype == torch.float64 or x != x or math.isinf(x):
        return rounded(x, dtype)
    single = rounded(x, torch.float32)  # what 16-bit kernels compute in
    return None if single is None else rounded(single, dtype)


def _mixed(name: str, x: Int | float, y: Int | float, dtype: torch.dtype, atoms: Atoms) -> Leaf | None:
    """At least one of the two is a form over axes, whose values the dtype holds exactly."""
    if any(isinstance(v, float) and math.isinf(v) for v in (x, y)):
        if name == "add" or (name == "sub" and isinstance(x, float)):
            return x if isinstance(x, float) else y
        return -y if name == "sub" and isinstance(y, float) else None
    left, right = _whole(x), _whole(y)
    if left is None or right is None or name not in ("add", "sub", "mul", "maximum", "minimum"):
        return None
    found = _integers(name, left, right, atoms)
    return tidy(found) if found is not None and exact(found, dtype) else None


def _whole(x: Int | float) -> Int | None:
    if isinstance(x, float):
        return int(x) if x.is_integer() and abs(x) <= 2**53 else None
    return x


# ---- comparisons ----------------------------------------------------------------------------------------------------


def compare(name: str, x: Leaf, y: Leaf, dtype: torch.dtype) -> Bool | None:
    """eq, ne, lt, le, gt, ge of numbers that `dtype`, the common one, holds exactly."""
    if isinstance(x, Atom) or isinstance(y, Atom):
        return None
    if name in ("ne", "lt", "gt"):
        opposite = compare({"ne": "eq", "lt": "ge", "gt": "le"}[name], x, y, dtype)
        return None if opposite is None else negate(opposite)
    if name == "le":
        return compare("ge", y, x, dtype)
    if isinstance(x, float) and isinstance(y, float):
        return x == y if name == "eq" else x >= y
    if isinstance(x, float):
        return _against(name, y, x, flip=True)  # type: ignore[arg-type]
    if isinstance(y, float):
        return _against(name, x, y, flip=False)
    return eq(x - y) if name == "eq" else ge(x - y)


def _against(name: str, x: Int, limit: float, flip: bool) -> Bool:
    """A form against a float: x >= limit, or with `flip` limit >= x."""
    if math.isinf(limit):
        return name != "eq" and (limit > 0) == flip
    if name == "eq":
        return eq(x - int(limit)) if limit.is_integer() else False
    return ge(math.floor(limit) - x) if flip else ge(x - math.ceil(limit))
