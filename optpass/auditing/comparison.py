"""Whether two runs computed the same: what compiled functions returned, call by call. Reads files of trial.py.

A tensor is compared by the largest difference of its elements relative to its largest element.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Largest difference that is taken for rounding, by dtype; other dtypes must be equal. Another fusion rounds otherwise,
#: and a training loop carries that on over the calls compared.
ALLOWED = {
    "torch.float64": 1e-8, "torch.complex128": 1e-8, "torch.float32": 1e-4, "torch.complex64": 1e-4,
    "torch.float16": 1e-2, "torch.bfloat16": 5e-2,
}  # fmt: skip


@dataclass(frozen=True)
class Same:
    """Result of a comparison.

    Attributes:
        equal: None where there is nothing to compare.
        told: in plain words.
    """

    equal: bool | None
    told: str


def load(path: Path) -> list[dict[str, Any]] | None:
    """The calls that a trial kept; None if it could not keep any, or its file is missing."""
    if not path.is_file():
        return None
    import torch

    kept = torch.load(path, weights_only=True)
    return None if kept["problem"] else list(kept["calls"])


def compare(before: list[dict[str, Any]] | None, after: list[dict[str, Any]] | None) -> Same:
    """Compare the calls of two runs, in order."""
    if not before or after is None:
        return Same(None, "no outputs of compiled functions could be compared")
    if len(before) != len(after):
        return Same(False, f"compiled functions returned {len(after)} times, {len(before)} times before")
    largest, allowed = 0.0, 0.0
    for number, (old, new) in enumerate(zip(before, after, strict=True), 1):
        if old.keys() != new.keys():
            return Same(False, f"call {number} returns another structure of values")
        for path in old:
            difference, told = _leaf(old[path], new[path])
            limit = ALLOWED.get(old[path].get("dtype", ""), 0.0)
            if told or difference > limit:
                said = told or f"differs by {difference:.1e} of the largest value, {limit:.0e} allowed"
                return Same(False, f"{path or 'result'} of call {number} {said}")
            if difference > largest:
                largest, allowed = difference, limit
    told = f"outputs of {len(before)} {'calls' if len(before) != 1 else 'call'} are equal"
    if largest:
        told += f" (largest difference {largest:.1e} of the largest value, {allowed:.0e} allowed)"
    return Same(True, told)


def _leaf(old: dict[str, Any], new: dict[str, Any]) -> tuple[float, str]:
    """(relative difference, what is different in kind)."""
    if "sample" not in old or "sample" not in new:
        plain = (
            {"value": old.get("value"), "type": old.get("type")},
            {"value": new.get("value"), "type": new.get("type")},
        )
        if "sample" in old or "sample" in new:
            return 0.0, f"is {_kind(new)}, {_kind(old)} before"
        same = plain[0] == plain[1] or _close(old.get("value"), new.get("value"))
        return 0.0, "" if same else f"is {new.get('value')!r}, {old.get('value')!r} before"
    for what in ("dtype", "shape"):
        if old[what] != new[what]:
            return 0.0, f"has {what} {new[what]}, {old[what]} before"
    import torch

    wide = torch.complex128 if old["sample"].is_complex() else torch.float64
    a, b = old["sample"].to(wide), new["sample"].to(wide)
    equal = (a == b) | (torch.isnan(a) & torch.isnan(b))
    if bool(equal.all()):
        return 0.0, ""
    scale = float(a[torch.isfinite(a)].abs().max()) if bool(torch.isfinite(a).any()) else 0.0
    difference = float((a - b)[~equal].abs().nan_to_num(nan=float("inf")).max())
    return (difference / scale if scale else float("inf")), ""


def _kind(leaf: dict[str, Any]) -> str:
    return "a tensor" if "sample" in leaf else f"a {leaf['type']}" if "type" in leaf else repr(leaf["value"])


def _close(old: Any, new: Any) -> bool:
    number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (old, new))
    return number and type(old) is type(new) and abs(old - new) <= ALLOWED["torch.float32"] * abs(old)
