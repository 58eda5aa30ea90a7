"""Points in torch's private code that optpass may watch: patched in a chain, never in the way.

The original always runs, once, with what it was given; a watcher that raises is dropped for that event and noted.
What the events mean is not known here.
"""

from __future__ import annotations

import importlib
import inspect
import linecache
import logging
import os
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from optpass.backend.compat.stack import with_room

log = logging.getLogger(__name__)

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


#: `quick(argument, frame)`: the single argument, and the frame that calls. For what runs at every call of the user's.
Quick = Callable[[Any, types.FrameType], None]


class Watcher(Protocol):
    """What a hook point tells: `before` its token, `after` the token and how the original ended."""

    def before(self, args: Args, kwargs: Kwargs) -> Any: ...

    def after(self, token: Any, args: Args, result: Any, error: BaseException | None) -> None: ...


@dataclass(eq=False)
class HookPoint:
    """One function of torch's that can be watched.

    Attributes:
        module: where it lives, e.g. 'torch._dynamo.symbolic_convert'.
        path: attribute path in the module, 'Class.method' or 'function'.
        parameters: names that its signature must have, in this order.
        loses: what is less precise where it is missing.
        observes: what is known by it, in a word or two.
        adjust: changes the arguments that the original gets for the frame that the patch adds; None: it does not care.
        before_only: it takes one argument, and nothing of ours may or need run once the original has returned.
        caller: the function that is watched calling it, where `before_only`; '' for whoever does.
        room: what it calls runs deep: the patch makes room on the interpreter's stack, see `compat.stack`.
        failures: what watchers raised, by text; the user never sees it happen.
    """

    module: str
    path: str
    parameters: tuple[str, ...]
    loses: str
    observes: str = ""
    adjust: Callable[[Kwargs], Kwargs] | None = None
    before_only: bool = False
    caller: str = ""
    room: bool = False
    failures: dict[str, int] = field(default_factory=dict, repr=False)
    _watchers: tuple[Watcher, ...] = ()
    _quick: tuple[Quick, ...] = ()
    _patch: Callable[..., Any] | None = None
    _original: Callable[..., Any] | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def __post_init__(self) -> None:
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.after_fork)

    @property
    def name(self) -> str:
        """`module.Class.method`."""
        return f"{self.module}.{self.path}"

    @property
    def file_name(self) -> str:
        """What the patch's code says to be its file, e.g. '<optpass>/torch/_dynamo/convert_frame.py'."""
        return f"<optpass>/{self.module.replace('.', '/')}.py"

    def problem(self) -> str | None:
        """Why it cannot be watched in this torch; None when it can."""
        if _exec_strategy() is None:
            return f"{self.name} cannot be patched: torch._C._dynamo.eval_frame.set_code_exec_strategy is missing"
        try:
            owner, attribute = self._owner()
        except (ImportError, AttributeError) as error:
            return f"{self.name} is missing ({error})"
        function = getattr(owner, attribute, None)
        if not callable(function):
            return f"{self.name} is missing"
        try:
            names = [p.name for p in inspect.signature(function).parameters.values()]
        except (TypeError, ValueError):  # a builtin tells no signature: it is called as it is
            return None
        wanted = list(self.parameters)
        if self.before_only and len(names) != 1:
            return f"{self.name} takes ({', '.join(names)}), not one argument"
        if names[: len(wanted)] != wanted and not _in_order(wanted, names):
            return f"{self.name} takes ({', '.join(names)}), not ({', '.join(wanted)})"
        return None

    def add(self, watcher: Watcher) -> str | None:
        """Watch from now on; gives the problem if that is impossible."""
        with self._lock:
            problem = self.problem()
            if problem is not None:
                return problem
            self._watchers = (*self._watchers, watcher)
            self._install()
            return None

    def add_quick(self, quick: Quick) -> str | None:
        """As `add`, for a point that is `before_only`; `remove_quick` ends it."""
        with self._lock:
            problem = self.problem()
            if problem is None:
                _leave_alone(getattr(quick, "__func__", quick).__code__, inside=True)
                self._quick = (*self._quick, quick)
                self._install()
            return problem

    def remove_quick(self, quick: Quick) -> None:
        """As `remove`."""
        with self._lock:
            self._quick = tuple(known for known in self._quick if known != quick)
            self._uninstall()

    def remove(self, watcher: Watcher) -> None:
        """Watch no longer; the original is put back when nobody watches, unless somebody patched over us."""
        with self._lock:
            self._watchers = tuple(w for w in self._watchers if w is not watcher)
            self._uninstall()

    def after_fork(self) -> None:
        """In a forked child: forget the watchers, and a lock that a thread not here may hold."""
        self._lock = threading.RLock()
        self._watchers, self._quick = (), ()

    def _owner(self) -> tuple[Any, str]:
        owner: Any = importlib.import_module(self.module)
        *parents, attribute = self.path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, attribute

    def _install(self) -> None:
        owner, attribute = self._owner()
        current = getattr(owner, attribute)
        if self._patch is None or not _reaches(current, self._patch):
            self._original, self._patch = current, self._wrap(current)
            setattr(owner, attribute, self._patch)

    def _uninstall(self) -> None:
        if self._watchers or self._quick or self._patch is None:
            return
        owner, attribute = self._owner()
        if getattr(owner, attribute) is self._patch:
            setattr(owner, attribute, self._original)
            self._patch = self._original = None

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        _leave_alone(HookPoint._guarded.__code__, inside=True)
        if self.before_only:
            return self._wrap_before(original)
        adjust = self.adjust

        def optpass_hook(*args: Any, **kwargs: Any) -> Any:
            watchers = self._watchers if self._patch is optpass_hook else ()  # a patch that was replaced stays silent
            tokens = [(w, self._guarded(w.before, args, kwargs)) for w in watchers]
            passed = kwargs if adjust is None else adjust(kwargs)
            try:
                result = original(*args, **passed)
            except BaseException as error:
                for watcher, token in tokens:
                    self._guarded(watcher.after, token, args, None, error)
                raise
            for watcher, token in tokens:
                self._guarded(watcher.after, token, args, result, None)
            return result

        # Dynamo looks for the frame that called into its own files: the patch counts as one of these.
        optpass_hook.__code__ = self._as_torchs(optpass_hook.__code__)
        _leave_alone(optpass_hook.__code__)
        optpass_hook.__wrapped__ = original  # type: ignore[attr-defined]
        return optpass_hook

    def _as_torchs(self, code: types.CodeType) -> types.CodeType:
        """The code as if it stood in the file that it watches.

        Dynamo formats a traceback in front of every compile: without an entry that says that there are no lines, they
        are looked for in each folder of `sys.path` each time.
        """
        linecache.cache.setdefault(self.file_name, (0, None, [], self.file_name))
        return (with_room(code) if self.room else code).replace(co_filename=self.file_name)

    def _wrap_before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        getframe, caller = sys._getframe, self.caller

        def optpass_hook(argument: Any) -> Any:
            frame = getframe(1)
            if (not caller or frame.f_code.co_name == caller) and self._patch is optpass_hook:
                for quick in self._quick:
                    try:
                        quick(argument, frame)
                    except Exception as error:  # noqa: BLE001  # as `_guarded`, without its call: it runs at every call
                        self._note(error)
                for watcher in self._watchers:
                    self._guarded(watcher.before, (argument,), {})
            return original(argument)

        optpass_hook.__code__ = self._as_torchs(optpass_hook.__code__)
        _leave_alone(optpass_hook.__code__)
        optpass_hook.__wrapped__ = original  # type: ignore[attr-defined]
        return optpass_hook

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001  # an audit that fails must not fail the user's compile; it is noted
            self._note(error)
            return None

    def _note(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        self.failures[text] = self.failures.get(text, 0) + 1
        log.debug("a watcher of %s failed", self.name, exc_info=error)


def _leave_alone(code: types.CodeType, *, inside: bool = False) -> None:
    """Keep Dynamo from compiling this code, which may run while it is on; also what it calls, where `inside`."""
    strategy = _exec_strategy()
    if strategy is not None:
        action, make, put = strategy
        put(code, make(action.SKIP, action.SKIP if inside else action.DEFAULT))


def _exec_strategy() -> tuple[Any, Any, Any] | None:
    """What tells Dynamo to leave code alone; None where this torch has no such thing."""
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:
        return None
    return _FrameAction, _FrameExecStrategy, set_code_exec_strategy


def _in_order(wanted: list[str], names: list[str]) -> bool:
    remaining = iter(names)
    return all(name in remaining for name in wanted)


def _reaches(function: Any, patch: Callable[..., Any]) -> bool:
    """Whether calling `function` ends up in `patch`, through wrappers that say what they wrap."""
    seen = 0
    while function is not None and seen < 100:
        if function is patch:
            return True
        function, seen = getattr(function, "__wrapped__", None), seen + 1
    return False
