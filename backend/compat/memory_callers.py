"""What functions of the program hold in variables, and the objects whose methods they are in attributes: those that
asked for a backward, and those in whose call a graph is being compiled. For `backend.memory`.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optpass.backend.compat.frames import globals_read
from optpass.backend.compat.memory_autograd import backward_frame

#: Frames above a backward in which its caller's tensors are looked for; torch's own do not count.
_CALLERS = 8


def tensors_of_callers(callers: int = _CALLERS, passed_over: Collection[str] = ("torch",)) -> list[torch.Tensor]:
    """Tensors that the functions which asked for the running backward hold in variables, or one container deep;
    what is differentiated, too.

    Args:
        callers: how many functions, from the innermost on.
        passed_over: packages whose functions are none.
    """
    return list({id(part): part for held in variables_of_callers(callers, passed_over) for part in held}.values())


def variables_of_callers(
    callers: int = _CALLERS, passed_over: Collection[str] = ("torch",)
) -> list[tuple[torch.Tensor, ...]]:
    """As `tensors_of_callers`, those of each variable together: one tensor, or what a container holds."""
    asked = _asked()
    roots = asked.f_locals.get("t_outputs", ()) if asked is not None else ()
    found: list[tuple[torch.Tensor, ...]] = [(root,) for root in roots if isinstance(root, torch.Tensor)]
    found += _held_by_callers(asked, passed_over, callers)
    del asked
    return found


def named_by_caller(passed_over: Collection[str]) -> list[tuple[torch.Tensor, ...]]:
    """Tensors that are variables of the function which asked for the running backward, or in one that is a tuple or a
    dict, as a batch is: lists grow. Those of each variable together."""
    values = (v for v in _values_of_callers(_asked(), passed_over, 1) if not issubclass(type(v), list))
    return [tuple(p for p in _parts(value) if issubclass(type(p), torch.Tensor)) for value in values]


def _asked() -> Any:
    """The frame in which the running backward was asked for, in whatever thread it runs."""
    frame: Any = sys._getframe()
    asked = backward_frame(frame)
    if asked is None:
        for frame in list(sys._current_frames().values()):
            asked = asked or backward_frame(frame)
    del frame  # which may be this one, in a cycle with what those behind it hold: the gradients that a hook is given
    return asked


def tensors_around_compile(callers: int = _CALLERS) -> list[torch.Tensor]:
    """Tensors that the functions hold in whose call a graph is being compiled, as `tensors_of_callers` has them."""
    return [part for held in variables_around_compile(callers) for part in held]


def variables_around_compile(callers: int = _CALLERS) -> list[tuple[torch.Tensor, ...]]:
    """As `tensors_around_compile`, those of each variable together."""
    return list(_held_by_callers(sys._getframe(), ("torch", "optpass"), callers))


def results_around_compile(depth: int = 3) -> list[torch.Tensor]:
    """What those functions have computed and hold in variables, in up to so many containers, and can differentiate."""
    found: dict[int, torch.Tensor] = {}
    for value in _values_of_callers(sys._getframe(), ("torch", "optpass"), _CALLERS):
        parts: list[Any] = [value]
        for _ in range(depth):
            parts = [inner for part in parts for inner in _parts(part)]
        found.update((id(t), t) for t in parts if issubclass(type(t), torch.Tensor) and t.grad_fn is not None)
    return list(found.values())


def _held_by_callers(frame: Any, passed_over: Collection[str], callers: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tensors that each variable holds of `frame` and those behind it, without those of the packages named."""
    for value in _values_of_callers(frame, passed_over, callers):
        yield tuple(part for part in _parts(value) if issubclass(type(part), torch.Tensor))


def _values_of_callers(frame: Any, passed_over: Collection[str], callers: int) -> Iterator[Any]:
    while frame is not None and callers:
        if not _is_of(frame, passed_over):
            callers -= 1
            read = [frame.f_globals.get(name) for name in globals_read(frame.f_code)]
            variables = variables_by_name(frame)
            yield from (*variables.values(), *read, *_attributes_of(variables.get("self")))
            del variables
        frame = frame.f_back


def _attributes_of(owner: Any) -> Iterable[Any]:
    """What the object of a method holds by itself, as trainers hold batches, outputs and losses. Nothing of its class
    runs."""
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return ()
    return list(dict.values(attributes)) if issubclass(type(attributes), dict) else ()


def _parts(value: Any) -> Iterable[Any]:
    """What a dict, list or tuple holds, or the value itself.

    Nothing of the user's classes runs: a dictionary may import what it is asked for, a proxy refuse to name its class.
    """
    kind = type(value)
    if issubclass(kind, dict):
        return list(dict.values(value))
    if issubclass(kind, list):
        return list(list.__iter__(value))
    return list(tuple.__iter__(value)) if issubclass(kind, tuple) else (value,)


def variables_by_name(frame: Any) -> dict[str, Any]:
    """A frame's variables. Up to Python 3.12, to ask that leaves a copy with the frame, which would keep what they held
    until the function returns: a micro-batch's outputs through all that follow."""
    copied = frame.f_locals
    found = dict(copied)
    optimized = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # else these are its variables themselves
    # Held by the frame, here, and as an argument; what somebody else holds, too, is `locals()` of the function.
    if optimized and isinstance(copied, dict) and sys.getrefcount(copied) <= 3:
        copied.clear()
    return found


def value_of(names: Sequence[str], variables: Mapping[str, Any], of_module: Mapping[str, Any]) -> Any:
    """What a function means by names with dots between them, without running anything; None where that is not found.

    Args:
        names: ('self', 'critic').
        variables: the function's.
        of_module: its globals.
    """
    value = variables.get(names[0], of_module.get(names[0]))
    for name in names[1:]:
        held = attributes_of(value)
        value = held.get(name, held.get("_modules", {}).get(name))
    return value


def attributes_of(value: Any) -> Mapping[str, Any]:
    """Those that an object itself holds; a class may answer to anything where it has none."""
    return value.__dict__ if type(value).__dictoffset__ else {}


@dataclass(frozen=True)
class Place:
    """Where a function of the program is: in which bytecode, where in it, and the identity of the object that is its
    first argument, as a trainer's methods have in common; None without one."""

    code: types.CodeType
    at: int
    first: int | None

    @classmethod
    def of(cls, frame: Any) -> Place:
        code = frame.f_code
        first = variables_by_name(frame).get(code.co_varnames[0]) if code.co_argcount else None
        return cls(code, frame.f_lasti, id(first) if type(first).__dictoffset__ else None)


def places_of_backward() -> list[Place]:
    """The functions in which the running backward was asked for, from the innermost on."""
    frame, found = _asked(), list[Place]()
    while frame is not None and len(found) < _CALLERS:
        if not _is_of(frame, ("torch", "optpass")):
            found.append(Place.of(frame))
        frame = frame.f_back
    return found


def _is_of(frame: Any, packages: Collection[str]) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in packages
