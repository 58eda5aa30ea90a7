"""Why a frame matches none of its cache entries: every failing guard of the entry that it is closest to."""

from __future__ import annotations

import gc
import inspect
import logging
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from optpass.backend.audit.causes import Judge
from optpass.backend.audit.findings import THREADS, Finding
from optpass.backend.audit.guards import Failure, Modes, Scope, failures, plain
from optpass.backend.audit.locations import Function, function_of, names_of
from optpass.backend.audit.remembered import THREAD, this_thread
from optpass.backend.audit.sources_text import prefixes
from optpass.backend.audit.values import describe, shorten
from optpass.backend.compat import audit_guards as dynamo

log = logging.getLogger(__name__)

_LIMIT = ("recompile limit exceeded", "RecompileLimit", "CacheLimitExceeded")
_GUARDS = 20
#: Of several failed guards, what is named first: what explains the others.
_RANK = {"backend": 0, "grad mode": 1, "autocast": 1, "device": 2, "dtype": 3, "training flag": 4}


@dataclass(frozen=True)
class Why:
    """Why one frame was compiled again.

    Attributes:
        guards: all failing guards of the closest cache entry.
        dynamic: what `torch.compile(dynamic=...)` was given.
        frame: name of the frame: the function's own, or that of what goes on behind a break.
        entry: it is what the user compiled; False: a function that it calls by itself, since it breaks there.
    """

    function: Function
    finding: Finding
    guards: tuple[str, ...]
    dynamic: bool | None
    frame: str = ""
    entry: bool = True


def is_limit(error: BaseException) -> bool:
    """Whether Dynamo refused to compile because it had compiled the function too often."""
    kind = getattr(error, "gb_type", None)
    text = f"{type(error).__name__} {kind if isinstance(kind, str) else ''}"
    return any(mark in text for mark in _LIMIT)


def explain(call: dynamo.CompileCall, made_for: Mapping[Any, Mapping[str, str]], modes: Modes | None) -> Why:
    """Why the frame matches none of its cache entries: every failing guard of the closest one.

    The closest entry fails the fewest guards, those that fail for the same change taken as one; of several, the one
    used last.

    Args:
        call: the compile.
        made_for: by an entry's guard manager, values that it was compiled for (see `remembered`).
        modes: torch function modes of the call, which Dynamo has switched off by now; None: not known.
    """
    best: tuple[int, Any, list[Failure], Scope] | None = None
    for entry in call.entries:
        if dynamo.invalidation(entry) is not None:
            continue
        scope = Scope(dynamo.guard_scope(entry, call.local))
        other = not same_backend(dynamo.entry_backend(entry), call.backend)
        failed = _failures(entry, scope, modes, call.local)
        distance = len({_change(failure) for failure in failed}) + other
        if best is None or distance < best[0]:
            best = (distance, entry, failed, scope)
    function = function_of(call)
    dynamic = getattr(call.backend, "dynamic", None)
    if best is None:
        return _gone(call, function, dynamic)
    _, entry, failed, scope = best
    names = names_of(call) | _intermediate(call)
    free = () if dynamo.wrapped_callable(call) is not None else call.code.co_freevars  # of a frame of Dynamo's own
    judge = Judge(scope, free, names, made_for.get(entry.guard_manager, {}), _by_id)
    findings = [(judge.finding(failure), failure) for failure in failed]
    if not same_backend(dynamo.entry_backend(entry), call.backend):
        findings.insert(0, (_backend(entry, call), Failure("BACKEND", "the backend is the same", "")))
    if not findings:
        findings = [(_unknown(entry, call, made_for.get(entry.guard_manager, {})), Failure("", "", ""))]
    finding, failure = min(enumerate(findings), key=lambda item: (*_rank(*item[1]), item[0]))[1]
    finding = replace(finding, behind=_behind(call, failure.source))
    guards = tuple(_guard_text(f, failure, judge) for f, failure in findings[:_GUARDS])
    scope.forget()
    return Why(function, finding, guards, dynamic if isinstance(dynamic, bool) else None, call.code.co_name)


def _behind(call: dynamo.CompileCall, source: str) -> int | None:
    """Line of the break that a value was computed in front of; None for arguments and what comes from outside."""
    line, path = dynamo.resumes_behind(call.code), prefixes(source)
    root = re.fullmatch(r"L\['(\w+)'\]", path[0]) if path else None
    if line is None or root is None:
        return None
    origin = dynamo.user_code(call.code)
    stars = bool(origin.co_flags & inspect.CO_VARARGS) + bool(origin.co_flags & inspect.CO_VARKEYWORDS)
    given = origin.co_varnames[: origin.co_argcount + origin.co_kwonlyargcount + stars]
    return None if root[1] in (*given, *origin.co_freevars) else line


def _intermediate(call: dynamo.CompileCall) -> dict[str, str]:
    """Texts for values that no variable held when a break came: by the line of the break."""
    line = dynamo.resumes_behind(call.code)
    held = [name for name in call.local if name.startswith("___stack")]
    if line is None:
        return {}
    numbered = {name: f" {name.removeprefix('___stack')}" if len(held) > 1 else "" for name in held}
    return {f"L[{name!r}]": f"<value{number} of line {line}>" for name, number in numbered.items()}


def _change(failure: Failure) -> tuple[str, ...]:
    """What changed, without where: a longer sequence makes many tensors longer, `eval()` changes many modules."""
    if failure.kind in ("tensor", "state"):
        return failure.kind, failure.property, failure.before or "", failure.after or ""
    return failure.kind, failure.code.replace(failure.source, "") if failure.source else failure.code


def _failures(entry: Any, scope: Scope, modes: Modes | None, local: dict[str, Any]) -> list[Failure]:
    """Every failing guard; Dynamo's own first one where the tree cannot be walked or tells nothing."""
    try:
        found = failures(entry, scope, modes)
    except Exception:  # a tree of guards of a form unknown here: Dynamo's own reason is left
        log.debug("guards could not be walked", exc_info=True)
        found = []
    if not found:
        found = [Failure("", plain(part), "") for part in dynamo.first_failure(entry, local)[:1]]
    return found


def _rank(finding: Finding, failure: Failure) -> tuple[int, int]:
    rank = _RANK.get(finding.cause, 5)
    if finding.shared:
        return -1, 0  # the function is another one: all else follows
    if failure.kind == "tensor" and finding.cause in ("device", "dtype"):
        rank = 3  # a tensor's own device explains no other failure
    if failure.kind == "SET_CONTAINS":
        rank += 1  # beside the set as a whole
    return rank, len(prefixes(failure.source))


def _guard_text(finding: Finding, failure: Failure, judge: Judge) -> str:
    if failure.kind == "tensor":
        return f"{finding.source} == {finding.before}, now {finding.after}"
    if failure.kind == "BACKEND":
        return f"{finding.source} == {finding.before}, now {finding.after}"
    if failure.kind in ("", "state", "TORCH_FUNCTION_MODE_STACK"):
        return shorten(failure.code, 300)
    text = judge.condition_text(failure.code)
    if text == failure.code and not failure.kind.startswith("LAMBDA"):
        text = f"{finding.source} == {finding.before}"
    return shorten(f"{text}, now {finding.after}" if finding.after else text, 300)


def _gone(call: dynamo.CompileCall, function: Function, dynamic: Any) -> Why:
    """All cache entries were given up because an object that they held weakly died."""
    reason = dynamo.invalidation(call.entries[0]) or ""
    source = reason.removeprefix("Cache line invalidated because ").removesuffix(" got deallocated")
    scope = Scope({"L": call.local, "G": call.namespace})
    judge = Judge(scope, call.code.co_freevars, names_of(call) | _intermediate(call), {}, _by_id)
    inner = source.removeprefix("type(").removesuffix(")") if source.startswith("type(") else source
    value = judge.value(inner)
    finding = Finding(
        "weak reference", judge.text(source), "an object that is gone", describe(value), judge.text(inner),
        behind=_behind(call, inner),
    )  # fmt: skip
    scope.forget()
    return Why(function, finding, (reason,), dynamic if isinstance(dynamic, bool) else None)


def _unknown(entry: Any, call: dynamo.CompileCall, made_for: Mapping[str, str]) -> Finding:
    parts = dynamo.first_failure(entry, call.local)
    if not parts and made_for.get(THREAD, this_thread()) != this_thread():
        return Finding(
            "other", THREADS, "compiled", "compiled again"
        )  # it waited for the other, and did not look again
    return Finding("other", "", "", "", parts[0] if parts else "")


def same_backend(first: Any, second: Any) -> bool:
    """As Dynamo's cache compares backends."""
    if first is second:
        return True
    try:
        return bool(first == second)
    except Exception:  # noqa: BLE001  # a backend's own `__eq__`
        return False


def _backend(entry: Any, call: dynamo.CompileCall) -> Finding:
    first, second = dynamo.entry_backend(entry), call.backend
    before, after = backend_text(first), backend_text(second)
    if before == after:
        after = f"another {after}"
    return Finding("backend", "torch.compile's backend", before, after)


def backend_text(backend: Any) -> str:
    """A backend's name and what it was given: what makes two of them differ."""
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None) or type(backend).__name__
    given: dict[str, Any] = {}
    if getattr(backend, "dynamic", None) is not None:
        given["dynamic"] = backend.dynamic
    options = getattr(backend, "kwargs", None) or getattr(backend, "config", None) or {}
    given |= options if isinstance(options, dict) else {}
    inside = ", ".join(f"{key}={describe(value)}" for key, value in given.items())
    return shorten(f"{name}({inside})" if inside else str(name))


def _by_id(identity: int) -> Any:
    """The living object with this id that the garbage collector knows; code objects by their function."""
    for thing in gc.get_objects():
        if id(thing) == identity:
            return thing
        if type(thing) is types.FunctionType and id(thing.__code__) == identity:
            return thing.__code__
    return None
