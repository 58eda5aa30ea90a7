"""The one report schema: what a compile did, declined and costs. Terminal, JSON and HTML are views of these objects.

Only data lives here; collecting is `store`, rendering is `terminal` and `html`. Units stand in the field names:
bytes, `_s` seconds, `_us` microseconds, FLOPs with a multiply-add counted as 2.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

REPORT_SCHEMA = "optpass.report/1"
ANALYSIS_SCHEMA = "optpass.analysis/1"

Bound = Literal["compute", "memory", "launch", "none", "unknown"]
Phase = Literal["forward", "backward"]


class Record(BaseModel):
    """Base of all records: unknown keys are an error, aliases (`schema`) are used on output.

    Figures are finite: JSON has no infinity, so a figure that is not known must be left out by who files the record.
    """

    model_config = ConfigDict(
        extra="forbid",
        populate_by_name=True,
        serialize_by_alias=True,
        allow_inf_nan=False,
        json_schema_serialization_defaults_required=True,  # every key is written, so the schema may require it
    )


class Site(Record):
    """One place in the user's program where a pass acted, or declined to, and why."""

    kind: str = Field(description="Name of the pass's concern, e.g. 'redundant' or 'attention'.")
    file: str | None = Field(default=None, description="The user's source file.")
    line: int | None = Field(default=None, description="Line in `file`, from 1.")
    module: str | None = Field(default=None, description="Module path, e.g. 'blocks.3.attn'.")
    node: str = Field(default="", description="Name of the FX node.")
    reason: str = Field(description="Why, in plain words. Never empty.", min_length=1)
    before: str = Field(default="", description="What stood there.")
    after: str = Field(default="", description="What stands there now; empty where nothing changed.")
    cost: dict[str, float] = Field(default_factory=dict, description="Figures behind the decision, units in the keys.")


class PassRecord(Record):
    """What one pass did to one graph."""

    name: str
    stage: str = Field(description="'dynamo', 'joint' or 'compiled'.")
    seconds: float = 0.0
    applied: list[Site] = Field(default_factory=list)
    declined: list[Site] = Field(default_factory=list)
    error: str | None = Field(default=None, description="Why the pass was rolled back, if it was.")


class Op(Record):
    """The roofline of one op of one graph."""

    name: str = Field(description="Name of the FX or ONNX node.")
    target: str = Field(description="Operator, e.g. 'aten.mm.default'.")
    graph: str = Field(default="0", description="Id of the graph it belongs to.")
    phase: Phase = "forward"
    module: str | None = None
    file: str | None = None
    line: int | None = None
    flops: float = 0.0
    bytes_read: float = 0.0
    bytes_written: float = 0.0
    intensity: float = Field(default=0.0, description="FLOPs per byte read or written.")
    dtype: str = Field(default="", description="Dtype whose peak bounds it, e.g. 'bfloat16'.")
    bound: Bound = "none"
    aligned: bool | None = Field(default=None, description="M, N, K fit the Tensor Cores; null for no matmul.")
    mnk: tuple[int, int, int] | None = None
    time_us: float = Field(default=0.0, description="Predicted time of this op alone, as its own kernel.")
    group: int | None = Field(
        default=None, description="`index` of its fused kernel among the groups of the same graph; null for views."
    )
    shape: str = Field(default="", description="Output, e.g. 'f32[8, 128]'.")


class Group(Record):
    """Ops that the inner compiler is expected to run as one kernel."""

    index: int
    graph: str = "0"
    phase: Phase = "forward"
    kind: str = Field(description="'matmul', 'pointwise', 'reduction', ...")
    ops: list[str] = Field(description="Names of the ops in it.")
    flops: float = 0.0
    bytes_read: float = 0.0
    bytes_written: float = 0.0
    bound: Bound = "none"
    time_us: float = 0.0


class Totals(Record):
    """Sums over the graphs, each run once: one step (forward, and backward when training).

    Over several processes FLOPs, bytes and kernels are summed; times are those of the slowest process.
    """

    flops: float = 0.0
    flops_forward: float = 0.0
    flops_backward: float = 0.0
    bytes_unfused: float = 0.0
    bytes_fused: float = 0.0
    time_us: float = Field(default=0.0, description="Predicted, after fusion.")
    time_unfused_us: float = 0.0
    kernels: int = Field(default=0, description="Kernels predicted after fusion.")
    mfu: float = Field(default=0.0, description="flops / (time x dense peak of the main matmul dtype), 0 to 1.")


class DeviceRecord(Record):
    """The device that figures were predicted for."""

    key: str
    name: str
    peak_flops: dict[str, float] = Field(default_factory=dict, description="Dense FLOP/s by dtype.")
    attainable_flops: dict[str, float] = Field(default_factory=dict, description="Peak x achievable fraction.")
    bandwidth: float = Field(default=0.0, description="Bytes per second from device memory.")
    attainable_bandwidth: float = 0.0
    memory_bytes: int | None = None
    launch_us: float = 0.0
    calibrated: bool = Field(default=False, description="Measured on this machine rather than taken from a datasheet.")


class GraphRecord(Record):
    """One graph that Dynamo handed over, from capture to first steady call."""

    id: str
    process: int = Field(default=0, description="Index into `processes`.")
    function: str = Field(default="", description="Compiled function, 'file:line name'.")
    training: bool = False
    dynamic: bool = Field(default=False, description="Captured with symbolic shapes.")
    inner: str = Field(default="", description="Inner compiler that served it.")
    cache: str = Field(default="", description="'hit', 'miss' or 'bypass' of the inner compiler's cache, where known.")
    nodes: int = 0
    t_compile_s: float = Field(default=0.0, description="Passes, inner compiler, and the lazy backward compile.")
    t_passes_s: float = Field(default=0.0, description="The part of t_compile_s that is optpass's own.")
    t_first_s: float | None = Field(default=None, description="First call, compile included.")
    t_steady_s: float | None = Field(default=None, description="Median of later calls of the forward, host time.")
    calls: int = 0
    passes: list[PassRecord] = Field(default_factory=list)
    totals: Totals = Field(default_factory=Totals, description="Predicted work of this graph alone.")
    unknown_ops: dict[str, int] = Field(default_factory=dict, description="Its ops without a formula, and how many.")


class CompileCost(Record):
    """What compiling cost, told apart from running: sums over graphs; over processes, the slowest one's."""

    graphs: int = 0
    t_compile_s: float = 0.0
    t_passes_s: float = Field(default=0.0, description="The part of t_compile_s that is optpass's own.")
    t_first_s: float = 0.0
    t_steady_s: float = 0.0


class ProcessRecord(Record):
    """One process (rank) that contributed graphs."""

    pid: int
    host: str
    rank: int = 0
    world_size: int = 1
    argv: list[str] = Field(default_factory=list)


class Analysis(Record):
    """Roofline of a target: every op, every fused kernel, and the totals. Schema `optpass.analysis/1`."""

    schema_: Literal["optpass.analysis/1"] = Field(default="optpass.analysis/1", alias="schema")
    target: str
    train: bool = False
    dtype: str = ""
    device: DeviceRecord
    totals: Totals
    ops: list[Op] = Field(default_factory=list)
    groups: list[Group] = Field(default_factory=list)
    graphs: list[GraphRecord] = Field(default_factory=list)
    unknown_ops: dict[str, int] = Field(default_factory=dict, description="Ops without a formula, and how many.")
    parameters: int = Field(default=0, description="Number of parameters.")
    notes: list[str] = Field(default_factory=list)


class Report(Record):
    """Everything the processes of a run compiled. Schema `optpass.report/1`."""

    schema_: Literal["optpass.report/1"] = Field(default="optpass.report/1", alias="schema")
    run_id: str = ""
    created: str = Field(default="", description="ISO 8601, UTC.")
    name: str = ""
    environment: dict[str, str] = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)
    processes: list[ProcessRecord] = Field(default_factory=list)
    device: DeviceRecord | None = None
    compile: CompileCost = Field(default_factory=CompileCost)
    totals: Totals = Field(default_factory=Totals)
    graphs: list[GraphRecord] = Field(default_factory=list)
    ops: list[Op] = Field(default_factory=list)
    groups: list[Group] = Field(default_factory=list)
    unknown_ops: dict[str, int] = Field(default_factory=dict)
    training: dict[str, Any] = Field(default_factory=dict, description="Filled by `optpass train`: config and curves.")
    warnings: list[str] = Field(default_factory=list)

    def sites(self, kind: str | None = None) -> list[Site]:
        """Every applied site, of one kind or of all, in graph order."""
        return [s for g in self.graphs for p in g.passes for s in p.applied if kind in (None, s.kind)]

    def declined(self, kind: str | None = None) -> list[Site]:
        """Every declined site with its reason, of one kind or of all, in graph order."""
        return [s for g in self.graphs for p in g.passes for s in p.declined if kind in (None, s.kind)]
