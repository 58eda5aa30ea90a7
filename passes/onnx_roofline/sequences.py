"""Sequences and optionals: lists here, which cost nothing; what is split or joined moves what its tensors move."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpass.passes.onnx_roofline.builder import meta_of
from optpass.passes.onnx_roofline.call import Call
from optpass.passes.onnx_roofline.handlers import attr_of, graph_of, handles, label, number_of
from optpass.passes.onnx_roofline.value import BOOL, INT64, Item, Sequence, Spec, Value
from optpass.passes.onnx_roofline.walk import Frame, Walker, child

if TYPE_CHECKING:
    import onnx


@handles("SequenceMap")
def _sequence_map(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    body = graph_of(node, "body")
    first = inputs[0]
    count = len(first.items) if isinstance(first, Sequence) and first.items is not None else None
    if count is None:
        w.notes.append(f"{label(node)}: the length of its sequence is not known; counted is 1 iteration")
    outputs: list[Sequence] = [Sequence([]) for _ in body.output]
    for trip in range(1 if count is None else count):
        scope = child(frame, suffix=f"{frame.suffix}#{trip}" if trip else frame.suffix)
        for formal, item in zip(body.input, inputs, strict=False):
            scope.scope[formal.name] = _item(w, item, trip, formal.name) if isinstance(item, Sequence) else item
        for sequence, found in zip(outputs, w.graph(body, scope), strict=True):
            if sequence.items is not None:
                sequence.items.append(found)
    return [Sequence(None) for _ in outputs] if count is None else [*outputs]


def _item(w: Walker, sequence: Sequence, index: int | None, name: str) -> Item:
    """An item; any item stands for one at a position that is not known."""
    items = sequence.items
    if not items:
        return Value(0, None, name=name)
    position = index if index is not None and -len(items) <= index < len(items) else 0
    return items[position]


@handles("SequenceConstruct", "SequenceEmpty")
def _construct(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    return [Sequence(list(inputs))]


@handles("SequenceInsert", "SequenceErase")
def _edit(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    sequence, inserts = inputs[0], node.op_type == "SequenceInsert"
    if not isinstance(sequence, Sequence) or sequence.items is None:
        return [Sequence(None)]
    place = 2 if inserts else 1
    position = number_of(inputs[place]) if len(inputs) > place else None
    items = list(sequence.items)
    if inserts:
        items.insert(len(items) if position is None else position % (len(items) + 1), inputs[1])
    elif items:
        del items[-1 if position is None else position % len(items)]
    return [Sequence(items)]


@handles("SequenceAt")
def _at(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    sequence = inputs[0]
    position = number_of(inputs[1]) if len(inputs) > 1 else None
    item = _item(w, sequence, position, node.output[0]) if isinstance(sequence, Sequence) else None
    return [_declared(w, node, item)]


def _declared(w: Walker, node: onnx.NodeProto, item: Item) -> Item:
    """The item, or what the file says it is."""
    if isinstance(item, Sequence) or (item is not None and item.shape is not None):
        return item
    spec = w.infer.declared_spec(node.output[0])
    return Value(spec.elem, spec.known) if spec is not None else item


@handles("SequenceLength")
def _length(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    items = inputs[0].items if isinstance(inputs[0], Sequence) else None
    return [Value(INT64, (), const=None if items is None else np.array(len(items), dtype=np.int64))]


@handles("Optional", "OptionalGetElement")
def _optional(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    return [_declared(w, node, inputs[0] if inputs else None)]


@handles("OptionalHasElement")
def _has(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    return [Value(BOOL, (), const=np.array(bool(inputs) and inputs[0] is not None))]


@handles("SplitToSequence")
def _split(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    """Parts of a known tensor are views."""
    source = inputs[0] if inputs else None
    if not isinstance(source, Value) or not source.shape:
        return [Sequence(None)]
    axis = int(attr_of(node, "axis", 0)) % len(source.shape)
    size = source.shape[axis]
    sizes = [1] * size
    if len(inputs) > 1 and isinstance(inputs[1], Value):
        given = inputs[1].const
        if given is None:
            return [Sequence(None)]
        step = int(given.reshape(-1)[0]) if given.size else size
        sizes = [int(n) for n in given] if given.shape else [min(step, size - i) for i in range(0, size, max(step, 1))]
    squeezed = len(inputs) < 2 and not attr_of(node, "keepdims", 1)
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


@handles("ConcatFromSequence")
def _join(w: Walker, node: onnx.NodeProto, frame: Frame, inputs: list[Item]) -> list[Item]:
    sequence = inputs[0] if inputs else None
    items = sequence.items if isinstance(sequence, Sequence) else None
    axis, stacked = int(attr_of(node, "axis", 0)), bool(attr_of(node, "new_axis", 0))
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
