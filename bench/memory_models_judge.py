"""Rows and verdict of the benchmark of budgets over all models, from figures alone. Nothing here measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from optpass.bench.result import Row

#: Least part of a budget that binds, and most relative error of a predicted peak.
USED, ERROR = 0.95, 0.005
#: Most relative error of a gradient; graphs that are run as they stand give the same bits.
GRADIENTS: Mapping[str, float] = {"aot_eager": 0.0, "inductor": 1e-5}
#: What is judged of each budget, and of each cell.
HELD, TOLD, IN_USE, RIGHT, RANDOM = "held", "predicted", "used", "gradients", "random state"
MONOTONE, FLOOR, REFUSED, WHOLE = "monotone", "floor", "refused", "every budget runs"
PARTS = (HELD, TOLD, IN_USE, RIGHT, RANDOM, MONOTONE, FLOOR, REFUSED, WHOLE)

Point = Mapping[str, Any]
Found = Mapping[str, Any]


def failures(point: Point, top: int, inner: str) -> list[str]:
    """What does not hold at one budget."""
    if "peak" not in point:
        return [WHOLE]
    pairs = [(point["peak"], point["predicted"])]
    pairs += [] if point["first"] is None else [(point["first"], point["first_predicted"])]
    wrong = [HELD] if any(peak > point["budget"] for peak, _ in pairs) else []
    wrong += [TOLD] if any(abs(told / peak - 1) > ERROR for peak, told in pairs) else []
    wrong += [IN_USE] if point["budget"] < top and point["peak"] < USED * point["budget"] else []
    wrong += [RIGHT] if point["error"] > GRADIENTS[inner] else []
    return wrong + ([] if point["rng"] else [RANDOM])


def failures_of_cell(found: Found, inner: str, budgets: int) -> list[str]:
    """What does not hold somewhere in a cell."""
    points = _run(found)
    wrong = {part for point in found["points"] for part in failures(point, found["top"], inner)}
    if len(points) < budgets:
        wrong.add(WHOLE)
    if not monotone(points):
        wrong.add(MONOTONE)
    floor = found.get("floor")
    # That gradients of earlier micro-batches are there is seen when the second one runs.
    told = [] if floor is None else [found["named"] if found["micro"] == 1 else floor, *(p["peak"] for p in points[:1])]
    if len(told) < 2 or any(abs(one / floor - 1) > ERROR for one in told):
        wrong.add(FLOOR)
    refused = found.get("refused")
    if refused is None or floor is None or abs(refused / floor - 1) > ERROR:
        wrong.add(REFUSED)
    return [part for part in PARTS if part in wrong]


def _run(found: Found) -> list[Point]:
    """The budgets at which the step ran."""
    return [point for point in found["points"] if "peak" in point]


def monotone(points: Sequence[Point]) -> bool:
    """Whether a larger budget never has a smaller peak, nor a slower step."""
    ordered = sorted(points, key=lambda point: point["budget"])
    return all(a["peak"] <= b["peak"] and a["slowdown"] >= b["slowdown"] - 1e-9 for a, b in pairwise(ordered))


def rows_of(name: str, found: Found, inner: str, budgets: int) -> Iterator[Row]:
    """A row for each budget, with the part of what is asked for that holds, and one for the cell."""
    asked = len((HELD, TOLD, IN_USE, RIGHT, RANDOM))
    for point in found["points"]:
        wrong = failures(point, found["top"], inner)
        share = 0.0 if WHOLE in wrong else 1 - len(wrong) / asked
        case = f"{point['budget'] / 1e6:.3f} MB"
        yield Row(case=case, group=name, unit="", median=share, extra=_figures(point) | _said(wrong))
    yield Row(case=name, group="all", unit="", median=None, extra=_summary(found, inner, budgets))


def _figures(point: Point) -> dict[str, float | str]:
    if "peak" not in point:
        return {"failed": point.get("failed", f"infeasible, the floor is {point.get('infeasible', 0) / 1e6:.3f} MB")}
    extra: dict[str, float | str] = {
        "peak MB": point["peak"] / 1e6,
        "predicted": point["predicted"] / point["peak"] - 1,
        "used": point["peak"] / point["budget"],
        "slowdown": point["slowdown"],
        "error": point["error"],
        "plans": float(point["plans"]),
    }
    if point["first"] is not None and point["first"] != point["peak"]:
        extra["first step MB"] = point["first"] / 1e6
    if point["first"] is not None and point["first_predicted"] != point["predicted"]:
        extra["first predicted"] = point["first_predicted"] / point["first"] - 1
    return extra | ({"gap": "yes"} if point["gap"] else {})


def _summary(found: Found, inner: str, budgets: int) -> dict[str, float | str]:
    top, floor = found["top"], found.get("floor")
    extra: dict[str, float | str] = {"unconstrained MB": top / 1e6}
    if floor is not None:
        extra |= {"floor MB": floor / 1e6}
        extra |= {} if floor == found["named"] else {"floor named at first MB": found["named"] / 1e6}
    points = _run(found)
    if points:
        binding = [p["peak"] / p["budget"] for p in points if p["budget"] < top]
        first = [p for p in points if p["first"] is not None]
        extra |= {
            "budgets": float(len(points)),
            "least used": min(binding, default=1.0),
            "most used": max(max(p["peak"], p["first"] or 0) / p["budget"] for p in points),
            "predicted": max((p["predicted"] / p["peak"] - 1 for p in points), key=abs),
            "first predicted": max((p["first_predicted"] / p["first"] - 1 for p in first), key=abs, default=0.0),
            "slowest": max(p["slowdown"] for p in points),
            "error": max(p["error"] for p in points),
        }
    return extra | _said(failures_of_cell(found, inner, budgets))


def _said(wrong: Sequence[str]) -> dict[str, float | str]:
    return {"falls short": ", ".join(wrong)} if wrong else {}


def judge(cells: Mapping[str, tuple[Found, str]], budgets: int, *, complete: bool) -> tuple[bool | None, str]:
    """The whole claim: it fails where anything of a cell does; of a part of the cells it decides nothing else.

    Args:
        cells: by name, what was found and the inner compiler.
        complete: all cells were measured.
    """
    if not cells:
        return None, "nothing was measured"
    short = {name: failures_of_cell(found, inner, budgets) for name, (found, inner) in cells.items()}
    good = [name for name, wrong in short.items() if not wrong]
    text = f"{len(good)} of {len(cells)} cells hold in every part"
    for part in PARTS:
        number = sum(part in wrong for wrong in short.values())
        text += f"; {part}: {number} fall short" if number else ""
    if len(good) < len(cells):
        return False, text
    return True if complete else None, text
