"""Undo for a pass, and the proof that a graph still computes tensors of the same metadata after it.

A snapshot is an fx graph copy (node metadata shared, not cloned) and the module's attribute dictionaries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from optpass.errors import PassError

_ATTRIBUTES = ("_parameters", "_buffers", "_modules")


@dataclass
class Snapshot:
    """State of a graph module before a pass."""

    graph: fx.Graph
    attributes: dict[str, dict[str, Any]]
    fingerprint: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)


def take(gm: fx.GraphModule, key: str) -> Snapshot:
    """Snapshot of `gm`; `key` is the metadata key that holds fake values ('example_value' or 'val')."""
    return Snapshot(
        graph=copy_graph(gm.graph),
        attributes={name: dict(getattr(gm, name)) for name in _ATTRIBUTES},
        fingerprint={n.name: (n.target, n.args, n.kwargs) for n in gm.graph.nodes},
        outputs=[_value(a, key) for a in _flat_outputs(gm.graph)],
    )


def restore(gm: fx.GraphModule, snapshot: Snapshot) -> None:
    """Put `gm` back to `snapshot`, in place: callers hold references to the module."""
    for name, saved in snapshot.attributes.items():
        current = getattr(gm, name)
        current.clear()
        current.update(saved)
    gm.graph = snapshot.graph
    gm.recompile()


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy whose nodes keep names, metadata and codegen; fake tensors are shared."""
    copied = fx.Graph(owning_module=graph.owning_module, tracer_cls=getattr(graph, "_tracer_cls", None))
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        mapping[node] = copied.node_copy(node, lambda n: mapping[n])
    copied._codegen = graph._codegen
    return copied


def check(gm: fx.GraphModule, before: Snapshot, key: str) -> None:
    """Lint `gm`, give every new node its fake value, and compare the outputs' metadata with the snapshot.

    Only nodes that are new or whose inputs changed metadata are evaluated, so the cost follows the change.

    Raises:
        PassError: the graph is malformed, a node cannot be evaluated, or an output changed shape, dtype, stride
            or device.
    """
    try:
        gm.graph.lint()
    except RuntimeError as error:
        raise PassError(f"left a malformed graph: {error}") from error
    dirty: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        unchanged = before.fingerprint.get(node.name) == (node.target, node.args, node.kwargs)
        if unchanged and key in node.meta and not any(a in dirty for a in node.all_input_nodes):
            continue
        value = _evaluate(gm, node, key)
        if key not in node.meta or not same_metadata(node.meta[key], value):
            dirty.add(node)
        node.meta[key] = value
    after = [_value(a, key) for a in _flat_outputs(gm.graph)]
    if len(after) != len(before.outputs):
        raise PassError(f"changed the number of outputs from {len(before.outputs)} to {len(after)}")
    for index, (old, new) in enumerate(zip(before.outputs, after, strict=True)):
        if not same_metadata(old, new):
            raise PassError(f"changed output {index} from {describe(old)} to {describe(new)}")


def _evaluate(gm: fx.GraphModule, node: fx.Node, key: str) -> Any:
    missing = [a.name for a in node.all_input_nodes if key not in a.meta and a.op != "get_attr"]
    if missing:
        raise PassError(f"node {node.name} uses {', '.join(missing)}, which has no fake value to check with")
    load = {a: a.meta[key] if key in a.meta else _attribute(gm, str(a.target)) for a in node.all_input_nodes}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), load.__getitem__)
    fake = next((v.fake_mode for v in _tensors(load.values()) if hasattr(v, "fake_mode")), None)
    try:
        with fake if fake is not None else torch.no_grad():
            if node.op == "call_function":
                return node.target(*args, **kwargs)  # type: ignore[operator]
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return gm.get_submodule(str(node.target))(*args, **kwargs)
    except Exception as error:
        raise PassError(f"node {node.name} ({node.target}) does not run on fake tensors: {error}") from error


def _tensors(values: Any) -> Any:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _flat_outputs(graph: fx.Graph) -> list[Any]:
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    flat: list[Any] = []
    fx.node.map_aggregate(output.args, flat.append)
    return flat


def _value(argument: Any, key: str) -> Any:
    return argument.meta.get(key) if isinstance(argument, fx.Node) else argument


def same_metadata(old: Any, new: Any) -> bool:
    """Equal shape, dtype, device and stride for tensors (deeply in tuples); equality for the rest."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        same = old.shape == new.shape and old.dtype == new.dtype and old.device == new.device
        return bool(same and old.layout == new.layout and (old.layout != torch.strided or old.stride() == new.stride()))
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return len(old) == len(new) and all(same_metadata(a, b) for a, b in zip(old, new, strict=True))
    return type(old) is type(new) and (old is new or bool(old == new))


def describe(value: Any) -> str:
    """`f32[8, 128] stride (128, 1)`, for messages."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} stride {tuple(value.stride())} {value.device}"
