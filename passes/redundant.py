"""Redundant round trips: layout and dtype changes that end where they began.

Two rules, both on the Dynamo graph, both proved from fake-tensor metadata and never from the spelling:

- *layout*: a chain of views (`transpose`, `permute`, `view`, `contiguous` on contiguous, `to` its own dtype, ...)
  whose end has the storage, shape, strides, offset and dtype of an earlier link is that link.
- *cast*: `x.to(A).to(B)` with `x` of dtype `B` is `x` where every value of `B` is exact in `A`.

What it saves: the two passes over memory of each cast pair, and nodes that autograd, the partitioner and the inner
compiler would otherwise carry. It declines where removing the copy could be seen (an output, a mutation) or felt
(gradients that would be summed in the narrower dtype).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from optpass.options import Options
from optpass.passes.contract import Pass, PassContext, PassResult, Stage
from optpass.passes.effects import op_name, written
from optpass.passes.source import locate
from optpass.reporting.model import Site

#: Ops whose result shares its input's memory, at least where the metadata says so. `detach` and `conj` are links too:
#: what they change (`requires_grad`, the conjugate bit) is compared.
VIEW_OPS = frozenset(
    "contiguous conj detach expand expand_as flatten movedim moveaxis mT narrow permute ravel reshape reshape_as "
    "squeeze swapaxes swapdims T t to transpose type_as unflatten unsqueeze view view_as "
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
        replaced: list[fx.Node] = []
        for node in list(gm.graph.nodes):
            if not node.users or _tensor(node) is None:
                continue
            trip = (_layout_trip(node) if self._config.layout else None) or (
                _cast_trip(node) if self._config.cast else None
            )
            if trip is None:
                continue
            blocked = trip.blocked or hazards.against(trip)
            site = _site(trip)
            if blocked:
                result.declined.append(site.model_copy(update={"reason": blocked, "after": "", "cost": {}}))
                continue
            node.replace_all_uses_with(trip.origin)
            replaced.append(node)
            result.applied.append(site)
        result.changed = bool(replaced)
        for node in reversed(replaced):
            _erase_dead(gm.graph, node)
        return result


@dataclass(frozen=True)
class _Trip:
    """A round trip: `node` is `origin` again after `links`; `blocked` says why it is not quite."""

    node: fx.Node
    origin: fx.Node
    kind: str
    links: tuple[fx.Node, ...]  #: from `node` upwards, `origin` not included
    blocked: str | None = None


def _tensor(node: object) -> torch.Tensor | None:
    """The fake value of `node` if it is a plain strided tensor with a storage; None for everything else."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
        return None
    # A subclass may mean anything by `view`; what Dynamo's fake tensors stand for is a plain tensor.
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) or hasattr(value, "fake_mode")
    return value if plain and _storage_of(value) is not None else None


def _input(node: fx.Node) -> fx.Node | None:
    first = node.args[0] if node.args else node.kwargs.get("input")
    return first if isinstance(first, fx.Node) and _tensor(first) is not None else None


def _layout_trip(node: fx.Node) -> _Trip | None:
    """To the earliest link of the view chain above `node` that is the same view; else to one that almost is."""
    best: _Trip | None = None
    almost: _Trip | None = None
    links: list[fx.Node] = []
    current = node
    while op_name(current) in VIEW_OPS:
        above = _input(current)
        if above is None or _storage(above) != _storage(node):
            break
        links.append(current)
        if _same_place(above, node):
            blocked = _difference(above, links)
            if blocked is None:
                best = _Trip(node, above, "layout", tuple(links))
            elif len(links) > 1:  # a lone `detach` or `conj` goes nowhere and comes back from nowhere
                almost = _Trip(node, above, "layout", tuple(links), blocked)
        current = above
    return best or almost


def _difference(origin: fx.Node, links: Sequence[fx.Node]) -> str | None:
    """What still tells `origin` and the end of its round trip apart (`links[0]`), in plain words."""
    x, y = _tensor(origin), _tensor(links[0])
    assert x is not None and y is not None
    if x.requires_grad != y.requires_grad or any(_starts_anew(link) for link in links):
        return f"{origin.name} and its round trip differ in requires_grad: one of them is cut off from the gradient"
    if x.is_conj() != y.is_conj() or x.is_neg() != y.is_neg():
        return f"{origin.name} and its round trip differ in the conjugate or negative bit"
    return None if type(x) is type(y) else f"{origin.name} and its round trip differ in type"


def _starts_anew(link: fx.Node) -> bool:
    """A view of a view under `no_grad` still says `requires_grad`, but is a leaf: no gradient passes it."""
    value, above = _tensor(link), _input(link)
    assert value is not None and above is not None
    try:
        return value.requires_grad and value.is_leaf and value is not _tensor(above)
    except RuntimeError:  # such a view whose base was then written to: autograd refuses even to look at it
        return True


def _cast_trip(node: fx.Node) -> _Trip | None:
    """`x` where `node` is `x.to(A).to(B)`, `x` is of dtype `B` and `A` is another."""
    middle = _input(node)
    if middle is None or op_name(node) not in CAST_OPS or op_name(middle) not in CAST_OPS:
        return None
    origin = _input(middle)
    if origin is None:
        return None
    x, a, b = _tensor(origin), _tensor(middle), _tensor(node)
    assert x is not None and a is not None and b is not None
    if x.dtype != b.dtype or a.dtype == b.dtype or not x.device == a.device == b.device:
        return None
    links = (node, middle)
    blocked = _difference(origin, links)
    if a.dtype not in EXACT_IN.get(x.dtype, set()):
        blocked = f"{_dtype(a)} does not hold every {_dtype(x)} exactly, so casting there and back rounds"
    elif not _same_sizes(x, b):
        blocked = f"{origin.name} and its round trip differ in strides"
    elif x.requires_grad and len(middle.users) > 1:
        blocked = (
            f"{middle.name} is used elsewhere too: its gradients would be summed in {_dtype(x)} "
            f"instead of {_dtype(a)}, and rounded each time"
        )
    return _Trip(node, origin, "cast", links, blocked)


def _storage_of(value: torch.Tensor) -> int | None:
    try:
        return int(value.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # wrapped by torch.func: no memory of its own to compare
        return None


def _storage(node: object) -> int | None:
    value = _tensor(node)
    return _storage_of(value) if value is not None else None


def _same_place(one: fx.Node, other: fx.Node) -> bool:
    """Same dtype, shape, strides and offset; the caller has compared the storages."""
    x, y = _tensor(one), _tensor(other)
    assert x is not None and y is not None
    return x.dtype == y.dtype and _same_sizes(x, y) and _equal(x.storage_offset(), y.storage_offset())


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
        self.output_storages = {_storage(n) for n in output.all_input_nodes} - {None}
        self.returned = _returned(output.all_input_nodes)
        self.writers: dict[int, tuple[fx.Node, bool]] = {}
        for node in graph.nodes:
            targets, certain = written(node)
            for target in targets:
                storage = _storage(target)
                if storage is not None:
                    self.writers.setdefault(storage, (node, certain))

    def against(self, trip: _Trip) -> str | None:
        """Why the round trip must stay, in plain words; None if it may go."""
        if trip.node in self.returned:
            return "its result is returned: the caller would get the input itself instead of a tensor of its own"
        for link in (*trip.links, trip.origin):
            writer, certain = self.writers.get(_storage(link) or 0, (None, True))
            if writer is not None:
                how = "is modified in place by" if certain else "is given to an op that may modify it:"
                return f"{link.name} {how} {writer.name}"
        if trip.kind == "cast" and _storage(trip.node) in self.output_storages:
            return "a view of its result is returned: the caller's tensor would share memory with the input"
        return None


def _returned(outputs: Sequence[fx.Node]) -> set[fx.Node]:
    """The outputs, and what they are by another name: `to` or `contiguous` that changes nothing returns its input."""
    found: set[fx.Node] = set()
    for node in outputs:
        current: fx.Node | None = node
        while current is not None and current not in found:
            found.add(current)
            above = _input(current) if op_name(current) in VIEW_OPS and _tensor(current) is not None else None
            same = above is not None and _storage(above) == _storage(current) and _same_place(above, current)
            current = above if same else None
    return found


def _site(trip: _Trip) -> Site:
    source = locate(trip.node)
    before = ".".join([trip.origin.name, *(op_name(link) for link in reversed(trip.links))])
    # A link that something else uses stays; so do those above it.
    gone = 1 + next((i for i, link in enumerate(trip.links[1:]) if len(link.users) > 1), len(trip.links) - 1)
    cost: dict[str, float] = {"nodes_removed": float(gone)}
    reason = "the chain ends at the storage, shape, strides and dtype that it began with"
    if trip.kind == "cast":
        value, middle = _tensor(trip.node), _tensor(trip.links[1])
        assert value is not None and middle is not None
        reason = f"{_dtype(value)} is exact in {_dtype(middle)}, so casting there and back changes nothing"
        if all(isinstance(s, int) for s in value.shape):  # each cast reads one dtype and writes the other
            cost["bytes_saved"] = float(gone * value.numel() * (value.element_size() + middle.element_size()))
    return Site(
        kind="redundant", file=source.file, line=source.line, module=source.module, node=trip.node.name,
        reason=reason, before=before, after=trip.origin.name, cost=cost,
    )  # fmt: skip


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _erase_dead(graph: fx.Graph, node: fx.Node) -> None:
    """Erase `node` and the links above it that nothing uses any more; all of them only look at their input."""
    current: fx.Node | None = node
    while current is not None and not current.users and op_name(current) in VIEW_OPS | CAST_OPS:
        above = _input(current)
        graph.erase_node(current)
        current = above
