"""Where what a tensor holds and what its gradient goes to are two things: memory that is written to behind `detach`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from optpass.passes.attention.program import calls
from optpass.passes.attention.program.ir import Value, ancestors


class Detached:
    """Which tensors are behind a `detach` (or `.data`), each behind which one."""

    def __init__(self) -> None:
        self._behind: dict[int, Value] = {}  #: id of a fake tensor -> the detached alias that it is a view of

    def note(self, value: Value, given: Iterable[torch.Tensor]) -> None:
        """`value` was made of the tensors `given`."""
        if value.name == "detach":
            self._behind[id(value.tensor)] = value
            return
        for tensor in given:
            if id(tensor) in self._behind and calls.storage_of(tensor) == value.storage:
                self._behind[id(value.tensor)] = self._behind[id(tensor)]

    def apart(
        self, other: torch.Tensor, written: torch.Tensor, becomes: Value, known: Mapping[int, Value]
    ) -> bool:  # fmt: skip
        """Whether `other`, in the memory of `written`, keeps a gradient of its own when that becomes `becomes`: it
        holds what is written, and stays made as it was.

        Args:
            known: what each tensor was, by its id.
        """
        if self._behind.get(id(other)) is self._behind.get(id(written)):
            return False
        before = known.get(id(other))
        return before is None or learns(before) or learns(becomes)


def learns(value: Any) -> bool:
    """Whether a gradient may flow to anything that a value is computed from."""
    reached = ancestors(value, through=lambda item: item.name != "detach") if isinstance(value, Value) else ()
    return any(item.learns for item in reached)


def stops(op: Any, arguments: Any) -> bool:
    """Whether an operation copies what has no gradient over what has one, to which zeros go then."""
    return op._schema.name == "aten::copy" and learns(arguments[0]) and not learns(arguments[1])
