"""Undo for a pass, and the proof that a graph still computes tensors of the same metadata after it.

A snapshot keeps the graph itself and leaves the module with a copy to work on (metadata shared, not cloned): Dynamo
goes on using the graph that it handed over, so what is put back must be that very object. Comparing sizes adds no
guard: symbols are equal where their expressions are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from optpass.backend.compat import TracingContext, tracing
from optpass.errors import PassError
from optpass.passes.attention.axes import equal
from optpass.passes.attention.strides import equal_strides

_ATTRIBUTES = ("_parameters", "_buffers", "_modules")
#: What Dynamo leaves on nodes that leads to the user's tensors; a copy that outlives the compile goes without.
_USER_DATA = ("grapharg", "tensor_dict")
#: Calls in a Dynamo graph that change how later nodes behave; the check goes through the same states.
_STATE_CALLS = frozenset(
    ("_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode", "_exit_inference_mode")
)


@dataclass
class Snapshot:
    """State of a graph module before a pass."""

    graph: fx.Graph
    attributes: dict[str, dict[str, Any]]
    fingerprint: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    inputs: list[tuple[str, Any]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


def take(gm: fx.GraphModule, key: str) -> Snapshot:
    """Snapshot of `gm`, which continues with a copy of its graph.

    `key` is the metadata key that holds fake values ('example_value' or 'val').
    """
    original = gm.graph
    gm.graph = copy_graph(original, keep=True)
    return Snapshot(
        graph=original,
        attributes={name: dict(getattr(gm, name)) for name in _ATTRIBUTES},
        fingerprint=_fingerprint(gm.graph),
        inputs=_inputs(gm.graph),
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


def copy_graph(graph: fx.Graph, *, keep: bool = False) -> fx.Graph:
    """A copy whose nodes keep names, metadata and codegen; fake tensors are shared.

    Unless `keep`, the copy may outlive the compile: it holds on to no module and to nothing of the user's. With it,
    inputs share their metadata with the original's, so that what Dynamo removes when it is done is gone here too.
    """
    copied = fx.Graph(tracer_cls=getattr(graph, "_tracer_cls", None))
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        mapping[node] = copied.node_copy(node, lambda n: mapping[n])
        for name, value in vars(node).items():  # AOTAutograd finds Dynamo's source of an input here, not in `meta`
            vars(mapping[node]).setdefault(name, value)
        if keep and node.op == "placeholder":
            mapping[node].meta = node.meta
        if not keep:
            for data in _USER_DATA:
                mapping[node].meta.pop(data, None)
    copied._codegen = graph._codegen
    return copied


def modified(gm: fx.GraphModule, before: Snapshot) -> bool:
    """Whether any node was added, removed, moved or rewired, or an attribute replaced, since the snapshot."""
    now, then = _fingerprint(gm.graph), before.fingerprint
    if list(now) != list(then) or any(now[name] != then[name] for name in now):
        return True
    return any(
        getattr(gm, name).keys() != saved.keys() or any(getattr(gm, name)[k] is not v for k, v in saved.items())
        for name, saved in before.attributes.items()
    )


def check(gm: fx.GraphModule, before: Snapshot, key: str) -> None:
    """Lint `gm`, give every new node its fake value, and compare inputs and outputs with the snapshot.

    Only nodes that are new or whose inputs changed metadata are evaluated, so the cost follows the change. Whether
    outputs share memory with inputs is not compared: a pass that could change that must prove that it does not.

    Raises:
        PassError: the graph is malformed, a node cannot be evaluated, inputs were added, removed or reordered, or an
            output changed shape, dtype, stride, device or (before autograd) `requires_grad`.
    """
    try:
        gm.graph.lint()
    except RuntimeError as error:
        raise PassError(f"left a malformed graph: {error}") from error
    if _inputs(gm.graph) != before.inputs:
        raise PassError("changed the graph's inputs")
    _evaluate_changed(gm, before, key)
    after = [_value(a, key) for a in _flat_outputs(gm.graph)]
    if len(after) != len(before.outputs):
        raise PassError(f"changed the number of outputs from {len(before.outputs)} to {len(after)}")
    for index, (old, new) in enumerate(zip(before.outputs, after, strict=True)):
        if not same_metadata(old, new) or (key == "example_value" and _needs_grad(old) != _needs_grad(new)):
            raise PassError(f"changed output {index} from {describe(old)} to {describe(new)}")


def _evaluate_changed(gm: fx.GraphModule, before: Snapshot, key: str) -> None:
    values = (v for n in gm.graph.nodes for v in _tensors([n.meta.get(key)]))
    fake = next((getattr(v, "fake_mode", None) for v in values if _is_fake(v)), None)
    dirty: set[fx.Node] = set()
    # Operators that trace a graph of their own (FlexAttention's score) ask for the fake mode that is at work.
    with tracing(TracingContext(fake)), _states(key) as enter:
        for node in gm.graph.nodes:
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            if enter(node):
                continue
            unchanged = before.fingerprint.get(node.name) == (node.op, node.target, node.args, node.kwargs)
            if unchanged and key in node.meta and not any(a in dirty for a in node.all_input_nodes):
                continue
            value = _evaluate(gm, node, key, fake)
            old = node.meta.get(key)
            if key not in node.meta or not same_metadata(old, value) or _needs_grad(old) != _needs_grad(value):
                dirty.add(node)
            node.meta[key] = value


@contextlib.contextmanager
def _states(key: str) -> Iterator[Any]:
    """Yields a function that goes through a state-changing call of a Dynamo graph; every state is left at the end."""
    open_states: dict[fx.Node, Any] = {}

    def enter(node: fx.Node) -> bool:
        name = getattr(node.target, "__name__", "")
        if key != "example_value" or node.op != "call_function" or name not in _STATE_CALLS:
            return False
        function: Any = node.target
        if name.startswith("_exit"):
            state = open_states.pop(node.args[0], None) if isinstance(node.args[0], fx.Node) else None
            if state is not None:
                function(state)
        else:
            result = function(*node.args, **node.kwargs)
            if name.startswith("_enter"):
                open_states[node] = result
        return True

    with torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            yield enter
        finally:
            for state in reversed(open_states.values()):
                state.__exit__(None, None, None)


def _evaluate(gm: fx.GraphModule, node: fx.Node, key: str, fake: Any) -> Any:
    missing = [a.name for a in node.all_input_nodes if key not in a.meta and a.op != "get_attr"]
    if missing:
        raise PassError(f"node {node.name} uses {', '.join(missing)}, which has no fake value to check with")
    load = {a: a.meta[key] if key in a.meta else _attribute(gm, str(a.target), fake) for a in node.all_input_nodes}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), load.__getitem__)
    try:
        with contextlib.ExitStack() as stack:
            if fake is not None:
                # As Dynamo ran them: without it some operations (`interpolate`, `pad`) have no symbolic sizes.
                stack.enter_context(getattr(torch._C, "_EnablePythonDispatcher", contextlib.nullcontext)())
                stack.enter_context(fake)
                if key == "example_value" and fake.shape_env is not None:
                    # AOTAutograd traces this graph again with guards of its own; the check must not add to them.
                    stack.enter_context(fake.shape_env.suppress_guards())
                    stack.enter_context(fake.shape_env.ignore_fresh_unbacked_symbols())
            if node.op == "call_function":
                return node.target(*args, **kwargs)  # type: ignore[operator]
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return gm.get_submodule(str(node.target))(*args, **kwargs)
    except Exception as error:
        raise PassError(f"node {node.name} ({node.target}) does not run on fake tensors: {error}") from error


def _is_fake(value: torch.Tensor) -> bool:
    return hasattr(value, "fake_mode")


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _attribute(gm: fx.GraphModule, target: str, fake: Any) -> Any:
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    if fake is not None and isinstance(value, torch.Tensor) and not _is_fake(value):
        return fake.from_tensor(value)
    return value


def _fingerprint(graph: fx.Graph) -> dict[str, tuple[Any, ...]]:
    return {n.name: (n.op, n.target, n.args, n.kwargs) for n in graph.nodes}


def _inputs(graph: fx.Graph) -> list[tuple[str, Any]]:
    return [(n.name, n.target) for n in graph.nodes if n.op == "placeholder"]


def _flat_outputs(graph: fx.Graph) -> list[Any]:
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    flat: list[Any] = []
    fx.node.map_aggregate(output.args, flat.append)
    return flat


def _value(argument: Any, key: str) -> Any:
    return argument.meta.get(key) if isinstance(argument, fx.Node) else argument


def _needs_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def same_metadata(old: Any, new: Any) -> bool:
    """Equal shape, dtype, device and stride for tensors (deeply in tuples); equality for the rest."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        if old.dtype != new.dtype or old.device != new.device or old.layout != new.layout:
            return False
        return _same_ints(old.shape, new.shape) and (old.layout != torch.strided or _same_strides(old, new))
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return len(old) == len(new) and all(same_metadata(a, b) for a, b in zip(old, new, strict=True))
    if _is_symbol(old) or _is_symbol(new):
        return _same_number(old, new)
    return type(old) is type(new) and (old is new or bool(old == new))


def _same_strides(old: torch.Tensor, new: torch.Tensor) -> bool:
    """A dim of size 1 has no stride to speak of."""
    triples = zip(old.shape, old.stride(), new.stride(), strict=True)
    return all(_same_number(size, 1) or _same_number(a, b) or equal_strides(a, b) for size, a, b in triples)


def _same_ints(old: Any, new: Any) -> bool:
    return len(old) == len(new) and all(_same_number(a, b) for a, b in zip(old, new, strict=True))


def _same_number(old: Any, new: Any) -> bool:
    """Equality that adds no guard: expressions are compared, not hints, and what guards have fixed since counts."""
    if not (_is_symbol(old) or _is_symbol(new)):
        return bool(old == new)
    if any(isinstance(value, torch.SymBool) for value in (old, new)):
        return _is_symbol(old) and _is_symbol(new) and bool(old.node.expr == new.node.expr)
    env = (old if _is_symbol(old) else new).node.shape_env
    one, other = (value.node.expr if _is_symbol(value) else value for value in (old, new))
    return bool(one == other) or equal(one, other) or _under_guards(one, env) == _under_guards(other, env)


def _under_guards(expr: Any, env: Any) -> Any:
    """`expr` with what the guards of the graph say is a number written as that number."""
    if not isinstance(expr, sympy.Expr):
        return sympy.sympify(expr)
    guards = (guard.expr for guard in env.guards)
    fixed = {g.lhs: g.rhs for g in guards if isinstance(g, sympy.Eq) and g.rhs.is_Integer and not g.lhs.is_Integer}
    return env.simplify(expr.subs(fixed))


def _is_symbol(value: Any) -> bool:
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def describe(value: Any) -> str:
    """`float32[8, 128] stride (128, 1) cpu`, for messages."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} stride {tuple(value.stride())} {value.device}"
    return text + (" requires_grad" if value.requires_grad else "")
