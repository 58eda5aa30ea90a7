"""A Dynamo graph as a program of ATen operations in single-assignment form: what recognition and mask proofs read.

Every spelling of attention becomes the same few operations here. Data and small queries only; `lower` builds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

#: Operations that give elements another place.
LAYOUT = frozenset("t transpose permute view _unsafe_view reshape expand unsqueeze squeeze alias detach".split())


@dataclass(eq=False)
class Value:
    """One tensor.

    Attributes:
        tensor: fake tensor; shape (ints or SymInts), dtype, strides, device.
        op: the ATen operation that makes it; None for a leaf. In-place operations stand here as what they compute.
        args: arguments in the order of the schema, defaults filled in; Values in place of tensors.
        index: which output of `op`.
        node: node of the Dynamo graph that it comes from.
        leaf: for a leaf, what it is: 'input' (placeholder), 'constant' (its contents are `real`), 'opaque' (not looked
            into, or an alias of memory that was written to).
        grad: grad mode under which it was made.
        autocast: autocast state under which it was made, as the lowering saw it; only compared.
        storage: identity of its memory.
        version: how many writes its memory had seen when it was made.
        real: for a constant of the graph, the tensor itself.
        learns: for a leaf, a gradient may flow to what it holds.
        gone: its memory was written to after it was made: what it held is nowhere any more.
    """

    tensor: torch.Tensor
    op: Any = None
    args: tuple[Any, ...] = ()
    index: int = 0
    node: fx.Node | None = None
    leaf: str = ""
    grad: bool = True
    autocast: Any = None
    storage: int = 0
    version: int = 0
    real: torch.Tensor | None = None
    learns: bool = False
    gone: bool = False

    @property
    def shape(self) -> torch.Size:
        """Sizes: ints, or SymInts where dynamic."""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self.tensor.dtype

    @property
    def dim(self) -> int:
        """Number of dims."""
        return self.tensor.dim()

    @property
    def name(self) -> str:
        """Name of the operation without namespace and overload, 'bmm'; '' for a leaf."""
        return "" if self.op is None else str(self.op._schema.name).rpartition("::")[2]

    def inputs(self) -> Iterator[Value]:
        """Values among the arguments, lists looked into."""
        return _values(self.args)

    def __repr__(self) -> str:
        where = f" of {self.node.name}" if self.node is not None else ""
        return f"<{self.name or self.leaf}{where} {tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}>"


@dataclass
class Program:
    """All values of one graph.

    Attributes:
        values: in the order they are made.
        of_node: what a Dynamo node returns: a Value, a nested tuple or list of them, or something else (SymInt ...).
        by_node: values made while a Dynamo node ran, in order.
        writes: per storage, the Dynamo nodes that write to it, in order.
        again: for a value that a node's tensor became when its memory was written to, that node.
        ran: nodes that were run on fake tensors, so that everything they do is among the values and writes.
        touches: per storage, every Dynamo node that makes an alias of it or writes to it.
        closed: nodes that are not looked into because no attention is written with them.
        softmaxes: nodes that are not looked into and make a softmax, or run a graph that does.
        autocast: under which state a node runs: on CPUs and on CUDA devices, whether it is on, and its dtype.
    """

    values: list[Value] = field(default_factory=list)
    of_node: dict[fx.Node, Any] = field(default_factory=dict)
    by_node: dict[fx.Node, list[Value]] = field(default_factory=dict)
    writes: dict[int, list[fx.Node]] = field(default_factory=dict)
    touches: dict[int, set[fx.Node]] = field(default_factory=dict)
    closed: set[fx.Node] = field(default_factory=set)
    softmaxes: set[fx.Node] = field(default_factory=set)
    again: dict[Value, fx.Node] = field(default_factory=dict)
    ran: set[fx.Node] = field(default_factory=set)
    autocast: dict[fx.Node, Any] = field(default_factory=dict)
    _users: dict[Value, list[Value]] | None = None
    _stored: dict[int, list[Value]] | None = None
    _writers: dict[fx.Node, set[int]] | None = None

    def forget_written(self) -> None:
        """A constant of the graph that the graph writes to holds something else at the next call."""
        for value in self.values:
            value.gone = len(self.writes.get(value.storage, ())) != value.version
            kept = value.real is not None and value.node is not None and value.node.op == "get_attr"
            if kept and value.storage in self.writes:
                value.real, value.leaf = None, "opaque"

    def users(self, value: Value) -> list[Value]:
        """Values computed from `value` directly."""
        if self._users is None:
            self._users = {}
            for user in self.values:
                for used in set(user.inputs()):
                    self._users.setdefault(used, []).append(user)
        return self._users.get(value, [])

    def reader(self, user: Value) -> Value:
        """What reads what `user` reads, if that only lays it out for one other."""
        while user.name in LAYOUT and len(users := self.users(user)) == 1:
            (user,) = users
        return user

    def stored(self, storage: int) -> list[Value]:
        """Values in the same memory, in the order they are made; once the program is complete."""
        if self._stored is None:
            self._stored = {}
            for value in self.values:
                self._stored.setdefault(value.storage, []).append(value)
        return self._stored.get(storage, [])

    def replace(self, value: Value, chain: Sequence[Value]) -> None:
        """Let `value` be computed as the last of `chain` is, values of the same node that stand in front of it then."""
        *before, last = chain
        value.op, value.args = last.op, last.args
        self.values[(at := self.values.index(value)) : at] = before
        if value.node is not None:
            made = self.by_node.setdefault(value.node, [])
            at = made.index(value) if value in made else len(made)
            made[at:at] = before
        self._users = self._stored = None

    def written_by(self, node: fx.Node) -> set[int]:
        """Storages that a Dynamo node writes to; once the program is complete."""
        if self._writers is None:
            self._writers = {}
            for storage, writers in self.writes.items():
                for writer in writers:
                    self._writers.setdefault(writer, set()).add(storage)
        return self._writers.get(node, set())

    def node_value(self, node: object) -> Value | None:
        """The single tensor that a Dynamo node returns, if it returns one."""
        found = self.of_node.get(node) if isinstance(node, fx.Node) else None
        return found if isinstance(found, Value) else None


def ancestors(*values: Value, through: Callable[[Value], bool] = lambda value: True) -> Iterator[Value]:
    """The values and those that they are computed from, each once; nothing is followed behind one for which `through`
    does not hold, and that one is left out too."""
    seen, todo = set(values), list(values)
    while todo:
        item = todo.pop()
        if not through(item):
            continue
        yield item
        for source in item.inputs():
            if source not in seen:
                seen.add(source)
                todo.append(source)


def flat_values(item: Any) -> list[Value]:
    """Values in what a node returns, in order."""
    return list(_values(item))


def _values(item: Any) -> Iterator[Value]:
    if isinstance(item, Value):
        yield item
    elif isinstance(item, (tuple, list)):
        for inner in item:
            yield from _values(inner)


def same(one: Any, other: Any) -> bool:
    """Whether two arguments or values are computed alike from the same leaves; random numbers never are."""
    if one is other:
        return True
    if isinstance(one, Value) and isinstance(other, Value):
        if one.real is not None and other.real is not None:
            return one.dtype == other.dtype and one.shape == other.shape == () and bool(one.real == other.real)
        random = one.op is None or torch.Tag.nondeterministic_seeded in one.op.tags
        alike = one.op is other.op and one.index == other.index
        return alike and not random and same(one.args, other.args)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return type(one) is type(other) and not isinstance(one, Value) and str(one) == str(other)


def arg(value: Value, name: str) -> Any:
    """The argument called `name` in the schema of `value.op`; None where the schema has none of that name."""
    for position, argument in enumerate(value.op._schema.arguments):
        if argument.name == name:
            return value.args[position]
    return None


def map_values(item: Any, function: Callable[[Value], Any]) -> Any:
    """`item` with `function` applied to every Value in its tuples and lists."""
    if isinstance(item, Value):
        return function(item)
    if isinstance(item, (tuple, list)):
        return type(item)(map_values(i, function) for i in item)
    return item
