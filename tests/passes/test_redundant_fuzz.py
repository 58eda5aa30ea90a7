"""Random programs of views, casts and mutations: the rewritten graph against the original, bit for bit.

Values are chosen so that sums are exact in every dtype in use while lossy casts show; so gradients are the same
whatever the order of summation, and a difference is an error of the pass and not of rounding.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from optpass.backend import pipeline
from optpass.options import Options
from optpass.passes.contract import PassContext
from optpass.passes.redundant import Redundant

SHAPES = ((2, 3), (2, 1, 3), (4,), (1, 1))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
GRAD_MODE = torch._C._set_grad_enabled

View = tuple[str, Callable[[torch.Tensor], tuple[Any, ...] | None]]


def _pair(t: torch.Tensor) -> tuple[int, int]:
    return (0, t.dim() - 1)


#: Method, and its arguments for a tensor (None where the tensor has no place for it).
VIEWS: tuple[View, ...] = (
    ("transpose", _pair),
    ("transpose", lambda t: (t.dim() - 1, 0)),
    ("permute", lambda t: tuple(reversed(range(t.dim())))),
    ("contiguous", lambda t: ()),
    ("reshape", lambda t: (-1,)),
    ("reshape", lambda t: (2, 3) if t.numel() == 6 else tuple(t.shape)),
    ("view", lambda t: (t.numel(),) if t.is_contiguous() else None),
    ("view", lambda t: (2, 1, 3) if t.is_contiguous() and t.numel() == 6 else None),
    ("flatten", lambda t: ()),
    ("unsqueeze", lambda t: (0,) if t.dim() < 4 else None),
    ("squeeze", lambda t: (0,) if t.dim() > 1 else None),
    ("narrow", lambda t: (0, 0, t.shape[0])),
    ("narrow", lambda t: (0, 0, 1)),
    ("expand", lambda t: tuple(t.shape)),
    ("detach", lambda t: ()),
    ("clone", lambda t: ()),
    *(("to", lambda t, d=d: (d,)) for d in DTYPES),
    ("float", lambda t: ()),
    ("double", lambda t: ()),
    ("bfloat16", lambda t: ()),
)
WRITES: tuple[tuple[str, tuple[Any, ...]], ...] = (("add_", (1,)), ("neg_", ()), ("zero_", ()))


@st.composite
def programs(draw: st.DrawFn) -> dict[str, Any]:
    """What to build: round trips are likely, since most steps go on from the newest value."""
    step = st.tuples(
        st.sampled_from(["view"] * 6 + ["there and back"] * 4 + ["add", "sum", "write", "write", "grad mode"]),
        st.integers(0, 3),
        st.integers(0, len(VIEWS) - 1),
    )
    return {
        "shape": draw(st.sampled_from(SHAPES)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "grad": draw(st.booleans()),
        "alias": draw(st.booleans()),
        "steps": draw(st.lists(step, min_size=2, max_size=14)),
        "outputs": draw(st.lists(st.integers(0, 20), min_size=1, max_size=4)),
    }


@dataclass
class Built:
    """A graph under construction, with the fake value of every node."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    pool: list[fx.Node] = field(default_factory=list)
    grad: bool = True

    def value(self, node: fx.Node) -> torch.Tensor:
        return node.meta["example_value"]

    def call(self, kind: str, target: Any, args: tuple[Any, ...]) -> None:
        values = fx.node.map_arg(args, self.value)
        try:
            value = getattr(values[0], target)(*values[1:]) if kind == "call_method" else target(*values)
        except RuntimeError:  # a view that these strides do not allow, a write to a leaf: not a program
            return
        node = self.graph.create_node(kind, target, args)
        node.meta["example_value"] = value
        self.pool.append(node)


def build(spec: dict[str, Any], inputs: list[torch.Tensor]) -> fx.GraphModule:
    fake, built = FakeTensorMode(), Built()
    with fake:
        for index, tensor in enumerate(inputs):
            node = built.graph.placeholder(f"x{index}")
            node.meta["example_value"] = fake.from_tensor(tensor)
            built.pool.append(node)
        base = built.pool[0]
        built.call("call_function", torch.mul, (base, 1))  # something to write to that is no leaf
        for kind, back, which in spec["steps"]:
            node = built.pool[max(len(built.pool) - 1 - back, 0)]
            value = built.value(node)
            if kind == "view":
                method, arguments = VIEWS[which]
                given_args = arguments(value)
                if given_args is not None:
                    built.call("call_method", method, (node, *given_args))
            elif kind == "there and back":
                built.call("call_method", "to", (node, DTYPES[which % len(DTYPES)]))
                built.call("call_method", "to", (built.pool[-1], value.dtype))
            elif kind == "add":
                built.call("call_function", torch.add, (node, 1))
            elif kind == "sum":
                same = [n for n in built.pool if built.value(n).shape == value.shape]
                if sum(n.target is torch.Tensor.add for n in built.graph.nodes) < 3:
                    built.call("call_function", torch.Tensor.add, (node, same[which % len(same)]))
            elif kind == "write":
                method, given_args = WRITES[which % len(WRITES)]
                built.call("call_method", method, (node, *given_args))
            else:
                built.grad = not built.grad
                built.graph.call_function(GRAD_MODE, (built.grad,))
                GRAD_MODE(built.grad)
        GRAD_MODE(True)
        if not built.grad:
            built.graph.call_function(GRAD_MODE, (True,))
    chosen = [built.pool[i % len(built.pool)] for i in spec["outputs"]]
    with fake:
        for node in [built.pool[-1], base]:  # a use of the newest value that is no output itself
            built.call("call_function", torch.Tensor.double, (node,))
    built.graph.output((*chosen, *built.pool[-2:]))
    built.graph.lint()
    return fx.GraphModule({}, built.graph)


def make_inputs(spec: dict[str, Any]) -> list[torch.Tensor]:
    dtype = spec["dtype"]
    values = torch.randint(-3, 4, spec["shape"]).to(torch.float64)
    if dtype in (torch.float32, torch.float64):  # a fraction that no half type holds
        values = values + torch.randint(0, 2, spec["shape"]) * 2.0**-12
    x = values.to(dtype).requires_grad_(spec["grad"])
    return [x, x.detach().view(-1)] if spec["alias"] else [x, torch.ones(2, dtype=dtype)]


def copies(inputs: list[torch.Tensor], alias: bool) -> list[torch.Tensor]:
    x = inputs[0].detach().clone().requires_grad_(inputs[0].requires_grad)
    return [x, x.detach().view(-1) if alias else inputs[1].clone()]


def storage(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()


def compare(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a.dtype, a.shape, a.stride(), a.storage_offset()) == (b.dtype, b.shape, b.stride(), b.storage_offset())
        assert torch.equal(a, b), index


def same_aliases(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for i, j in itertools.combinations(range(len(ours)), 2):
        assert (storage(ours[i]) == storage(ours[j])) == (storage(theirs[i]) == storage(theirs[j])), (i, j)
        assert (ours[i] is ours[j]) == (theirs[i] is theirs[j]), (i, j)


def standing(t: torch.Tensor) -> tuple[bool, bool] | None:
    """(requires_grad, is_leaf); None for a view made under no_grad whose base was then written to: autograd refuses."""
    try:
        return t.requires_grad, t.is_leaf
    except RuntimeError:
        return None


def gradient(outputs: tuple[torch.Tensor, ...], x: torch.Tensor) -> torch.Tensor | None:
    # A view of a view under no_grad claims to require a gradient, and refuses to take one.
    wanted = [t for t in outputs if t is x or standing(t) == (True, False)]
    if not wanted or not x.requires_grad:
        return None
    weights = [(1 + torch.arange(t.numel()) % 2).view(t.shape).to(t.dtype) for t in wanted]
    (grad,) = torch.autograd.grad(wanted, [x], weights, allow_unused=True, retain_graph=True)
    return grad


def check(spec: dict[str, Any]) -> int:
    """Runs the pass over the program and compares; returns the number of sites applied."""
    inputs = make_inputs(spec)
    original = build(spec, inputs)
    rewritten = fx.GraphModule({}, copy_of(original.graph))
    context = PassContext(Options(strict=True), lambda: None, "0", False)  # type: ignore[arg-type, return-value]
    record, _ = pipeline.run_pass(Redundant(), rewritten, context)
    ours_in, theirs_in = copies(inputs, spec["alias"]), copies(inputs, spec["alias"])
    ours, theirs = rewritten(*ours_in), original(*theirs_in)
    compare([*ours, *ours_in], [*theirs, *theirs_in])
    assert list(map(standing, ours)) == list(map(standing, theirs))
    same_aliases([*ours, *ours_in], [*theirs, *theirs_in])
    a, b = gradient(ours, ours_in[0]), gradient(theirs, theirs_in[0])
    assert (a is None) == (b is None)
    if a is not None and b is not None:
        assert torch.equal(a, b)
    with torch.no_grad():  # a write to an output reaches the same tensors
        for mine, their in zip(ours, theirs, strict=True):
            if mine.numel():
                mine.view(-1)[0].add_(5) if mine.is_contiguous() else mine.neg_()
                their.view(-1)[0].add_(5) if their.is_contiguous() else their.neg_()
            compare([*ours, *ours_in], [*theirs, *theirs_in])
    return len(record.applied)


def copy_of(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        mapping[node] = copied.node_copy(node, mapping.__getitem__)
        mapping[node].meta = copy.copy(node.meta)
    return copied


APPLIED: list[int] = []


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_random_programs(spec: dict[str, Any]) -> None:
    APPLIED.append(check(spec))


def test_the_programs_had_something_to_remove() -> None:
    """Runs after the fuzzer: a generator whose programs never trip proves nothing."""
    assert sum(1 for n in APPLIED if n) >= len(APPLIED) // 20
