"""From a `.onnx` file to a `Program`: ops with FLOPs and bytes, and the kernels they fuse into, without a torch model.

The ONNX graph is expressed as ATen calls on meta tensors (walk.py, rules/); costs are those of the calls, and the
fusion model that serves captured graphs serves them too. Not here: times, devices, rendering.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import fx

from optpass.naming import setting
from optpass.passes.contract import AtenGraph
from optpass.passes.onnx_roofline import control, sequences
from optpass.passes.onnx_roofline.builder import Builder, opaque
from optpass.passes.onnx_roofline.cost import combine
from optpass.passes.onnx_roofline.dims import Dims
from optpass.passes.onnx_roofline.epilogue import absorb_biases
from optpass.passes.onnx_roofline.infer import Inference
from optpass.passes.onnx_roofline.load import graphs_of, load_model
from optpass.passes.onnx_roofline.value import (
    DTYPES,
    PACKED,
    PARAMETER_TYPES,
    DtypeMap,
    Item,
    Sequence,
    Value,
    stored_bytes,
)
from optpass.passes.onnx_roofline.walk import Op, Walker
from optpass.passes.roofline.extract import Extractor, tensors
from optpass.passes.roofline.flops import OpCost
from optpass.passes.roofline.fusion import kernels_of
from optpass.passes.roofline.program import GroupInfo, OpInfo, Program

if TYPE_CHECKING:
    import onnx


#: Importing them registers what walks control flow and sequences.
HANDLERS = (control, sequences)


@dataclass(frozen=True)
class OnnxFacts:
    """What a report says about an ONNX model besides its ops.

    Attributes:
        parameters: elements of stored tensors that are weights (indices, masks and scalars left out).
        parameter_bytes: bytes they take.
        dims: every symbolic dimension with the size it was given.
        inputs, outputs: e.g. 'input_ids: int64[1, 128]'.
        opset: version of ai.onnx.
        folded: nodes that only compute shapes and small constants; they are not ops of the program.
        notes: assumptions and what could not be counted, one sentence each.
    """

    parameters: int
    parameter_bytes: int
    dims: Mapping[str, int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    opset: int
    folded: int
    notes: tuple[str, ...]


def program_of_onnx(
    path: Path, *, dims: Mapping[str, int] | None = None, dtype: torch.dtype | None = None, on_cpu: bool = False
) -> tuple[Program, OnnxFacts]:
    """Ops and kernels of the model in `path`, run once forward.

    Args:
        path: an ONNX model; its weights may be missing.
        dims: sizes of symbolic dimensions by name ("<input>.<axis>" where it has none); others are 1, with a note.
        dtype: floating dtype to analyse it in, in place of those it was exported in.
        on_cpu: whether to fuse as Inductor's CPU backend does, rather than its GPU backend.

    Raises:
        ConfigError: onnx is not installed; the file cannot be read or is no ONNX model; `dims` names no dimension.
    """
    model = load_model(path)
    bound = Dims(model.graph, dims or {}, str(path))
    declared = {v.name: v.type for graph in graphs_of(model.graph) for v in (*graph.value_info, *graph.output)}
    builder = Builder(DtypeMap(dtype))
    walker = Walker(model, Inference(bound, declared, model.ir_version or 8), builder, str(path))
    inputs = _inputs(model.graph, bound)
    outputs = walker.run(inputs)
    program = _program(walker, path, on_cpu)
    count, size = _parameters(model)
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    results = {v.name: item for v, item in zip(model.graph.output, outputs, strict=True)}
    facts = OnnxFacts(
        count, size, dict(bound.values), _described(inputs), _described(results), opset, walker.folded,
        tuple(_notes(walker, bound)),
    )  # fmt: skip
    return program, facts


def _inputs(graph: onnx.GraphProto, dims: Dims) -> dict[str, Item]:
    stored = {t.name for t in graph.initializer}
    found: dict[str, Item] = {}
    for value in graph.input:
        if value.name in stored:
            continue
        if not value.type.HasField("tensor_type"):
            found[value.name] = (
                Sequence(None) if value.type.HasField("sequence_type") else Value(0, None, name=value.name)
            )
            continue
        tensor = value.type.tensor_type
        shape = None
        if tensor.HasField("shape"):
            shape = tuple(dims.size(d, f"{value.name}.{axis}") for axis, d in enumerate(tensor.shape.dim))
        found[value.name] = Value(tensor.elem_type, shape, name=value.name)
    return found


# ---- ops --------------------------------------------------------------------------------------------------------


def _program(walker: Walker, path: Path, on_cpu: bool) -> Program:
    graph = walker.b.graph
    absorb_biases([op for op in walker.ops if not op.dropped])
    extractor = Extractor(AtenGraph("forward", graph), int)
    calls: list[OpInfo] = []
    index: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            index[node] = len(calls)
            calls.append(extractor.op(node))
            if node.target is opaque:
                calls[-1].cost = node.meta.get("cost")
    groups = kernels_of(extractor, index, calls, on_cpu)
    kept = [op for op in walker.ops if not op.dropped]
    program = Program(ops=[_op(op, extractor, [calls[index[n]] for n in op.calls], path) for op in kept])
    for op, info in zip(kept, program.ops, strict=True):
        if info.cost is None:
            program.unknown[info.target] += op.repeat
    owner = {index[node]: number for number, op in enumerate(kept) for node in op.calls}
    _group(program, groups, kept, [[calls[index[n]] for n in op.calls] for op in kept], owner)
    program.working_set = sum(
        t.nbytes for n in graph.nodes if n.op == "placeholder" and n.users for t in tensors(extractor.values[n])
    )
    return program


def _op(op: Op, x: Extractor, parts: list[OpInfo], path: Path) -> OpInfo:
    """One ONNX op from the calls it expands to."""
    cost = None if op.reason else combine([p.cost for p in parts])
    if not op.reason and not parts:  # it hands its input on
        cost = OpCost(0, "view")
    main = max(parts, key=lambda p: p.cost.flops if p.cost is not None else -1, default=None)
    reads, writes = _moved(op, cost, parts)
    if cost is not None and op.repeat > 1:
        cost = OpCost(
            cost.flops * op.repeat, cost.kind, cost.mnk, cost.batch * op.repeat, cost.transcendental * op.repeat
        )
    located = next((p for p in parts if p.file is not None), None)
    return OpInfo(
        name=op.name,
        target=op.target,
        phase="forward",
        file=located.file if located is not None else str(path),
        line=located.line if located is not None else None,
        module=next((p.module for p in parts if p.module), None),
        cost=cost,
        reads=reads * op.repeat,
        writes=writes * op.repeat,
        dtype=main.dtype if main is not None else "",
        shape=", ".join(str(t) for n in op.results for t in tensors(x.values[n])),
    )


def _moved(op: Op, cost: OpCost | None, parts: list[OpInfo]) -> tuple[int, int]:
    """Bytes the op reads and writes as a kernel of its own: its inputs and results, not what lies between."""
    if not parts or (cost is not None and cost.kind == "view" and not cost.flops):
        return 0, 0
    working = [(n, p) for n, p in zip(op.calls, parts, strict=True) if n.target is not operator.getitem]
    if len(working) == 1:
        return working[0][1].reads, working[0][1].writes
    own = set(op.calls)
    seen: dict[fx.Node, int] = {}
    for node, part in working:
        for place, argument in enumerate(node.all_input_nodes):
            if argument in own:
                continue
            amount = _stored(argument)
            if part.cost is not None and part.cost.kind == "indexing" and place == 0:
                amount = min(amount, part.reads)
            seen[argument] = max(seen.get(argument, 0), amount)
    made = {_origin(n, own) for n in op.results}
    return sum(seen.values()), sum(_stored(n) for n in made if n is not None)


def _stored(node: fx.Node) -> int:
    value = node.meta["val"]
    return sum(
        stored_bytes(t) for t in (value if isinstance(value, tuple) else (value,)) if isinstance(t, torch.Tensor)
    )


_VIEWS = frozenset({"view", "permute", "select", "slice", "expand", "alias", "getitem", "split_with_sizes"})


def _origin(node: fx.Node, own: set[fx.Node]) -> fx.Node | None:
    """The call whose result a view shows; None where that is not the op's own. A result of several is itself."""
    current = node
    while current in own:
        name = getattr(current.target, "__name__", "").partition(".")[0]
        if name not in _VIEWS:
            return node if node.target is operator.getitem else current
        source = current.args[0]
        if not isinstance(source, fx.Node):
            return current
        current = source
    return None


# ---- kernels ----------------------------------------------------------------------------------------------------


def _group(
    program: Program, groups: list[GroupInfo], ops: list[Op], parts: list[list[OpInfo]], owner: dict[int, int]
) -> None:
    """Kernels over ONNX ops in place of calls; each op is listed by the kernel that does most of its work."""
    for number, pieces in enumerate(parts):
        placed = [p for p in pieces if p.group is not None]
        if placed:
            main = max(placed, key=lambda p: p.cost.flops if p.cost is not None else 0)
            program.ops[number].group = main.group
    for group in groups:
        members = list(dict.fromkeys(owner[i] for i in group.ops))
        group.ops = [m for m in members if program.ops[m].group == group.index] or members
        repeat = max((ops[m].repeat for m in members), default=1)
        group.reads, group.writes, group.strided = (n * repeat for n in (group.reads, group.writes, group.strided))
        group.elements *= repeat
    program.groups = groups


# ---- facts ------------------------------------------------------------------------------------------------------


def _parameters(model: onnx.ModelProto) -> tuple[int, int]:
    """(elements, bytes) of the model's weights: initializers and constants that are no scalars."""
    stored = [t for graph in graphs_of(model.graph) for t in graph.initializer]
    for graph in graphs_of(model.graph):
        stored.extend(a.t for n in graph.node if n.op_type == "Constant" for a in n.attribute if a.name == "value")
    count = size = 0
    for tensor in stored:
        if tensor.data_type in PARAMETER_TYPES and tensor.dims:
            elements = prod(tensor.dims)
            count += elements
            size += _bytes(elements, tensor.data_type)
    return count, size


def _bytes(elements: int, elem: int) -> int:
    if elem in PACKED:
        return int(-(-elements // PACKED[elem][0]))
    return elements * DTYPES[elem].itemsize


def _described(values: Mapping[str, Item]) -> tuple[str, ...]:
    return tuple(f"{name}: {_description(item)}" for name, item in values.items())


def _description(item: Item) -> str:
    if not isinstance(item, Value):
        return "sequence" if isinstance(item, Sequence) else "unknown"
    dtype = DTYPES.get(item.elem)
    name = str(dtype).removeprefix("torch.") if dtype is not None else f"type {item.elem}"
    return f"{name}{list(item.shape)}" if item.shape is not None else f"{name} of unknown shape"


def _notes(walker: Walker, dims: Dims) -> list[str]:
    notes = []
    if dims.assumed:
        names = ", ".join(sorted(set(dims.assumed)))
        notes.append(f"symbolic dimensions taken as 1: {names}; bind them with {setting('NAME', 'SIZE')}")
    notes.extend(dict.fromkeys(walker.notes))
    for reason, targets in walker.trouble.items():
        found = +targets
        if found:
            names = ", ".join(f"{name} x{n}" if n > 1 else name for name, n in sorted(found.items()))
            notes.append(f"not counted: {names}: {reason}")
    return notes
