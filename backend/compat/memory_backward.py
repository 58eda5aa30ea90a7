"""What eager autograd nodes hold, read before a backward releases it: results of other nodes, and what no node made, as
targets, masks and constants. For `backend.memory`; nothing here counts bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from optpass.backend.compat.dynamo import TracingContext
from optpass.backend.compat.memory_autograd import (
    is_compiled,
    is_packed,
    leaf_of,
    order,
    saved_by_function,
)
from optpass.backend.compat.memory_hooks import checkpoint_of

#: What a node saves of its own results begins so; as such they are named elsewhere.
_RESULTS = ("_saved_result", "_saved_output", "_saved_out", "_saved_self_or_result", "_saved_total_weight")


@dataclass(frozen=True)
class Outside:
    """A storage that an eager node has saved, and that is no result of a node.

    Attributes:
        key: of the storage, while it is there.
        storage: weakly.
        bytes: of all of it.
        extent: shape of the tensor, and bytes of an element; of a part of a storage, that of all of it.
        floating: what is stored are floating-point or complex numbers.
    """

    key: int
    storage: weakref.ref[Any]
    bytes: int
    extent: tuple[tuple[int, ...], int]
    floating: bool


@dataclass(frozen=True)
class Held:
    """What an eager node has saved, beside its own results.

    Attributes:
        outside: what is no result of a node.
        results_of: nodes whose results are saved: their `order`, and whether it is a compiled graph.
        storages: of all that it has saved, its own results too; weakly.
        checkpoints: which make what it has saved again when its backward runs, and hold it until then; weakly.
        again: the bytes of each of these tensors, parameters aside; None where that is not known.
    """

    outside: tuple[Outside, ...]
    results_of: tuple[tuple[int, bool], ...]
    storages: tuple[weakref.ref[Any], ...] = ()
    checkpoints: tuple[weakref.ref[Any], ...] = ()
    again: tuple[int | None, ...] = ()

    def recomputed(self) -> list[torch.Tensor]:
        """What its checkpoints have made again and still hold."""
        frames = [frame for one in self.checkpoints if (frame := one()) is not None]
        made = [tensors for frame in frames for tensors in list(frame.recomputed.values())]
        return [t for tensors in made for t in list(tensors.values()) if isinstance(t, torch.Tensor)]


def watch_backwards(told: Callable[[list[Any]], None]) -> Callable[[], None]:
    """Call `told` with the nodes that each backward begins at, before it begins; what ends that. Of what a compiler
    differentiates while it traces a graph nothing is told.

    Where this torch asks its engine for a backward in another way, nothing is told.
    """
    original = getattr(torch.autograd, "_engine_run_backward", None)
    if original is None:
        return lambda: None
    active = [True]

    def tell(outputs: Any) -> None:
        roots = [getattr(t, "grad_fn", None) or getattr(t, "node", None) for t in outputs]
        told([root for root in roots if root is not None])

    quietly = untraced(tell)

    def asked(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if active and TracingContext.try_get() is None:
            quietly(outputs)
        return original(outputs, *args, **kwargs)

    watched = untraced(asked, recursive=False)

    def end() -> None:
        active.clear()
        if getattr(torch.autograd, "_engine_run_backward", None) is watched:
            setattr(torch.autograd, "_engine_run_backward", original)  # noqa: B010  # a name that it does not export

    setattr(torch.autograd, "_engine_run_backward", watched)  # noqa: B010
    return end


def untraced(function: Callable[..., Any], recursive: bool = True) -> Callable[..., Any]:
    """`function`, which Dynamo leaves alone: where a step is compiled with its backward, it would trace what that
    calls. Not `recursive`: only the function itself."""
    disabled: Callable[..., Any] = torch.compiler.disable(function, recursive=recursive)  # type: ignore[no-untyped-call, unused-ignore]
    return disabled


def held_by_nodes(nodes: Iterable[Any]) -> dict[int, Held]:
    """What eager nodes hold, by their `order`; a node is missing whose saved tensors cannot be read, but for one inside
    of a checkpoint, which holds none."""
    found = {}
    for node in nodes:
        if leaf_of(node) is None:
            held = _held(node)
            if held is not None:
                found[order(node)] = held
    return found


def _held(node: Any) -> Held | None:
    outside: list[Outside] = []
    results: list[tuple[int, bool]] = []
    storages: list[weakref.ref[Any]] = []
    checkpoints: dict[int, weakref.ref[Any]] = {}
    again: list[int | None] = []
    for raw in dir(node):
        name = raw.removeprefix("_raw")
        if not raw.startswith("_raw_saved_"):
            continue
        try:
            if is_packed(node, name):
                frames = _checkpoints(node, raw)
                if not frames:
                    return None
                again += _made_again(node, raw, frames)
                new = [frame for frame in frames if id(frame) not in checkpoints]
                checkpoints.update((id(frame), weakref.ref(frame)) for frame in new)
                value = [tensor for frame in new for tensor in _given(frame)]
            else:
                value = getattr(node, "saved_tensors" if name == "_saved_tensors" else name)
        except (RuntimeError, AttributeError, TypeError):
            return None
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
                continue
            storages.append(weakref.ref(tensor.untyped_storage()))
            if name.startswith(_RESULTS) and not checkpoints:
                continue
            if tensor.grad_fn is not None and tensor.grad_fn is not node:
                results.append((order(tensor.grad_fn), is_compiled(tensor.grad_fn)))
            elif not tensor.requires_grad:
                storage = tensor.untyped_storage()
                floating = tensor.is_floating_point() or tensor.is_complex()
                outside.append(
                    Outside(storage._cdata, weakref.ref(storage), storage.nbytes(), _extent(tensor), floating)
                )
    return Held(tuple(outside), tuple(results), tuple(storages), tuple(checkpoints.values()), tuple(again))


def held_by_checkpoints(node: Any) -> list[torch.Tensor]:
    """What checkpoints hold, to begin from, that make again what `node` keeps."""
    try:
        frames = [frame for raw in dir(node) if raw.startswith("_raw_saved_") for frame in _checkpoints(node, raw)]
    except RuntimeError:  # released
        return []
    return [tensor for frame in {id(frame): frame for frame in frames}.values() for tensor in _given(frame)]


def _checkpoints(node: Any, raw: str) -> list[Any]:
    """The frames of `torch.utils.checkpoint` whose hooks have packed what a node keeps under the name `raw`; none where
    others' have packed any of it."""
    kept = getattr(node, raw)
    found = []
    for one in kept if isinstance(kept, (list, tuple)) else (kept,):
        if one.unpack_hook is None:
            continue
        frame = checkpoint_of(one.unpack_hook)
        if frame is None:
            return []
        found.append(frame)
    return found


def _made_again(node: Any, raw: str, frames: Sequence[Any]) -> list[int | None]:
    """Bytes of the tensors that a node keeps under the name `raw` and checkpoints make again, by the notes that they
    have taken of each to compare it with."""
    kept = getattr(node, raw)
    kept = kept if isinstance(kept, (list, tuple)) else [kept]
    leaves = [shape for n, _ in node.next_functions for shape in _shapes_of_leaf(n)]
    found: list[int | None] = []
    for one, frame in zip((k for k in kept if k.unpack_hook is not None), frames, strict=True):
        held, notes = getattr(one, "data", None), getattr(frame, "x_metadatas", ())
        places = [i for i, holder in enumerate(getattr(frame, "weak_holders", ())) if holder() is held]
        note = notes[places[0]] if places and places[0] < len(notes) else None
        if not isinstance(note, dict) or not isinstance(note.get("dtype"), torch.dtype) or "shape" not in note:
            found.append(None)
        elif tuple(note["shape"]) not in leaves:
            found.append(prod(note["shape"]) * note["dtype"].itemsize)
    return found


def _shapes_of_leaf(node: Any) -> list[tuple[int, ...]]:
    """The shape of the leaf that `node` is of, or of its transpose."""
    if node is not None and node.name() == "TBackward0":
        return [shape[::-1] for shape in _shapes_of_leaf(node.next_functions[0][0])]
    leaf = None if node is None else leaf_of(node)
    return [] if leaf is None else [tuple(leaf.shape)]


def _given(frame: Any) -> list[torch.Tensor]:
    """What a checkpoint holds to begin from, states of generators included; before torch 2.13 a node held it."""
    cells = getattr(getattr(frame, "recompute_fn", None), "__closure__", None) or ()
    states = [tensor for cell in cells if isinstance(tensor := _content(cell), torch.Tensor)]
    node = getattr(getattr(frame, "input_saver", None), "grad_fn", None)
    if node is not None:
        return [*saved_by_function(node), *states]
    kept = [one for one in getattr(frame, "saved_args", ()) if hasattr(one, "unpack") and one.unpack_hook is None]
    return [*(tensor for one in kept if isinstance(tensor := one.unpack(), torch.Tensor)), *states]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _extent(tensor: torch.Tensor) -> tuple[tuple[int, ...], int]:
    whole = tensor.untyped_storage().nbytes()
    return (tuple(tensor.shape), tensor.element_size()) if tensor.nbytes == whole else ((whole,), 1)
