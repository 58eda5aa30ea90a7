"""The pass contract: what a pass declares, receives and returns.

A pass says what it did and what it did not do. Running, ordering, timing, checking and rolling back are the
pipeline's business (`optpass.backend.pipeline`); nothing here knows Dynamo, the CLI or rendering.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from optpass.options import Options
from optpass.passes.devices import DeviceSpec
from optpass.reporting.model import Phase, Site


class Stage(enum.StrEnum):
    """Where in a graph's journey a pass runs."""

    DYNAMO = "dynamo"  #: torch-level FX before autograd; `meta["example_value"]` holds shapes
    JOINT = "joint"  #: ATen, forward and backward together (forward alone in inference); `meta["val"]`
    COMPILED = "compiled"  #: after the inner compiler; read-only: looks at `PassContext.aten`


class Tier(enum.StrEnum):
    """Whether a pass keeps the mathematics."""

    EXACT = "exact"  #: on by default; rounding aside, results are the same
    OPT_IN = "opt_in"  #: may change semantics; runs only where its own option asks for it


@dataclass(frozen=True)
class AtenGraph:
    """An ATen graph as the inner compiler lowers it: `phase` is 'forward' or 'backward'; `meta["val"]` on nodes."""

    phase: Phase
    graph: fx.Graph


@dataclass(frozen=True)
class ContentGuard:
    """This rewrite holds only while a tensor's contents are what they were.

    Before each call the backend makes sure that they are, and otherwise runs the graph without such rewrites.

    Attributes:
        node: a placeholder or `get_attr` node whose contents `PassContext.contents` gave.
        reason: what rests on them, as a clause for the user: 'layer attn is causal'.
    """

    node: fx.Node
    reason: str


def no_contents(node: fx.Node) -> torch.Tensor | None:
    """No tensor's contents are known."""
    return None


@dataclass(frozen=True)
class PassContext:
    """What a pass may know besides its graph.

    Attributes:
        options: the resolved options of this `torch.compile` call.
        device: spec to decide for; a callable, because finding it may mean calibrating.
        graph_id: id of the graph in the report.
        training: True where a backward will be compiled.
        aten: the partitioned graphs, at the compiled stage; empty before it.
        contents: at the Dynamo stage, a copy of the tensor behind a placeholder or `get_attr` node that belongs to a
            module (a buffer, a frozen parameter, a tensor attribute); None for every other node, and where the graph
            itself or a gradient can change it. A pass that uses it returns a `ContentGuard`.
        stand_in: True where the graph is planned and not run, on tensors that stand for those of the device.
    """

    options: Options
    device: Callable[[], DeviceSpec]
    graph_id: str
    training: bool
    aten: tuple[AtenGraph, ...] = ()
    contents: Callable[[fx.Node], torch.Tensor | None] = no_contents
    stand_in: bool = False


@dataclass
class PassResult:
    """What a pass did and did not do.

    Attributes:
        applied: sites changed, each with a reason.
        declined: sites looked at and left alone, each with a reason.
        changed: True if the graph was modified; the pipeline then lints it and re-checks its metadata.
        product: what an analysis pass found; the backend keeps it under the pass's name.
        guards: contents that the changes rest on (Dynamo stage).
    """

    applied: list[Site] = field(default_factory=list)
    declined: list[Site] = field(default_factory=list)
    changed: bool = False
    product: Any = None
    guards: list[ContentGuard] = field(default_factory=list)


class Pass(ABC):
    """One pass. Subclasses are stateless between graphs; state that decides output belongs in `config`.

    Class attributes:
        name: unique name, used in `disable_passes` and in the report.
        summary: one line for the docs.
        stage, tier: see the enums.
        requires: passes that must have run on this graph; if one is disabled or failed, this one is skipped.
        runs_after: ordering only; the named passes may be absent.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    stage: ClassVar[Stage]
    tier: ClassVar[Tier] = Tier.EXACT
    requires: ClassVar[tuple[str, ...]] = ()
    runs_after: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @abstractmethod
    def from_options(cls, options: Options) -> Pass | None:
        """The pass as these options configure it; None where they do not ask for it (opt-in tier)."""

    @abstractmethod
    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        """Analyse or transform `gm` in place. May raise: the pipeline restores the graph and reports why."""

    @property
    def config(self) -> Any:
        """Frozen dataclass of everything that changes this pass's output; part of the cache identity."""
        return None
