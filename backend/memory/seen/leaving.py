"""What a caller holds of a run when its backward begins, and what of that is gone when an optimizer steps.

A function that computes the loss and calls `backward` has let go of its variables when it has returned; where its
caller steps the optimizer, they are not there. An optimizer's step shows in the versions of what it trains.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from optpass.backend.memory.versions import version_of


class Leaving:
    """Watches storages until an optimizer has stepped.

    Args:
        storages: that are there when a backward begins.
        trained: a parameter that the optimizer changes.
    """

    def __init__(self, storages: Iterable[Any], trained: torch.Tensor) -> None:
        self._parameter, self._version = weakref.ref(trained), version_of(trained)
        self._gone: list[int] = []
        note = functools.partial(_note, self._gone, self._parameter, self._version)
        self._watched = [weakref.ref(s, functools.partial(note, s.nbytes())) for s in storages]

    def stepped(self) -> bool:
        """Whether an optimizer has stepped since."""
        parameter = self._parameter()
        return parameter is not None and version_of(parameter) != self._version

    def gone(self) -> int:
        """Bytes that were released before it did."""
        return sum(self._gone)


def _note(gone: list[int], parameter: weakref.ref[torch.Tensor], version: int, size: int, _: Any) -> None:
    trained = parameter()
    if trained is not None and version_of(trained) == version:
        gone.append(size)
