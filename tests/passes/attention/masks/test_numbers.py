"""Arithmetic of single numbers, against torch's own, and of integer forms, against all their values."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch

from optpass.passes.attention.masks.atoms import Atoms
from optpass.passes.attention.masks.bounds import nonneg, numeric, within
from optpass.passes.attention.masks.integers import Int, Lin, substitute
from optpass.passes.attention.masks.numbers import arithmetic, cast, compare, rounded
from optpass.passes.attention.masks.predicates import Bool, Pred, all_of, any_of, choose, eq, ge, negate

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SPECIAL = [0.0, 1.0, -1.0, math.inf, -math.inf, 1e-45, 65504.0, 65519.0, 65520.0, 3.4028234663852886e38, -1e9, -1e4]
SPECIAL += [3.3895313892515355e38, 3.396e38, 1e39, -1e300, 0.1, 257.0, 2049.0, 16777217.0]


def numbers() -> list[float]:
    drawn = [math.ldexp(random.uniform(-1, 1), random.randrange(-60, 60)) for _ in range(200)]
    return SPECIAL + drawn


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rounding_is_torchs(dtype: torch.dtype) -> None:
    for x in numbers():
        assert rounded(x, dtype) == torch.tensor([x], dtype=torch.float64).to(dtype).item(), x


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "maximum", "minimum"])
def test_float_arithmetic_is_torchs(name: str, dtype: torch.dtype) -> None:
    values = [rounded(x, dtype) for x in numbers()]
    random.shuffle(values)
    for x, y in itertools.pairwise([x for x in values if x is not None]):
        found = arithmetic(name, x, y, dtype, Atoms())
        if found is not None:
            exact = getattr(torch, name)(torch.tensor([x], dtype=dtype), torch.tensor([y], dtype=dtype)).item()
            assert found == exact, (x, y)


@pytest.mark.parametrize("target", [*FLOATS, torch.int64, torch.int32, torch.uint8], ids=str)
def test_casts_are_torchs(target: torch.dtype) -> None:
    for x in [*map(float, range(-300, 300)), *SPECIAL]:
        found = cast(x, torch.float64, target)
        if found is not None:
            assert found == torch.tensor([x], dtype=torch.float64).to(target).item()
    assert cast(300, torch.int64, torch.uint8) is None
    assert cast(math.inf, torch.float32, torch.int64) is None
    assert cast(2**53 + 1, torch.int64, torch.float64) is None


# ---- forms ----------------------------------------------------------------------------------------------------------


class Box:
    """Three axes of small sizes, and random forms over them."""

    def __init__(self) -> None:
        self.atoms = Atoms()
        self.sizes = [random.randrange(2, 5) for _ in "xyz"]
        self.axes = [self.atoms.axis(n, s) for n, s in zip("xyz", self.sizes, strict=True)]
        self.points = [dict(zip("xyz", p, strict=True)) for p in itertools.product(*map(range, self.sizes))]

    def form(self, depth: int = 2) -> Int:
        """A random form, with maxima, quotients and remainders in it."""
        if depth and random.random() < 0.3:
            name = random.choice(["max", "min", "floordiv", "mod", "mul"])
            by: Any = random.randrange(1, 5) if name in ("floordiv", "mod") else self.form(depth - 1)
            return self.atoms.call(name, self.form(depth - 1), by)
        total: Int = random.randrange(-4, 5)
        for axis in random.sample(self.axes, random.randrange(1, 4)):
            total = total + axis * random.randrange(-3, 4)
        return total

    def predicate(self, depth: int = 3) -> Bool:
        """A random proposition."""
        if depth == 0 or random.random() < 0.2:
            return random.choice([ge, eq])(self.form())
        join = random.choice(["and", "or", "not", "choose"])
        parts = [self.predicate(depth - 1) for _ in range(random.randrange(2, 4))]
        if join == "not":
            return negate(parts[0])
        if join == "choose":
            return choose(parts[0], parts[1], parts[-1])
        return all_of(parts) if join == "and" else any_of(parts)


def at(x: Int, point: dict[str, int]) -> int:
    def atom(a: Any) -> Int:
        function, _, u, v = a.args
        u, v = at(u, point), at(v, point)
        return {"max": max, "min": min, "floordiv": int.__floordiv__, "mod": int.__mod__, "mul": int.__mul__}[function](
            u, v
        )

    found = substitute(x, point, atom)
    assert isinstance(found, int)
    return found


def true_at(p: Bool, point: dict[str, int]) -> bool:
    if isinstance(p, bool):
        return p
    if p.op in ("and", "or"):
        return (all if p.op == "and" else any)(true_at(part, point) for part in p.parts)
    value = at(p.form, point)
    return value >= 0 if p.op == "ge" else (value == 0) == (p.op == "eq")


def test_forms_are_bounded_by_their_bounds() -> None:
    for _ in range(300):
        box = Box()
        form = box.form()
        values = [at(form, point) for point in box.points]
        low, high = numeric(form), numeric(form, True)
        assert low is None or low <= min(values)
        assert high is None or high >= max(values)
        assert not nonneg(form) or min(values) >= 0
        assert not within(form, -3, 3) or max(map(abs, values)) <= 3


def test_propositions_keep_their_meaning_when_simplified() -> None:
    """A proposition built from simplified parts holds where the parts say, by truth tables over all points."""
    for _ in range(400):
        box = Box()
        parts = [box.predicate(2) for _ in range(3)]
        tables = [[true_at(p, point) for point in box.points] for p in parts]
        joined = {
            all_of(parts): [all(row) for row in zip(*tables, strict=True)],
            any_of(parts): [any(row) for row in zip(*tables, strict=True)],
            choose(*parts): [b if a else c for a, b, c in zip(*tables, strict=True)],
            negate(parts[0]): [not a for a in tables[0]],
        }
        for made, table in joined.items():
            assert [true_at(made, point) for point in box.points] == table, (parts, made)


def test_comparisons_of_forms() -> None:
    for _ in range(300):
        box = Box()
        x, y = box.form(), box.form()
        for name in ("eq", "ne", "lt", "le", "gt", "ge"):
            found = compare(name, x, y, torch.int64)
            assert found is not None
            for point in box.points:
                exact = getattr(torch, name)(torch.tensor(at(x, point)), torch.tensor(at(y, point))).item()
                assert true_at(found, point) == exact
        limit = random.choice([0.5, -1.5, 2.0, math.inf, -math.inf])
        found = compare("ge", x, limit, torch.float64) if isinstance(x, Lin) else None
        assert found is None or all(true_at(found, point) == (at(x, point) >= limit) for point in box.points)


def test_equal_conjunctions_are_equal_objects() -> None:
    box = Box()
    one, other = ge(box.axes[0] - box.axes[1] - 1), eq(box.axes[2] - 1)
    assert isinstance(one, Pred) and all_of((one, other)) == all_of((other, one))
    assert all_of((one, negate(one))) is False and any_of((one, negate(one))) is True
