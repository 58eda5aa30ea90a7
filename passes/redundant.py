"""Redundant round trips: layout and dtype changes that end where they began.

Two rules, both on the Dynamo graph, both proved from fake-tensor metadata and never from the spelling:

- *layout*: a chain of views (`transpose`, `permute`, `view`, `contiguous` on contiguous, `to` its own dtype, ...)
  whose end has the storage, shape, strides, offset and dtype of an earlier link is that link.
- *cast*: `x.to(A).to(B)` with `x` of dtype `B` is `x` where every value of `B` is exact in `A`.

What it saves: the two passes over memory of each cast pair, and nodes that autograd, the partitioner and the inner
compiler would otherwise carry. It declines where removing the copy could be seen: an output, a mutation.
"""

from __future__ import annotations

import functools
import inspect
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from optpass.options import Options
from optpass.passes.contract import Pass, PassContext, PassResult, Stage
from optpass.passes.source import locate
from optpass.report.model import Site

#: Ops that return a view or their input and are transparent to autograd. `detach`, `conj` and `data` are not here.
VIEW_OPS = frozenset(
    "contiguous expand expand_as flatten movedim moveaxis mT narrow permute ravel reshape reshape_as squeeze "
    "swapaxes swapdims T t to transpose type_as unflatten unsqueeze view view_as "
    "float half bfloat16 double type".split()
)
#: Casts by method; `to` and `type` take the dtype as an argument. All are read off the metadata, not the name.
CAST_OPS = frozenset("to type type_as float half bfloat16 double".split())
#: Each dtype with those that hold all its values exactly.
EXACT_IN = {
    torch.bfloat16: {torch.float32, torch.float64},
    torch.float16: {torch.float32, torch.float64},
    torch.float32: {torch.float64},
    torch.int8: {torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64},
    torch.uint8: {torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64},
    torch.int16: {torch.int32, torch.int64, torch.float32, torch.float64},
    torch.int32: {torch.int64, torch.float64},
}


@dataclass(frozen=True)
class RedundantConfig:
    """Which rules run."""

    layout: bool = True
    cast: bool = True


class Redundant(Pass):
    """Removes layout and dtype round trips; see the module docstring."""

    name = "redundant"
    summary = "Removes view chains and cast pairs that end where they began."
    stage = Stage.DYNAMO

    def __init__(self, config: RedundantConfig | None = None) -> None:
        self._config = config or RedundantConfig()

    @classmethod
    def from_options(cls, options: Options) -> Redundant:
        return cls()

    @property
    def config(self) -> RedundantConfig:
        return self._config

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        result = PassResult()
        hazards = _Hazards(gm.graph)
        for node in list(gm.graph.nodes):
            if not node.users or _tensor(node) is None:
                continue
            found = (self._config.layout and _layout_origin(node)) or (self._config.cast and _cast_origin(node))
            if not found:
                continue
            origin, kind = found
            site = _site(node, origin, kind)
            blocked = hazards.against(node, origin, kind)
            if blocked:
                result.declined.append(site.model_copy(update={"reason": blocked, "after": "", "cost": {}}))
                continue
            node.replace_all_uses_with(origin)
            result.applied.append(site)
        if result.applied:
            result.changed = True
            _erase_dead(gm.graph, {s.node for s in result.applied})
        return result


def _op_name(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    if node.target is getattr and len(node.args) > 1:
        return str(node.args[1])
    return getattr(node.target, "__name__", "")


def _tensor(node: object) -> torch.Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    plain = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized
    return value if plain else None


def _input(node: fx.Node) -> fx.Node | None:
    first = node.args[0] if node.args else None
    return first if isinstance(first, fx.Node) and _tensor(first) is not None else None


def _layout_origin(node: fx.Node) -> tuple[fx.Node, str] | None:
    """The earliest link of the view chain above `node` that is the same view of the same memory."""
    best: fx.Node | None = None
    current = node
    while _op_name(current) in VIEW_OPS:
        above = _input(current)
        if above is None or not _same_storage(above, node):
            break
        if _same_view(above, node):
            best = above
        current = above
    return (best, "layout") if best is not None else None


def _cast_origin(node: fx.Node) -> tuple[fx.Node, str] | None:
    """`x` where `node` is `x.to(A).to(B)`, `x` is of dtype `B`, and `A` holds every `B` exactly."""
    middle = _input(node)
    if middle is None or _op_name(node) not in CAST_OPS or _op_name(middle) not in CAST_OPS:
        return None
    origin = _input(middle)
    if origin is None:
        return None
    x, a, b = _tensor(origin), _tensor(middle), _tensor(node)
    assert x is not None and a is not None and b is not None
    exact = x.dtype == b.dtype and a.dtype in EXACT_IN.get(x.dtype, set())
    same_grad = x.requires_grad == b.requires_grad
    if exact and same_grad and x.device == a.device == b.device and _same_sizes(x, b) and not x.is_conj():
        return origin, "cast"
    return None


def _storage(node: object) -> int | None:
    value = _tensor(node)
    return value.untyped_storage()._cdata if value is not None else None


def _same_storage(one: fx.Node, other: fx.Node) -> bool:
    return _storage(one) == _storage(other)


def _same_view(one: fx.Node, other: fx.Node) -> bool:
    x, y = _tensor(one), _tensor(other)
    assert x is not None and y is not None
    bits = x.is_conj() == y.is_conj() and x.is_neg() == y.is_neg()
    same = x.dtype == y.dtype and x.requires_grad == y.requires_grad and bits and type(x) is type(y)
    return same and _same_sizes(x, y) and _equal(x.storage_offset(), y.storage_offset())


def _same_sizes(x: torch.Tensor, y: torch.Tensor) -> bool:
    pairs = [*zip(x.shape, y.shape, strict=False), *zip(x.stride(), y.stride(), strict=False)]
    return x.dim() == y.dim() and all(_equal(a, b) for a, b in pairs)


def _equal(a: Any, b: Any) -> bool:
    """Equality of ints or SymInts that never adds a guard: symbols are compared as expressions."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return bool(a.node.expr == b.node.expr)
    return False


class _Hazards:
    """Where an alias in place of a copy, or one object in place of two, could be noticed."""

    def __init__(self, graph: fx.Graph) -> None:
        output = next(n for n in reversed(graph.nodes) if n.op == "output")
        self.outputs = set(output.all_input_nodes)
        self.output_storages = {_storage(n) for n in self.outputs} - {None}
        self.mutated: dict[int, fx.Node] = {}
        for node in graph.nodes:
            for target in _mutated_arguments(node):
                storage = _storage(target)
                if storage is not None:
                    self.mutated.setdefault(storage, node)

    def against(self, node: fx.Node, origin: fx.Node, kind: str) -> str | None:
        """Why `node` must stay, in plain words; None if it may go."""
        if node in self.outputs:
            return "its result is returned: the caller would get the input itself instead of a tensor of its own"
        for candidate in (node, origin):
            writer = self.mutated.get(_storage(candidate) or 0)
            if writer is not None:
                return f"{candidate.name} is modified in place by {writer.name}"
        if kind == "cast" and _storage(node) in self.output_storages:
            return "a view of its result is returned: the caller's tensor would share memory with the input"
        return None


def _mutated_arguments(node: fx.Node) -> list[object]:
    """Arguments that `node` writes to: in-place methods and operators, `out=`, item assignment, mutable schemas."""
    if node.op not in ("call_method", "call_function"):
        return []
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema
        return [a for a, s in zip(node.args, schema.arguments, strict=False) if s.alias_info and s.alias_info.is_write]
    name = _op_name(node)
    targets: list[object] = []
    inplace = name.endswith("_") and not name.endswith("__")
    if inplace or node.kwargs.get("inplace") or node.target in _INPLACE_OPERATORS:
        targets.extend(node.args[:1])
    if node.kwargs.get("out") is not None:
        targets.append(node.kwargs["out"])
    position = _inplace_position(node.target)
    if position is not None and len(node.args) > position and node.args[position] is not False:
        targets.extend(node.args[:1])
    if name in ("batch_norm", "instance_norm"):
        targets.extend(node.args[1:3])  # running statistics
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        targets.extend(node.all_input_nodes)  # sub-graphs may write to what they are given
    return targets


@functools.cache
def _inplace_position(target: object) -> int | None:
    """Position of the `inplace` parameter of a Python function such as `F.relu`; None where it has none."""
    if not callable(target) or not inspect.isfunction(target):
        return None
    names = list(inspect.signature(target).parameters)
    return names.index("inplace") if "inplace" in names else None


_INPLACE_OPERATORS = frozenset(
    getattr(operator, n)
    for n in "setitem iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift".split()
)


def _site(node: fx.Node, origin: fx.Node, kind: str) -> Site:
    source = locate(node)
    chain = []
    current: fx.Node | None = node
    while current is not None and current is not origin:
        chain.append(_op_name(current))
        current = _input(current)
    before = f"{origin.name}." + ".".join(reversed(chain))
    value = _tensor(node)
    cost: dict[str, float] = {"nodes_removed": float(len(chain))}
    if kind == "cast" and value is not None:
        middle = _tensor(node.args[0])
        sizes = value.element_size() + (middle.element_size() if middle is not None else 0)
        if all(isinstance(s, int) for s in value.shape):
            cost["bytes_saved"] = float(2 * value.numel() * sizes)
        reason = f"{_dtype(value)} is exact in {_dtype(middle)}, so casting there and back changes nothing"
    else:
        reason = "the chain ends at the storage, shape, strides and dtype that it began with"
    return Site(
        kind="redundant", file=source.file, line=source.line, module=source.module, node=node.name,
        reason=reason, before=before, after=origin.name, cost=cost,
    )  # fmt: skip


def _dtype(value: torch.Tensor | None) -> str:
    return str(value.dtype).removeprefix("torch.") if value is not None else "?"


def _erase_dead(graph: fx.Graph, removed: set[str]) -> None:
    """Erase the replaced nodes and the links above them that nothing uses any more; all of them are pure."""
    for node in reversed(list(graph.nodes)):
        pure = node.name in removed or _op_name(node) in VIEW_OPS
        if pure and not node.users and not _mutated_arguments(node):
            graph.erase_node(node)
