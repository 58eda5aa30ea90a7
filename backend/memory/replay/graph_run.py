"""Runs an FX graph of ATen operators on fake tensors and counts what it allocates, as `aot_eager` would run it.

The order is the graph's; a value is released after its last use, and an input that nobody else holds too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from optpass.backend import compat
from optpass.backend.memory.replay.graph_values import concrete
from optpass.backend.memory.replay.storages import Storages
from optpass.backend.memory.replay.strides import as_run


class GraphRun:
    """An ATen graph, ready to run on fake tensors of `mode`."""

    def __init__(self, gm: fx.GraphModule, mode: compat.FakeTensorMode) -> None:
        self._gm = gm
        self._mode = mode
        self._releases = _last_uses(gm.graph)

    def run(self, args: list[Any], storages: Storages) -> list[Any]:
        """Run with `args`, a list that is emptied, so that inputs are released as they are by a boxed call."""
        environment: dict[fx.Node, Any] = {}
        inputs = iter(args)
        for node in self._gm.graph.find_nodes(op="placeholder"):
            environment[node] = next(inputs)
        del inputs
        args.clear()
        with torch.no_grad(), self._mode:
            for node in self._gm.graph.nodes:
                if node.op == "output":
                    return list(fx.node.map_arg(node.args[0], environment.__getitem__))
                if node.op != "placeholder":
                    self._execute(node, environment, storages)
                for dead in self._releases.get(node, ()):
                    del environment[dead]
        raise AssertionError("a graph without an output")

    def _execute(self, node: fx.Node, environment: dict[fx.Node, Any], storages: Storages) -> None:
        if node.op == "get_attr":
            environment[node] = self._attribute(str(node.target), storages)
            return
        args = fx.node.map_arg(node.args, environment.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, environment.__getitem__)
        target: Any = node.target
        try:
            out = as_run(target, args, kwargs, target(*args, **kwargs))
        except Exception as error:
            if not compat.needs_values(error):
                raise
            out = torch.utils._pytree.tree_map(lambda value: concrete(value, self._mode), node.meta["val"])
        storages.ran(node.name, target, args, kwargs, out)
        environment[node] = out

    def _attribute(self, target: str, storages: Storages) -> Any:
        value: Any = self._gm
        for part in target.split("."):
            value = getattr(value, part)
        if isinstance(value, torch.Tensor):
            if not isinstance(value, compat.FakeTensor) or value.fake_mode is not self._mode:
                value = self._mode.from_tensor(value)
            storages.external(value)
        return value


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Which values are released after which node, as FX's generated code does; unused inputs stay to the end."""
    found: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node not in seen and node.op not in ("placeholder", "output"):
            found.setdefault(node, []).append(node)
            seen.add(node)
        if node.op == "output":
            seen.update(node.all_input_nodes)  # what is returned lives on
            continue
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                found.setdefault(node, []).append(used)
    return found
