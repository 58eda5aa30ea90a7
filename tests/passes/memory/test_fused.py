"""What the search takes Inductor not to store, views of several tensors, and the order of the backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.inductor_prims  # registers prims.inductor_random
from torch import nn

from optpass.passes import devices
from optpass.passes.memory.pricing import node_prices
from optpass.passes.memory.problem import Operation
from optpass.passes.memory.search.fused import Fusion, Steps, Stored
from optpass.passes.memory.search.schedule import Schedule
from optpass.passes.memory.search.search import Search
from optpass.passes.memory.search.sequence import tightened
from optpass.passes.roofline.lowering import Fusing, fusing_of

INLINED = Fusing(inlined=True, reads=True, overwrites=True)
HEAVY = replace(INLINED, heavy=True)
REDUCED = Fusing(reads=True)
ALONE = Fusing()
aten = torch.ops.aten


def stored(
    program: list[tuple[Fusing, list[int]]], size: int = 100, given: int = 1, weights: Sequence[int] = ()
) -> Stored:
    """Steps that make one value each, from values before them; the first `given` values are there before. `weights`:
    how many parameters each step reads."""
    n = len(program) + given
    more = [tuple(range(n, n + number)) for number in weights] + [()] * len(program)
    operations = [
        Operation(i, None, (*r, *w), (i + given,), fusing=f)  # type: ignore[arg-type]
        for i, ((f, r), w) in enumerate(zip(program, more, strict=False))
    ]
    birth = np.array([-1] * given + list(range(len(program))))
    steps = Steps(range(len(program)), np.arange(n), birth, [r for _, r in program])
    sizes, throughout = np.full(n, size, dtype=np.int64), range(n, n + max(weights, default=0))
    return Fusion(operations, sizes, throughout).stored(steps, np.zeros(n, dtype=bool))


def test_a_pointwise_chain_is_computed_where_it_is_read() -> None:
    found = stored([(INLINED, [0]), (INLINED, [1]), (ALONE, []), (REDUCED, [2])])
    assert found.inside == [True, True, False, False]
    assert found.bytes.tolist() == [100, 0, 0, 100, 100]
    assert found.last[0] == 3  # what the chain reads is held until then


def test_what_a_kernel_of_its_own_reads_is_stored() -> None:
    found = stored([(INLINED, [0]), (ALONE, [1]), (INLINED, [1])])
    assert not found.inside[0] and found.bytes[1] == 100 and found.last[0] == 0


@pytest.mark.parametrize(("between", "vanishes"), [(REDUCED, True), (ALONE, False)])
def test_a_dear_value_that_is_reused_vanishes_within_one_kernel_alone(between: Fusing, vanishes: bool) -> None:
    found = stored([(HEAVY, [0]), (REDUCED, [1]), (between, [2]), (REDUCED, [1, 3])])
    assert found.inside[0] is vanishes
    assert stored([(INLINED, [0]), (REDUCED, [1]), (between, [2]), (REDUCED, [1, 3])]).inside[0]


def test_what_reads_too_many_values_is_stored_for_its_readers() -> None:
    many = [(ALONE, []) for _ in range(5)]
    found = stored([*many, (INLINED, [1, 2, 3, 4, 5]), (REDUCED, [6]), (ALONE, [0]), (REDUCED, [6])])
    assert not found.inside[5]
    few = stored([*many, (INLINED, [1, 2]), (REDUCED, [6]), (ALONE, [0]), (REDUCED, [6])])
    assert few.inside[5]


def test_parameters_count_among_what_is_read_too() -> None:
    program = [(INLINED, [0]), (REDUCED, [1]), (ALONE, [0]), (REDUCED, [1])]
    assert stored(program, weights=[3]).inside[0] and not stored(program, weights=[4]).inside[0]


def test_what_is_read_by_several_ways_counts_once() -> None:
    twice = [
        (INLINED, [0, 1, 2]),
        (INLINED, [0, 1, 2]),
        (INLINED, [3, 4]),
        (REDUCED, [5]),
        (ALONE, [0]),
        (REDUCED, [5]),
    ]
    assert stored(twice, given=3).inside[2]


def test_complex_numbers_are_left_to_operators(programs: Any) -> None:
    """Inductor generates no code for them, so that nothing of theirs is computed inside others."""

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, dtype=torch.cfloat))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            f = nn.functional.pad(torch.fft.rfft(torch.tanh(x))[..., :8] * self.weight, (0, 1))
            return torch.fft.irfft(f, n=16).square().sum()

    graph = programs.joint_of(Complex(), torch.randn(4, 16)).graph
    of = node_prices(graph, devices.resolve("h100"), fused=True)
    values = {n: n.meta.get("val") for n in graph.nodes if n.op == "call_function"}
    made = {n: isinstance(v, torch.Tensor) and v.is_complex() for n, v in values.items()}
    assert [n for n in made if made[n] and n.target is aten.mul.Tensor]
    assert all(of(n).fusing == ALONE for n in made if made[n])
    assert of(next(n for n in made if n.target is aten.tanh.default)).fusing.inlined


def test_a_result_takes_the_place_of_an_input_that_nobody_reads_any_more() -> None:
    program = [(ALONE, []), (INLINED, [1]), (ALONE, [2])]
    assert stored(program).overwritten.tolist() == [0, 100, 0]
    assert stored([*program, (ALONE, [1])]).overwritten.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("target", "kind", "found"),
    [
        (aten.mm.default, "matmul", ALONE),
        (aten.mul.Tensor, "pointwise", INLINED),
        (aten.exp.default, "pointwise", HEAVY),
        (aten.sum.dim_IntList, "reduction", REDUCED),
        (aten.cat.default, "copy", Fusing(reads=True, overwrites=True)),
        (aten.embedding.default, "indexing", Fusing(inlined=True, reads=True)),
        (aten.index_put.default, "indexing", Fusing(overwrites=True)),
        (aten.native_dropout.default, "pointwise", ALONE),  # left by Inductor's `fallback_random` alone
        (aten.bernoulli.p, "pointwise", ALONE),
        (torch.ops.prims.inductor_random.default, "pointwise", Fusing(reads=True, overwrites=True)),
        (len, "other", ALONE),
    ],
)
def test_how_an_operator_goes_into_kernels(target: Any, kind: str, found: Fusing) -> None:
    assert fusing_of(target, kind) == found


class Split(nn.Module):
    """A product whose result is taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).split(8, -1)
        return self.out(torch.tanh(q) * torch.sigmoid(k) + v).sum()


def test_the_parts_of_a_tensor_are_views_of_it(programs: Any) -> None:
    problem = programs.problem_of(programs.joint_of(Split(), torch.randn(16, 8)))
    parts = [n for n in problem.storage_of if n.target is aten.split.Tensor]
    assert parts
    for node in parts:
        base = problem.storage_of[node.args[0]]
        assert problem.storage_of[node] == base
        assert all(problem.storage_of[item] == base for item in node.users)
    assert not any(o.node in parts for o in problem.operations)


def fused(problem: Any) -> Any:
    """The problem under an executor that fuses."""
    for o in problem.operations:
        pointwise = isinstance(o.node.target, torch._ops.OpOverload) and torch.Tag.pointwise in o.node.target.tags
        o.fusing = fusing_of(o.node.target, "pointwise" if pointwise else "other")
    return problem


@pytest.mark.parametrize("name", ["stack", "chain", "branches"])
def test_fusing_takes_no_more_bytes_and_plans_are_still_carried_out_in_order(
    joints: Any, programs: Any, name: str
) -> None:
    plain, inlining = (Search(f(programs.problem_of(joints[name][2]))) for f in (lambda p: p, fused))
    assert inlining.unconstrained <= plain.unconstrained and inlining.floor <= plain.floor
    for share in (0.0, 0.4, 0.8):
        budget = int(inlining.floor + share * (inlining.unconstrained - inlining.floor))
        found = inlining.at_most(budget)
        assert found is not None and found[1].peak <= budget
        timeline = found[1]
        for step, reads in enumerate(timeline.reads):
            assert all(timeline.birth[i] < step <= timeline.last[i] for i in reads)


def test_letting_go_of_what_is_read_inside_others_frees_it(joints: Any, programs: Any) -> None:
    """A storage that is held only because something computed from it is read later is let go of with that."""
    search = Search(fused(programs.problem_of(joints["stack"][2])))
    assert any(len({s for s, _ in move.evict}) > 1 for move in search.way.moves)
    assert search.floor < search.unconstrained


def _operation(index: int, reads: tuple[int, ...], made: tuple[int, ...], why: str = "") -> Operation:
    return Operation(index, None, reads, made, backward=True, kept_why=why)  # type: ignore[arg-type]


def test_the_gradient_of_a_weight_comes_before_that_of_the_input() -> None:
    # Gradient 0 and saved input 1 are read; 2 is the input's gradient, 3 the weight's.
    operations = [_operation(0, (0,), (2,)), _operation(1, (0, 1), (3,)), _operation(2, (2, 3), ())]
    sizes = [100, 100, 100, 60]
    assert tightened(operations, [0, 1, 2], sizes, ()) == [1, 0, 2]
    assert tightened(operations, [0, 1, 2], [100, 0, 100, 60], ()) == [0, 1, 2]  # it releases nothing
    assert tightened(operations, [0, 1, 2], sizes, (1,)) == [0, 1, 2]  # it is not released
    fixed = [replace(operations[0], kept_why="writes in place"), *operations[1:]]
    assert tightened(fixed, [0, 1, 2], sizes, ()) == [0, 1, 2]
    dependent = [operations[0], _operation(1, (1, 2), (3,)), _operation(2, (3,), ())]
    assert tightened(dependent, [0, 1, 2], sizes, ()) == [0, 1, 2]


@pytest.mark.parametrize("name", ["stack", "branches", "outside"])
def test_the_order_of_the_backward_respects_what_is_read(joints: Any, programs: Any, name: str) -> None:
    problem = programs.problem_of(joints[name][2])
    schedule = Schedule(problem)
    assert sorted(schedule.anchors) == [o.index for o in problem.operations if o.backward]
    assert schedule.anchors[-1] == problem.operations[-1].index
    place = {index: i for i, index in enumerate(schedule.anchors)}
    for index in schedule.anchors:
        made_by = (problem.storages[s].producer for s in problem.operations[index].inputs)
        assert all(place[p] < place[index] for p in made_by if p in place)
