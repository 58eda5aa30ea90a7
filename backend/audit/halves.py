"""The two graphs beside a break, and what the break keeps from being fused: predicted, when somebody asks.

The halves are priced by the roofline as they were compiled, then as one graph: inputs of the second that the first
makes are joined, by the names of the local variables that carry them across. What crosses on the interpreter's stack
is not joined, so the figure may be too low, never too high for that reason. Sizes are the hints of the compile.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from optpass.backend import capture, compat, snapshot
from optpass.backend.compat import audit as dynamo
from optpass.backend.device import spec_for
from optpass.errors import OptPassError
from optpass.options import Options
from optpass.passes.roofline.analysis import program_of
from optpass.passes.roofline.price import price

_LOCAL = re.compile(r"^L\['(\w+)'\]$")


@dataclass(frozen=True)
class Half:
    """One Dynamo graph beside a break.

    Attributes:
        graph: a copy, without anything of the user's.
        sources: Dynamo's name of each placeholder, `L['x']`.
        carried: local variables alive at its end, and the node that each holds.
        grad: whether gradients were on.
        autocast: what was cast to what.
    """

    graph: fx.Graph
    sources: dict[str, str]
    carried: dict[str, str]
    grad: bool
    autocast: dict[str, torch.dtype]


def half_of(output: Any, gm: fx.GraphModule) -> Half | None:
    """What is needed of a graph on its way to the backend; None for one that holds modules or constants.

    Args:
        output: Dynamo's `OutputGraph`.
    """
    nodes = list(gm.graph.nodes)
    if any(node.op in ("get_attr", "call_module") for node in nodes):
        return None
    sources = {node.name: dynamo.source_name(node) for node in nodes if node.op == "placeholder"}
    graph = snapshot.copy_graph(gm.graph)
    cast = {d: torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)}
    return Half(graph, sources, dynamo.carried_locals(output), torch.is_grad_enabled(), cast)


def lost_us(before: Half, after: Half) -> float | None:
    """Predicted microseconds per call of the two graphs less those of the joined one; None where they cannot be priced.

    Never negative: a joined graph can always be run as the two.
    """
    joined = _joined(before, after)
    try:
        apart = _time_us(before.graph, before) + _time_us(after.graph, after)
        together = _time_us(joined, after)
    except (OptPassError, RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError, KeyError):
        return None  # a graph that does not trace again by itself, or a device without figures
    return max(0.0, apart - together)


def _time_us(graph: fx.Graph, half: Half) -> float:
    mode = compat.fake_mode_for_planning()
    with mode:
        inputs = [_input(node.meta.get("example_value")) for node in graph.nodes if node.op == "placeholder"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(half.grad))
        for device, dtype in half.autocast.items():
            stack.enter_context(torch.autocast(device, dtype))
        traced = capture.trace(fx.GraphModule({}, _copied(graph)), inputs)
    program = program_of(traced[:1])
    return price(program, spec_for(Options(), inputs)()).totals.time_us


def _input(value: Any) -> Any:
    """A stand-in of fixed size for a traced input."""
    if isinstance(value, torch.Tensor):
        sizes, strides = ([_size(item) for item in items] for items in (value.shape, value.stride()))
        made = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
        return made.requires_grad_(value.requires_grad) if value.is_floating_point() else made
    if isinstance(value, (int, torch.SymInt)):
        return _size(value)
    raise TypeError(f"an input that is no tensor: {type(value).__name__}")


def _size(value: Any) -> int:
    hint = dynamo.size_hint(value)
    if hint is None:
        raise ValueError("a size that depends on values")
    return hint


def _copied(graph: fx.Graph) -> fx.Graph:
    """Nodes and nothing else: what Dynamo noted on them belongs to another trace."""
    made = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        env[node] = made.node_copy(node, lambda n: env[n])
        env[node].meta = {}
    return made


def _joined(before: Half, after: Half) -> fx.Graph:
    """Both graphs as one; outputs of the first that the second takes are its own business then."""
    made = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    by_source: dict[str, fx.Node] = {}
    by_name: dict[str, fx.Node] = {}
    ends: list[fx.Node] = []
    for node in before.graph.nodes:
        if node.op == "output":
            ends = list(node.all_input_nodes)
            continue
        env[node] = by_name[node.name] = made.node_copy(node, lambda n: env[n])
        if node.op == "placeholder":
            by_source[before.sources[node.name]] = env[node]
    taken: set[fx.Node] = set()
    fresh = next((node for node in made.nodes if node.op != "placeholder"), None)
    results: list[fx.Node] = []
    for node in after.graph.nodes:
        if node.op == "output":
            results = [env[n] for n in node.all_input_nodes]
        elif node.op == "placeholder":
            found = _carrier(node, before, after, by_source, by_name)
            if found is None:
                with made.inserting_before(fresh) if fresh is not None else contextlib.nullcontext():
                    found = made.node_copy(node, lambda n: env[n])
            env[node] = found
            taken.add(found)
        else:
            env[node] = made.node_copy(node, lambda n: env[n])
    kept = [env[node] for node in ends if env[node] not in taken]
    made.output(tuple(dict.fromkeys([*results, *kept])))
    return made


def _carrier(
    node: fx.Node, before: Half, after: Half, by_source: dict[str, fx.Node], by_name: dict[str, fx.Node]
) -> fx.Node | None:
    """The node of the first graph that an input of the second holds."""
    source = after.sources[node.name]
    local = _LOCAL.match(source)
    found = by_name.get(before.carried.get(local[1], "")) if local else None
    found = found if found is not None else by_source.get(source)
    if found is None:
        return None
    mine, theirs = node.meta.get("example_value"), found.meta.get("example_value")
    if not (isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor)):
        return found if isinstance(mine, int | torch.SymInt) and isinstance(theirs, int | torch.SymInt) else None
    same = mine.dtype == theirs.dtype and mine.device == theirs.device and mine.dim() == theirs.dim()
    sizes = zip(mine.shape, theirs.shape, strict=False)
    return found if same and all(dynamo.size_hint(a) == dynamo.size_hint(b) for a, b in sizes) else None
