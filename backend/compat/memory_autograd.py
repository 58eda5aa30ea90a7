"""Autograd's graph as it stands while a step runs: the node of a compiled graph, what eager nodes save, and where the
backward that is running began. For `backend.memory`; nothing here counts bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optpass.backend.compat.memory_hooks import is_checkpointed as is_checkpointed
from optpass.backend.compat.memory_hooks import packs_what_is_saved as packs_what_is_saved

#: Nodes that autograd puts between a compiled function and an output that is a view or an alias of another tensor.
_BETWEEN = 4


def compiled_node(result: Any) -> Any | None:
    """The autograd node of the AOTAutograd function that gave `result`; None where nothing is to be differentiated."""
    outputs = [r for r in torch.utils._pytree.tree_leaves(result) if isinstance(r, torch.Tensor)]
    for output in outputs:
        node = output.grad_fn
        for _ in range(_BETWEEN):
            if node is None:
                break
            if is_compiled(node):
                return node
            node = next((n for n, _ in node.next_functions if n is not None), None)
    return next((o.grad_fn for o in outputs if o.grad_fn is not None), None)


def is_compiled(node: Any) -> bool:
    """Whether a node is the backward of a graph that AOTAutograd compiled."""
    return "CompiledFunction" in node.name()


def is_in_backward() -> bool:
    """Whether this thread is in the midst of a backward: a checkpoint runs its forward again there."""
    current = getattr(torch._C, "_current_graph_task_id", None)
    return current is not None and current() != -1


def saved_by_function(node: Any) -> list[torch.Tensor]:
    """Tensors that a custom function's node saves; none where they are released, or packed by the user's own hooks."""
    try:
        return [] if is_packed(node, "_saved_tensors") else saved_now(node)
    except RuntimeError:
        return []


def saved_now(node: Any) -> list[torch.Tensor]:
    """The same of a node that was made just now, which only hooks that still hold could pack; in a fraction of the
    time."""
    if packs_what_is_saved():
        return []
    try:
        return [t for t in getattr(node, "saved_tensors", ()) if isinstance(t, torch.Tensor)]
    except RuntimeError:
        return []


def is_packed(node: Any, name: str) -> bool:
    """Whether hooks of the user's have packed what a node keeps as `name` ('_saved_self'; '_saved_tensors' of a custom
    function): to unpack it runs their code, or the forward of a checkpoint, which gives it out once.

    Raises:
        RuntimeError: it is released.
    """
    kept = getattr(node, f"_raw{name}", ())
    return any(
        getattr(k, "unpack_hook", None) is not None for k in (kept if isinstance(kept, (list, tuple)) else (kept,))
    )


def held_elsewhere(node: Any, storage: Any) -> bool:
    """Whether a storage is held by anybody but the custom function's node that has saved it; taken to be so where
    torch does not count."""
    saved = sum(t.untyped_storage()._cdata == storage._cdata for t in saved_by_function(node))  # these are gone now
    count = _holders_of(storage)
    return count is None or count > saved


def held_by_more(storage: Any, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether anybody but `tensors` holds a storage; where torch does not count, nobody is taken to."""
    count = _holders_of(storage)
    return count is not None and count > sum(t.untyped_storage()._cdata == storage._cdata for t in tensors)


def _holders_of(storage: Any) -> int | None:
    """How many tensors are of a storage, beside whoever asks; None where torch does not count."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else int(count(storage._cdata)) - 1


def saved_by_operator(node: Any) -> list[torch.Tensor]:
    """Tensors that an eager operator's node saves, as far as they are not released yet."""
    if packs_what_is_saved():
        return []
    found: list[torch.Tensor] = []
    for name in saved_names(node):
        try:
            if is_packed(node, name):
                continue
            value = getattr(node, name)
        except RuntimeError:
            continue
        values = value if isinstance(value, (list, tuple)) else (value,)
        found.extend(v for v in values if isinstance(v, torch.Tensor))
    return found


def saved_names(node: Any) -> list[str]:
    """Names under which an eager operator's node keeps tensors and arguments: '_saved_self', '_saved_dim'."""
    return [name for name in dir(node) if name.startswith("_saved_")]


def is_released(node: Any, name: str) -> bool:
    """Whether what the node keeps under `name` is a tensor that its backward has released."""
    try:
        if not is_packed(node, name):
            getattr(node, name)
    except RuntimeError:
        return True
    return False


def leaf_of(node: Any) -> torch.Tensor | None:
    """The tensor that an accumulating node is of."""
    value = getattr(node, "variable", None)
    return value if isinstance(value, torch.Tensor) else None


def output_extents(node: Any) -> list[tuple[tuple[int, ...], int]]:
    """Shape, and bytes of an element, of each tensor that the operator behind a node returned; without an element
    where that is not known."""
    found: list[tuple[tuple[int, ...], int]] = []
    for entry in getattr(node, "_input_metadata", ()) or ():
        try:
            found.append((tuple(int(size) for size in entry.shape), entry.dtype.itemsize))
        except (RuntimeError, TypeError, AttributeError):
            found.append(((0,), 0))
    return found


def is_on_cpu(node: Any) -> bool:
    """Whether the operator behind a node returned tensors on a CPU."""
    entries = getattr(node, "_input_metadata", ()) or ()
    return any(getattr(getattr(entry, "device", None), "type", "") == "cpu" for entry in entries)


def nodes_behind(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """The nodes that made `tensors`."""
    return [t.grad_fn for t in tensors if t.grad_fn is not None]


def walk(start: Iterable[Any], stop: Callable[[Any], bool]) -> Iterator[Any]:
    """Nodes that gradients of `start` go to, these included, each once; those that `stop` is true of are the last."""
    seen: set[Any] = set()
    stack = list(start)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if not stop(node):
            stack.extend(n for n, _ in node.next_functions if n is not None)


def order(node: Any) -> int:
    """The place of a node among those that a thread made; a backward runs them from the last to the first."""
    return int(node._sequence_nr())


def next_order() -> int:
    """The place of the next node that this thread makes; the last one where this torch does not tell."""
    told = getattr(torch.autograd, "_get_sequence_nr", None)
    return sys.maxsize if told is None else int(told())


@dataclass(frozen=True)
class RunningBackward:
    """The call of autograd that is under way.

    Attributes:
        roots: nodes of the tensors whose backward was asked for.
        keeps: the graph is kept for another backward.
        outer: roots of the backwards that it was asked for in, as a checkpoint does.
    """

    roots: Sequence[Any]
    keeps: bool
    outer: tuple[Any, ...] = ()


def running_backward() -> RunningBackward | None:
    """The innermost backward that is running, in whatever thread it was asked for; None where it cannot be told.

    A hook of a node may run in a thread of the engine's, so that the asking frame is looked for in all threads.
    """
    frame: Any = sys._getframe()
    found = _asked_for(frame)
    if found is None:
        for frame in list(sys._current_frames().values()):
            found = found or _asked_for(frame)
    del frame  # a frame that holds itself would live on, with all that its callers hold
    return found


def _asked_for(frame: Any) -> RunningBackward | None:
    asked = backward_frame(frame)
    if asked is None:
        return None
    rest = asked.f_locals.get("args", ())
    roots, outer = _roots(asked), []
    while (asked := backward_frame(asked.f_back)) is not None:
        outer += _roots(asked)
    return RunningBackward(roots, bool(len(rest) > 1 and rest[1]), tuple(outer))


def _roots(asked: Any) -> list[Any]:
    """Of a tensor, or of an edge of the graph, which names its node otherwise."""
    found = [getattr(t, "grad_fn", None) or getattr(t, "node", None) for t in asked.f_locals.get("t_outputs", ())]
    return [node for node in found if node is not None]


def backward_frame(frame: Any) -> Any:
    """The innermost frame from `frame` on in which a backward was asked for."""
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        frame = frame.f_back
    return frame
