"""What real tensors hold, as functions of their indices: constants, ramps, bands, thresholds. Checked on every element.

Data goes in, a formula comes out or nothing does; where the tensors come from is the caller's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from optpass.passes.attention.masks.integers import Int
from optpass.passes.attention.masks.numbers import DIGITS, RANGES, compare
from optpass.passes.attention.masks.pieces import Expr, lift, where
from optpass.passes.attention.masks.predicates import ge

#: A formula: the element at the given indices, each within its dim.
Formula: TypeAlias = Callable[[Sequence[Int]], Expr]

#: Larger tensors are not read: it takes seconds from a mask of 65,536 queries and keys on.
MOST_ELEMENTS = 2**32
#: A function of one index may have this many constant runs.
_MOST_RUNS = 8
#: Larger matrices are only looked at along their diagonals, which takes a tenth of the time.
_MOST_IN_RUNS = 2**22


def formula(data: torch.Tensor) -> Formula | None:
    """The element of `data` as a function of its indices; None where none of the known kinds fits exactly."""
    if data.layout != torch.strided or data.numel() > MOST_ELEMENTS or not _readable(data.dtype):
        return None
    if data.numel() == 0:
        return None
    active = [d for d in range(data.dim()) if data.shape[d] > 1 and not _constant_along(data, d)]
    if len(active) > 2:
        return None
    for d in reversed(range(data.dim())):
        if d not in active:
            data = data.select(d, 0)
    if not active:
        value = number(data.item())
        return None if value is None else lambda _index: value
    if len(active) == 1:
        function = _of_one(data, 0)
        return None if function is None else lambda index: function(index[active[0]])
    return _of_two(data, active[0], active[1])


def number(value: object) -> Expr | None:
    """A Python number as an expression; None for NaN."""
    if isinstance(value, (bool, int)):
        return value
    if not isinstance(value, float) or value != value:
        return None
    return value + 0.0


def _readable(dtype: torch.dtype) -> bool:
    return dtype == torch.bool or dtype in RANGES or dtype in DIGITS


def _constant_along(data: torch.Tensor, d: int) -> bool:
    if data.stride(d) == 0:
        return True
    last = data.shape[d] - 1
    if not torch.equal(data.select(d, 0), data.select(d, last)):
        return False
    return torch.equal(data.narrow(d, 1, last), data.narrow(d, 0, last))


def _of_two(data: torch.Tensor, rows: int, columns: int) -> Formula | None:
    """A matrix that is constant along its diagonals, or else rows that each are one run of True."""
    height, width = data.shape
    corner = torch.equal(data[1:3, 1:3], data[:2, :2][: max(height - 1, 0), : max(width - 1, 0)])
    if corner and torch.equal(data[1:, 1:], data[:-1, :-1]):
        along = torch.cat((data[1:, 0].flip(0), data[0]))  # of column - row, from -(height - 1)
        function = _of_one(along, height - 1)
        return None if function is None else lambda index: function(index[columns] - index[rows])
    return _runs_of_rows(data, rows, columns)


def _runs_of_rows(data: torch.Tensor, rows: int, columns: int) -> Formula | None:
    """Two values, one of them in a single run of each row whose ends are functions of the row."""
    if data.numel() > _MOST_IN_RUNS:
        return None
    first = data[0, 0]
    on = data != first
    second = data.flatten()[int(on.flatten().to(torch.uint8).argmax())]
    values = [number(first.item()), number(second.item())]
    if values[0] is None or values[1] is None or not torch.equal(data == second, on):
        return None
    for inside, run in ((values[1], on), (values[0], ~on)):
        outside = values[0] if inside is values[1] else values[1]
        assert inside is not None and outside is not None
        ends = _ends(run)
        if ends is None:
            continue
        begin, end = (_of_one(e, 0) for e in ends)
        if begin is None or end is None:
            continue
        return _between(begin, end, rows, columns, inside, outside)
    return None


def _ends(run: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """First and last True of each row; None where a row has none or has a gap."""
    count = run.sum(1)
    begin = run.to(torch.uint8).argmax(1)
    end = begin + count - 1
    place = torch.arange(run.shape[1], device=run.device)
    filled = (place >= begin[:, None]) & (place <= end[:, None])
    return (begin, end) if bool((count > 0).all()) and torch.equal(filled, run) else None


def _between(
    begin: Callable[[Int], Expr], end: Callable[[Int], Expr], rows: int, columns: int, inside: Expr, outside: Expr
) -> Formula:
    def at_least(x: Expr, y: Expr) -> Expr:
        found = lift(lambda a, b: compare("ge", a, b, torch.int64), (x, y))  # type: ignore[arg-type, return-value]
        assert found is not None
        return found

    def element(index: Sequence[Int]) -> Expr:
        row, column = index[rows], index[columns]
        low, high = at_least(column, begin(row)), at_least(end(row), column)
        return where(low, where(high, inside, outside), outside)  # type: ignore[arg-type]

    return element


# ---- functions of one index -----------------------------------------------------------------------------------------


def _of_one(values: torch.Tensor, origin: int) -> Callable[[Int], Expr] | None:
    """values[origin + t] as a function of t: pieces that are constant, or rise by one whole number per step."""
    if values.dtype.is_floating_point and bool(torch.isnan(values).any()):
        return None
    if values.dtype == torch.bool:
        steps = values[1:] != values[:-1]
        return _pieces(values, steps, origin)
    wide = values.double() if values.dtype.is_floating_point else values.long()
    if values.dtype in DIGITS and bool(torch.isinf(wide).any()):
        return _pieces(values, values[1:] != values[:-1], origin)
    whole = values.dtype in RANGES or bool((wide == wide.round()).all() and wide.abs().max() <= 2**24)
    slopes = wide[1:] - wide[:-1]
    if not whole:
        return _pieces(values, slopes != 0, origin)
    return _ramps(wide.long(), slopes.long(), origin, values.dtype)


def _pieces(values: torch.Tensor, steps: torch.Tensor, origin: int) -> Callable[[Int], Expr] | None:
    """Constant runs."""
    ends = steps.nonzero().flatten()
    if ends.numel() >= _MOST_RUNS:
        return None
    limits = [int(e) for e in ends]
    numbers = [number(values[i].item()) for i in (*limits, values.numel() - 1)]
    if any(n is None for n in numbers):
        return None

    def element(t: Int) -> Expr:
        found = numbers[-1]
        for limit, value in zip(reversed(limits), reversed(numbers[:-1]), strict=True):
            found = where(ge(limit - origin - t), value, found)  # type: ignore[arg-type]
        assert found is not None
        return found

    return element


def _ramps(values: torch.Tensor, slopes: torch.Tensor, origin: int, dtype: torch.dtype) -> Callable[[Int], Expr] | None:
    """Runs of one slope each; a jump between two of them is a run of its own, of length one."""
    bends = (slopes[1:] != slopes[:-1]).nonzero().flatten()
    if bends.numel() >= 2 * _MOST_RUNS:
        return None
    last, stops = values.numel() - 1, [*(int(b) + 1 for b in bends), values.numel() - 1]
    pieces: list[tuple[int, int, int]] = []  # last place, value of its line at place 0, slope
    place = 0
    while place <= last:
        stop = next((s for s in stops if s > place), last)
        slope = int(slopes[place]) if place < last else 0
        pieces.append((stop, int(values[place]) - slope * place, slope))
        place = stop + 1
    return (lambda t: _line(pieces, t, origin, dtype)) if _verified(values, pieces) else None


def _verified(values: torch.Tensor, pieces: list[tuple[int, int, int]]) -> bool:
    if len(pieces) > _MOST_RUNS:
        return False
    place, made = 0, []
    for stop, base, slope in pieces:
        made.append(torch.arange(place, stop + 1, device=values.device) * slope + base)
        place = stop + 1
    return torch.equal(torch.cat(made), values)


def _line(pieces: list[tuple[int, int, int]], t: Int, origin: int, dtype: torch.dtype) -> Expr:
    found: Expr | None = None
    for stop, base, slope in reversed(pieces):
        value: Expr = (t + origin) * slope + base
        if dtype in DIGITS and isinstance(value, int):
            value = float(value)
        found = value if found is None else where(ge(stop - origin - t), value, found)
    assert found is not None
    return found
