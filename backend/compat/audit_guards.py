"""What the audit reads of Dynamo's guards, cache entries and frame decisions; nothing here judges it.

Each reader gives None (or nothing) where this torch has no such thing; `guard_problems` says what is lost for it.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from optpass.backend.compat.hooks import Args, HookPoint, Kwargs


def _one_more_frame(kwargs: Kwargs) -> Kwargs:
    """Dynamo skips so many of its own frames in stack traces: the patch adds one."""
    return kwargs | {"skip": kwargs.get("skip", 0) + 1}


COMPILE = HookPoint(
    "torch._dynamo.convert_frame",
    "_compile",
    ("code", "globals", "locals", "compiler_fn", "cache_entry", "frame", "compile_id", "skip"),
    "recompiles are read from Dynamo's trace log: one guard each, of the newest compiled code, without what it cost; "
    "that and why a frame runs eager is known less precisely",
    adjust=_one_more_frame,
    room=True,  # all of a compile is below it: the hooks' own frames must not make it slower
)


@dataclass(frozen=True)
class CompileCall:
    """One call of Dynamo's compile of a frame.

    Attributes:
        entries: cache entries that the frame did not match, the most recently used first.
        compile_id: e.g. '0/1'.
    """

    code: types.CodeType
    local: dict[str, Any]
    namespace: dict[str, Any]
    closure: tuple[types.CellType, ...]
    backend: Any
    entries: tuple[Any, ...]
    compile_id: str


def compile_call(args: Args, kwargs: Kwargs) -> CompileCall:
    """The arguments of `COMPILE`, whatever their order in this torch."""
    bound = dict(zip(_parameters(), args, strict=False)) | kwargs
    entries = bound.get("cache_entries_for_reasons")
    if entries is None:
        entries = bound.get("cache_entries")
    if entries is None:
        entries = _linked(bound.get("cache_entry"))
    return CompileCall(
        bound["code"],
        bound["locals"],
        bound["globals"],
        tuple(bound.get("closure") or ()),
        innermost_backend(bound["compiler_fn"]),
        tuple(entries),
        str(bound["compile_id"]),
    )


@functools.cache
def _parameters() -> tuple[str, ...]:
    from torch._dynamo import convert_frame

    return tuple(inspect.signature(convert_frame._compile).parameters)  # looks through patches


def _linked(entry: Any) -> Iterator[Any]:
    """Cache entries of older releases: a linked list."""
    while entry is not None:
        yield entry
        entry = getattr(entry, "next", None)


def innermost_backend(callback: Any) -> Any:
    """What the cache compares: the backend inside of Dynamo's own callbacks."""
    for _ in range(100):
        inner = getattr(callback, "_torchdynamo_orig_backend", None)
        if inner is None:
            return callback
        callback = inner
    return callback


def entry_backend(entry: Any) -> Any:
    """The backend that a cache entry was compiled by; itself, seen through debugging wrappers."""
    return getattr(entry, "backend", None)


def invalidation(entry: Any) -> str | None:
    """Why the entry was given up ('... got deallocated'); None while it is in use."""
    reason = getattr(entry.guard_manager, "invalidation_reason", None)
    return reason if isinstance(reason, str) else None


def guard_root(entry: Any) -> Any:
    """The root of the entry's tree of guards."""
    return entry.guard_manager.root


def guard_scope(entry: Any, local: dict[str, Any]) -> dict[str, Any]:
    """The names that the entry's guard expressions use: `L`, `G` and Dynamo's helpers."""
    manager = entry.guard_manager
    scope: dict[str, Any] = dict(manager.closure_vars or {})
    scope["G"] = (manager.global_scope or {}).get("G", {})
    scope["L"] = local
    return scope


def conditions(manager: Any) -> list[str]:
    """Texts of the conditions over several places (symbolic sizes) that a guard manager holds."""
    leaves: list[Any] = getattr(manager.root, "get_epilogue_lambda_guards", list)()
    return [str(part) for leaf in leaves for part in leaf.verbose_code_parts()]


def unaliased_sources(entry: Any) -> list[str]:
    """Tensors that the entry takes to be distinct objects."""
    known = getattr(entry.guard_manager, "no_tensor_aliasing_sources", None) or ()
    return [source if isinstance(source, str) else str(source.name) for source in known]  # Source objects since 2.15


def first_failure(entry: Any, local: dict[str, Any]) -> list[str]:
    """Dynamo's own word on why the entry does not match: the texts of the first guard that fails."""
    info = entry.guard_manager.check_verbose(local)
    return [] if info.result else [str(part) for part in info.verbose_code_parts]


def function_mode_types(entry: Any) -> list[type] | None:
    """Torch function modes that were active when the entry was compiled; None where torch does not tell."""
    check = (entry.guard_manager.closure_vars or {}).get("___check_torch_function_mode_stack")
    known = inspect.getclosurevars(check).nonlocals.get("types") if inspect.isfunction(check) else None
    return list(known) if isinstance(known, list) else None


def active_function_modes() -> list[tuple[type, str]]:
    """Torch function modes that are active in this thread, the outermost first, each with what to say of it."""
    from torch.overrides import _get_current_function_mode_stack

    stack: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call, unused-ignore]
    return [(type(m), str(getattr(m, "device", type(m).__qualname__))) for m in stack]


def global_state() -> str:
    """JSON of the global state that Dynamo guards on, as it is now; '' where torch does not tell."""
    from torch._C._dynamo.guards import GlobalStateGuard

    read = getattr(GlobalStateGuard(), "__getstate__", None)
    state = read() if callable(read) else ""
    return state if isinstance(state, str) else ""


def dispatch_keys(tensor: torch.Tensor) -> str:
    """The tensor's dispatch keys, as guards print them."""
    keys = torch._C._dispatch_keys(tensor) | torch._C._dispatch_tls_local_include_set()
    return str(keys - torch._C._dispatch_tls_local_exclude_set())


def automatic_dynamic() -> bool:
    """Whether a size that changes is compiled as a symbol the second time."""
    import torch._dynamo.config as config

    return bool(getattr(config, "automatic_dynamic_shapes", True) and getattr(config, "assume_static_by_default", True))


def recompile_limits() -> dict[str, int]:
    """Dynamo's limits by the name of their setting."""
    import torch._dynamo.config as config

    names = ("recompile_limit", "accumulated_recompile_limit", "cache_size_limit", "accumulated_cache_size_limit")
    return {name: value for name in names if isinstance(value := getattr(config, name, None), int)}


def user_code(code: types.CodeType) -> types.CodeType:
    """The user's function, also for the functions that Dynamo makes to go on behind a break."""
    from optpass.backend.compat.audit import resumed_from

    return resumed_from(code) or code


def resumes_behind(code: types.CodeType) -> int | None:
    """Line of the break that a function made by Dynamo goes on behind; None for a function of the user's."""
    if user_code(code) is code:
        return None
    line = code.co_name.rpartition("_at_")[2]
    return int(line) if line.isdigit() else code.co_firstlineno


def wrapped_callable(call: CompileCall) -> Any:
    """What the user compiled, where Dynamo put a frame of its own around it; else None."""
    if call.code.co_name != "inner" or not call.code.co_filename.endswith("external_utils.py"):
        return None
    if "fn" not in call.code.co_freevars:
        return None
    index = call.code.co_freevars.index("fn")
    return call.closure[index].cell_contents if index < len(call.closure) else call.local.get("fn")


def guard_problems() -> list[str]:
    """What of this is missing in this torch, each with what is less precise for it."""
    found = [f"{problem}: {COMPILE.loses}"] if (problem := COMPILE.problem()) is not None else []
    from torch._C._dynamo import guards

    for name in ("get_leaf_guards", "get_child_managers", "get_source"):
        if not hasattr(guards.GuardManager, name):
            found.append(f"GuardManager.{name} is missing: only the first failing guard of a recompile is known")
    return found
