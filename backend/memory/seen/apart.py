"""Modules that are compiled on their own and have not run yet: in the first step they may run beside the graph that is
being compiled.

A module whose loss is outside of the graph may be all that a step runs, or one of several (two encoders, a generator
and its critic). Which it is shows when the first step is over; that others of the program wait for their first call is
known before. Nothing here says what follows from that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from optpass.backend.compat.memory_modules import compiled_modules
from optpass.backend.memory.seen.stores import Stores


class Started:
    """The parameters of which graphs were compiled that may run backward."""

    def __init__(self) -> None:
        self._parameters = Stores()

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take in those of a graph."""
        self._parameters.prune()
        self._parameters.add(parameters)

    def waiting(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Parameters to train of compiled modules that no graph was compiled of, beside the one of `parameters`."""
        mine = Stores(parameters)
        found: dict[int, torch.Tensor] = {}
        for module in compiled_modules("optpass"):
            trained = [p for p in module.parameters() if p.requires_grad] if module.training else []
            stores = [p.untyped_storage() for p in trained]
            if not any(self._parameters.has(s) or mine.has(s) for s in stores):
                found.update((id(p), p) for p in trained)
        return list(found.values())


STARTED = Started()
