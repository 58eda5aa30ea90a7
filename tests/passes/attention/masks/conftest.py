"""Shared by the mask tests: programs lowered to Values, and expressions computed on real numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from optpass.passes.attention.masks.evaluate import call
from optpass.passes.attention.masks.integers import Atom, Lin
from optpass.passes.attention.masks.pieces import Expr, Where
from optpass.passes.attention.masks.predicates import Pred
from optpass.passes.attention.program.ir import Program, Value
from optpass.passes.attention.program.lower import lower


@dataclass
class Lowered:
    """A function lowered through Dynamo.

    Attributes:
        program: its Values.
        outputs: the Values that it returns.
        inputs: what its leaves hold.
    """

    program: Program
    outputs: list[Value]
    inputs: dict[Value, torch.Tensor]

    def contents(self, value: Value) -> torch.Tensor | None:
        """What an input holds: every input is taken for a buffer."""
        return self.inputs.get(value)


def lowered(function: Callable[..., Sequence[torch.Tensor]], *args: torch.Tensor, dynamic: bool = False) -> Lowered:
    """`function`, which returns several tensors, as Dynamo hands it to a backend."""
    found: list[Lowered] = []

    def backend(gm: Any, examples: Sequence[Any]) -> Any:
        program = lower(gm.graph, lambda name: getattr(gm, name), whole=True)
        (output,) = (node for node in gm.graph.nodes if node.op == "output")
        places = [node for node in gm.graph.nodes if node.op == "placeholder"]
        inputs = {
            program.of_node[node]: real
            for node, real in zip(places, examples, strict=True)
            if isinstance(real, torch.Tensor)
        }
        found.append(Lowered(program, [program.of_node[node].args[0] for node in output.args[0]], inputs))
        return gm.forward

    def returns(*args: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in function(*args)]  # a reader after every write

    torch._dynamo.reset()
    torch.compile(returns, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    assert len(found) == 1
    return found[0]


class UnreadableError(Exception):
    """An expression rests on an element of a Value that lowering did not look into."""


class Concrete:
    """Expressions on real numbers: what the tests compare with what torch computes.

    Attributes:
        inputs: what the leaves hold.
        axes: for each axis name, an array of indices; all broadcast against each other.
        shape_env: where symbolic sizes come from; None where there are none.
    """

    def __init__(self, inputs: Mapping[Value, torch.Tensor], axes: Mapping[str, np.ndarray], shape_env: Any) -> None:
        self.inputs, self.axes, self.shape_env = inputs, axes, shape_env
        self._made: dict[Value, Any] = {}

    def __call__(self, x: Expr | None) -> Any:
        assert x is not None
        if isinstance(x, (bool, int, float)):
            return np.asarray(x)
        if isinstance(x, Lin):
            total = np.asarray(x.const)
            for atom, factor in x.terms:
                total = total + self._atom(atom) * factor
            return total
        if isinstance(x, Where):
            return np.where(self(x.pred), self(x.yes), self(x.no))
        return self._pred(x) if isinstance(x, Pred) else self._atom(x)

    def _pred(self, p: Pred) -> Any:
        if p.op in ("and", "or"):
            parts = np.broadcast_arrays(*(self(part) for part in p.parts))
            return (np.logical_and if p.op == "and" else np.logical_or).reduce(parts)
        if p.op in ("is", "not"):
            return np.asarray(self._atom(p.atom)) == (p.op == "is")
        form = self(p.form)
        return form >= 0 if p.op == "ge" else form == 0 if p.op == "eq" else form != 0

    def _atom(self, atom: Atom) -> Any:
        if atom.kind == "axis":
            return self.axes[atom.args[0]]
        if atom.kind == "size":
            return np.asarray(number(self.shape_env.create_symintnode(atom.args[0], hint=None)))
        if atom.kind == "elem":
            value, index = atom.args
            data = self.tensor(value)
            # Out of range only where a `where` takes the other side.
            place = [torch.as_tensor(self(i)).clamp(-size, size - 1) for i, size in zip(index, data.shape, strict=True)]
            return _wide(data[tuple(place)] if place else data)
        if atom.kind == "call":
            function, _, x, y = (*atom.args[:2], *map(self, atom.args[2:]))
            names = {
                "floordiv": np.floor_divide,
                "mod": np.mod,
                "max": np.maximum,
                "min": np.minimum,
                "mul": np.multiply,
            }
            return names[function](x, y)
        return self._applied(*atom.args)

    def _applied(self, function: Any, dtype: torch.dtype, _kinds: Any, *operands: Expr) -> Any:
        values = [torch.as_tensor(self(x)) for x in operands]
        if function == "to":
            return _wide(values[0].to(dtype))
        if isinstance(function, str):
            named = {
                "eq": torch.eq,
                "lt": torch.lt,
                "le": torch.le,
                "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
            }
            if dtype != torch.bool:
                values = [value.to(dtype) for value in values]
            if (
                function in ("floor_divide", "remainder", "trunc") and not dtype.is_floating_point
            ):  # by 0 only where a `where` takes the other side
                values[1] = values[1].where(values[1] != 0, 1)
            return _wide(named.get(function, getattr(torch, function, None))(*values).to(dtype))
        op, _, *template = function
        rest = iter(values)
        args = [next(rest).to(d[1]) if d[0] == "tensor" else eval(d[1]) if d[0] == "float" else d[1] for d in template]
        return _wide(call(op, args))

    def tensor(self, value: Value) -> torch.Tensor:
        """A Value computed for real."""
        if value not in self._made:
            if value.op is None:
                if value.leaf == "opaque":
                    raise UnreadableError
                self._made[value] = self.inputs[value] if value.real is None else value.real
            else:
                result = call(value.op, self._real(value.args))
                self._made[value] = result if isinstance(result, torch.Tensor) else result[value.index]
        return self._made[value]

    def _real(self, item: Any) -> Any:
        if isinstance(item, Value):
            return self.tensor(item)
        if isinstance(item, (list, tuple)):
            return type(item)(self._real(i) for i in item)
        return number(item) if isinstance(item, torch.SymInt) else item


def _wide(data: torch.Tensor) -> np.ndarray:
    """In a dtype that numpy's own arithmetic does not overflow."""
    wide = data if data.dtype == torch.bool else data.double() if data.is_floating_point() else data.long()
    return wide.numpy()


def grid(shape: Sequence[Any], names: Sequence[str]) -> dict[str, np.ndarray]:
    """All indices of a tensor, an array for each axis name, shaped to broadcast."""
    sizes = [number(size) for size in shape]
    return {
        name: np.arange(size).reshape([-1 if d == i else 1 for i in range(len(sizes))])
        for d, (name, size) in enumerate(zip(names, sizes, strict=True))
    }


def number(size: Any) -> int:
    """A size, symbolic ones as in the example."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


@pytest.fixture(scope="session", name="lowered")
def lowered_fixture() -> Callable[..., Lowered]:
    """`lowered`."""
    return lowered


@pytest.fixture(scope="session")
def concrete() -> Callable[..., np.ndarray | None]:
    """An expression over named axes as an array of the shape of a Value; None where it rests on an opaque leaf."""

    def compute(x: Expr | None, value: Value, names: Sequence[str], low: Lowered) -> np.ndarray | None:
        axes = grid(value.shape, names)
        sizes = (size for v in low.program.values for size in v.shape if isinstance(size, torch.SymInt))
        shape_env = next((size.node.shape_env for size in sizes), None)
        try:
            found = Concrete(low.inputs, axes, shape_env)(x)
        except UnreadableError:
            return None
        return np.broadcast_to(found, [axis.size for axis in axes.values()])

    return compute


@pytest.fixture(scope="session")
def lowered_type() -> type[Lowered]:
    """`Lowered`, to be made without Dynamo."""
    return Lowered
