"""Walking an ONNX graph in order: sizes, constants, functions, and one `Op` with its ATen calls per node.

Control flow and sequences are control.py's, expansion is rules/, sizes are infer.py's.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx

from optpass.errors import ConfigError
from optpass.passes.onnx_roofline.builder import Builder, opaque
from optpass.passes.onnx_roofline.call import Call, NotKnown, ShapeNotKnown
from optpass.passes.onnx_roofline.cost import cost_of
from optpass.passes.onnx_roofline.handlers import control_of
from optpass.passes.onnx_roofline.infer import MALFORMED, Inference
from optpass.passes.onnx_roofline.rules import rule_of
from optpass.passes.onnx_roofline.source import metadata
from optpass.passes.onnx_roofline.value import Item, Sequence, Spec, Value, attributes

if TYPE_CHECKING:
    import onnx

Scope = MutableMapping[str, Item]
#: Functions within functions, and graphs within graphs, beyond which a file is taken to be malformed.
DEEPEST = 64


@dataclass(slots=True)
class Op:
    """One node that was counted.

    Attributes:
        calls: its ATen calls, in order.
        results: the nodes of its outputs.
        reason: why its cost is not known; empty where it is.
        repeat: how many times it runs beyond what was unrolled.
    """

    name: str
    target: str
    calls: list[fx.Node] = field(default_factory=list)
    results: list[fx.Node] = field(default_factory=list)
    reason: str = ""
    repeat: int = 1
    dropped: bool = False


@dataclass(frozen=True)
class Frame:
    """Where a node stands: its scope, the opsets in force, the attributes of the function around it."""

    scope: Scope
    opsets: Mapping[str, int]
    attrs: Mapping[str, onnx.AttributeProto] = field(default_factory=dict)
    where: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    suffix: str = ""
    depth: int = 0

    def inner(self, scope: Scope, **changes: Any) -> Frame:
        """The frame of something inside this one."""
        return replace(self, scope=scope, depth=self.depth + 1, **changes)


class Walker:
    """Walks one model. After `run`, `ops` holds what was counted, `b.graph` the calls."""

    def __init__(self, model: onnx.ModelProto, inference: Inference, builder: Builder, path: str) -> None:
        self.model, self.infer, self.b, self.path = model, inference, builder, path
        self.functions = {(_domain(f.domain), f.name, f.overload): f for f in model.functions}
        self.ops: list[Op] = []
        self.notes: list[str] = []
        self.folded = 0
        self.trouble: dict[str, Counter[str]] = {}

    def run(self, inputs: Mapping[str, Item]) -> list[Item]:
        """Walk the main graph; returns the values of its outputs."""
        frame = Frame(dict(inputs), {_domain(o.domain): o.version for o in self.model.opset_import})
        found = self.graph(self.model.graph, frame)
        self.b.graph.output(tuple(node for item in found for node in self._nodes(item)))
        return found

    def graph(self, graph: onnx.GraphProto, frame: Frame) -> list[Item]:
        """Walk a graph whose inputs are in the frame's scope already."""
        if frame.depth > DEEPEST:
            raise ConfigError(
                f"{self.path}: graphs or functions are nested more than {DEEPEST} deep; is one of them recursive?"
            )
        for tensor in graph.initializer:
            frame.scope[tensor.name] = self.infer.tensor(tensor, tensor.name)
        for sparse in graph.sparse_initializer:
            shape = tuple(int(d) for d in sparse.dims)
            frame.scope[sparse.values.name] = Value(sparse.values.data_type, shape, name=sparse.values.name)
        for node in graph.node:
            self.node(node, frame)
        return [frame.scope.get(value.name) for value in graph.output]

    # ---- one node ---------------------------------------------------------------------------------------------

    def node(self, node: onnx.NodeProto, frame: Frame) -> None:
        """Walk one node; one that its own op's definition forbids is unknown."""
        try:
            self._node(node, frame)
        except (StopIteration, *MALFORMED) as error:
            op = self.ops[self.begin(_domain(node.domain), node, frame)]
            op.reason = f"its inputs and attributes do not fit ({_first_line(error)})"
            self.finish(op, [])
            self._bind(node, [Value(0, None) for _ in node.output], frame)

    def _node(self, node: onnx.NodeProto, frame: Frame) -> None:
        """A function's body, control flow, a constant, or an op."""
        domain = _domain(node.domain)
        node = self._bound(node, frame)
        function = self.functions.get((domain, node.op_type, node.overload))
        if function is not None:
            self._function(function, node, frame)
            return
        inputs = [frame.scope.get(name) if name else None for name in node.input]
        handler = control_of(domain, node.op_type)
        if handler is not None:
            self._bind(node, handler(self, node, frame, inputs), frame)
        elif node.op_type == "Constant" and domain == "":
            self._constant(node, frame)
        elif node.op_type == "Identity" and inputs and isinstance(inputs[0], Sequence):
            self._bind(node, inputs, frame)
        else:
            self._plain(node, domain, frame, inputs)

    def _plain(self, node: onnx.NodeProto, domain: str, frame: Frame, inputs: list[Item]) -> None:
        version = frame.opsets.get(domain, 1)
        attrs = attributes(
            {a.name: self.infer.onnx.helper.get_attribute_value(a) for a in node.attribute if _plain_attribute(a)}
        )
        specs, trouble = self.infer.specs(node, node.op_type, domain, version, inputs, attrs)
        numbers = self.infer.fold(node, domain, version, inputs, specs)
        if numbers is not None:
            self.folded += 1
            arrays = iter(numbers)
            self._bind(node, [self._number(next(arrays), spec) if spec is not None else None for spec in specs], frame)
            return
        call = Call(node.op_type, domain, version, attrs, inputs, specs, self.b)
        self._bind(node, self.expand(call, node, frame, trouble), frame)

    def expand(self, call: Call, node: onnx.NodeProto, frame: Frame, trouble: str = "") -> list[Item]:
        """Count one op; returns its outputs."""
        index = self.begin(call.domain, node, frame)
        op, rule = self.ops[index], rule_of(call.domain, call.op)
        results: list[fx.Node | None]
        try:
            if rule is None:
                raise NotKnown("no rule counts this op")
            made = rule(call)
            results = [made] if isinstance(made, fx.Node) else [*made]
            for each in self.b.mine:  # a rule that takes malformed sizes shows here, not when the program is made
                cost_of(each)
        except ShapeNotKnown as error:
            op.reason = str(error)
            results = self._opaque(call)
        except NotKnown as error:
            op.reason = f"{error}: {trouble}" if trouble and rule is not None else str(error)
            results = self._opaque(call)
        except MALFORMED as error:
            op.reason = f"its inputs and attributes do not fit ({trouble or _first_line(error)})"
            results = self._opaque(call)
        self.finish(op, [r for r in results if r is not None])
        results += [None] * (len(call.specs) - len(results))
        return [self._result(spec, node_) for spec, node_ in zip(call.specs, results, strict=False)]

    def begin(self, domain: str, node: onnx.NodeProto, frame: Frame) -> int:
        """Start a new op; calls belong to it until the next one starts."""
        index = len(self.ops)
        name = f"{frame.prefix}{node.name or f'{node.op_type}_{index}'}{frame.suffix}"
        self.ops.append(Op(name, f"{domain or 'onnx'}.{node.op_type}"))
        self.b.begin(index, {**frame.where, **metadata(node)})
        return index

    def finish(self, op: Op, results: list[fx.Node]) -> None:
        """The calls made since `begin` are the op's."""
        op.calls = list(self.b.mine)
        op.results = results
        if op.reason:
            self.trouble.setdefault(op.reason, Counter())[op.target] += 1

    def _opaque(self, call: Call) -> list[fx.Node | None]:
        """An op of unknown cost still reads its inputs and writes its outputs."""
        self.b.erase(self.b.mine)
        self.b.mine = []
        read = [n for item in call.inputs for n in self._nodes(item)]
        outs = []
        for spec in call.specs:
            sizes = spec.known if spec is not None else None
            outs.append(self.b.dtypes.meta(spec.elem, sizes) if spec is not None and sizes is not None else None)
        return self.b.parts_or_none(self.b.call(opaque, tuple(read), {}, tuple(outs)))

    def _result(self, spec: Spec | None, node: fx.Node | None) -> Item:
        if spec is None:
            return None
        meta = node.meta["val"] if node is not None else None
        shape = spec.known
        if shape is None and isinstance(meta, torch.Tensor):
            shape = tuple(meta.shape)
        return Value(spec.elem, shape, node)

    def _nodes(self, item: Item) -> list[fx.Node]:
        """The FX nodes of a value; of a sequence those of its items."""
        if isinstance(item, Sequence):
            return [n for each in item.items or [] for n in self._nodes(each)]
        node = self.b.node_of(item) if item is not None else None
        return [node] if node is not None else []

    # ---- constants and functions ------------------------------------------------------------------------------

    def _number(self, array: np.ndarray[Any, Any], spec: Spec) -> Value:
        elem = spec.elem or int(self.infer.onnx.helper.np_dtype_to_tensor_dtype(array.dtype))
        return Value(elem, tuple(array.shape), const=array)

    def _constant(self, node: onnx.NodeProto, frame: Frame) -> None:
        """A stored tensor: like an initializer."""
        given = {a.name: a for a in node.attribute}
        if "value" in given:
            self._bind(node, [self.infer.tensor(given["value"].t, node.output[0])], frame)
            return
        plain = {k: self.infer.onnx.helper.get_attribute_value(a) for k, a in given.items() if k.startswith("value_")}
        if not plain:
            self._bind(node, [None], frame)
            return
        kind, value = next(iter(plain.items()))
        dtype = {"f": np.float32, "i": np.int64}.get(kind[len("value_")])
        array = np.array(value, dtype=dtype if dtype is not None else object)
        elem = {"f": 1, "i": 7}.get(kind[len("value_")], 8)
        self._bind(node, [Value(elem, tuple(array.shape), const=array if dtype is not None else None)], frame)

    def _function(self, function: onnx.FunctionProto, node: onnx.NodeProto, frame: Frame) -> None:
        """Walk the body of a function of the model with the node's inputs and attributes bound."""
        if frame.depth > DEEPEST:
            raise ConfigError(f"{self.path}: function {function.name!r} calls itself, or calls are nested too deep")
        scope: Scope = {}
        for place, formal in enumerate(function.input):
            scope[formal] = (
                frame.scope.get(node.input[place]) if place < len(node.input) and node.input[place] else None
            )
        attrs = {a.name: a for a in function.attribute_proto} | {a.name: a for a in node.attribute}
        opsets = {_domain(o.domain): o.version for o in function.opset_import}
        prefix = f"{frame.prefix}{node.name or function.name}/"
        inner = frame.inner(scope, opsets=opsets, attrs=attrs, prefix=prefix, where={**frame.where, **metadata(node)})
        for each in function.node:
            self.node(each, inner)
        self._bind(node, [scope.get(name) for name in function.output], frame)

    def _bound(self, node: onnx.NodeProto, frame: Frame) -> onnx.NodeProto:
        """The node with references to the function's attributes replaced by their values."""
        if not any(a.ref_attr_name for a in node.attribute):
            return node
        copy: onnx.NodeProto = self.infer.onnx.NodeProto()
        copy.CopyFrom(node)
        del copy.attribute[:]
        for attribute in node.attribute:
            if not attribute.ref_attr_name:
                copy.attribute.append(attribute)
            elif attribute.ref_attr_name in frame.attrs:
                value = self.infer.onnx.AttributeProto()
                value.CopyFrom(frame.attrs[attribute.ref_attr_name])
                value.name = attribute.name
                copy.attribute.append(value)
        return copy

    @staticmethod
    def _bind(node: onnx.NodeProto, items: list[Item], frame: Frame) -> None:
        for name, item in zip(node.output, items, strict=False):
            if name:
                frame.scope[name] = item
                if isinstance(item, Value) and not item.name:
                    item.name = name


def child(frame: Frame, **changes: Any) -> Frame:
    """The frame of a graph inside a node: it sees the values around it, and hides what it defines."""
    outer = frame.scope
    scope: Scope = outer.new_child() if isinstance(outer, ChainMap) else ChainMap({}, outer)
    return frame.inner(scope, **changes)


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _plain_attribute(attribute: onnx.AttributeProto) -> bool:
    """Graphs are walked, not decoded; a type of 0 is malformed."""
    return attribute.type not in (0, attribute.GRAPH, attribute.GRAPHS)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
