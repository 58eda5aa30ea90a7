"""Elements of random programs of mask operations: at every index the expression is what torch computes."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from optpass.passes.attention.masks.elements import Elements
from optpass.passes.attention.program.lower import lower

INF = float("inf")
DTYPES = (
    torch.bool,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
)
COMPARISONS = (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)


class Builder:
    """A random program as a graph with fake tensors beside the real ones.

    Attributes:
        graph: the program.
        real: what each tensor node holds.
        sizes: nodes of sizes, with their values; numbers where shapes are static.
    """

    def __init__(self, seed: int, dynamic: bool) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.graph = fx.Graph()
        self.real: dict[fx.Node, torch.Tensor] = {}
        self.inputs: list[fx.Node] = []
        self.dynamic = dynamic
        self.mode = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None, static_shapes=not dynamic)
        self.sizes: list[tuple[Any, int]] = []
        n, m = self.rng.choice([2, 3, 4, 5]), self.rng.choice([3, 4, 6, 7])
        for data in (torch.randint(-3, 4, (n, m)), torch.randn(n, m), torch.rand(m) > 0.5, torch.randint(0, 5, (m,))):
            self._input(data)
        if dynamic:
            for dim in (0, 1):
                node = self.graph.call_method("size", (self.inputs[0], dim))
                node.meta["example_value"] = self.inputs[0].meta["example_value"].size(dim)
                self.sizes.append((node, (n, m)[dim]))
        else:
            self.sizes = [(n, n), (m, m), (1, 1)]

    def _input(self, data: torch.Tensor) -> None:
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        context = StatelessSymbolicContext([DimDynamic.DYNAMIC] * data.dim()) if self.dynamic else None
        node.meta["example_value"] = self.mode.from_tensor(data, symbolic_context=context)
        self.inputs.append(node)
        self.real[node] = data

    def call(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node | None:
        """Add an operation on nodes; None where torch refuses it."""

        def values(kind: str) -> Any:
            def of(node: fx.Node) -> Any:
                if kind == "fake":
                    return node.meta["example_value"]
                return self.real[node] if node in self.real else dict(self.sizes)[node]

            return fx.node.map_arg((args, kwargs), of)

        try:
            real_args, real_kwargs = values("real")
            real = function(*real_args, **real_kwargs)
            if not isinstance(real, torch.Tensor) or real.numel() > 300 or real.numel() == 0 or real.dim() > 4:
                return None
            fake_args, fake_kwargs = values("fake")
            with enable_python_dispatcher(), self.mode:
                fake = function(*fake_args, **fake_kwargs)
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
            return None
        node = self.graph.call_function(function, args, kwargs)
        node.meta["example_value"] = fake
        self.real[node] = real
        return node

    # ---- choices ----------------------------------------------------------------------------------------------

    def tensor(self, want: Callable[[torch.Tensor], bool] = lambda _t: True) -> fx.Node:
        """A random tensor, later ones more often."""
        nodes = [node for node, real in self.real.items() if want(real)]
        nodes = nodes or list(self.real)
        return self.rng.choices(nodes, weights=range(1, len(nodes) + 1))[0]

    def size(self) -> Any:
        return self.rng.choice(self.sizes)[0]

    def number(self) -> Any:
        return self.rng.choice([0, 1, -1, 2, 3, 7, 0.0, 1.0, 0.5, -10000.0, -INF, INF, torch.finfo(torch.float32).min])

    def dim(self, node: fx.Node) -> int:
        return self.rng.randrange(-self.real[node].dim(), self.real[node].dim()) if self.real[node].dim() else 0

    def step(self) -> fx.Node | None:
        """Add one random operation."""
        return getattr(self, self.rng.choice([name for name in dir(self) if name.startswith("add_")]))()

    def add_range(self) -> fx.Node | None:
        dtype = self.rng.choice(DTYPES[1:])
        if self.rng.random() < 0.3:
            start, step = self.rng.randrange(-3, 3), self.rng.choice([1, 2, 3])
            return self.call(torch.arange, start, start + step * self.rng.randrange(1, 6), step, dtype=dtype)
        return self.call(torch.arange, self.size(), dtype=dtype)

    def add_full(self) -> fx.Node | None:
        shape = [self.size() for _ in range(self.rng.randrange(3))]
        return self.call(torch.full, shape, self.number(), dtype=self.rng.choice(DTYPES))

    def add_ones(self) -> fx.Node | None:
        function = self.rng.choice([torch.ones, torch.zeros])
        return self.call(function, self.size(), self.size(), dtype=self.rng.choice(DTYPES))

    def add_like(self) -> fx.Node | None:
        function = self.rng.choice([torch.ones_like, torch.zeros_like])
        return self.call(function, self.tensor(), dtype=self.rng.choice(DTYPES))

    def add_triangle(self) -> fx.Node | None:
        return self.call(
            self.rng.choice([torch.tril, torch.triu]), self.tensor(lambda t: t.dim() >= 2), self.rng.randrange(-2, 3)
        )

    def add_comparison(self) -> fx.Node | None:
        other = self.rng.choice([self.tensor(), self.number()])
        return self.call(self.rng.choice(COMPARISONS), self.tensor(), other)

    add_another_comparison = add_comparison

    def add_logic(self) -> fx.Node | None:
        function = self.rng.choice([operator.and_, operator.or_, operator.xor, torch.logical_and, torch.logical_xor])
        return self.call(function, *(self.tensor(lambda t: t.dtype == torch.bool) for _ in range(2)))

    def add_not(self) -> fx.Node | None:
        return self.call(torch.logical_not, self.tensor())

    def add_arithmetic(self) -> fx.Node | None:
        function = self.rng.choice([torch.add, torch.sub, torch.mul, torch.minimum, torch.maximum, torch.div])
        other = (
            self.tensor()
            if function in (torch.minimum, torch.maximum)
            else self.rng.choice([self.tensor(), self.number()])
        )
        return self.call(function, self.tensor(), other)

    add_more_arithmetic = add_arithmetic

    def add_division(self) -> fx.Node | None:
        other = self.rng.choice([2, 3, self.tensor()])
        if self.rng.random() < 0.3:
            return self.call(torch.div, self.tensor(), other, rounding_mode=self.rng.choice(["floor", "trunc"]))
        return self.call(self.rng.choice([torch.floor_divide, torch.remainder]), self.tensor(), other)

    def add_scaled(self) -> fx.Node | None:
        function = self.rng.choice([torch.add, torch.sub, torch.rsub])
        return self.call(
            function, self.tensor(), self.rng.choice([self.tensor(), 3]), alpha=self.rng.choice([1, 2, -1])
        )

    def add_unary(self) -> fx.Node | None:
        functions = [torch.neg, torch.abs, torch.square, torch.sqrt, torch.log, torch.isinf, torch.exp, torch.relu]
        return self.call(self.rng.choice(functions), self.tensor())

    def add_clamp(self) -> fx.Node | None:
        return self.call(torch.clamp, self.tensor(), self.rng.choice([None, 0, 1]), self.rng.choice([None, 2, 3]))

    def add_where(self) -> fx.Node | None:
        choices = [self.tensor(), self.number()]
        condition = self.tensor(lambda t: t.dtype == torch.bool)
        return self.call(torch.where, condition, self.rng.choice(choices), self.rng.choice(choices))

    def add_masked_fill(self) -> fx.Node | None:
        return self.call(torch.masked_fill, self.tensor(), self.tensor(lambda t: t.dtype == torch.bool), self.number())

    def add_cast(self) -> fx.Node | None:
        return self.call(torch.Tensor.to, self.tensor(), self.rng.choice(DTYPES))

    def add_view(self) -> fx.Node | None:
        node = self.tensor()
        dim = self.dim(node)
        return self.rng.choice(
            [
                lambda: self.call(
                    torch.unsqueeze, node, self.rng.randrange(-self.real[node].dim() - 1, self.real[node].dim() + 1)
                ),
                lambda: self.call(torch.transpose, node, dim, self.dim(node)),
                lambda: self.call(torch.squeeze, node),
                lambda: self.call(torch.flip, node, [dim]),
                lambda: self.call(torch.roll, node, self.rng.randrange(-2, 3), dim),
                lambda: self.call(torch.Tensor.repeat, node, *self.rng.choices([1, 2], k=self.real[node].dim() + 1)),
                lambda: self.call(torch.cumsum, node, dim),
                lambda: self.call(torch.flatten, node),
                lambda: self.call(torch.select, node, dim, self.rng.choice([0, 1, -1])),
                lambda: self.call(torch.diff, node, dim=dim),
                lambda: self.call(torch.narrow, node, dim, self.rng.choice([0, 1]), self.rng.choice([1, 2])),
            ]
        )()

    add_another_view = add_view

    def add_reshape(self) -> fx.Node | None:
        node = self.tensor()
        numel = self.real[node].numel()
        factors = [f for f in range(1, numel + 1) if numel % f == 0]
        first = self.rng.choice(factors)
        return self.call(torch.reshape, node, (first, numel // first, 1) if not self.dynamic else (-1, self.size()))

    def add_slice(self) -> fx.Node | None:
        node = self.tensor(lambda t: t.dim() >= 1)
        place = slice(self.rng.choice([None, 0, 1, -2]), self.rng.choice([None, 3, -1]), self.rng.choice([None, 1, 2]))
        lead = self.rng.choice([(), (..., None), (slice(None),), (...,)])
        return self.call(operator.getitem, node, (*lead, place))

    def add_join(self) -> fx.Node | None:
        node = self.tensor(lambda t: t.dim() >= 1)
        other = self.rng.choice([node, self.tensor()])
        return self.call(self.rng.choice([torch.cat, torch.stack]), [node, other], self.dim(node))

    def add_pad(self) -> fx.Node | None:
        pads = [self.rng.randrange(-1, 3) for _ in range(2)]
        return self.call(torch.nn.functional.pad, self.tensor(), pads, value=self.rng.choice([0, 1]))

    def add_index(self) -> fx.Node | None:
        node = self.tensor(lambda t: t.dim() >= 1)
        whole = lambda t: t.dtype == torch.int64 and t.dim() <= 2  # noqa: E731
        place = self.rng.choice([(), (slice(None),), (self.tensor(whole),), (self.tensor(whole), slice(None))])
        return self.call(operator.getitem, node, (*place, self.tensor(whole)))

    def add_gather(self) -> fx.Node | None:
        node = self.tensor(lambda t: t.dim() >= 1)
        return self.call(torch.gather, node, self.dim(node), self.tensor(lambda t: t.dtype == torch.int64))


def check(seed: int, dynamic: bool, compare: Any) -> tuple[int, int]:
    """Compare all Values of one random program; how many there are, and how many are looked into."""
    builder = Builder(seed, dynamic)
    for _ in range(14):
        builder.step()
    with enable_python_dispatcher():  # as under Dynamo: some shape functions need it for symbolic sizes
        program = lower(builder.graph, whole=True)
    leaves = {program.of_node[node]: builder.real[node] for node in builder.inputs}
    # The contents of one input may be read, those of the others not.
    held = {program.of_node[builder.inputs[3]]: builder.real[builder.inputs[3]]}
    engine = Elements(held.get)
    counted = [0, 0]
    for node, real in builder.real.items():
        value = program.of_node[node]
        names = [f"d{d}" for d in range(value.dim)]
        index = tuple(engine.atoms.axis(name, engine.sizes.form(s)) for name, s in zip(names, value.shape, strict=True))
        element = engine.element(value, index)
        told = compare(element, value, names, program, leaves)
        if told is None:
            continue
        wide = real if real.dtype == torch.bool else real.double() if real.is_floating_point() else real.long()
        assert np.array_equal(told, wide.numpy(), equal_nan=real.is_floating_point()), (
            f"seed {seed}: {node.format_node()}\n{value} {element!r}\n{told}\n{wide}"
        )
        counted[0] += 1
        counted[1] += value.op is not None and repr(element) != repr(engine.unknown(value, index))
    return counted[0], counted[1]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_elements_of_random_programs(dynamic: bool, concrete: Any, lowered_type: Any) -> None:
    def compare(element: Any, value: Any, names: Any, program: Any, leaves: Any) -> Any:
        return concrete(element, value, names, lowered_type(program, [], leaves))

    first = random.randrange(2**31)
    counts = [check(first + i, dynamic, compare) for i in range(8 if dynamic else 40)]
    total, inside = (sum(numbers) for numbers in zip(*counts, strict=True))
    assert inside > total / 3, f"seed {first}: {inside} of {total}"
