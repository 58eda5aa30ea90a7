"""What is computed for the backward alone is computed where what it is made of would else be released."""

from __future__ import annotations

import operator
import random

import pytest
import torch
from torch import fx

from optpass.passes.memory.early import compute_early

aten = torch.ops.aten


class Joint:
    """A graph of 4 x 4 matrices: each step is called with nodes."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def given(self, name: str) -> fx.Node:
        return self._with(self.graph.placeholder(name), torch.ones(4, 4))

    def call(self, target, *args, value=None) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=target.__name__.split(".")[0])
        return self._with(node, torch.ones(4, 4) if value is None else value)

    def _with(self, node, value):
        node.meta["val"] = value
        return node

    def order(self) -> list[str]:
        self.graph.lint()
        return [n.name for n in self.graph.nodes]


def test_a_mask_is_made_behind_the_last_use_of_what_it_is_of():
    joint = Joint()
    x, tangent = joint.given("primals_1"), joint.given("tangents_1")
    relu = joint.call(aten.relu.default, x)
    product = joint.call(aten.mm.default, relu, x)
    out = joint.call(aten.sin.default, product)
    mask = joint.call(aten.le.Scalar, relu, 0)
    gradient = joint.call(aten.mul.Tensor, tangent, mask)
    joint.graph.output((out, gradient))
    assert compute_early(joint.graph, [out], {"le"}) == 1
    assert joint.order() == ["primals_1", "tangents_1", "relu", "mm", "le", "sin", "mul", "output"]


def test_views_come_along_and_a_chain_keeps_its_order():
    joint = Joint()
    x = joint.given("primals_1")
    a = joint.call(aten.sin.default, x)
    b = joint.call(aten.cos.default, a)
    out = joint.call(aten.exp.default, b)
    turned = joint.call(aten.t.default, a)
    cast = joint.call(aten.neg.default, turned)
    half = joint.call(aten.abs.default, cast)
    joint.graph.output((out, half))
    assert compute_early(joint.graph, [out], {"abs_1"}) == 2
    assert joint.order() == ["primals_1", "sin", "cos", "t", "neg", "abs_1", "exp", "output"]


def test_parts_of_a_tuple_are_there_before_they_are_read():
    joint = Joint()
    x = joint.given("primals_1")
    a = joint.call(aten.sin.default, x)
    pair = joint.call(aten.max.dim, x, 0, value=(torch.ones(4), torch.ones(4)))
    values = joint.call(operator.getitem, pair, 0, value=torch.ones(4))
    b = joint.call(aten.cos.default, values)
    out = joint.call(aten.exp.default, b)
    late = joint.call(aten.mul.Tensor, a, values)
    joint.graph.output((out, late))
    assert compute_early(joint.graph, [out], {"mul"}) == 1
    assert joint.order() == ["primals_1", "sin", "max_1", "getitem", "mul", "cos", "exp", "output"]


@pytest.mark.parametrize("why", ["returned", "given", "random", "written"])
def test_what_gains_nothing_or_may_differ_stays(why):
    joint = Joint()
    x, y = joint.given("primals_1"), joint.given("primals_2")
    a = joint.call(aten.sin.default, x)
    out = joint.call(aten.exp.default, a)
    if why == "random":
        late = joint.call(aten.rand_like.default, a)
    else:
        late = joint.call(aten.mul.Tensor, *((a, a) if why == "returned" else (x, x) if why == "given" else (a, y)))
    if why == "written":
        joint.call(aten.copy_.default, y, out)
    joint.graph.output((out, late))
    returned = [out, a] if why == "returned" else [out]
    before = joint.order()
    assert compute_early(joint.graph, returned, {late.name}) == 0
    assert joint.order() == before


@pytest.mark.parametrize("seed", range(20))
def test_results_are_the_same_bits(seed):
    rng = random.Random(seed)
    joint = Joint()
    made = [joint.given(f"primals_{i}") for i in range(1, 4)]
    for _ in range(12):
        made.append(joint.call(rng.choice([aten.mm.default, aten.add.Tensor]), *rng.sample(made, 2)))
    out = made[-1]
    for _ in range(8):
        target = rng.choice([aten.t.default, aten.neg.default, aten.mul.Tensor])
        made.append(joint.call(target, *rng.sample(made, 2 if target is aten.mul.Tensor else 1)))
    saved = rng.sample(made[-8:], 4)
    joint.graph.output((out, *saved))
    inputs = [torch.rand(4, 4) for _ in range(3)]
    module = fx.GraphModule(torch.nn.Module(), joint.graph)
    wanted = fx.Interpreter(module).run(*inputs)
    compute_early(joint.graph, [out], {n.name for n in saved})
    joint.order()
    assert all(torch.equal(a, b) for a, b in zip(fx.Interpreter(module).run(*inputs), wanted, strict=True))
