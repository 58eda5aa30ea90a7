"""Our hooks inside the inner compiler: the joint graph before partitioning, and what the partitioner made of it.

The Inductor forms carry a `uuid()` (see `identity`), so that its caches keep working; a hook that the user had set
in the same place runs first, and without a uuid of its own it keeps its effect on the cache (a bypass).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import fx

from optpass.backend import compat
from optpass.passes.memory.tangents import is_tangent


class Hooks:
    """Callbacks of one compile. `on_joint` may transform the graph; the others only look.

    Args:
        uuid: cache identity of this compile.
        past_uuid: that of what follows the partitioning; default: the same.
        on_joint: called with the joint graph (the forward graph in inference) before partitioning.
        on_partitioned: called with the forward and backward graphs.
        on_inference: called with the graph when there is no backward.
        on_compiled: called with (is_backward, seconds) when Inductor has lowered a graph.

    Attributes:
        partition: the partitioner of this compile, where it is another one than the default.
        lowered: what that partitioner has lowered of its result already, by (is_backward); None for nothing.
    """

    def __init__(
        self,
        uuid: str,
        on_joint: Callable[[fx.GraphModule], None],
        on_partitioned: Callable[[fx.GraphModule, fx.GraphModule], None],
        on_inference: Callable[[fx.Graph], None],
        on_compiled: Callable[[bool, float], None],
        past_uuid: str | None = None,
    ) -> None:
        self.uuid = uuid
        self.past_uuid = past_uuid or uuid
        self.on_joint = on_joint
        self.on_partitioned = on_partitioned
        self.on_inference = on_inference
        self.on_compiled = on_compiled
        self.partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]] = compat.min_cut_partition
        self.lowered: Callable[[bool], Any] | None = None

    def joint_pass(self, users: Any, partitioner: Any = None) -> Any:
        """`joint_custom_post_pass`: the user's passes, if any, then ours.

        `partitioner` is the user's, whose identity counts here too: for a partitioner alone, Inductor takes a missing
        uuid for an identity and would hit where it cannot know.
        """
        return OptPassJointPass(self, _as_tuple(users), _as_tuple(partitioner))

    def partitioner(self, users: Any) -> Any:
        """`custom_partitioner_fn`: the user's partitioner or the default one, watched."""
        return OptPassPartitioner(self, users)


def _as_tuple(users: Any) -> tuple[Any, ...]:
    if users is None:
        return ()
    return tuple(users) if isinstance(users, (list, tuple)) else (users,)


class _Hook:
    """What both Inductor hooks share: identity instead of content.

    Inductor copies its configuration when it is patched and pickles it into the cache key. A hook is one object per
    compile, so a copy is the object itself; what is pickled is the identity, and nothing of the compile's state.
    """

    _hooks: Hooks
    _users: tuple[Any, ...]
    _beside: tuple[Any, ...] = ()  #: the user's hooks elsewhere whose identity counts here as well
    _past: tuple[Any, ...] | None = None  #: what decides beside the graph, once that is partitioned

    def uuid(self) -> Any:
        """Cache identity; None bypasses the caches, where a hook of the user's in the same place has none."""
        theirs = [user.uuid() if hasattr(user, "uuid") else None for user in (*self._users, *self._beside)]
        ours = (self._hooks.uuid,) if self._past is None else (self._hooks.past_uuid, *self._past)
        return None if any(u is None for u in theirs) else (*ours, *theirs)

    def past(self, decides: tuple[Any, ...]) -> Self:
        """The hook as it stands in the settings when the graph is partitioned: it has run, and what it went by is in
        the graph that it left. Equal graphs of a model are then compiled once, whatever each was planned beside.

        Args:
            decides: what decides what is compiled, beside the graph and the settings; plain values.
        """
        hook = type(self).__new__(type(self))
        hook.__dict__.update(self.__dict__, _past=decides)
        return hook

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __copy__(self) -> Any:
        return self

    def __reduce__(self) -> Any:
        return _identity_only, (type(self).__name__, repr(self.uuid()))


def _identity_only(kind: str, uuid: str) -> str:
    """What a hook is when unpickled: only cache keys are pickled, and nobody runs those."""
    return f"{kind}:{uuid}"


class OptPassJointPass(_Hook, compat.CustomGraphPass):
    """`joint_custom_post_pass`: the joint stage of the pipeline."""

    def __init__(self, hooks: Hooks, users: tuple[Any, ...], beside: tuple[Any, ...] = ()) -> None:
        self._hooks, self._users, self._beside = hooks, users, beside

    def __call__(self, graph: fx.Graph) -> None:
        for user in self._users:
            user(graph)
        module = graph.owning_module
        if module is None:
            return
        self._hooks.on_joint(module)
        if not any(is_tangent(n) for n in graph.nodes):
            self._hooks.on_inference(module.graph)


class OptPassPartitioner(_Hook, compat.CustomPartitionerFn):
    """`custom_partitioner_fn`: the partitioner in force, with our look at its result."""

    def __init__(self, hooks: Hooks, user: Any) -> None:
        self._hooks, self._users = hooks, () if user is None else (user,)

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        partition = self._users[0] if self._users else self._hooks.partition
        forward, backward = partition(gm, joint_inputs, **kwargs)
        self._hooks.on_partitioned(forward, backward)
        return forward, backward
