"""The attention pass: find, plan, choose, gate, write. Each step is a module of its own; this one connects them."""

from __future__ import annotations

import copy
import dataclasses

from torch import fx

from optpass.options import Options
from optpass.passes.attention import gate
from optpass.passes.attention.program.reach import has_softmax
from optpass.passes.attention.settings import AttentionConfig
from optpass.passes.attention.work import GraphWork
from optpass.passes.contract import Pass, PassContext, PassResult, Stage
from optpass.passes.processor import instructions, slow_library


class Attention(Pass):
    """Hand-written attention becomes one call of a fused kernel; see the package's docstring."""

    name = "attention"
    summary = "Computes hand-written attention by fused kernels."
    stage = Stage.DYNAMO
    runs_after = ("redundant",)

    def __init__(self, config: AttentionConfig | None = None) -> None:
        self._config = config or AttentionConfig()

    @classmethod
    def from_options(cls, options: Options) -> Attention | None:
        chosen = options.attention
        if chosen.mode == "off":
            return None
        tables = f"{gate.fingerprint()} {instructions()} {slow_library()}" if chosen.mode == "auto" else ""
        return cls(AttentionConfig(chosen.mode, chosen.dropout, chosen.masked_rows, tables))

    @property
    def config(self) -> AttentionConfig:
        return self._config

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        result = PassResult(product=[])  # swapped sites, each with the problem that it is
        self._graph(gm, ctx, result)
        return result

    def _graph(self, gm: fx.GraphModule, ctx: PassContext, result: PassResult, around: tuple[str, ...] = ()) -> None:
        """`gm`, and the graphs inside it (an activation checkpoint's, a branch's), each on its own.

        `around`: the operators that run it.
        """
        for node in list(gm.graph.nodes):
            inner = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
            if isinstance(inner, fx.GraphModule):
                self._inner(gm, node, inner, ctx, result, around)
        graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
        if has_softmax(graphs):
            GraphWork(gm, ctx, self._config, result, around=around).run()

    def _inner(
        self,
        gm: fx.GraphModule,
        node: fx.Node,
        inner: fx.GraphModule,
        ctx: PassContext,
        result: PassResult,
        around: tuple[str, ...],
    ) -> None:
        """A copy of the inner graph is worked on, so that undoing the pass means putting the old one back."""
        if any(str(user.target) == "flex_attention" for user in node.users):
            return  # what it does to one score is not a graph with attention in it
        worked, found = copy.deepcopy(inner), PassResult(product=[])
        around += tuple(str(user.target) for user in node.users)
        self._graph(worked, dataclasses.replace(ctx, contents=lambda _node: None), found, around)
        result.applied += found.applied
        result.declined += found.declined
        result.product += found.product
        if found.changed:
            worked.recompile()
            setattr(gm, str(node.target), worked)
            result.changed = True
