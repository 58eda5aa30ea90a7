"""Whether an optimizer has stepped: by the version of a parameter that it changes, which torch counts up.

Fused optimizers (`fused=True`) change parameters without counting up their versions; their steps are counted here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch

#: Modules that are alike share a graph; so many of them are told apart.
ALIKE = 16


class FusedSteps:
    """Steps of the optimizers that are followed, by the identities of what they train."""

    def __init__(self) -> None:
        self._followed: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[int]] = weakref.WeakKeyDictionary()
        self._of: dict[int, list[int]] = {}

    def follow(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Count the steps of those that are fused from now on."""
        for optimizer in optimizers:
            groups = [group for group in optimizer.param_groups if group.get("fused")]
            if groups and optimizer not in self._followed:
                count = [0]
                try:
                    optimizer.register_step_post_hook(lambda *_, count=count: _count_up(count))
                except AttributeError:  # a wrapper that torch's constructor did not make has no place for hooks
                    continue
                self._followed[optimizer] = count
            for group in groups:
                self._of.update((id(p), self._followed[optimizer]) for p in group["params"])

    def of(self, parameter: torch.Tensor) -> int:
        """Steps that were counted of what trains a parameter."""
        count = self._of.get(id(parameter))
        return 0 if count is None else count[0]


FUSED_STEPS = FusedSteps()


def _count_up(count: list[int]) -> None:
    count[0] += 1


def first_trained(parameters: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """The parameter by whose version it is told whether an optimizer has stepped; None without."""
    return next((p for p in parameters if p.requires_grad), None)


def version_of(parameter: torch.Tensor) -> int:
    """Another one where an optimizer has stepped since."""
    return parameter._version + FUSED_STEPS.of(parameter)


class Versions:
    """By which it is told whether an optimizer has stepped since a graph was called last with the same parameters:
    modules that are alike share a graph."""

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}

    def look(self, parameters: Iterable[torch.Tensor]) -> tuple[int | None, int | None]:
        """The version then, and now."""
        first = first_trained(parameters)
        return (None, None) if first is None else (self._versions.get(id(first)), version_of(first))

    def note(self, parameters: Sequence[torch.Tensor]) -> tuple[int | None, int | None]:
        """The same; it is called now."""
        before, now = self.look(parameters)
        first = first_trained(parameters)
        if first is not None:
            self._versions.pop(id(first), None)
            self._versions[id(first)] = version_of(first)
            if len(self._versions) > ALIKE:
                del self._versions[next(iter(self._versions))]
        return before, now
