"""The roofline pass: from the graphs that the inner compiler lowers to a `Program`. `price` gives it times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from optpass.errors import ConfigError
from optpass.options import Options
from optpass.passes.contract import AtenGraph, Pass, PassContext, PassResult, Stage
from optpass.passes.roofline.extract import Extractor, tensors
from optpass.passes.roofline.fusion import kernels_of
from optpass.passes.roofline.program import Program


class Roofline(Pass):
    """FLOPs and bytes of every op and every fused kernel; see `optpass.passes.roofline`."""

    name = "roofline"
    summary = "Counts FLOPs and bytes of every op, before and after fusion, for the report."
    stage = Stage.COMPILED

    @classmethod
    def from_options(cls, options: Options) -> Roofline:
        return cls()

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        try:
            on_cpu: bool | None = ctx.device().kind == "cpu"
        except ConfigError:  # a device in no table: FLOPs and bytes are known all the same, and the report says why
            on_cpu = None  # there are no times
        return PassResult(product=program_of(ctx.aten, on_cpu=on_cpu))


def program_of(
    graphs: Sequence[AtenGraph], *, on_cpu: bool | None = None, hint: Callable[[Any], int] | None = None
) -> Program:
    """The ops and kernels of a forward graph, or of a forward and a backward graph.

    Args:
        graphs: as partitioned, in execution order.
        on_cpu: whether Inductor's C++ backend lowers them, rather than Triton; default: by the graphs' tensors.
        hint: int for a symbolic size; default the symbol's own hint.
    """
    program = Program()
    for aten in graphs:
        extractor = Extractor(aten, hint or _hint)
        first = len(program.ops)
        indices: dict[fx.Node, int] = {}
        for node in aten.graph.nodes:
            if node.op == "call_function":
                indices[node] = len(program.ops)
                program.ops.append(extractor.op(node))
        for info in program.ops[first:]:
            if info.cost is None:
                program.unknown[info.target] += 1
        offset = len(program.groups)
        groups = kernels_of(extractor, indices, program.ops, _on_cpu(aten.graph) if on_cpu is None else on_cpu)
        for group in groups:
            group.index += offset
        for info in program.ops[first:]:
            info.group = None if info.group is None else info.group + offset
        program.groups.extend(groups)
        given = (n for n in aten.graph.nodes if n.op in ("placeholder", "get_attr"))
        program.working_set += sum(t.nbytes for n in given for t in tensors(extractor.values[n]))
    return program


def _hint(value: Any) -> int:
    """The hint of a symbolic size, without adding a guard; 1 where it has none, as the lengths of a nested tensor."""
    if isinstance(value, int):
        return value
    node = getattr(value, "node", None)
    hint = getattr(node, "hint", None)
    return int(hint) if isinstance(hint, (int, torch.SymInt)) and not _is_nested(hint) else 1


def _is_nested(size: Any) -> bool:
    said = getattr(getattr(size, "node", None), "is_nested_int", None)
    return bool(said is not None and said())


def _on_cpu(graph: fx.Graph) -> bool:
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return value.device.type == "cpu"
    return True
