"""The parts into which Dynamo splits a graph for DistributedDataParallel, each compiled when it first runs.

Dynamo hands them over one after another, with fake tensors, before the first one has run. What a memory budget and
what proofs of masks rest on is read from real tensors: what a buffer holds, who holds a parameter's gradient and
optimizer state, what the parts before have kept. So a part is compiled as if a graph break came before it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from optpass.backend import compat
from optpass.backend.compat import data_parallel
from optpass.backend.compat.memory_callers import tensors_around_compile
from optpass.backend.snapshot import copy_graph
from optpass.options import Options

#: What is known around a call: what it was given, what its callers hold, the modules that are called.
Around = tuple[list[torch.Tensor], list[torch.Tensor], list[nn.Module]]


def is_awaited(gm: fx.GraphModule, options: Options) -> bool:
    """Whether a graph is such a part, and what is to be known of it takes real tensors."""
    return data_parallel.is_part(gm) and (options.budget is not None or any(map(_is_lent, gm.graph.nodes)))


def _is_lent(node: fx.Node) -> bool:
    """Whether it is a module's tensor that is not trained."""
    if node.op == "get_attr":
        return True
    value = node.meta.get("example_value")
    lent = isinstance(value, torch.Tensor) and not value.requires_grad
    return node.op == "placeholder" and lent and compat.module_attribute(node) is not None


@dataclass(frozen=True)
class Ending:
    """In place of what Dynamo says of a graph's end.

    Attributes:
        graph_break: other graphs of the same forward follow.
        all_train: each parameter of the modules that are called gets a gradient in the step.
        reason: as it is reported.
    """

    graph_break: bool
    all_train: bool
    reason: str = "a part of a graph"


#: The parts of each graph that was split, in order.
_PARTS: weakref.WeakKeyDictionary[Any, list[weakref.ref[Part]]] = weakref.WeakKeyDictionary()
_NUMBERS = itertools.count()


class Part:
    """One part of a graph, compiled when it first runs.

    Args:
        gm: as Dynamo handed it over.
        compile_it: compiles the part that it is given, under the name that it is given.
    """

    def __init__(self, gm: fx.GraphModule, compile_it: Callable[[Part, str], Callable[..., Any]]) -> None:
        self._gm = fx.GraphModule(gm, copy_graph(gm.graph))
        self._compile_it = compile_it
        self._compiled: Callable[..., Any] | None = None
        self._lock = threading.Lock()
        self._breaks, self._all_train = data_parallel.breaks_behind(), data_parallel.all_train()
        self._modules = [weakref.ref(module) for module in compat.modules_of_call()]
        self._siblings = _PARTS.setdefault(data_parallel.whole_graph(), [])
        self._siblings.append(weakref.ref(self))

    def __call__(self, *args: Any) -> Any:
        if self._compiled is None:
            with self._lock:
                if self._compiled is None:
                    self._compiled = self._compile_it(self, f"part_{next(_NUMBERS)}")
        return self._compiled(*args)

    def original(self) -> fx.GraphModule:
        """Its graph."""
        return self._gm

    def around(self) -> Around:
        """What is known around the call in which it is compiled."""
        return [], tensors_around_compile(), [module for reference in self._modules if (module := reference())]

    def tell(self, gm: fx.GraphModule, placeholders: Sequence[fx.Node]) -> None:
        """`gm` is this part, traced anew from a function of `*args`, for which `placeholders` stand."""
        compat.say_module_attributes(gm, placeholders)
        last = self._siblings[-1]() is self
        gm.compile_subgraph_reason = Ending(self._breaks if last else True, self._all_train)  # type: ignore[assignment]
