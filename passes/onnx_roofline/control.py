"""Control flow and sequences: which branch, how many times, which item.

If: the branch its known condition takes, else the costlier one. Loop and Scan: unrolled by their trip count up to
`UNROLLED` nodes, beyond that one iteration whose cost is repeated. Sequences are lists here and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from optpass.passes.onnx_roofline.builder import meta_of
from optpass.passes.onnx_roofline.call import Call
from optpass.passes.onnx_roofline.cost import combine, cost_of
from optpass.passes.onnx_roofline.value import BOOL, INT64, Item, Sequence, Spec, Value
from optpass.passes.onnx_roofline.walk import Frame, Walker, child

if TYPE_CHECKING:
    import onnx

Handler = Callable[[Walker, "onnx.NodeProto", Frame, list[Item]], list[Item]]
#: Nodes to which a loop's iterations are written out one by one.
UNROLLED = 4096
#: A trip count from here on is an exporter's "no limit".
ENDLESS = 2**31
_HANDLERS: dict[str, Handler] = {}


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def wrap(handler: Handler) -> Handler:
        for name in names:
            _HANDLERS[name] = handler
        return handler

    return wrap


def control_of(domain: str, op: str) -> Handler | None:
    """What walks this op, if it is control flow or a sequence."""
    return _HANDLERS.get(op) if domain == "" else None


def handled() -> set[str]:
    """Every op of ai.onnx that is handled here."""
    return set(_HANDLERS)


def _number(item: Item) -> Any:
    """The single number of a value, or None."""
    if isinstance(item, Value) and item.const is not None and item.const.size == 1:
        return item.const.reshape(-1)[0].item()
    return None


def _graph(node: onnx.NodeProto, name: str) -> onnx.GraphProto:
    found: onnx.GraphProto = next(a.g for a in node.attribute if a.name == name)
    return found


def _attr(node: onnx.NodeProto, name: str, default: Any) -> Any:
    for attribute in node.attribute:
        if attribute.name == name:
            return list(attribute.ints) if attribute.ints else attribute.i
    return default


def _label(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {node.name!r}" if node.name else node.op_type


def _flops(w: Walker, start: int, end: int) -> float:
    """FLOPs of the ops from `start` to `end`, of those that are known."""
    costs = [combine([cost_of(n) for n in op.calls]) for op in w.ops[start:end] if op.calls and not op.dropped]
    return sum(cost.flops * op.repeat for cost, op in zip(costs, w.ops[start:end], strict=False) if cost is not None)


# ---- branches ---------------------------------------------------------------------------------------------------


@_handles("If")
def _if(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    branches = {name: _graph(node, name) for name in ("then_branch", "else_branch")}
    known = _number(inputs[0])
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
    w.notes.append(f"{_label(node)}: its condition is not known; counted is the costlier {taken}")
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
    w.notes.append(f"{_label(node)}: runs {trips} times; kernel launches are those of one iteration")


@_handles("Loop")
def _loop(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    body, state = _graph(node, "body"), list(inputs[2:])
    limit = _number(inputs[0]) if inputs else None
    hidden = bool(inputs) and inputs[0] is not None and limit is None  # a count that only the run knows
    limit = limit if limit is not None and limit < ENDLESS else None
    cap = max(1, UNROLLED // max(1, len(body.node)))
    condition: Item = inputs[1] if len(inputs) > 1 and inputs[1] is not None else Value(BOOL, (), const=np.array(True))
    results = len(body.output) - 1 - len(state)
    scans: list[list[Item]] = [[] for _ in range(max(results, 0))]
    start, trips, going = len(w.ops), 0, _number(condition)
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
        trips, going = trips + 1, _number(condition)
    trips = _settle(w, node, start, trips, limit, uncertain)
    return [*state, *_stacked(w, node, frame, scans, trips, [0] * len(scans))]


def _settle(w: Walker, node: onnx.NodeProto, start: int, trips: int, limit: int | None, uncertain: bool) -> int:
    """Notes on how often a loop runs; repeats what was not unrolled. Returns the trip count."""
    if uncertain and limit is not None:
        _repeat(w, node, start, limit)
        return int(limit)
    if uncertain:
        w.notes.append(f"{_label(node)}: its trip count is not known; counted are {trips} iteration{'s' * (trips > 1)}")
    return trips


@_handles("Scan")
def _scan(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    body, count = _graph(node, "body"), int(_attr(node, "num_scan_inputs", 1))
    if frame.opsets.get("", 1) < 9:
        specs = [w.infer.declared_spec(name) or Spec(0, None) for name in node.output]
        return w.expand(Call("Scan", "", 8, {}, inputs, [*specs], w.b), node, frame)  # it had a batch dim; no rule
    if not 0 < count <= len(inputs):
        raise ValueError(f"it scans {count} of {len(inputs)} inputs")
    state, sources = list(inputs[: len(inputs) - count]), inputs[len(inputs) - count :]
    axes = _attr(node, "scan_input_axes", [0] * count)
    first = sources[0] if sources else None
    known = isinstance(first, Value) and bool(first.shape)
    trips = first.shape[axes[0]] if isinstance(first, Value) and first.shape else 1
    if not known:
        w.notes.append(f"{_label(node)}: its trip count is not known; counted is 1 iteration")
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
    return [*state, *_stacked(w, node, frame, scans, trips, _attr(node, "scan_output_axes", [0] * len(scans)))]


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


@_handles("SequenceMap")
def _sequence_map(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    body = _graph(node, "body")
    first = inputs[0]
    count = len(first.items) if isinstance(first, Sequence) and first.items is not None else None
    if count is None:
        w.notes.append(f"{_label(node)}: the length of its sequence is not known; counted is 1 iteration")
    outputs: list[Sequence] = [Sequence([]) for _ in body.output]
    for trip in range(1 if count is None else count):
        scope = child(frame, suffix=f"{frame.suffix}#{trip}" if trip else frame.suffix)
        for formal, item in zip(body.input, inputs, strict=False):
            scope.scope[formal.name] = _item(w, item, trip, formal.name) if isinstance(item, Sequence) else item
        for sequence, found in zip(outputs, w.graph(body, scope), strict=True):
            if sequence.items is not None:
                sequence.items.append(found)
    return [Sequence(None) for _ in outputs] if count is None else [*outputs]


# ---- sequences and optionals ------------------------------------------------------------------------------------


def _item(w: Walker, sequence: Sequence, index: int | None, name: str) -> Item:
    """An item; any item stands for one at a position that is not known."""
    items = sequence.items
    if not items:
        return Value(0, None, name=name)
    position = index if index is not None and -len(items) <= index < len(items) else 0
    return items[position]


@_handles("SequenceConstruct", "SequenceEmpty")
def _construct(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    return [Sequence(list(inputs))]


@_handles("SequenceInsert", "SequenceErase")
def _edit(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    sequence, inserts = inputs[0], node.op_type == "SequenceInsert"
    if not isinstance(sequence, Sequence) or sequence.items is None:
        return [Sequence(None)]
    place = 2 if inserts else 1
    position = _number(inputs[place]) if len(inputs) > place else None
    items = list(sequence.items)
    if inserts:
        items.insert(len(items) if position is None else position % (len(items) + 1), inputs[1])
    elif items:
        del items[-1 if position is None else position % len(items)]
    return [Sequence(items)]


@_handles("SequenceAt")
def _at(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    sequence = inputs[0]
    position = _number(inputs[1]) if len(inputs) > 1 else None
    item = _item(w, sequence, position, node.output[0]) if isinstance(sequence, Sequence) else None
    return [_declared(w, node, item)]


def _declared(w: Walker, node: onnx.NodeProto, item: Item) -> Item:
    """The item, or what the file says it is."""
    if isinstance(item, Sequence) or (item is not None and item.shape is not None):
        return item
    spec = w.infer.declared_spec(node.output[0])
    return Value(spec.elem, spec.known) if spec is not None else item


@_handles("SequenceLength")
def _length(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    items = inputs[0].items if isinstance(inputs[0], Sequence) else None
    return [Value(INT64, (), const=None if items is None else np.array(len(items), dtype=np.int64))]


@_handles("Optional", "OptionalGetElement")
def _optional(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    return [_declared(w, node, inputs[0] if inputs else None)]


@_handles("OptionalHasElement")
def _has(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    return [Value(BOOL, (), const=np.array(bool(inputs) and inputs[0] is not None))]


@_handles("SplitToSequence")
def _split(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    """Parts of a known tensor are views."""
    source = inputs[0] if inputs else None
    if not isinstance(source, Value) or not source.shape:
        return [Sequence(None)]
    axis = int(_attr(node, "axis", 0)) % len(source.shape)
    size = source.shape[axis]
    sizes = [1] * size
    if len(inputs) > 1 and isinstance(inputs[1], Value):
        given = inputs[1].const
        if given is None:
            return [Sequence(None)]
        step = int(given.reshape(-1)[0]) if given.size else size
        sizes = [int(n) for n in given] if given.shape else [min(step, size - i) for i in range(0, size, max(step, 1))]
    squeezed = len(inputs) < 2 and not _attr(node, "keepdims", 1)
    shapes = [tuple(n if d == axis else s for d, s in enumerate(source.shape)) for n in sizes]
    op = w.ops[w.begin("", node, frame)]
    node_in = w.b.node_of(source)
    items: list[Item] = [Value(source.elem, shape) for shape in shapes]
    if node_in is not None and sum(sizes) == size:
        parts = tuple(meta_of(node_in).split_with_sizes(sizes, axis))
        made = w.b.parts(w.b.emit("split_with_sizes", node_in, sizes, axis, out=parts))
        made = [w.b.select(m, axis, 0) for m in made] if squeezed else made
        items = [Value(source.elem, tuple(meta_of(m).shape), m) for m in made]
        w.finish(op, made)
    return [Sequence(items)]


@_handles("ConcatFromSequence")
def _join(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    sequence = inputs[0] if inputs else None
    items = sequence.items if isinstance(sequence, Sequence) else None
    axis, stacked = int(_attr(node, "axis", 0)), bool(_attr(node, "new_axis", 0))
    known = [i.shape for i in items or [] if isinstance(i, Value) and i.shape is not None]
    spec = w.infer.declared_spec(node.output[0]) or Spec(0, None)
    if items and len(known) == len(items) and isinstance(items[0], Value):
        first = list(known[0])
        if stacked:
            first.insert(axis % (len(first) + 1), len(items))
        else:
            first[axis % len(first)] = sum(s[axis % len(s)] for s in known)
        spec = Spec(items[0].elem, tuple(first))
    call = Call("Concat", "", 13, {"axis": axis}, list(items or []), [spec], w.b)
    return w.expand(call, node, frame)
