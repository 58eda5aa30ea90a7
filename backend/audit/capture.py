"""Reading Dynamo's objects at the moment of an event: stacks, places, graph sizes, what a compile made."""

from __future__ import annotations

import re
import types
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from optpass.backend.audit.events import FrameEvent, Place, RawBreak
from optpass.backend.compat import audit as dynamo
from optpass.passes.source import clean_path

#: A place as Dynamo's stacks name it: file, line, function, column.
Key = tuple[str, int, str, int | None]
#: A module that is a local or a global of the frame: its path begins with the variable's name.
_GLOBAL = re.compile(r"^[GL]\.")
#: Instructions that enter a `with` block, in the Pythons that torch runs on.
_ENTERS = frozenset({"BEFORE_WITH", "BEFORE_ASYNC_WITH", "SETUP_WITH", "LOAD_SPECIAL"})
_DEEPEST = 200
_REST = "Encountered graph break that we cannot resume from"
_FRAME = "Failed to handle graph break gracefully"


@dataclass(frozen=True)
class Seen:
    """What the innermost traced frame told when Dynamo gave up in it; `places` of all frames, the outermost first."""

    place: Place
    module: str | None
    places: tuple[Place, ...]
    opname: str


def remember(modules: dict[Key, Seen]) -> None:
    """Note where the innermost traced frame of this thread stands; a break reported later is looked up there."""
    translator = dynamo.innermost_translator()
    if translator is None:
        return
    code, opname = translator.f_code, str(getattr(translator.current_instruction, "opname", ""))
    line = _line(translator)
    stack = getattr(translator, "nn_module_stack", None) or {}
    last = next(reversed(stack.values()), None)
    path = _GLOBAL.sub("", clean_path(str(last[0]))) if isinstance(last, tuple) and last else None
    places: list[Place] = []
    while translator is not None and len(places) < _DEEPEST:
        places.append(_standing(translator))
        translator = getattr(translator, "parent", None)
    place = places[0]
    seen = Seen(place, path or None, tuple(reversed(places)), opname)
    for column in {place.column, None}:  # Dynamo's stacks of torch before 2.13 have no columns
        modules.setdefault((code.co_filename, line, code.co_name, column), seen)


def _standing(translator: Any) -> Place:
    """Where a traced frame stands: the place of the instruction that it is at, of the call for an outer frame."""
    positions = getattr(translator.current_instruction, "positions", None)
    return Place(
        translator.f_code.co_filename,
        getattr(positions, "lineno", None) or _line(translator),
        qualified(translator.f_code),
        getattr(positions, "col_offset", None),
        getattr(positions, "end_lineno", None),
        getattr(positions, "end_col_offset", None),
    )


def _line(translator: Any) -> int:
    positions = getattr(translator.current_instruction, "positions", None)
    found = getattr(translator, "lineno", None) or getattr(positions, "lineno", None)
    return int(found or translator.f_code.co_firstlineno)


def qualified(code: types.CodeType) -> str:
    """Qualified name of the user's function, also for code that Dynamo made of it."""
    origin = dynamo.resumed_from(code) or code
    return getattr(origin, "co_qualname", origin.co_name)


def logged_break(error: BaseException, reason: str, modules: dict[Key, Seen]) -> RawBreak:
    """A break that Dynamo handles; how it goes on stands at the beginning of its reason."""
    effect = "split"
    if getattr(error, "skip_frame", False) or reason.startswith(_FRAME):
        effect = "frame eager"
    elif reason.startswith(_REST):
        effect = "rest eager"
    return _raw(error, modules, effect)


def raw_break(error: BaseException, modules: dict[Key, Seen], convert: Any) -> RawBreak:
    """A break that leaves the compile: raised to the user, or the frame runs eager.

    Args:
        convert: Dynamo's `ConvertFrameAssert`, which knows what was asked for.
    """
    return _raw(error, modules, "error" if dynamo.raises(convert, error) else "frame eager")


def _raw(error: BaseException, modules: dict[Key, Seen], effect: str) -> RawBreak:
    stack = getattr(error, "real_stack", None)
    stack = stack or dynamo.traced_stack()
    places = [_place(frame) for frame in stack]
    seen = None
    if stack:
        last = stack[-1]
        seen = modules.get((last.filename, last.lineno or 0, last.name, getattr(last, "colno", None)))
    if seen is not None:
        places[-1] = seen.place
        if len(seen.places) == len(places):
            places = [_completed(p, known) for p, known in zip(places, seen.places, strict=True)]
    message = getattr(error, "msg", None) or str(error)
    kind = getattr(error, "gb_type", None)
    above = tuple(
        Place(frame.f_code.co_filename, frame.f_lineno, qualified(frame.f_code))
        for frame, _ in zip(dynamo.above_dynamo(), range(_DEEPEST), strict=False)
    )
    name = kind if isinstance(kind, str) else ""
    enters = seen is not None and seen.opname in _ENTERS
    return RawBreak(name, str(message), tuple(places), above, seen.module if seen else None, effect, enters)


def _place(frame: Any) -> Place:
    column, end = getattr(frame, "colno", None), getattr(frame, "end_colno", None)
    return Place(frame.filename, frame.lineno or 0, frame.name, column, getattr(frame, "end_lineno", None), end)


def _completed(place: Place, known: Place) -> Place:
    """A place of Dynamo's stack with the function's qualified name, and with columns where that stack has none."""
    if place.column is None and (place.file, place.line) == (known.file, known.line):
        return known
    return replace(place, function=known.function)


def finish(event: FrameEvent, frame: Any, result: Any, error: BaseException | None) -> None:
    """Fill in what a compile made: code, guards, the functions that go on behind a break."""
    guarded = getattr(result, "guarded_code", None)
    event.compiled = guarded is not None
    event.skip_reason = getattr(result, "skip_reason", None)
    event.error = type(error).__name__ if error is not None else None
    if event.code is None or (not event.compiled and error is None and not event.breaks):
        return  # a frame that Dynamo left alone at once: there are hundreds of these behind a break
    metrics = dynamo.latest_metrics(event.code)
    event.ops = getattr(metrics, "graph_op_count", None)
    event.guard_us = getattr(metrics, "guard_latency_us", None)
    code = getattr(guarded, "code", None)
    if isinstance(code, types.CodeType):
        event.namespace = frame.f_globals
        event.compiled_names = tuple(name for name in code.co_names if name.startswith("__compiled_fn"))
        event.resumes = tuple(_resumes(code, frame.f_globals))


def _resumes(code: types.CodeType, namespace: dict[str, Any]) -> list[types.CodeType]:
    found: list[Any] = list(code.co_consts)
    for function in (namespace.get(name) for name in code.co_names if name.startswith("__resume")):
        found.append(getattr(function, "__code__", None))
        # Where the user's function has variables of an outer one, it is made at each call, by a function that holds it.
        found += [_content(cell) for cell in getattr(function, "__closure__", None) or ()]
    return [made for made in found if isinstance(made, types.CodeType) and dynamo.is_resume(made)]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def size_of(gm: Any) -> tuple[int, float | None]:
    """Operations of a Dynamo graph, and the bytes of its outputs, each once; None where a size is not known."""
    ops = 0
    outputs: tuple[fx.Node, ...] = ()
    for node in gm.graph.nodes:
        ops += node.op in ("call_function", "call_method", "call_module")
        if node.op == "output":
            outputs = tuple(node.all_input_nodes)
    total = 0.0
    for node in outputs:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            sizes = [dynamo.size_hint(size) for size in value.shape]
            if any(size is None for size in sizes):
                return ops, None
            count = 1
            for size in sizes:
                count *= size or 0
            total += count * value.dtype.itemsize
    return ops, total
