"""Values as short texts. No method of the user's runs for it: an unknown object is named by its type."""

from __future__ import annotations

import enum
import types
from typing import Any

import torch

_LONGEST = 80
_ITEMS = 6
_PLAIN = (int, float, complex, bool, type(None), bytes)


def describe(value: Any, depth: int = 2) -> str:
    """A text of at most about 100 characters."""
    kind = type(value)
    if kind is str:
        text = repr(value if len(value) <= _LONGEST else value[: _LONGEST - 3] + "...")
    elif kind in _PLAIN or kind in (torch.dtype, torch.device, torch.layout, torch.memory_format):
        text = repr(value)
    elif isinstance(value, enum.Enum):
        text = f"{kind.__name__}.{value._name_}"
    elif isinstance(value, torch.Tensor):
        text = f"{kind.__name__}({', '.join(map(str, value.shape))}; {str(value.dtype).removeprefix('torch.')})"
    elif isinstance(value, types.ModuleType):
        text = value.__name__
    elif isinstance(value, types.BuiltinFunctionType):
        text = value.__name__  # its qualified name tells of a class of PyTorch's that nobody wrote
    elif isinstance(value, (type, types.FunctionType, types.MethodType)):
        text = getattr(value, "__qualname__", kind.__name__)
    elif isinstance(value, types.CodeType):
        text = value.co_qualname
    elif kind in (list, tuple, set, frozenset, torch.Size) and depth:
        text = _sequence(list(value), "[]" if kind is list else "{}" if kind in (set, frozenset) else "()", depth)
    elif kind is dict and depth:
        shown = [f"{describe(k, 0)}: {describe(v, depth - 1)}" for k, v in list(value.items())[:_ITEMS]]
        text = "{" + ", ".join([*shown, *(["..."] if len(value) > _ITEMS else [])]) + "}"
    elif kind in (slice, range):
        text = repr(value) if all(type(v) in _PLAIN for v in (value.start, value.stop, value.step)) else kind.__name__
    elif kind.__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        text = f"{kind.__name__}({value.item()!r})"
    else:
        text = f"{kind.__qualname__} object"
    return shorten(text)


def shorten(text: str, longest: int = 120) -> str:
    """`text` on one line, cut where it is longer than `longest`."""
    flat = " ".join(text.split())
    return flat if len(flat) <= longest else flat[: longest - 3] + "..."


def _sequence(items: list[Any], brackets: str, depth: int) -> str:
    shown = [describe(item, depth - 1) for item in items[:_ITEMS]]
    more = ["..."] if len(items) > _ITEMS else []
    comma = "," if brackets == "()" and len(items) == 1 else ""
    return brackets[0] + ", ".join([*shown, *more]) + comma + brackets[1]
