"""What runs between the compiled forward and the compiled backward: the caller's loss, and how gradients come in.

A tail is data about bytes; the caller's code is not run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from optpass.backend.memory.storages import Storages


@dataclass(frozen=True)
class Tail:
    """The caller's part of a step, outside of the graphs.

    Attributes:
        holds_outputs: the caller keeps the forward's outputs until the step ends (`out = model(x); loss(out)`).
        forward_bytes: most bytes that the loss allocates at one time, beside the outputs.
        saved_bytes: bytes of the loss's own that live from the forward to its backward.
        backward_bytes: most bytes that the loss's backward allocates, the gradients of the outputs included.
    """

    holds_outputs: bool = True
    forward_bytes: int = 0
    saved_bytes: int = 0
    backward_bytes: int = 0

    def after_forward(self, outputs: list[Any], storages: Storages) -> list[Any]:
        """The forward has returned `outputs`; what lives until the backward of the loss."""
        storages.mark("loss", self.forward_bytes)
        return list(outputs)

    def before_backward(self, tangents: list[torch.Tensor], held: list[Any], storages: Storages) -> None:
        """Before the backward runs, with the gradients of the outputs."""
        storages.mark("backward of the loss", self.saved_bytes + self.backward_bytes)
        storages.add_all(tangents)
        if not self.holds_outputs:
            held.clear()
        storages.mark("tangents")


#: The loss is in the graph: its gradient is one number.
NO_TAIL = Tail()
