"""Every ATen operation that runs on fake tensors, told to whoever records them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optpass.passes.attention.program import nodes


class Listener(Protocol):
    """Is told of operations."""

    def reshaped(self, tensor: torch.Tensor) -> None:
        """Called before an operation gives `tensor` another shape in place."""

    def record(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Called for every ATen operation, after it ran."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Tells the lowering every ATen operation that a node makes."""

    def __init__(self, lowering: Listener) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.lowering = lowering

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.rpartition("::")[2] in nodes.RESHAPING:
            self.lowering.reshaped(args[0])
        result = func(*args, **(kwargs or {}))
        self.lowering.record(func, args, kwargs or {}, result)
        return result
