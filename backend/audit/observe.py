"""One call of a broken function, observed: how many of its tensor operations ran in graphs, and how many eager.

Torch's own profiler tells; nothing is added to the program but names around the compiled graphs, for that one call.
Operations of the backward count on neither side.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from optpass.backend.compat import audit as dynamo
from optpass.backend.compat import disable_dynamo

_MARK = "optpass_graph:"
_BACKWARD = ("autograd::engine::evaluate_function", "CompiledFunctionBackward")
#: One observed call at a time: graphs are marked for all threads.
_BUSY = threading.Lock()


@dataclass(frozen=True)
class Observed:
    """Tensor operations of one call: of the graphs that ran, and outside of them."""

    captured: int
    eager: int


@dataclass(frozen=True)
class Graph:
    """A compiled graph where Dynamo's code finds it: a global of the user's module."""

    namespace: dict[str, Any]
    name: str
    ops: int


class Observation:
    """Begins when made by `begin`; `end` gives the counts."""

    def __init__(self, graphs: Iterable[Graph], profile: Any) -> None:
        self._replaced: list[tuple[Graph, Any, Any]] = []
        self._profile = profile
        for graph in graphs:
            original = graph.namespace.get(graph.name)
            if callable(original):
                marked = _marked(original, f"{_MARK}{graph.ops}")
                graph.namespace[graph.name] = marked
                self._replaced.append((graph, original, marked))
        self._profile.__enter__()

    def end(self) -> Observed | None:
        """Put everything back and count; None where the profiler told nothing."""
        try:
            self._profile.__exit__(None, None, None)
        except AssertionError:  # operations that end in another thread, as collectives do, are beyond this profiler
            return None
        finally:
            for graph, original, marked in self._replaced:
                if graph.namespace.get(graph.name) is marked:
                    graph.namespace[graph.name] = original
            _BUSY.release()
        return _count(self._profile.function_events)


def begin(graphs: Iterable[Graph]) -> Observation | None:
    """Observe from now on; None where somebody profiles already, or torch has no such profiler."""
    profile = dynamo.operation_profiler()
    if profile is None or not _BUSY.acquire(blocking=False):
        return None
    try:
        return Observation(graphs, profile)
    except BaseException:
        _BUSY.release()
        raise


def _marked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function` under a name that the profiler sees; never traced, since it is called where Dynamo is on."""

    def optpass_graph(*args: Any, **kwargs: Any) -> Any:
        with dynamo.fast_marker(name):
            return function(*args, **kwargs)

    return disable_dynamo(optpass_graph)


def _count(events: Any) -> Observed | None:
    if events is None:
        return None
    captured = eager = 0
    for event in events:
        if event.name.startswith(_MARK):
            captured += int(event.name.removeprefix(_MARK))
        elif _is_op(event.name) and not _inside(event):
            eager += 1
    return Observed(captured, eager)


def _is_op(name: str) -> bool:
    return "::" in name and " " not in name and not name.startswith("autograd::")


def _inside(event: Any) -> bool:
    """Whether it is part of another operation, of a compiled graph or of the backward."""
    parent, depth = event.cpu_parent, 0
    while parent is not None and depth < 1000:
        name = parent.name
        if name.startswith((_MARK, *_BACKWARD)) or _is_op(name):
            return True
        parent, depth = parent.cpu_parent, depth + 1
    return False
