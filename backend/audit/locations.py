"""Which function of the user's a frame belongs to: file, first line, qualified name."""

from __future__ import annotations

import functools
import inspect
import sysconfig
import types
from pathlib import Path
from typing import Any

import torch

from optpass.backend.compat import audit_guards as dynamo

_TORCH = str(Path(torch.__file__).parent)
_LIBRARY = sysconfig.get_paths()["stdlib"]
_SITE = ("site-packages", "dist-packages")

#: File, first line, qualified name.
Function = tuple[str, int, str]


def code_place(code: types.CodeType) -> Function:
    """The user's function, also for one that Dynamo made to go on behind a break."""
    origin = dynamo.user_code(code)
    return origin.co_filename, origin.co_firstlineno, origin.co_qualname


def function_of(call: dynamo.CompileCall) -> Function:
    """The function that the user compiled, where Dynamo or a decorator wrapped it in a frame of its own."""
    wrapped = dynamo.wrapped_callable(call)
    code = code_of(wrapped) if wrapped is not None else _below_a_decorator(call)
    return code_place(code if code is not None else call.code)


def names_of(call: dynamo.CompileCall) -> dict[str, str]:
    """How the arguments of a frame that Dynamo wrapped around the user's function are called in that function."""
    wrapped = dynamo.wrapped_callable(call)
    if wrapped is None:
        return _names_below_a_decorator(call)
    code = code_of(wrapped)
    place, partials = "L['fn']", {}
    while isinstance(wrapped, functools.partial):
        partials[place], place, wrapped = wrapped, f"{place}.func", wrapped.func
    module = isinstance(getattr(wrapped, "__self__", wrapped), torch.nn.Module)
    names = {place: "self" if module else getattr(wrapped, "__name__", "fn"), f"{place}.__self__": "self"}
    if code is not None:
        left = code.co_varnames[int(module or inspect.ismethod(wrapped)) : code.co_argcount]
        for place, made in reversed(partials.items()):  # the innermost one's come first
            names |= {f"{place}.args[{index}]": name for index, name in enumerate(left[: len(made.args)])}
            left = left[len(made.args) :]
        names |= {f"L['args'][{index}]": name for index, name in enumerate(left)}
    names |= {f"{place}.keywords[{key!r}]": key for place, made in partials.items() for key in made.keywords}
    keywords = call.local.get("kwargs")
    if isinstance(keywords, dict):
        names |= {f"L['kwargs'][{key!r}]": str(key) for key in keywords}
    return names


def _names_below_a_decorator(call: dynamo.CompileCall) -> dict[str, str]:
    """The same for a method of a module below decorators that take `*args, **kwargs` (and say what they wrap)."""
    code = call.code
    names = code.co_varnames
    first = code.co_argcount + code.co_kwonlyargcount
    inner = _below_a_decorator(call)
    if inner is None:
        return {}
    given = inner.co_varnames[: inner.co_argcount]
    found: dict[str, str] = {}
    if code.co_flags & inspect.CO_VARARGS:
        taken = given[code.co_argcount :]
        found |= {f"L[{names[first]!r}][{index}]": name for index, name in enumerate(taken)}
        first += 1
    keywords = call.local.get(names[first]) if code.co_flags & inspect.CO_VARKEYWORDS else None
    if isinstance(keywords, dict):
        found |= {f"L[{names[first]!r}][{key!r}]": str(key) for key in keywords}
    return found


def _below_a_decorator(call: dynamo.CompileCall) -> types.CodeType | None:
    """The `forward` of a module that the frame's function wraps and says so; None where it is no such wrapper.

    All functions below one decorator share the wrapper's code: only the module tells whose frame it is.
    """
    code = dynamo.user_code(call.code)
    names = code.co_varnames
    owner = call.local.get(names[0]) if names and code.co_argcount else None
    method = inspect.getattr_static(type(owner), "forward", None) if isinstance(owner, torch.nn.Module) else None
    if not callable(method) or getattr(method, "__code__", None) is not code or not hasattr(method, "__wrapped__"):
        return None
    inner = getattr(inspect.unwrap(method), "__code__", None)
    return inner if isinstance(inner, types.CodeType) else None


def code_of(target: Any) -> types.CodeType | None:
    """The code that runs when `target` (function, method, module, callable object) is called; None for a builtin."""
    for _ in range(20):
        if isinstance(target, functools.partial):
            target = target.func
            continue
        inner = getattr(target, "_torchdynamo_orig_callable", None)
        if inner is None:
            break
        target = inner
    owner = getattr(target, "__self__", None)
    if isinstance(target, types.MethodType) and isinstance(owner, torch.nn.Module):
        name = target.__func__.__name__
        target = owner if name in ("_wrapped_call_impl", "_call_impl", "__call__") else target
    if isinstance(target, torch.nn.Module):
        inner = getattr(target, "_orig_mod", target)
        target = getattr(inner, "forward", None)
    elif not inspect.isroutine(target) and not isinstance(target, type):
        target = inspect.getattr_static(type(target), "__call__", None)
    code = getattr(getattr(target, "__func__", target), "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def is_torch(code: types.CodeType) -> bool:
    """Whether the code is PyTorch's own."""
    return code.co_filename.startswith(_TORCH) or code.co_filename.startswith(("<eval_with_key>", "<frozen"))


def is_standard(code: types.CodeType) -> bool:
    """Whether the code is of Python's standard library."""
    name = code.co_filename
    return name.startswith(_LIBRARY) and not any(part in name for part in _SITE)
