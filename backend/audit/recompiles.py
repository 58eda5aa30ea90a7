"""Recompiles: which guard failed, what changed and to what, attributed to the cache entry that the call is closest to.

Guards are read in `guards`, judged in `causes`; what to do about it is in `recompile_fixes`.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from optpass.backend.audit import recompile_fixes
from optpass.backend.audit.causes import Finding, Judge, keys_of
from optpass.backend.audit.eager_calls import FRAMES, EagerEvent
from optpass.backend.audit.guards import Failure, Modes, Scope, failures, plain
from optpass.backend.audit.locations import function_of, names_of
from optpass.backend.audit.sources_text import prefixes, sources_in
from optpass.backend.audit.values import describe, shorten
from optpass.backend.compat import audit_guards as dynamo
from optpass.backend.compat.hooks import Args, Kwargs
from optpass.reporting.audit.model import Fix, Recompile

log = logging.getLogger(__name__)

_LIMIT = ("recompile limit exceeded", "RecompileLimit", "CacheLimitExceeded")
_GUARDS = 20
_VALUES = 64
#: Of several failed guards, what is named first: what explains the others.
_RANK = {"backend": 0, "grad mode": 1, "autocast": 1, "device": 2, "dtype": 3, "training flag": 4}


@dataclass
class _Seen:
    """What is known of one place of one function."""

    record: Recompile
    finding: Finding
    dynamic: bool | None
    values: list[str] = field(default_factory=list)
    seconds: float = 0.0
    count: int = 0


@dataclass(frozen=True)
class _Why:
    """Why one frame was compiled again."""

    function: tuple[str, int, str]
    finding: Finding
    guards: tuple[str, ...]
    dynamic: bool | None


class RecompileCollector:
    """Records of recompiles, from `install` to `uninstall`.

    Attributes:
        problems: why recompiles could not be explained, if so.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._lock = threading.Lock()
        self._seen: dict[tuple[Any, ...], _Seen] = {}
        self._made_for: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()
        self._active = False

    def install(self) -> None:
        """Start to watch; more than one collector may."""
        if self._active:
            return
        problem = dynamo.COMPILE.add(self)
        self.problems = [problem] if problem is not None else []
        self._active = problem is None
        if self._active:
            FRAMES.listen(self)

    def uninstall(self) -> None:
        """Stop to watch; what was seen stays."""
        if self._active:
            dynamo.COMPILE.remove(self)
            FRAMES.leave(self)
            self._active = False

    def records(self) -> list[Recompile]:
        """What was seen so far, in order; may be called at any time."""
        with self._lock:
            return [_record(seen) for seen in self._seen.values()]

    def on_eager(self, event: EagerEvent) -> None:
        """Nothing: calls that run eager are the silent ledger's; only the modes of a call are asked of the frames."""

    def before(self, args: Args, kwargs: Kwargs) -> Any:
        """A frame is about to be compiled: guards can be evaluated on what it was called with."""
        call = dynamo.compile_call(args, kwargs)
        why = explain(call, self._made_for) if call.entries else None
        return call, why, time.perf_counter()

    def after(self, token: Any, args: Args, result: Any, error: BaseException | None) -> None:
        """It has been compiled, or not."""
        if token is None:
            return
        call, why, start = token
        seconds = time.perf_counter() - start
        manager = getattr(getattr(result, "guarded_code", None), "guard_manager", None)
        if manager is not None:
            self._made_for[manager] = conditioned(manager, call)
        if why is not None:
            with self._lock:
                self._file(why, seconds, refused=error is not None and is_limit(error))

    def _file(self, why: _Why, seconds: float, *, refused: bool) -> None:
        finding = why.finding
        key = (*why.function, finding.cause, finding.source)
        seen = self._seen.get(key)
        if seen is None:
            if refused:
                return  # the limit's own record says so; nothing was compiled
            file, line, function = why.function
            record = Recompile(
                file=file,
                line=line,
                function=function,
                cause=finding.cause,
                source=finding.source,
                before=finding.before,
                after=finding.after,
                guards=list(why.guards),
            )
            seen = self._seen[key] = _Seen(record, finding, why.dynamic)
        for value in (finding.before, finding.after) if not finding.dynamic else (finding.after,):
            if value and value not in seen.values and len(seen.values) < _VALUES:
                seen.values.append(value)
        if not refused:
            seen.count += 1
            seen.seconds += seconds


def _record(seen: _Seen) -> Recompile:
    text = recompile_fixes.advice(seen.finding, seen.values, seen.count, seen.dynamic)
    update = {
        "count": seen.count,
        "values": list(seen.values),
        "seconds": seen.seconds,
        "fix": Fix(text=text),
    }
    return seen.record.model_copy(update=update)


def is_limit(error: BaseException) -> bool:
    """Whether Dynamo refused to compile because it had compiled the function too often."""
    kind = getattr(error, "gb_type", None)
    text = f"{type(error).__name__} {kind if isinstance(kind, str) else ''}"
    return any(mark in text for mark in _LIMIT)


def conditioned(manager: Any, call: dynamo.CompileCall) -> dict[str, str]:
    """Values of the places that a new entry's guards put conditions on; the guards themselves do not keep them."""
    parts = dynamo.conditions(manager)
    scope = Scope({"L": call.local, "G": call.namespace})
    found = {keys_of(source): describe(keys) for source, keys in dicts_in(call.local)}
    for source in dict.fromkeys(source for part in parts for source in sources_in(plain(part))):
        try:
            found[source] = describe(scope.evaluate(source))
        except Exception:  # noqa: BLE001  # Dynamo's own helpers are not known here: the condition is told instead
            continue
    return found


def dicts_in(local: Mapping[str, Any], most: int = 200) -> Iterator[tuple[str, list[Any]]]:
    """Dicts that a frame was called with, at most three steps deep, as Dynamo names them, with their keys."""
    waiting: list[tuple[str, Any, int]] = [(f"L[{name!r}]", value, 3) for name, value in local.items()]
    for source, value, depth in waiting:
        if type(value) is dict:
            yield source, list(value)
            items = [(f"{source}[{key!r}]", item) for key, item in value.items() if type(key) in (str, int)]
        elif type(value) in (list, tuple):
            items = [(f"{source}[{index}]", item) for index, item in enumerate(value)]
        elif isinstance(value, torch.Tensor) or type(value).__module__ == "builtins":
            continue
        else:
            items = [(f"{source}.{name}", item) for name, item in list(getattr(value, "__dict__", {}).items())]
        if depth and len(waiting) + len(items) <= most:
            waiting.extend((inner, item, depth - 1) for inner, item in items)


def explain(call: dynamo.CompileCall, made_for: Mapping[Any, dict[str, str]]) -> _Why | None:
    """Why the frame matches none of its cache entries: every failing guard of the closest one.

    The closest entry fails the fewest guards; of several, the one used last.

    Args:
        call: the compile.
        made_for: by an entry's guard manager, values that it was compiled for (see `conditioned`).
    """
    best: tuple[int, Any, list[Failure], Scope] | None = None
    modes = FRAMES.modes_of_call()
    for entry in call.entries:
        if dynamo.invalidation(entry) is not None:
            continue
        scope = Scope(dynamo.guard_scope(entry, call.local))
        other = not same_backend(dynamo.entry_backend(entry), call.backend)
        enough = best[0] if best is not None else 400
        failed = _failures(entry, scope, modes, enough, call.local)
        distance = len(failed) + other
        if best is None or distance < best[0]:
            best = (distance, entry, failed, scope)
    function = function_of(call)
    dynamic = getattr(call.backend, "dynamic", None)
    if best is None:
        return _gone(call, function, dynamic)
    _, entry, failed, scope = best
    names = names_of(call)
    judge = Judge(scope, call.code.co_freevars, names, made_for.get(entry.guard_manager, {}), _by_id)
    findings = [(judge.finding(failure), failure) for failure in failed]
    if not same_backend(dynamo.entry_backend(entry), call.backend):
        findings.insert(0, (_backend(entry, call), Failure("BACKEND", "the backend is the same", "")))
    if not findings:
        findings = [(_unknown(entry, call), Failure("", "", ""))]
    finding, _ = min(enumerate(findings), key=lambda item: (*_rank(*item[1]), item[0]))[1]
    guards = tuple(_guard_text(f, failure, judge) for f, failure in findings[:_GUARDS])
    scope.forget()
    return _Why(function, finding, guards, dynamic if isinstance(dynamic, bool) else None)


def _failures(entry: Any, scope: Scope, modes: Modes | None, enough: int, local: dict[str, Any]) -> list[Failure]:
    """Every failing guard; Dynamo's own first one where the tree cannot be walked or tells nothing."""
    try:
        found = failures(entry, scope, modes, enough)
    except Exception:  # noqa: BLE001  # a tree of guards of a form unknown here: Dynamo's own reason is left
        log.debug("guards could not be walked", exc_info=True)
        found = []
    if not found:
        found = [Failure("", plain(part), "") for part in dynamo.first_failure(entry, local)[:1]]
    return found


def _rank(finding: Finding, failure: Failure) -> tuple[int, int]:
    rank = _RANK.get(finding.cause, 5)
    if failure.kind == "tensor" and finding.cause in ("device", "dtype"):
        rank = 3  # a tensor's own device explains no other failure
    if failure.kind == "SET_CONTAINS":
        rank += 1  # beside the set as a whole
    return rank, len(prefixes(failure.source))


def _guard_text(finding: Finding, failure: Failure, judge: Judge) -> str:
    if failure.kind == "tensor":
        return f"{finding.source} == {finding.before}, now {finding.after}"
    if failure.kind in ("", "state", "BACKEND", "TORCH_FUNCTION_MODE_STACK"):
        return shorten(failure.code, 300)
    text = judge.condition_text(failure.code)
    if text == failure.code and not failure.kind.startswith("LAMBDA"):
        text = f"{finding.source} == {finding.before}"
    return shorten(f"{text}, now {finding.after}" if finding.after else text, 300)


def _gone(call: dynamo.CompileCall, function: tuple[str, int, str], dynamic: Any) -> _Why:
    """All cache entries were given up because an object that they held weakly died."""
    reason = dynamo.invalidation(call.entries[0]) or ""
    source = reason.removeprefix("Cache line invalidated because ").removesuffix(" got deallocated")
    scope = Scope({"L": call.local, "G": call.namespace})
    judge = Judge(scope, call.code.co_freevars, names_of(call), {}, _by_id)
    inner = source.removeprefix("type(").removesuffix(")") if source.startswith("type(") else source
    value = judge.value(inner)
    finding = Finding(
        "weak reference", judge.text(source), "an object that is gone", describe(value), judge.text(inner)
    )
    scope.forget()
    return _Why(function, finding, (reason,), dynamic if isinstance(dynamic, bool) else None)


def _unknown(entry: Any, call: dynamo.CompileCall) -> Finding:
    parts = dynamo.first_failure(entry, call.local)
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
