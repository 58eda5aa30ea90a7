"""What a memory plan says: which tensors are saved, which are recomputed, the peak in bytes and what it costs.

Plain data. `problem` describes a step, `search` finds plans, `emit` carries one out.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field


@dataclass(frozen=True)
class Ledger:
    """Where the bytes of the peak are.

    Attributes:
        parameters, gradients, optimizer, buffers, inputs: bytes held throughout the step.
        activations: tensors kept from the forward for the backward, and the outputs that the caller holds.
        temporaries: everything else that is live at the peak.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    inputs: int = 0
    activations: int = 0
    temporaries: int = 0

    @property
    def total(self) -> int:
        """Sum of all entries, bytes."""
        return (
            self.parameters + self.gradients + self.optimizer + self.buffers + self.inputs + self.activations
            + self.temporaries
        )  # fmt: skip

    def plus(self, more: Ledger) -> Ledger:
        """Both together, entry by entry."""
        return Ledger(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(more), strict=True)))


@dataclass(frozen=True)
class Tensor:
    """A tensor of the plan, where the user's source makes it.

    Attributes:
        node: FX node that makes it.
        bytes: of its storage.
        op: operator, e.g. 'aten.mm.default'.
        shape: e.g. 'f32[8, 128]'.
    """

    node: str
    bytes: int
    op: str = ""
    shape: str = ""
    file: str | None = None
    line: int | None = None
    module: str | None = None


@dataclass(frozen=True)
class Recomputed(Tensor):
    """A tensor of the forward that the backward computes again.

    Attributes:
        flops: of one computation.
        seconds: predicted, of one computation.
        copies: how often the backward computes it.
    """

    flops: float = 0.0
    seconds: float = 0.0
    copies: int = 1


@dataclass(frozen=True)
class CurvePoint:
    """One plan on the way from 'save everything' to the floor: peak in bytes, step time over the unconstrained's."""

    peak_bytes: int
    slowdown: float


@dataclass(frozen=True)
class MemoryPlan:
    """A plan for one step.

    Attributes:
        budget_bytes: what was asked for; None for the unconstrained plan.
        predicted_peak_bytes: of this plan, ledger included.
        floor_bytes: the smallest peak of any plan.
        floor_estimated: it is an estimate, rather too large than too small.
        unconstrained_bytes: the peak when nothing is asked for.
        saved, recomputed: largest first.
        recompute_seconds: predicted time that recomputing adds to a step, over the unconstrained plan.
        step_seconds: predicted time of a step of the unconstrained plan.
        curve: plans by falling peak; slowdown never falls.
        outputs_bytes: of what the forward returns.
        offloaded: kept in host memory meanwhile, largest first; not among `saved`.
        transfer_seconds: predicted time on the link to the host per step, both ways together; it runs beside the step.
    """

    budget_bytes: int | None
    predicted_peak_bytes: int
    floor_bytes: int
    unconstrained_bytes: int
    ledger: Ledger
    saved: tuple[Tensor, ...] = ()
    recomputed: tuple[Recomputed, ...] = ()
    recompute_seconds: float = 0.0
    step_seconds: float = 0.0
    curve: tuple[CurvePoint, ...] = field(default=())
    outputs_bytes: int = 0
    floor_estimated: bool = False
    offloaded: tuple[Tensor, ...] = ()
    transfer_seconds: float = 0.0

    @property
    def slowdown(self) -> float:
        """Predicted step time over the unconstrained plan's, 1 or more."""
        return 1.0 + self.recompute_seconds / self.step_seconds if self.step_seconds > 0 else 1.0

    @property
    def recompute_flops(self) -> float:
        """FLOPs that recomputing adds to a step."""
        return sum(item.flops * item.copies for item in self.recomputed)
