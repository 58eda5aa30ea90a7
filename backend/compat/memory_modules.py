"""Modules that were compiled, as torch keeps them."""

from __future__ import annotations

import gc
import inspect
import types
from typing import Any

from torch import nn

#: Wrappers around a backend at most.
_WRAPPED = 8


def compiled_modules(backend: str) -> list[nn.Module]:
    """All modules that `torch.compile` or `Module.compile` was called with, in no order, but for those of another
    backend than the one named.

    What the garbage collector tracks is walked once: a wrapped module refers to its class, a module that was compiled
    in place is behind a bound method. Where torch calls these otherwise, none are found.
    """
    wrappers = [kind for kind in type.__subclasses__(nn.Module) if kind.__name__ == "OptimizedModule"]
    call = getattr(nn.Module, "_call_impl", None)
    wanted = [*wrappers, call]
    found: dict[int, nn.Module] = {}
    for holder in gc.get_referrers(*wanted):
        if type(holder) in wrappers:
            if _backend(getattr(holder, "dynamo_ctx", None)) in ("", backend):
                found[id(holder)] = holder
        elif type(holder) is types.MethodType and holder.__func__ is call:
            bound: Any = holder.__self__
            compiled = vars(bound).get("_compiled_call_impl")
            function = isinstance(compiled, types.FunctionType)
            context = inspect.getclosurevars(compiled).nonlocals.get("self") if function else None
            if compiled is not None and _backend(context) in ("", backend):
                found[id(bound)] = bound
    return list(found.values())


def is_compiled(value: Any) -> bool:
    """Whether `torch.compile` gave it, or `Module.compile` was called of it."""
    kind = type(value)
    if issubclass(kind, nn.Module):
        return kind.__name__ == "OptimizedModule" or vars(value).get("_compiled_call_impl") is not None
    return kind is types.FunctionType and "_torchdynamo_orig_callable" in vars(value)


def _backend(context: Any) -> str:
    """The name that a compile was asked for by; "" where it was a function, or cannot be told."""
    callback = getattr(context, "callback", None)
    for _ in range(_WRAPPED):
        callback = getattr(callback, "_torchdynamo_orig_backend", None)
        name = getattr(callback, "compiler_name", None) or getattr(callback, "name", None)
        if isinstance(name, str):
            return name
    return ""
