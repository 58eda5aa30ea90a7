"""What runs between the compiled forward and the compiled backward: the caller's loss, and how gradients come in.

A `Tail` is data about bytes, for a loss that nobody has seen yet; a `LossTail` runs a known loss on fake tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optpass.backend import compat
from optpass.backend.memory.replay.graph_values import laid_out_anew
from optpass.backend.memory.replay.storages import Operators, Storages

#: State of a CPU's generator, which a checkpoint keeps.
GENERATOR_BYTES = torch.get_rng_state().nbytes


@dataclass(frozen=True)
class Tail:
    """The caller's part of a step, outside of the graphs.

    Attributes:
        holds_outputs: the caller keeps the forward's outputs until the step ends (`out = model(x); loss(out)`), not
            only until the loss has read them.
        forward_bytes: most bytes that the loss allocates at one time, beside the outputs.
        saved_bytes: bytes of the loss's own that live from the forward to its backward.
        backward_bytes: most bytes that the loss's backward allocates, the gradients of the outputs included.
        kept_bytes: bytes that are there from the loss on: a number in a storage as large as what it was reduced from;
            less what other graphs' outputs were that have gone.
        early_bytes: there in the forward, and gone before the graph's backward: what an earlier call returned, too.
        reads_outputs: the loss's backward reads outputs, so that they are there until it has run.
        gone: bytes of each output that is released before that all the same.
        retains: the backward keeps the graph for another one, and with it all that was saved.
    """

    holds_outputs: bool = True
    forward_bytes: int = 0
    saved_bytes: int = 0
    backward_bytes: int = 0
    kept_bytes: int = 0
    reads_outputs: bool = False
    early_bytes: int = 0
    gone: tuple[int, ...] = ()
    retains: bool = False

    @classmethod
    def of_checkpoint(cls, outputs: int) -> Tail:
        """That of a graph that a checkpoint runs again: its loss is over before anything but `outputs` bytes is there.
        Beside the second forward are the gradients of its outputs, and generator states: its own, and that to go back
        to."""
        return cls(False, early_bytes=outputs + 2 * GENERATOR_BYTES)

    def released(self, outputs: int) -> int:
        """Bytes of `outputs` bytes that are gone when the loss runs backward."""
        if self.holds_outputs:
            return 0
        return min(outputs, sum(self.gone)) if self.reads_outputs else outputs

    def beside(self, tangents: int, outputs: int) -> int:
        """Most bytes between forward and backward, beside `outputs` bytes and `tangents` bytes of their gradients;
        negative where some of these are never there together."""
        later = max(self.saved_bytes + self.backward_bytes - tangents, 0) - self.released(outputs)
        return self.kept_bytes + max(self.forward_bytes - tangents, later)

    def after_forward(self, outputs: list[Any], storages: Storages) -> list[Any]:
        """The forward has returned `outputs`; what lives until the backward of the loss."""
        storages.live += self.kept_bytes
        storages.mark("loss", self.forward_bytes)
        if self.holds_outputs:
            return list(outputs)
        return _without(outputs, self.gone) if self.reads_outputs else []

    def before_backward(self, tangents: list[torch.Tensor], held: list[Any], storages: Storages) -> None:
        """Before the backward runs, with the gradients of the outputs."""
        storages.mark("backward of the loss", self.saved_bytes + self.backward_bytes)
        if self.holds_outputs:
            storages.lend(held)
        held.clear()
        storages.add_all(tangents)
        storages.mark("tangents", laid_out_anew(tangents))


@dataclass(frozen=True)
class LossTail(Tail):
    """A loss that is known: it runs eagerly, with autograd, on the fake outputs, and every operator of it is counted.

    Attributes:
        loss: called with the forward's output (a list of them, where there are several), gives a scalar.
    """

    loss: Callable[[Any], torch.Tensor] = torch.sum

    def after_forward(self, outputs: list[Any], storages: Storages) -> list[Any]:
        """Runs the loss; what autograd saves for its backward lives on in what is returned."""
        leaves = [o.detach().requires_grad_() if _trains(o) else o for o in outputs]
        with _mode_of(leaves), Operators(storages), torch.enable_grad():
            value = self.loss(leaves[0] if len(leaves) == 1 else leaves)
        storages.mark("loss")
        kept = list(outputs) if self.holds_outputs else []
        return [value, [leaf for leaf in leaves if _trains(leaf)], kept]

    def before_backward(self, tangents: list[torch.Tensor], held: list[Any], storages: Storages) -> None:
        """Runs the loss's backward; its gradients become the tangents."""
        value, leaves, _ = held
        with _mode_of([value]), Operators(storages):
            gradients = torch.autograd.grad(value, leaves, allow_unused=True)
        storages.mark("backward of the loss")
        del gradients  # the tangents are the same bytes
        leaves.clear()
        if not self.holds_outputs:
            held.clear()
            del value  # its graph ends in the leaves, as the caller's does not
        storages.add_all(tangents)
        storages.mark("tangents")


def _without(outputs: list[Any], gone: Sequence[int]) -> list[Any]:
    """`outputs` less those of so many bytes each, as far as there are such; they may share their storages."""
    tensors = [o for o in outputs if isinstance(o, torch.Tensor)]
    sizes = {o.untyped_storage()._cdata: o.untyped_storage().nbytes() for o in tensors}
    left, dropped = Counter(gone), set()
    for key, size in sizes.items():
        if left[size]:
            left[size] -= 1
            dropped.add(key)
    return [o for o in outputs if not isinstance(o, torch.Tensor) or o.untyped_storage()._cdata not in dropped]


def _trains(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _mode_of(values: list[Any]) -> compat.FakeTensorMode:
    found = next(v for v in values if isinstance(v, compat.FakeTensor))
    return found.fake_mode


#: The loss is in the graph: its gradient is one number.
NO_TAIL = Tail()
