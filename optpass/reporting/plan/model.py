"""The record of a memory plan: schema `optpass.plan/1`. Only data lives here; planning is `optpass.planning`.

Bytes are those of one training step on one device. Times are predictions of the roofline model.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from optpass.reporting.model import DeviceRecord, Record
from optpass.reporting.record import Document

PLAN_SCHEMA = "optpass.plan/1"


class LedgerRecord(Record):
    """Where the bytes of the peak are. The entries add up to `predicted_peak_bytes`."""

    parameters: int = Field(default=0, description="Parameters; under sharding, this device's share.")
    gradients: int = Field(default=0, description="Gradients of parameters that are live at the peak.")
    optimizer: int = Field(default=0, description="Optimizer state.")
    buffers: int = Field(default=0, description="Buffers of the module.")
    inputs: int = Field(default=0, description="Inputs of the step.")
    activations: int = Field(default=0, description="Saved tensors, and outputs that the caller holds.")
    temporaries: int = Field(default=0, description="Everything else that is live at the peak.")

    @property
    def total(self) -> int:
        """Sum of all entries, bytes."""
        return sum(getattr(self, name) for name in type(self).model_fields)


class PlannedTensor(Record):
    """A tensor of the forward that the backward needs, and what making it again takes."""

    tensor: str = Field(description="Name of the FX node that makes it.")
    bytes: int = Field(description="Of its storage.")
    op: str = Field(default="", description="Operator that makes it, e.g. 'aten.mm.default'.")
    shape: str = Field(default="", description="E.g. 'f32[8, 128]'.")
    flops: float = Field(default=0.0, description="Of making it once, from what it is made of.")
    time_us: float = Field(default=0.0, description="Predicted time of making it once.")
    file: str | None = Field(default=None, description="The user's source file.")
    line: int | None = Field(default=None, description="Line in `file`, from 1.")
    module: str | None = Field(default=None, description="Module path, e.g. 'blocks.3.attn'.")


class RecomputedTensor(PlannedTensor):
    """A tensor that the plan does not keep: the backward makes it again where it needs it."""

    copies: int = Field(default=1, description="How often the backward makes it.")


class OffloadedTensor(PlannedTensor):
    """A saved tensor whose copy to host memory and back is hidden behind computing."""

    transfer_us: float = Field(default=0.0, description="Predicted time on the link, both ways together.")


class Overhead(Record):
    """What the plan costs over the unconstrained step."""

    recompute_flops_fraction: float = Field(default=0.0, description="Recomputed FLOPs over the step's own.")
    predicted_slowdown: float = Field(default=1.0, description="Step time over the unconstrained step's; 1 or more.")
    recompute_us: float = Field(default=0.0, description="Predicted time that recomputing adds.")
    step_us: float = Field(default=0.0, description="Predicted time of the unconstrained step, forward and backward.")


class ParetoPoint(Record):
    """The best plan at one peak."""

    peak_bytes: int = Field(description="Predicted peak.")
    slowdown: float = Field(description="Step time over the unconstrained step's.")


class OffloadRecord(Record):
    """Saved tensors in host memory between forward and backward, as a third choice beside saving and recomputing. The
    plan's own figures are those without."""

    link_bytes_per_s: float = Field(description="Link to the host, per direction.")
    frees_bytes: int = Field(default=0, description="Fewer bytes saved on the device.")
    transfer_us: float = Field(default=0.0, description="Predicted time on the link per step, both ways together.")
    hidden_us: float = Field(default=0.0, description="The part of it that runs behind computing.")
    replaces_us: float = Field(default=0.0, description="Recomputing that these bytes would make unnecessary.")
    pays: bool = Field(default=False, description="Whether it is faster than recomputing the same bytes.")
    runs: bool = Field(
        default=False,
        description="A run with this budget moves them, unless its option `offload` is 'off'; else they could be.",
    )
    tensors: list[OffloadedTensor] = Field(default_factory=list, description="What is moved, largest first.")


class ShardRecord(Record):
    """How the model's state is divided among devices."""

    kind: str = Field(description="'fsdp'.")
    world_size: int = Field(description="Devices.")
    layer: str = Field(default="", description="The layer that takes most when gathered.")
    gathered_bytes: int = Field(default=0, description="Its parameters, whole; part of `ledger.temporaries`.")
    gradient_bytes: int = Field(default=0, description="Its gradients before they are divided; part of the same.")


class BatchRecord(Record):
    """The micro-batch that the plan is for."""

    size: int | None = Field(default=None, description="Samples at once; null where the target does not say.")
    searched: bool = Field(default=False, description="It is the largest that fits the budget.")
    tried: list[tuple[int, int]] = Field(
        default_factory=list, description="Sizes that were tried, each with its smallest peak in bytes."
    )


class PlanReport(Document):
    """The memory plan of one training step. Schema `optpass.plan/1`."""

    schema_: Literal["optpass.plan/1"] = Field(default="optpass.plan/1", alias="schema")
    target: str = Field(description="What was planned.")
    device: DeviceRecord = Field(description="What it was planned for.")
    dtype: str = Field(default="", description="Dtype of most parameters.")
    parameter_count: int = Field(default=0, description="Number of parameters.")
    inputs: str = Field(default="", description="The inputs, e.g. 'int64[1, 8192]'.")
    optimizer: str = Field(default="none", description="Optimizer whose state is counted.")
    accumulation: int = Field(default=1, description="Micro-batches per optimizer step.")
    budget_bytes: int | None = Field(default=None, description="What was asked for; null for no budget.")
    predicted_peak_bytes: int = Field(description="Largest number of bytes allocated at any time of the step.")
    floor_bytes: int = Field(description="The smallest peak of any plan.")
    unconstrained_bytes: int = Field(description="The peak when nothing is asked for.")
    optimizer_step_bytes: int = Field(
        default=0, description="The peak while the optimizer steps, which no plan lowers."
    )
    ledger: LedgerRecord = Field(description="Where the bytes of the peak are.")
    saved: list[PlannedTensor] = Field(
        default_factory=list, description="Tensors kept for the backward, largest first."
    )
    recomputed: list[RecomputedTensor] = Field(default_factory=list, description="Tensors made again, largest first.")
    overhead: Overhead = Field(default_factory=Overhead, description="What it costs.")
    pareto: list[ParetoPoint] = Field(default_factory=list, description="The best plans, by falling peak.")
    offload: OffloadRecord | None = Field(default=None, description="For devices with a known link to the host.")
    batch: BatchRecord = Field(default_factory=BatchRecord, description="The micro-batch.")
    shard: ShardRecord | None = Field(default=None, description="How the state is divided; null for one device.")
    notes: list[str] = Field(default_factory=list, description="What a reader must know to judge the figures.")
