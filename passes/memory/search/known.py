"""What searches have found, for problems that are equal: a graph is planned again for every case that it runs in.

With gradients of earlier micro-batches or without, beside more or less that others hold, the step of one graph is the
same problem, and its plans do not depend on the budget. Nothing here searches.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Generic, TypeVar

from optpass.passes.memory.problem import Problem

T = TypeVar("T")

#: Problems that are remembered, the last ones.
MOST = 16


class Known(Generic[T]):
    """Something found for each of the last problems, by what they are."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._found: OrderedDict[str, T] = OrderedDict()

    def get(self, key: str) -> T | None:
        """What was found for the problem of that `key_of`."""
        if key in self._found:
            self._found.move_to_end(key)
        return self._found.get(key)

    def put(self, key: str, found: T) -> None:
        """Remember what was found; the problem asked for least lately is forgotten."""
        self._found[key] = found
        self._found.move_to_end(key)
        while len(self._found) > self._most:
            self._found.popitem(last=False)


def key_of(problem: Problem, graph: str = "") -> str:
    """Equal for problems that are equal in all that a search reads: everything but what FX nodes are called. `graph`:
    its `graph_key_of`, where that is known."""
    between = (problem.tail, problem.kept, problem.early)
    held = (problem.outputs_held, problem.tangents_held, problem.saved_held)
    return f"{graph or graph_key_of(problem)} {between} {held}"


def graph_key_of(problem: Problem) -> str:
    """Equal for problems that are equal but for what is there between their halves, and what is held meanwhile."""
    digest = hashlib.sha256()
    for o in problem.operations:
        figures = (o.inputs, o.outputs, o.seconds, o.workspace, o.forward, o.backward, o.kept_why, o.fusing)
        digest.update(repr((str(o.node.target), figures)).encode())
    for s in problem.storages:
        name = str(s.node.target) if s.node.op == "call_function" else s.node.op
        digest.update(repr((name, s.bytes, s.producer, s.given, s.tangent)).encode())
    ends = (problem.forward_outputs, problem.backward_outputs, sorted(problem.baseline))
    digest.update(repr(ends).encode())
    return digest.hexdigest()
