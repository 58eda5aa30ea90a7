"""What one ATen call on fake tensors is: its arguments in order, what it writes to, and the memory behind its tensors.

Nothing here knows of a graph or of what was called before; that is `lower`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch


def is_fake(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "fake_mode", None) is not None


def is_plain(tensor: torch.Tensor) -> bool:
    """Has memory of its own: not one of `torch.func`'s wrappers."""
    try:
        tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def storage_of(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # wrapped by torch.func, or without a storage
        return id(tensor)


def same_place(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return (
            storage_of(one) == storage_of(other)
            and one.dtype == other.dtype
            and str((one.shape, one.stride(), one.storage_offset()))
            == str((other.shape, other.stride(), other.storage_offset()))
        )
    except (RuntimeError, NotImplementedError):
        return False


def positional(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments of the schema in order, defaults filled in."""
    schema = op._schema.arguments
    rest = [kwargs.get(a.name, a.default_value) for a in schema[len(args) :]]
    return (*args, *rest)


def filled_with(op: Any, filled: tuple[Any, ...]) -> Any:
    """The number that `ones_like` and its kin fill a tensor with; None for any other operation."""
    name = op._schema.name.rpartition("::")[2]
    if name in ("ones_like", "new_ones"):
        return 1
    if name in ("zeros_like", "new_zeros"):
        return 0
    number = filled[2] if name == "new_full" else filled[1] if name == "full_like" else None
    return number if isinstance(number, (int, float)) else None


def is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def functional_form(op: Any) -> Any:
    """`aten.add_.Tensor` -> `aten.add.Tensor`; None where there is no such form with the same arguments."""
    name = op._schema.name.rpartition("::")[2]
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    found = getattr(packet, op._overloadname, None) if packet is not None else None
    names = [a.name for a in op._schema.arguments]
    same = found is not None and [a.name for a in found._schema.arguments][: len(names)] == names
    return found if same else None


def tensors(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, (tuple, list)):
        for inner in item:
            yield from tensors(inner)


def map_tensors(item: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(item, torch.Tensor):
        return function(item)
    if isinstance(item, (tuple, list)):
        mapped = [map_tensors(i, function) for i in item]
        return tuple(mapped) if isinstance(item, tuple) else mapped
    return item


def rate(p: Any, needed: bool) -> float:
    """The probability of a dropout, NaN where it is not known.

    Under dynamic shapes a module's `p` is an input of the graph. That it is 0 becomes a guard, and where it is `needed`
    so does any other value: AOTAutograd does the same later on, but other compilers are given the graph only once.
    """
    hint = getattr(getattr(p, "node", None), "hint", None)
    if isinstance(p, (int, float)) or (hint is not None and (needed or hint == 0)):
        return float(p)
    return math.nan
