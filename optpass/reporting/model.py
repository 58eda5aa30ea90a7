"""The one report schema: what a compile did, declined and costs. Terminal, JSON and HTML are views of these objects.

Only data lives here; collecting is `store`, rendering is `terminal` and `html`. Units stand in the field names:
bytes, `_s` seconds, `_us` microseconds, FLOPs with a multiply-add counted as 2.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from optpass.reporting.audit.model import Audit
from optpass.reporting.record import Document
from optpass.reporting.record import ProcessRecord as ProcessRecord
from optpass.reporting.record import Record as Record

REPORT_SCHEMA = "optpass.report/1"
ANALYSIS_SCHEMA = "optpass.analysis/1"

Bound = Literal["compute", "memory", "launch", "none", "unknown"]
Phase = Literal["forward", "backward"]


class Site(Record):
    """One place in the user's program where a pass acted, or declined to, and why."""

    kind: str = Field(description="Name of the pass's concern, e.g. 'redundant' or 'attention'.")
    file: str | None = Field(default=None, description="The user's source file.")
    line: int | None = Field(default=None, description="Line in `file`, from 1.")
    module: str | None = Field(default=None, description="Module path, e.g. 'blocks.3.attn'.")
    node: str = Field(default="", description="Name of the FX node.")
    node_file: str | None = Field(default=None, description="The user's source file that makes `node`, if elsewhere.")
    node_line: int | None = Field(default=None, description="Line in `node_file`, from 1.")
    reason: str = Field(description="Why, in plain words. Never empty.", min_length=1)
    before: str = Field(default="", description="What stood there.")
    after: str = Field(default="", description="What stands there now; empty where nothing changed.")
    cost: dict[str, float] = Field(default_factory=dict, description="Figures behind the decision, units in the keys.")


class PassRecord(Record):
    """What one pass did to one graph."""

    name: str = Field(description="As in `disable_passes`.")
    stage: str = Field(description="'dynamo', 'joint' or 'compiled'.")
    seconds: float = Field(default=0.0, description="Time it took, checking included.")
    applied: list[Site] = Field(default_factory=list, description="Sites it changed.")
    declined: list[Site] = Field(default_factory=list, description="Sites it looked at and left alone.")
    error: str | None = Field(default=None, description="Why the pass was rolled back, if it was.")


class Op(Record):
    """The roofline of one op of one graph."""

    name: str = Field(description="Name of the FX or ONNX node.")
    target: str = Field(description="Operator, e.g. 'aten.mm.default'.")
    graph: str = Field(default="0", description="Id of the graph it belongs to.")
    phase: Phase = Field(default="forward", description="Where it runs; a recomputed op runs in the backward.")
    module: str | None = Field(default=None, description="Module path, e.g. 'blocks.3.attn'.")
    file: str | None = Field(default=None, description="The user's source file.")
    line: int | None = Field(default=None, description="Line in `file`, from 1.")
    flops: float = Field(default=0.0, description="A multiply-add counts 2.")
    bytes_read: float = Field(default=0.0, description="As a kernel of its own.")
    bytes_written: float = Field(default=0.0, description="As a kernel of its own.")
    intensity: float = Field(default=0.0, description="FLOPs per byte read or written.")
    dtype: str = Field(default="", description="Dtype whose peak bounds it, e.g. 'bfloat16'.")
    bound: Bound = Field(default="none", description="What limits it: compute, memory, launch; none for views.")
    aligned: bool | None = Field(default=None, description="M, N, K fit the Tensor Cores; null for no matmul.")
    mnk: tuple[int, int, int] | None = Field(default=None, description="M, N, K of the matrix product, if it is one.")
    time_us: float = Field(default=0.0, description="Predicted time of this op alone, as its own kernel.")
    group: int | None = Field(
        default=None, description="`index` of its fused kernel among the groups of the same graph; null for views."
    )
    shape: str = Field(default="", description="Output, e.g. 'f32[8, 128]'.")


class Group(Record):
    """Ops that the inner compiler is expected to run as one kernel."""

    index: int = Field(description="Position in `groups`.")
    graph: str = Field(default="0", description="Id of the graph it belongs to.")
    phase: Phase = Field(default="forward", description="Forward or backward.")
    kind: str = Field(description="'matmul', 'pointwise', 'reduction', ...")
    ops: list[str] = Field(description="Names of the ops in it.")
    flops: float = Field(default=0.0, description="Of all its ops.")
    bytes_read: float = Field(default=0.0, description="From outside the kernel.")
    bytes_written: float = Field(default=0.0, description="That something outside the kernel uses.")
    bound: Bound = Field(default="none", description="What limits it.")
    time_us: float = Field(default=0.0, description="Predicted.")


class Totals(Record):
    """Sums over the graphs, each run once: one step (forward, and backward when training).

    Over several processes FLOPs, bytes and kernels are summed; times are those of the slowest process.
    """

    flops: float = Field(default=0.0, description="Model FLOPs: what a step computes, recomputed ops left out.")
    flops_forward: float = Field(default=0.0, description="Their forward part.")
    flops_backward: float = Field(default=0.0, description="Their backward part.")
    bytes_unfused: float = Field(default=0.0, description="Every op as a kernel of its own.")
    bytes_fused: float = Field(default=0.0, description="After fusion, as the inner compiler would.")
    time_us: float = Field(default=0.0, description="Predicted, after fusion.")
    time_unfused_us: float = Field(default=0.0, description="Predicted, every op as a kernel of its own.")
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

    id: str = Field(description="Unique in the report.")
    process: int = Field(default=0, description="Index into `processes`.")
    function: str = Field(default="", description="Compiled function, 'file:line name'.")
    training: bool = Field(default=False, description="A backward was compiled with it.")
    dynamic: bool = Field(default=False, description="Captured with symbolic shapes.")
    inner: str = Field(default="", description="Inner compiler that served it.")
    cache: str = Field(default="", description="'hit', 'miss' or 'bypass' of the inner compiler's cache, where known.")
    nodes: int = Field(default=0, description="Nodes of the Dynamo graph.")
    t_compile_s: float = Field(default=0.0, description="Passes, inner compiler, and the lazy backward compile.")
    t_passes_s: float = Field(default=0.0, description="The part of t_compile_s that is optpass's own.")
    t_first_s: float | None = Field(
        default=None,
        description="First call of the forward, compile included; a backward compiles later, when first run.",
    )
    t_steady_s: float | None = Field(default=None, description="Median of later calls of the forward, host time.")
    calls: int = Field(default=0, description="Calls that were timed: the first 21 at most.")
    passes: list[PassRecord] = Field(
        default_factory=list, description="What each pass did, in the order in which they ran."
    )
    totals: Totals = Field(default_factory=Totals, description="Predicted work of this graph alone.")
    unknown_ops: dict[str, int] = Field(default_factory=dict, description="Its ops without a formula, and how many.")


class CompileCost(Record):
    """What compiling cost, told apart from running: sums over graphs; over processes, the slowest one's."""

    graphs: int = Field(default=0, description="Number of graphs.")
    t_compile_s: float = Field(default=0.0, description="Time spent compiling.")
    t_passes_s: float = Field(default=0.0, description="The part of t_compile_s that is optpass's own.")
    t_first_s: float = Field(default=0.0, description="First calls, compile included.")
    t_steady_s: float = Field(default=0.0, description="Later calls of the forwards, host time.")


class Analysis(Document):
    """Roofline of a target: every op, every fused kernel, and the totals. Schema `optpass.analysis/1`."""

    schema_: Literal["optpass.analysis/1"] = Field(default="optpass.analysis/1", alias="schema")
    target: str = Field(description="What was analysed.")
    train: bool = Field(default=False, description="Forward and backward rather than inference.")
    dtype: str = Field(default="", description="Dtype that parameters and inputs were built in, if one was asked for.")
    device: DeviceRecord = Field(description="What the figures are predicted for.")
    totals: Totals = Field(description="Sums over everything.")
    ops: list[Op] = Field(default_factory=list, description="Every op.")
    groups: list[Group] = Field(default_factory=list, description="Every kernel after fusion.")
    graphs: list[GraphRecord] = Field(default_factory=list, description="The graphs that Dynamo made of the target.")
    unknown_ops: dict[str, int] = Field(default_factory=dict, description="Ops without a formula, and how many.")
    parameters: int = Field(default=0, description="Number of parameters.")
    notes: list[str] = Field(default_factory=list, description="What a reader must know to judge the figures.")


class Report(Document):
    """Everything the processes of a run compiled. Schema `optpass.report/1`."""

    schema_: Literal["optpass.report/1"] = Field(default="optpass.report/1", alias="schema")
    run_id: str = Field(default="", description="Shared by the processes of a run.")
    created: str = Field(default="", description="ISO 8601, UTC.")
    name: str = Field(default="", description="Name of the run, if it has one.")
    environment: dict[str, str] = Field(default_factory=dict, description="Versions and machine.")
    options: dict[str, Any] = Field(default_factory=dict, description="Resolved options of the latest compile.")
    processes: list[ProcessRecord] = Field(default_factory=list, description="Who contributed graphs.")
    device: DeviceRecord | None = Field(default=None, description="What the figures are predicted for.")
    compile: CompileCost = Field(default_factory=CompileCost, description="What compiling cost.")
    totals: Totals = Field(default_factory=Totals, description="Predicted sums over all graphs.")
    graphs: list[GraphRecord] = Field(default_factory=list, description="Every graph compiled.")
    ops: list[Op] = Field(default_factory=list, description="Every op of every graph.")
    groups: list[Group] = Field(default_factory=list, description="Every kernel after fusion.")
    unknown_ops: dict[str, int] = Field(default_factory=dict, description="Ops without a formula, and how many.")
    audit: Audit | None = Field(
        default=None, description="Graph breaks and recompiles of these graphs' functions; null: not recorded."
    )
    training: dict[str, Any] = Field(default_factory=dict, description="Filled by `optpass train`: config and curves.")
    warnings: list[str] = Field(default_factory=list, description="What went otherwise than asked.")

    def sites(self, kind: str | None = None) -> list[Site]:
        """Every applied site, of one kind or of all, in graph order."""
        return [s for g in self.graphs for p in g.passes for s in p.applied if kind in (None, s.kind)]

    def declined(self, kind: str | None = None) -> list[Site]:
        """Every declined site with its reason, of one kind or of all, in graph order."""
        return [s for g in self.graphs for p in g.passes for s in p.declined if kind in (None, s.kind)]
