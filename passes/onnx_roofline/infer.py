"""Sizes of a node's results, and their numbers where they follow from shapes and small constants.

Asks, in this order: our own table, ONNX's shape inference of the node, what the file declares, the most that a
data-dependent result can be. Not here: walking the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from optpass.passes.onnx_roofline import shapes_attention
from optpass.passes.onnx_roofline.dims import Dims
from optpass.passes.onnx_roofline.load import require_onnx
from optpass.passes.onnx_roofline.shapes import STAND_IN, Sizes, at_most, custom
from optpass.passes.onnx_roofline.value import INT64, Item, Sequence, Spec, Value

if TYPE_CHECKING:
    import onnx

#: Importing it registers its rules.
SIZE_RULES = (shapes_attention,)
#: Elements up to which a value that only hangs on constants is computed: shapes, axes, scales, small tables.
FOLD_ELEMENTS = 1024
#: What a malformed node makes ONNX's Python code raise; the node is then reported as unknown.
MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, ArithmeticError, AssertionError)
_RANDOM = frozenset(
    "RandomNormal RandomNormalLike RandomUniform RandomUniformLike Bernoulli Multinomial Dropout".split()
)


class Inference:
    """Shape inference and folding of single nodes; `declared` are the types that the file itself states."""

    def __init__(self, dims: Dims, declared: Mapping[str, onnx.TypeProto], ir_version: int) -> None:
        self.onnx = require_onnx()
        self.dims, self.declared, self.ir_version = dims, declared, ir_version
        self._types: dict[tuple[int, tuple[int, ...] | None], onnx.TypeProto] = {}
        onnx = self.onnx
        self._errors = (
            onnx.shape_inference.InferenceError,
            onnx.defs.SchemaError,
            onnx.checker.ValidationError,
            *MALFORMED,
        )

    # ---- sizes ------------------------------------------------------------------------------------------------

    def specs(
        self, node: onnx.NodeProto, op: str, domain: str, version: int, inputs: list[Item], attrs: dict[str, Any]
    ) -> tuple[list[Spec | None], str]:
        """One spec per output (None for those left out, element type 0 where nothing is known), and what went wrong."""
        sizes = Sizes(op, inputs, attrs, len(node.output))
        found, trouble = self._asked(node, op, domain, version, inputs, sizes)
        most = self._most(sizes) if domain == "" else None
        specs: list[Spec | None] = []
        for index, name in enumerate(node.output):
            if not name:
                specs.append(None)
                continue
            spec = found[index] if index < len(found) else None
            spec = self._completed(spec, self.declared_spec(name))
            if spec.known is None and most is not None and index < len(most):
                spec = most[index]
            specs.append(spec)
        return specs, trouble

    @staticmethod
    def _most(sizes: Sizes) -> list[Spec] | None:
        try:
            return at_most(sizes)
        except MALFORMED:
            return None

    def _asked(
        self, node: onnx.NodeProto, op: str, domain: str, version: int, inputs: list[Item], sizes: Sizes
    ) -> tuple[list[Spec | None], str]:
        rule = custom(domain, op)
        if rule is not None:
            try:
                return [*rule(sizes)], ""
            except MALFORMED as error:
                return [], f"its attributes and inputs do not fit ({error})"
        stand_in = STAND_IN.get((domain, op))
        target = ("", stand_in, max(version, 21)) if stand_in else (domain, op, version)
        try:
            return self._schema(node, *target, inputs), ""
        except self._errors as error:
            return [], str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

    def _schema(
        self, node: onnx.NodeProto, domain: str, op: str, version: int, inputs: list[Item]
    ) -> list[Spec | None]:
        onnx = self.onnx
        schema = onnx.defs.get_schema(op, version, domain)
        renamed = onnx.NodeProto(op_type=op, domain=domain, output=node.output, attribute=node.attribute)
        types, data = {}, {}
        for index, (name, item) in enumerate(zip(node.input, inputs, strict=True)):
            given = self._type(item) if name else None
            renamed.input.append(f"i{index}" if name else "")
            if given is not None:
                types[f"i{index}"] = given
            if isinstance(item, Value) and item.const is not None and item.const.size <= FOLD_ELEMENTS:
                data[f"i{index}"] = onnx.numpy_helper.from_array(item.const)
        opsets = [onnx.helper.make_opsetid(domain, version)]
        inferred = onnx.shape_inference.infer_node_outputs(
            schema, renamed, types, data, opset_imports=opsets, ir_version=self.ir_version
        )
        return [_spec(inferred.get(name)) for name in node.output]

    def _type(self, item: Item) -> onnx.TypeProto | None:
        if not isinstance(item, Value):
            return None
        key = (item.elem, item.shape)
        if key not in self._types:
            self._types[key] = self.onnx.helper.make_tensor_type_proto(item.elem, item.shape)
        return self._types[key]

    def declared_spec(self, name: str) -> Spec | None:
        """What the file says about a value."""
        given = self.declared.get(name)
        if given is None or not given.HasField("tensor_type"):
            return None
        tensor = given.tensor_type
        if not tensor.HasField("shape"):
            return Spec(tensor.elem_type, None)
        return Spec(tensor.elem_type, tuple(self.dims.known(d) for d in tensor.shape.dim))

    @staticmethod
    def _completed(found: Spec | None, declared: Spec | None) -> Spec:
        """What inference found, gaps filled from what the file declares."""
        if found is None:
            return declared or Spec(0, None)
        if declared is None or found.known is not None:
            return found
        if found.shape is None or declared.shape is None or len(found.shape) != len(declared.shape):
            return Spec(found.elem or declared.elem, found.shape if found.shape is not None else declared.shape)
        sizes = (b if a is None else a for a, b in zip(found.shape, declared.shape, strict=True))
        return Spec(found.elem or declared.elem, tuple(sizes))

    # ---- numbers ----------------------------------------------------------------------------------------------

    def fold(
        self, node: onnx.NodeProto, domain: str, version: int, inputs: list[Item], specs: list[Spec | None]
    ) -> list[np.ndarray[Any, Any]] | None:
        """The results' numbers, if they hang on nothing but shapes and small constants; else None."""
        if node.op_type in ("Shape", "Size") and domain == "":
            return self._shape(node, inputs)
        if domain != "" or node.op_type in _RANDOM or any(a.HasField("g") for a in node.attribute):
            return None
        consts = []
        for item in inputs:
            if item is not None and (isinstance(item, Sequence) or item.const is None):
                return None
            consts.append(item.const if isinstance(item, Value) else None)
        if any(s is not None and s.known is not None and prod(s.known) > FOLD_ELEMENTS for s in specs):
            return None
        return self._evaluated(node, version, consts)

    def _shape(self, node: onnx.NodeProto, inputs: list[Item]) -> list[np.ndarray[Any, Any]] | None:
        item = inputs[0] if inputs else None
        if not isinstance(item, Value) or item.shape is None:
            return None
        if node.op_type == "Size":
            return [np.array(prod(item.shape), dtype=np.int64)]
        bounds = {a.name: a.i for a in node.attribute}
        return [np.array(item.shape[slice(bounds.get("start", 0), bounds.get("end"))], dtype=np.int64)]

    def _evaluated(
        self, node: onnx.NodeProto, version: int, consts: list[np.ndarray[Any, Any] | None]
    ) -> list[np.ndarray[Any, Any]] | None:
        from onnx.reference import ReferenceEvaluator

        names = [n for n in dict.fromkeys(node.input) if n]
        feeds = {n: c for n, c in zip(node.input, consts, strict=True) if n and c is not None}
        outputs = [n for n in node.output if n]
        try:
            function = self.onnx.helper.make_function(
                "fold", "f", names, outputs, [node], [self.onnx.helper.make_opsetid("", version)]
            )
            results = ReferenceEvaluator(function).run(outputs, feeds, attributes={})
        except (NotImplementedError, *self._errors):
            return None
        arrays = [np.asarray(r) for r in results]
        if any(a.size > FOLD_ELEMENTS for a in arrays) or any(isinstance(r, list) for r in results):
            return None
        return arrays

    def tensor(self, proto: onnx.TensorProto, name: str) -> Value:
        """A stored tensor; its numbers only where they are few and in the file."""
        shape = tuple(int(d) for d in proto.dims)
        if any(d < 0 for d in shape):
            return Value(proto.data_type, None, name=name)
        const = None
        if prod(shape) <= FOLD_ELEMENTS and proto.data_location != self.onnx.TensorProto.EXTERNAL:
            try:
                const = self.onnx.numpy_helper.to_array(proto)
            except self._errors:
                const = None
        return Value(proto.data_type, shape, const=const, name=name)


def _spec(given: onnx.TypeProto | None) -> Spec | None:
    if given is None or not given.HasField("tensor_type"):
        return None
    tensor = given.tensor_type
    if not tensor.HasField("shape"):
        return Spec(tensor.elem_type, None)
    sizes = tuple(int(d.dim_value) if d.HasField("dim_value") and d.dim_value >= 0 else None for d in tensor.shape.dim)
    return Spec(tensor.elem_type, sizes)


def spec_of_array(array: np.ndarray[Any, Any], elem: int) -> Spec:
    """The spec of known numbers; text and unknown dtypes keep the element type that inference gave."""
    return Spec(elem or INT64, tuple(array.shape))
