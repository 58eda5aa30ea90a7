"""What the tensors hold that a module lends to a Dynamo graph, for passes that prove something from it.

Only tensors of modules count (buffers, frozen parameters, tensor attributes), never inputs of the call; and only those
that neither this graph nor a gradient changes. Watching that they stay as they were is `content_guard`'s business.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import fx, nn

from optpass.backend import compat, snapshot
from optpass.backend.held import Held, private_copy
from optpass.passes.contract import ContentGuard
from optpass.passes.effects import written


@dataclass(frozen=True)
class Known:
    """A tensor whose contents a pass may use.

    Attributes:
        name: as the user calls it, 'h.0.attn.bias'.
        position: index among the graph's inputs; None for a constant of the graph.
        tensor: the user's tensor.
        held: its contents.
    """

    name: str
    position: int | None
    tensor: torch.Tensor
    held: Held


class Contents:
    """`PassContext.contents` of one graph.

    Args:
        gm: the graph as Dynamo handed it over.
        inputs: one per placeholder, real tensors where there are any; empty if nothing is to be known.
        keep: `original` will be asked for, even where no contents are given.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], *, keep: bool = False) -> None:
        self._attributes = {
            str(n.target): _attribute(gm, str(n.target)) for n in gm.graph.nodes if n.op in ("get_attr", "call_module")
        }
        self._tensors: dict[str, tuple[str, int | None, torch.Tensor]] = {}
        placeholders = (n for n in gm.graph.nodes if n.op == "placeholder")
        for position, (node, value) in enumerate(zip(placeholders, inputs, strict=False)):
            if is_readable(value) and not value.requires_grad and (name := compat.module_attribute(node)) is not None:
                self._tensors[_key(node)] = name, position, value
        for target, value in self._attributes.items() if inputs else ():
            if is_readable(value) and not value.requires_grad:
                self._tensors[f"get_attr {target}"] = target, None, value
        self._graph = snapshot.copy_graph(gm.graph) if self._tensors or keep else None
        self._inputs = list(inputs) if self._tensors else []
        self._known: dict[str, Known | None] = {}
        self._copies: dict[str, torch.Tensor] = {}  #: of what is held otherwise, while passes run
        self._kept: frozenset[str] | None = None

    def __call__(self, node: fx.Node) -> torch.Tensor | None:
        """A copy of the tensor behind `node`, or None."""
        key = _key(node)
        if key not in self._known:
            self._known[key] = self._look(key)
        known = self._known[key]
        return None if known is None else self._copies.get(key, known.held.copy)

    def guarded(self, guards: Sequence[ContentGuard]) -> list[tuple[Known, str]]:
        """What `guards` rest on, each tensor once, with all that rests on it. No more contents are asked for."""
        self._copies.clear()
        found: dict[str, tuple[Known, list[str]]] = {}
        for guard in guards:
            known = self._known[_key(guard.node)]
            assert known is not None  # the pipeline refuses other guards
            reasons = found.setdefault(_key(guard.node), (known, []))[1]
            if guard.reason not in reasons:
                reasons.append(guard.reason)
        return [(known, "; ".join(reasons)) for known, reasons in found.values()]

    def original(self) -> Callable[[], fx.GraphModule]:
        """What makes the graph as it was before any pass. Only where contents were given, or with `keep`."""
        assert self._graph is not None
        return functools.partial(fx.GraphModule, self._attributes, self._graph)

    def _look(self, key: str) -> Known | None:
        if key not in self._tensors or self._graph is None:
            return None
        name, position, tensor = self._tensors[key]
        if self._kept is None:
            self._kept = _kept(self._graph, self._inputs, self._attributes)
        if key not in self._kept:
            return None
        alike = next((k for k, known in self._known.items() if known is not None and known.held.same(tensor)), None)
        before = None if alike is None else self._known[alike]
        held = Held.of(tensor) if before is None else before.held
        if held is not None and held.copy is None:
            copy = None if alike is None else self._copies.get(alike)
            try:
                self._copies[key] = private_copy(tensor) if copy is None else copy
            except torch.OutOfMemoryError:
                return None
        return None if held is None else Known(name, position, tensor, held)


def is_readable(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether `value` is a tensor like any other, with memory to read and writes that torch counts."""
    return (
        type(value) in (torch.Tensor, nn.Parameter)
        and value.layout == torch.strided
        and value.device.type != "meta"
        and not (value.is_inference() or value.is_quantized or value.is_conj() or value.is_neg())
        and not compat.is_wrapped(value)
    )


def _key(node: fx.Node) -> str:
    """A name that passes and copies of the graph keep."""
    return f"{node.op} {node.target}"


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _kept(graph: fx.Graph, inputs: Sequence[Any], attributes: dict[str, Any]) -> frozenset[str]:
    """Keys of the inputs and constants whose memory no node writes to, under any name; none where that is not known."""
    targets = [t for node in graph.nodes for t in written(node)[0] if not _is_module(t, attributes)]
    if not all("example_value" in target.meta for target in targets):
        return frozenset()
    fakes = {storage for target in targets for storage in _storages(target.meta["example_value"])}
    sources = [n for n in graph.nodes if n.op == "placeholder"]
    real: dict[fx.Node, Any] = dict(zip(sources, inputs, strict=False))
    real |= {n: attributes[str(n.target)] for n in graph.nodes if n.op == "get_attr" and not _is_module(n, attributes)}
    changed: set[int] = set()
    untouched: list[fx.Node] = []
    for node, value in real.items():
        own = _storages(node.meta.get("example_value"))
        if own and own.isdisjoint(fakes):
            untouched.append(node)
        else:
            changed |= _storages(value)
    return frozenset(_key(node) for node in untouched if changed.isdisjoint(_storages(real[node])))


def _is_module(node: fx.Node, attributes: dict[str, Any]) -> bool:
    return node.op == "get_attr" and isinstance(attributes[str(node.target)], nn.Module)


def _storages(value: Any) -> set[int]:
    """Identities of the memory behind the tensors in `value`; views share theirs, real and fake."""
    leaves = torch.utils._pytree.tree_leaves(value)
    tensors = [compat.unwrapped(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    dense = [tensor for tensor in tensors if tensor.layout == torch.strided]
    return {leaf.untyped_storage()._cdata for leaf in dense}
