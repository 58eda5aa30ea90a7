"""Branches, loops, sequences, functions and symbolic dimensions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import helper

from optpass.errors import ConfigError
from optpass.naming import on_the_command_line


def _value(name: str, elem: int = T.FLOAT, shape: Any = None) -> Any:
    return helper.make_tensor_value_info(name, elem, shape)


def _branch(node: Any, op: str, name: str) -> Any:
    return helper.make_graph([node(op, "x w" if op == "MatMul" else "x", name)], name, [], [_value(name)])


def _if(node: Any) -> Any:
    branches = {"then_branch": _branch(node, "Relu", "t"), "else_branch": _branch(node, "MatMul", "e")}
    return [node("If", "c", "y", name="gate", **branches), node("Sigmoid", "y", "z")]


def test_if_takes_the_costlier_branch(analyse: Any, node: Any) -> None:
    found = analyse(_if(node), {"c": ([], T.BOOL), "x": [4, 8]}, {"w": [8, 8]})
    assert [o.target for o in found.program.ops] == ["onnx.MatMul", "onnx.Sigmoid"]
    assert found.flops() == 2 * 4 * 8 * 8 + 4 * 32
    assert "If 'gate': its condition is not known; counted is the costlier else_branch" in found.notes
    assert len(found.program.groups) == 2


def test_if_with_a_known_condition(analyse: Any, node: Any) -> None:
    found = analyse(_if(node), {"x": [4, 8]}, {"w": [8, 8]}, consts={"c": np.array(True)})
    assert [o.target for o in found.program.ops] == ["onnx.Relu", "onnx.Sigmoid"]
    assert found.notes == ""


def _loop_body(node: Any, growing: bool = False) -> Any:
    """state = state @ w; scan output relu(state); goes on while i < 3 if `growing`."""
    condition = [node("Less", "i three", "go")] if growing else [node("Identity", "go_in", "go")]
    nodes = [*condition, node("MatMul", "s_in w", "s"), node("Relu", "s", "r")]
    given = [_value("i", T.INT64, []), _value("go_in", T.BOOL, []), _value("s_in")]
    return helper.make_graph(nodes, "body", given, [_value("go", T.BOOL), _value("s"), _value("r")])


STATE, WEIGHTS = {"s0": [4, 8]}, {"w": [8, 8]}
ONCE = 2 * 4 * 8 * 8 + 32


def test_loop_with_a_known_count(analyse: Any, node: Any) -> None:
    loop = node("Loop", "n - s0", "last all", name="steps", body=_loop_body(node))
    found = analyse([loop], STATE, WEIGHTS, outputs=["last", "all"], consts={"n": np.int64(5)})
    assert found.flops() == 5 * ONCE
    assert found.facts.outputs == ("last: float32[4, 8]", "all: float32[5, 4, 8]")
    assert sum(g.kind == "matmul" for g in found.program.groups) == 5
    assert found.notes == ""


def test_loop_whose_condition_is_arithmetic_on_the_counter(analyse: Any, node: Any) -> None:
    """No trip count, but i < 3 is known in every iteration: four of them (0, 1, 2, and the one that stops)."""
    loop = node("Loop", "- go s0", "last all", body=_loop_body(node, growing=True))
    found = analyse([loop], STATE, WEIGHTS, consts={"go": np.array(True), "three": np.int64(3)})
    assert found.flops("MatMul") == 4 * (ONCE - 32)
    assert found.notes == ""


def test_loop_of_unknown_count_is_counted_once(analyse: Any, node: Any) -> None:
    loop = node("Loop", "n - s0", "last all", name="steps", body=_loop_body(node))
    found = analyse([loop], {**STATE, "n": ([], T.INT64)}, WEIGHTS)
    assert found.flops() == ONCE
    assert "Loop 'steps': its trip count is not known" in found.notes


def test_long_loop_repeats_one_iteration(analyse: Any, node: Any) -> None:
    loop = node("Loop", "n - s0", "last all", name="steps", body=_loop_body(node))
    found = analyse([loop], STATE, WEIGHTS, outputs=["last", "all"], consts={"n": np.int64(100_000)})
    assert found.flops() == 100_000 * ONCE
    assert len(found.program.ops) < 10
    product = next(g for g in found.program.groups if g.kind == "matmul")
    assert product.reads == 100_000 * 4 * (32 + 64)
    assert "runs 100000 times" in found.notes


def test_scan(analyse: Any, node: Any) -> None:
    """A running product along axis 1: as many steps as the axis is long."""
    body = helper.make_graph(
        [node("MatMul", "s_in w", "m"), node("Add", "m x_t", "s"), node("Identity", "s", "o")],
        "body",
        [_value("s_in"), _value("x_t")],
        [_value("s"), _value("o")],
    )
    scan = node("Scan", "s0 xs", "last all", body=body, num_scan_inputs=1, scan_input_axes=[1])
    found = analyse([scan], {"s0": [4, 8], "xs": [4, 6, 8]}, WEIGHTS, outputs=["last", "all"])
    assert found.flops() == 6 * (2 * 4 * 8 * 8 + 32)
    assert found.facts.outputs == ("last: float32[4, 8]", "all: float32[6, 4, 8]")


def test_sequences_are_lists(analyse: Any, node: Any) -> None:
    nodes = [
        node("SplitToSequence", "x two", "seq", axis=0),
        node("SequenceAt", "seq one", "item"),
        node("Relu", "item", "r"),
        node("SequenceInsert", "seq r", "more"),
        node("ConcatFromSequence", "more", "y", axis=0),
    ]
    found = analyse(nodes, {"x": [6, 5]}, consts={"two": np.int64(2), "one": np.int64(1)})
    assert found.flops("Relu") == 10
    assert found.facts.outputs == ("y: float32[8, 5]",)


# ---- functions --------------------------------------------------------------------------------------------------


def test_functions_of_the_model(analyse: Any, node: Any) -> None:
    """Attributes are bound, and the function's opset is its own: Softmax of opset 11 flattens."""
    leaky = node("LeakyRelu", "a", "b")
    attribute = leaky.attribute.add()
    attribute.name, attribute.ref_attr_name, attribute.type = "alpha", "slope", 1
    inner = helper.make_function(
        "local", "Inner", ["a"], ["c"], [leaky, node("LogSoftmax", "b", "c", axis=1)], [helper.make_opsetid("", 11)],
        attributes=["slope"],
    )  # fmt: skip
    outer = helper.make_function(
        "local", "Outer", ["x", "w"], ["y"],
        [node("MatMul", "x w", "m"), node("Inner", "m", "y", domain="local", name="act", slope=0.2)],
        [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)],
    )  # fmt: skip
    found = analyse(
        [node("Outer", "x w", "y", domain="local", name="layer")],
        {"x": [2, 3, 4]},
        {"w": [4, 5]},
        functions=[inner, outer],
        extra_opsets={"local": 1},
    )
    assert [o.target for o in found.program.ops] == ["onnx.MatMul", "onnx.LeakyRelu", "onnx.LogSoftmax"]
    assert found.flops() == 2 * 6 * 4 * 5 + 3 * 30 + 5 * 30 + 2
    assert found.program.ops[1].name.startswith("layer/act/")


def test_a_function_that_calls_itself(analyse: Any, node: Any) -> None:
    opsets = [helper.make_opsetid("local", 1)]
    function = helper.make_function("local", "F", ["a"], ["b"], [node("F", "a", "b", domain="local")], opsets)
    with pytest.raises(ConfigError, match=r"model\.onnx: function 'F' calls itself"):
        analyse([node("F", "x", "y", domain="local")], {"x": [1]}, functions=[function], extra_opsets={"local": 1})


# ---- symbolic dimensions ----------------------------------------------------------------------------------------


def test_symbols_are_bound_or_noted(analyse: Any, node: Any) -> None:
    args = ([node("MatMul", "x w", "y")], {"x": ["batch", "seq", 8]}, {"w": [8, 4]})
    bound = analyse(*args, dims={"batch": 3, "seq": 5})
    assert bound.flops() == 2 * 15 * 8 * 4
    assert bound.notes == ""
    free = analyse(*args, dims={"batch": 3})
    assert free.flops() == 2 * 3 * 8 * 4
    assert "symbolic dimensions taken as 1: seq; bind them with sets: NAME=SIZE" in free.notes
    with on_the_command_line():
        assert "bind them with --set NAME=SIZE" in analyse(*args, dims={"batch": 3}).notes
    assert free.facts.dims == {"batch": 3, "seq": 1}


def test_unnamed_and_computed_dimensions(analyse: Any, node: Any) -> None:
    nodes = [node("Add", "mask bias", "y"), node("Relu", "x", "z")]
    inputs = {"mask": ["past + 2*seq"], "bias": [1], "x": [None, 4]}
    found = analyse(nodes, inputs, outputs=["y", "z"], dims={"past": 3, "seq": 4, "x.0": 6})
    assert found.flops() == 11 + 24


@pytest.mark.parametrize("dims", [{"batsh": 2}, {"batch": -1}, {"batch": 1.5}, {"batch": True}])
def test_wrong_bindings_are_errors(analyse: Any, node: Any, dims: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        analyse([node("Relu", "x", "y")], {"x": ["batch"]}, dims=dims)
    assert "model.onnx" in str(caught.value) and "\n" not in str(caught.value)
    assert "batch" in str(caught.value)


def test_shape_arithmetic_is_folded(analyse: Any, node: Any) -> None:
    """Shape, Gather, Concat and Reshape as exporters write them: sizes follow, and nothing of it is counted."""
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s zero", "b", axis=0),
        node("Unsqueeze", "b zeros", "b1"),
        node("Mul", "heads d", "hd"),
        node("Concat", "b1 minus hd", "target", axis=0),
        node("Reshape", "x target", "r"),
        node("MatMul", "r w", "y"),
    ]
    numbers = {"zero": 0, "zeros": [0], "heads": [4], "d": [2], "minus": [-1]}
    consts = {name: np.array(value) for name, value in numbers.items()}
    found = analyse(nodes, {"x": ["batch", 6, 4, 2]}, {"w": [8, 3]}, consts=consts, dims={"batch": 5})
    assert [o.target for o in found.program.ops] == ["onnx.Reshape", "onnx.MatMul"]
    assert found.op("MatMul").cost.flops == 2 * 30 * 8 * 3
    assert found.facts.folded == 5
