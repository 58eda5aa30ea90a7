"""A model as one graph without Dynamo, by non-strict export: for models that Dynamo cannot follow through a loop.

The Python of the model runs once, under fake tensors, so its prints and breaks do not matter. Lines and module paths
are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn


class _Step(nn.Module):
    """The model, and the loss of its output."""

    def __init__(self, fn: Callable[..., Any], owner: nn.Module | None, loss: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self.owner = owner if owner is not fn else None  # so that the parameters of a method are found
        self.fn = fn
        self.loss = loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.fn(*args, **kwargs)
        return output if self.loss is None else self.loss(output)


def whole_graph(
    model: Callable[..., Any],
    owner: nn.Module | None,
    inputs: tuple[Any, ...],
    named: dict[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
) -> tuple[fx.GraphModule, list[Any]]:
    """A graph of ATen ops with flat inputs, parameters among them, and the fake values of those.

    Args:
        model, owner: a module or a function, and the module that holds its parameters; tensors fake.
        inputs, named: its inputs, fake.
        loss: applied to the output, in the graph.

    Raises:
        Exception: whatever `torch.export.export` raises for a model that it cannot trace.
    """
    exported = torch.export.export(_Step(model, owner, loss), inputs, named, strict=False)
    gm = exported.graph_module
    for node in gm.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            node.meta["nn_module_stack"] = {key: (_own(path), kind) for key, (path, kind) in stack.items()}
    return gm, [node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"]


def _own(path: str) -> str:
    """A module's path below the user's model rather than below `_Step`."""
    head, _, rest = path.partition(".")
    return rest if head in ("fn", "owner") else path
