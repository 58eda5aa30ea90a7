"""A model's state divided among devices, as fully sharded data parallelism does it (`--shard fsdp:8`).

Parameters, gradients and optimizer state are divided by the world size. A layer's parameters are gathered whole while
it computes, and its gradients are whole until they are reduced: the largest layer's are counted. A layer is a member of
a `ModuleList`, or else a direct child of the model (Zhao et al. 2023, section 3.2; `fully_shard` on each of them).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from optpass.backend.model_tensors import owner
from optpass.errors import ConfigError
from optpass.naming import given
from optpass.planning.step import StepState, bytes_of

_FORM = re.compile(r"\s*(?P<kind>[a-z0-9_]+)\s*:\s*(?P<size>-?\d+)\s*")


@dataclass(frozen=True)
class Shard:
    """How the state is divided. `kind` is 'fsdp'."""

    kind: str
    world_size: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """`fsdp:8`.

        Raises:
            ConfigError: another kind, or no number of devices of at least 1.
        """
        found = _FORM.fullmatch(text) if isinstance(text, str) else None
        if found is None or found["kind"] != "fsdp" or int(found["size"]) < 1:
            raise ConfigError(f"{given('shard', text)}: write fsdp:N with the number of devices, e.g. fsdp:8")
        return cls("fsdp", int(found["size"]))


@dataclass(frozen=True)
class Gathered:
    """The layer that takes most when it is gathered: its parameters, and its gradients before they are divided."""

    layer: str = ""
    parameters: int = 0
    gradients: int = 0

    @property
    def bytes(self) -> int:
        """Both together."""
        return self.parameters + self.gradients


def layers(model: Any) -> dict[str, list[nn.Parameter]]:
    """Parameters by the layer that is gathered with them; a tied parameter belongs to the first that has it."""
    module = owner(model)
    found: dict[str, list[nn.Parameter]] = {}
    if module is None:
        return found
    lists = {name for name, part in module.named_modules() if isinstance(part, nn.ModuleList)}
    for name, parameter in module.named_parameters():
        found.setdefault(_layer(name, lists), []).append(parameter)
    return found


def _layer(name: str, lists: set[str]) -> str:
    parts = name.split(".")
    for end in range(1, len(parts) - 1):
        if ".".join(parts[:end]) in lists:
            return ".".join(parts[: end + 1])
    return parts[0] if len(parts) > 1 else ""


def gathered(model: Any, unit: int) -> Gathered:
    """The layer of `model` that takes most bytes when it is gathered and its gradients are whole."""
    each = [
        Gathered(name, bytes_of(own, unit), bytes_of([p for p in own if p.requires_grad], unit))
        for name, own in layers(model).items()
    ]
    return max(each, key=lambda g: g.bytes, default=Gathered())


def divided(state: StepState, shard: Shard) -> StepState:
    """The share of one device of a step's state, the gathered layer left out."""
    n = shard.world_size
    cost = state.optimizer
    return replace(
        state,
        parameters=_share(state.parameters, n),
        gradients=_share(state.gradients, n),
        optimizer=replace(cost, state_bytes=_share(cost.state_bytes, n), step_bytes=_share(cost.step_bytes, n)),
    )


def _share(count: int, n: int) -> int:
    return -(-count // n)
