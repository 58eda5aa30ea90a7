"""The audit's schema: graph breaks, recompiles and silent eager, one record per cause in the user's source.

Only data lives here; collecting is `optpass.backend.audit`, rendering is this package's other files. Units stand in
the field names: bytes, `_s` seconds, `_us` microseconds.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from optpass.reporting.record import Document, ProcessRecord, Record

AUDIT_SCHEMA = "optpass.audit/1"

Owner = Literal["user", "library", "torch"]
Cause = Literal[
    "shape", "dtype", "device", "stride", "int", "float", "str", "bool", "global", "closure", "module attribute",
    "list length", "dict keys", "grad mode", "requires_grad", "autocast", "object identity", "training flag",
    "backend", "weak reference", "other",
]  # fmt: skip
SilentKind = Literal[
    "recompile limit", "skip poisoned", "frame skipped", "backend error suppressed", "compile disabled", "not compiled"
]


class Fix(Record):
    """What to do about it."""

    text: str = Field(default="", description="What to do, in one or two sentences. Empty: nothing is known.")
    diff: str = Field(default="", description="Unified diff against the user's file, where the change is mechanical.")
    note: str = Field(default="", description="What to know of the diff before taking it.")
    verified: bool | None = Field(
        default=None, description="Tried on a copy: the break is gone and outputs are equal. Null: not tried."
    )
    outcome: str = Field(default="", description="What trying it showed.")


class BreakCost(Record):
    """What one break costs. Null where it is not known."""

    boundary_bytes: float | None = Field(default=None, description="Tensors that cross the boundary, per call.")
    fusion_lost_us: float | None = Field(
        default=None, description="Predicted time of the two halves less that of the joined graph, per call."
    )
    compile_s: float | None = Field(default=None, description="Compiling the resumed functions behind it.")
    guard_us: float | None = Field(
        default=None, description="Checking their guards, per call, as Dynamo measures it: once, with cold caches."
    )


class Break(Record):
    """One place in the source where Dynamo ended a graph before the function ended."""

    file: str = Field(description="Source file.")
    line: int = Field(description="Line, from 1.")
    column: int | None = Field(default=None, description="Column, from 1; null where Python does not tell.")
    end_line: int | None = Field(default=None, description="Last line of the expression.")
    end_column: int | None = Field(default=None, description="Column behind its end, from 1.")
    code: str = Field(
        default="", description="Text of the source line, stripped: finds it again when lines move. Filled on output."
    )
    function: str = Field(default="", description="Qualified name of the user's function.")
    module: str | None = Field(default=None, description="Module path, e.g. 'blocks.3.attn'.")
    gb_type: str = Field(description="Dynamo's name of the kind of break, e.g. 'Data-dependent branching'.")
    gb_id: str | None = Field(
        default=None, description="Id in Dynamo's registry, e.g. 'GB0170'; null: none registered."
    )
    reason: str = Field(description="Why, in plain words.", min_length=1)
    owner: Owner = Field(default="user", description="Whose line it is.")
    user_file: str | None = Field(default=None, description="The user's line that led there, if `owner` is another.")
    user_line: int | None = Field(default=None, description="Line in `user_file`, from 1.")
    user_column: int | None = Field(default=None, description="Where the expression that led there begins, from 1.")
    user_end_line: int | None = Field(default=None, description="Its last line.")
    user_end_column: int | None = Field(default=None, description="Column behind its end, from 1.")
    occurrences: int = Field(default=1, description="How often Dynamo met it.")
    caused_by: int | None = Field(
        default=None, description="Index in `breaks` of the break that this one follows from."
    )
    effect: str = Field(
        default="",
        description="'split': the function goes on in another graph; 'rest eager', 'frame eager': the rest of the "
        "function or all of it runs eager; 'error': raised to the user.",
    )
    hints: list[str] = Field(default_factory=list, description="Dynamo's own hints.")
    context: str = Field(default="", description="What Dynamo was looking at, in its own words.")
    fix: Fix = Field(default_factory=Fix, description="What to do.")
    cost: BreakCost = Field(default_factory=BreakCost, description="What it costs.")
    rank: int = Field(default=0, description="Rank of the process that met it first.")


class Recompile(Record):
    """A function compiled again because a guard failed."""

    file: str = Field(description="Source file of the function.")
    line: int = Field(description="First line of the function, from 1.")
    code: str = Field(
        default="", description="Text of the source line, stripped: finds it again when lines move. Filled on output."
    )
    function: str = Field(description="Qualified name.")
    cause: Cause = Field(description="What kind of thing changed.")
    source: str = Field(default="", description="What changed, in the user's terms: 'self.scale', 'x.size(1)'.")
    before: str = Field(default="", description="Its value that the closest compiled entry was made for.")
    after: str = Field(default="", description="Its value now.")
    guards: list[str] = Field(
        default_factory=list,
        description="All failing guards of the closest cache entry; of later recompiles, those of other sources.",
    )
    count: int = Field(default=1, description="Recompiles of this function for this source.")
    values: list[str] = Field(default_factory=list, description="Values seen, in order, each once.")
    seconds: float | None = Field(default=None, description="Spent compiling, all occurrences together.")
    fix: Fix = Field(default_factory=Fix, description="What to do.")
    rank: int = Field(default=0, description="Rank of the process that met it first.")


class SilentEager(Record):
    """Code that the user asked to compile and that runs uncompiled."""

    file: str = Field(default="", description="Source file of the function.")
    line: int | None = Field(default=None, description="First line of the function, from 1.")
    code: str = Field(
        default="", description="Text of the source line, stripped: finds it again when lines move. Filled on output."
    )
    function: str = Field(default="", description="Qualified name.")
    kind: SilentKind = Field(description="Why it runs eager.")
    calls: int | None = Field(default=None, description="Calls that ran eager since; null: cannot be counted.")
    reason: str = Field(default="", description="In plain words.")
    fix: Fix = Field(default_factory=Fix, description="What to do.")
    rank: int = Field(default=0, description="Rank of the process that met it first.")


class FunctionRecord(Record):
    """One compiled function over the run."""

    file: str
    line: int
    function: str
    graphs: int = Field(default=0, description="Graphs compiled for it, those of its resumed parts included.")
    compiles: int = Field(default=0, description="Compiles of its own frame.")
    ops_captured: int = Field(default=0, description="Tensor operations inside its graphs.")
    ops_total: int | None = Field(
        default=None,
        description="Tensor operations of a call. Where graphs break, as torch's profiler counted one: a call without "
        "a compile, or, as long as there was none, what ran between the compiles of one. Null: not counted.",
    )
    compile_s: float = Field(default=0.0, description="Spent compiling it and its resumed parts.")
    t_first_s: float | None = Field(default=None, description="First call, compile included.")
    t_steady_s: float | None = Field(default=None, description="Median of calls after warm-up (no compile since).")
    calls: int = Field(default=0, description="Calls that were timed: the first some hundred after each compile.")
    guard_us: float | None = Field(default=None, description="Checking its guards, per call, as of a break's cost.")


class AuditSummary(Record):
    """The counts that a gate compares."""

    graphs: int = Field(default=0, description="Graphs compiled.")
    breaks: int = Field(default=0, description="Source breaks, those that only follow from another left out.")
    recompiles: int = Field(default=0, description="Recompiles, each counted.")
    silent_eager: int = Field(default=0, description="Functions in the silent eager ledger.")
    ops_captured_fraction: float | None = Field(default=None, description="Tensor operations in graphs / all, 0 to 1.")
    t_first_s: float | None = Field(default=None, description="First calls, summed over functions.")
    t_steady_s: float | None = Field(default=None, description="Steady calls, summed over functions.")


class Audit(Document):
    """What a run's compiled functions did wrong. Schema `optpass.audit/1`."""

    schema_: Literal["optpass.audit/1"] = Field(default="optpass.audit/1", alias="schema")
    run_id: str = Field(default="", description="Shared by the processes of a run.")
    target: str = Field(default="", description="What was audited.")
    root: str = Field(default="", description="Project folder; files below it are matched by their path from there.")
    created: str = Field(default="", description="ISO 8601, UTC.")
    partial: str | None = Field(default=None, description="Why the run ended early, if it did.")
    exit_code: int | None = Field(default=None, description="The script's own exit code.")
    environment: dict[str, str] = Field(default_factory=dict, description="Versions and machine.")
    processes: list[ProcessRecord] = Field(default_factory=list, description="Who contributed.")
    summary: AuditSummary = Field(default_factory=AuditSummary, description="The counts that a gate compares.")
    breaks: list[Break] = Field(default_factory=list, description="Source breaks, the costliest first.")
    recompiles: list[Recompile] = Field(default_factory=list, description="Recompiles, the costliest first.")
    silent_eager: list[SilentEager] = Field(default_factory=list, description="What runs eager without a word.")
    functions: list[FunctionRecord] = Field(default_factory=list, description="Compiled functions.")
    hooks: dict[str, Any] = Field(
        default_factory=dict, description="How each thing was observed, and what is less precise."
    )
    notes: list[str] = Field(default_factory=list, description="What a reader must know to judge the figures.")
