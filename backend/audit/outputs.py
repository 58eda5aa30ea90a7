"""What calls of compiled functions gave: returned values and the tensors they were given, for comparing two runs.

Costs a copy of each tensor, so it is for trial runs only. Values are compared elsewhere.
"""

from __future__ import annotations

import dataclasses
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from optpass.backend.compat import audit as dynamo

#: Elements of a tensor that are kept; of a larger one, as many at even steps.
_KEPT = 1 << 16
_DEEPEST = 8

Leaf = dict[str, Any]


class OutputCollector:
    """Keeps what the first calls of compiled functions returned, those inside of another's call left out.

    Attributes:
        calls: one `{path: leaf}` per call, in order; see `leaves`.
        problem: why calls cannot be watched in this torch, if so.

    Args:
        limit: calls to keep.
    """

    def __init__(self, limit: int) -> None:
        self.calls: list[dict[str, Leaf]] = []
        self.problem: str | None = None
        self._limit = limit
        self._local = threading.local()

    def install(self) -> None:
        """Watch from now on."""
        self.problem = dynamo.ENTER_COMPILED.add_quick(self.quick)

    def uninstall(self) -> None:
        """Watch no longer."""
        dynamo.ENTER_COMPILED.remove_quick(self.quick)

    def quick(self, callback: Any, frame: types.FrameType) -> None:
        """A compiled function's entry switches Dynamo on, or back behind the call: then its frame holds the result."""
        if len(self.calls) >= self._limit:
            return
        entered: list[types.FrameType] = self._local.__dict__.setdefault("entered", [])
        if frame not in entered:
            entered.append(frame)
            if "result" not in frame.f_code.co_varnames:  # torch 2.11 returns it at once
                self.problem = "this torch does not show what compiled functions return"
            return
        del entered[entered.index(frame) :]
        if not entered and (values := frame.f_locals).get("call_succeeded", "result" in values):
            with torch.no_grad():
                kept = [leaf for name in ("result", "args", "kwargs") for leaf in leaves(values.get(name), name)]
            self.calls.append(dict(kept))


def leaves(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Leaf]]:
    """(path, what it is) of each tensor and plain value inside of containers.

    A tensor is `{shape, dtype, sample, norm}`, a plain value `{value}`, anything else `{type}`.
    """
    if isinstance(value, torch.Tensor):
        yield path, _tensor(value)
    elif isinstance(value, bool | int | float | str | type(None)):
        yield path, {"value": value}
    elif depth < _DEEPEST and (inner := _inside(value)) is not None:
        for name, part in inner.items():
            yield from leaves(part, f"{path}{name}", depth + 1)
    else:
        yield path, {"type": type(value).__qualname__}


def _inside(value: Any) -> dict[str, Any] | None:
    if isinstance(value, Mapping):
        return {f"[{key!r}]" if isinstance(key, str | int) else f"[{i}]": v for i, (key, v) in enumerate(value.items())}
    if isinstance(value, list | tuple):
        return {f"[{i}]": part for i, part in enumerate(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f".{field.name}": getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return None


def _tensor(value: torch.Tensor) -> Leaf:
    try:
        flat = value.detach().reshape(-1)
        step = max(1, -(-flat.numel() // _KEPT))
        sample = flat[::step].to("cpu", copy=True)
        exact = flat.is_floating_point() or flat.is_complex()
        norm = float(torch.linalg.vector_norm(flat.abs().double())) if exact else float(flat.double().sum())
    except (RuntimeError, NotImplementedError, TypeError) as error:  # sparse, nested, a subclass without these
        return {"type": f"{type(value).__qualname__}: {type(error).__name__}"}
    return {"shape": list(value.shape), "dtype": str(value.dtype), "sample": sample, "norm": norm}
