"""What a step holds of its modules and does not train: what no graph reads, and what no gradient reaches.

A parameter without a gradient takes its own bytes, and none for a gradient or for an optimizer's state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter


def unread_of(modules: Iterable[nn.Module], read: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Buffers and parameters of those `modules` some of whose tensors are `read`, but for what is."""
    seen, devices = {id(t) for t in read}, {t.device for t in read}
    found: dict[int, torch.Tensor] = {}
    for module in modules:
        own = [*module.buffers(), *module.parameters()]
        if any(id(t) in seen for t in own):
            there = [t for t in own if not isinstance(t, (UninitializedBuffer, UninitializedParameter))]
            found.update((id(t), t) for t in there if t.device in devices and t.layout == torch.strided)
    return [t for key, t in found.items() if key not in seen]


def idle_of(
    unread: Iterable[torch.Tensor], parameters: Iterable[tuple[int, torch.Tensor]], ungraded: Collection[int],
    elsewhere: Iterable[torch.Tensor],
) -> list[torch.Tensor]:  # fmt: skip
    """The parameters that a step of one graph does not train.

    Args:
        unread: those that the graph does not read.
        parameters: those that it reads, with their positions among its inputs.
        ungraded: positions of those that its backward makes no gradient of.
        elsewhere: what graphs and eager code before it train.
    """
    trained = {id(p) for p in elsewhere}
    without = [p for i, p in parameters if i in ungraded and p.requires_grad and p.grad is None]
    return [p for p in (*unread, *without) if id(p) not in trained]
