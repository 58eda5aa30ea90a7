"""Control flow: which branch, how many times.

If: the branch its known condition takes, else the costlier one. Loop and Scan: unrolled by their trip count up to
`UNROLLED` nodes, beyond that one iteration whose cost is repeated. Sequences are in sequences.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpass.passes.onnx_roofline.builder import meta_of
from optpass.passes.onnx_roofline.call import Call
from optpass.passes.onnx_roofline.cost import combine, cost_of
from optpass.passes.onnx_roofline.handlers import attr_of, graph_of, handles, label, number_of
from optpass.passes.onnx_roofline.value import BOOL, INT64, Item, Spec, Value
from optpass.passes.onnx_roofline.walk import Frame, Walker, child

if TYPE_CHECKING:
    import onnx

#: Nodes to which a loop's iterations are written out one by one.
UNROLLED = 4096
#: A trip count from here on is an exporter's "no limit".
ENDLESS = 2**31


def _flops(w: Walker, start: int, end: int) -> float:
    """FLOPs of the ops from `start` to `end`, of those that are known."""
    costs = [combine([cost_of(n) for n in op.calls]) for op in w.ops[start:end] if op.calls and not op.dropped]
    return sum(cost.flops * op.repeat for cost, op in zip(costs, w.ops[start:end], strict=False) if cost is not None)


# ---- branches ---------------------------------------------------------------------------------------------------


@handles("If")
def _if(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    branches = {name: graph_of(node, name) for name in ("then_branch", "else_branch")}
    known = number_of(inputs[0])
    if known is not None:
        name = "then_branch" if known else "else_branch"
        return w.graph(branches[name], child(frame))
    spans, outputs = {}, {}
    for name, branch in branches.items():
        start = len(w.ops)
        outputs[name] = w.graph(branch, child(frame))
        spans[name] = (start, len(w.ops))
    costs = {name: _flops(w, *span) for name, span in spans.items()}
    taken = max(costs, key=lambda name: costs[name])
    other = next(name for name in branches if name != taken)
    w.notes.append(f"{label(node)}: its condition is not known; counted is the costlier {taken}")
    for op in reversed(w.ops[slice(*spans[other])]):
        w.b.erase(op.calls)
        op.calls, op.results, op.dropped = [], [], True
        if op.reason:
            w.trouble[op.reason][op.target] -= 1
    return outputs[taken]


# ---- loops ------------------------------------------------------------------------------------------------------


def _scan_output(w: Walker, node: onnx.NodeProto, slices: list[Item], trips: int, axis: int = 0) -> Item:
    """The slices of all iterations as one tensor."""
    first = slices[0] if slices else None
    if not isinstance(first, Value):
        return None
    if first.shape is None:
        return Value(first.elem, None)
    shape = list(first.shape)
    shape.insert(axis % (len(shape) + 1), trips)
    spec = Spec(first.elem, tuple(shape))
    parts = [w.b.node_of(s) for s in slices if isinstance(s, Value)]
    out = w.b.dtypes.meta(spec.elem, tuple(shape))
    if out is None or any(p is None for p in parts):
        return Value(first.elem, tuple(shape))
    return Value(first.elem, tuple(shape), w.b.emit("stack", parts, axis, out=out))


def _stacked(
    w: Walker, node: onnx.NodeProto, frame: Frame, scans: list[list[Item]], trips: int, axes: list[int]
) -> list[Item]:
    if not scans:
        return []
    op = w.ops[w.begin("", node, frame)]
    items = [_scan_output(w, node, slices, trips, axis) for slices, axis in zip(scans, axes, strict=True)]
    w.finish(op, [i.node for i in items if isinstance(i, Value) and i.node is not None])
    return items


def _repeat(w: Walker, node: onnx.NodeProto, start: int, trips: int) -> None:
    """Let one iteration, from op `start` on, stand for all."""
    for op in w.ops[start:]:
        op.repeat *= trips
    w.notes.append(f"{label(node)}: runs {trips} times; kernel launches are those of one iteration")


@handles("Loop")
def _loop(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    body, state = graph_of(node, "body"), list(inputs[2:])
    limit = number_of(inputs[0]) if inputs else None
    hidden = bool(inputs) and inputs[0] is not None and limit is None  # a count that only the run knows
    limit = limit if limit is not None and limit < ENDLESS else None
    cap = max(1, UNROLLED // max(1, len(body.node)))
    condition: Item = inputs[1] if len(inputs) > 1 and inputs[1] is not None else Value(BOOL, (), const=np.array(True))
    results = len(body.output) - 1 - len(state)
    scans: list[list[Item]] = [[] for _ in range(max(results, 0))]
    start, trips, going = len(w.ops), 0, number_of(condition)
    uncertain = False
    while going is not False and (limit is None or trips < limit):
        open_ended = limit is None and (hidden or going is None)
        if trips and (trips >= cap or open_ended or (limit is not None and limit > cap)):
            uncertain = True
            break
        scope = child(frame, suffix=f"{frame.suffix}#{trips}" if trips else frame.suffix)
        given = [Value(INT64, (), const=np.array(trips, dtype=np.int64)), condition, *state]
        for formal, item in zip(body.input, given, strict=False):
            scope.scope[formal.name] = item
        found = w.graph(body, scope)
        condition, state, rest = found[0], found[1 : 1 + len(state)], found[1 + len(state) :]
        for slices, item in zip(scans, rest, strict=False):
            slices.append(item)
        trips, going = trips + 1, number_of(condition)
    trips = _settle(w, node, start, trips, limit, uncertain)
    return [*state, *_stacked(w, node, frame, scans, trips, [0] * len(scans))]


def _settle(w: Walker, node: onnx.NodeProto, start: int, trips: int, limit: int | None, uncertain: bool) -> int:
    """Notes on how often a loop runs; repeats what was not unrolled. Returns the trip count."""
    if uncertain and limit is not None:
        _repeat(w, node, start, limit)
        return int(limit)
    if uncertain:
        w.notes.append(f"{label(node)}: its trip count is not known; counted are {trips} iteration{'s' * (trips > 1)}")
    return trips


@handles("Scan")
def _scan(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    body, count = graph_of(node, "body"), int(attr_of(node, "num_scan_inputs", 1))
    if frame.opsets.get("", 1) < 9:
        specs = [w.infer.declared_spec(name) or Spec(0, None) for name in node.output]
        return w.expand(Call("Scan", "", 8, {}, inputs, [*specs], w.b), node, frame)  # it had a batch dim; no rule
    if not 0 < count <= len(inputs):
        raise ValueError(f"it scans {count} of {len(inputs)} inputs")
    state, sources = list(inputs[: len(inputs) - count]), inputs[len(inputs) - count :]
    axes = attr_of(node, "scan_input_axes", [0] * count)
    first = sources[0] if sources else None
    known = isinstance(first, Value) and bool(first.shape)
    trips = first.shape[axes[0]] if isinstance(first, Value) and first.shape else 1
    if not known:
        w.notes.append(f"{label(node)}: its trip count is not known; counted is 1 iteration")
    unrolled = trips if trips * max(1, len(body.node)) <= UNROLLED else 1
    scans: list[list[Item]] = [[] for _ in range(len(body.output) - len(state))]
    start = len(w.ops)
    for trip in range(unrolled):
        suffix = f"{frame.suffix}#{trip}" if trip else frame.suffix
        op = w.ops[w.begin("", node, child(frame, suffix=suffix))]
        slices = [_slice(w, item, axis, trip) for item, axis in zip(sources, axes, strict=True)]
        w.finish(op, [s.node for s in slices if isinstance(s, Value) and s.node is not None])
        scope = child(frame, suffix=suffix)
        for formal, item in zip(body.input, [*state, *slices], strict=False):
            scope.scope[formal.name] = item
        found = w.graph(body, scope)
        state = found[: len(state)]
        for collected, item in zip(scans, found[len(state) :], strict=False):
            collected.append(item)
    if unrolled < trips:
        _repeat(w, node, start, trips)
    return [*state, *_stacked(w, node, frame, scans, trips, attr_of(node, "scan_output_axes", [0] * len(scans)))]


def _slice(w: Walker, item: Item, axis: int, index: int) -> Item:
    """One step of a scanned value: a view."""
    if not isinstance(item, Value) or not item.shape:
        return Value(item.elem if isinstance(item, Value) else 0, None)
    axis %= len(item.shape)
    shape = tuple(s for d, s in enumerate(item.shape) if d != axis)
    node = w.b.node_of(item)
    if node is None or tuple(meta_of(node).shape) != item.shape:
        return Value(item.elem, shape)
    return Value(item.elem, shape, w.b.select(node, axis, index))
