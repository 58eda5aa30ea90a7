"""Inductor's own attention matcher, kept away from the graphs of optpass.

`torch._inductor.fx_passes.fuse_attention` takes dims and scalars of its patterns for wildcards, so that it fuses what
is not attention (softmax over another dim, a fill of 0, a mask `m == 2`) and changes results. Under `shielded()`, the
joint-graph passes of this thread run without its patterns; every other compile of the process has them as before.

The patterns sit in `PatternMatcherPass` objects of `joint_graph`. Their `apply` is replaced, once, by one that asks
whether this thread is shielded, and then applies a copy without those patterns. Registering them takes 0.2 s, so the
first compile under the shield puts that off until a compile needs them.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

log = logging.getLogger(__name__)

_MODULE = "torch._inductor.fx_passes.fuse_attention"
_SHIELDED: contextvars.ContextVar[bool] = contextvars.ContextVar("optpass_shielded", default=False)
_INSTALLING = threading.Lock()


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """In this thread, Inductor runs without its attention patterns, if `matcher_problem()` is None."""
    if matcher_problem() is not None:
        yield
        return
    token = _SHIELDED.set(True)
    try:
        yield
    finally:
        _SHIELDED.reset(token)


def is_shielded() -> bool:
    """Whether this thread is under `shielded()`."""
    return _SHIELDED.get()


def matcher_problem() -> str | None:
    """Why the matcher cannot be taken out of a single compile with this torch, or None. Installs what does it."""
    with _INSTALLING:
        return _install()


@functools.cache
def _install() -> str | None:
    try:
        from torch._inductor.fx_passes import fuse_attention, joint_graph
    except ImportError as error:
        return f"{error.name} is not there"
    registers = getattr(fuse_attention, "_sfdp_init", None)
    if not callable(registers):
        return f"{_MODULE}._sfdp_init is not there"
    passes = [getattr(joint_graph, "early_patterns", None), *getattr(joint_graph, "pass_patterns", ())]
    passes = [item for item in passes if item is not None]
    if not passes or not all(hasattr(item, "apply") and isinstance(_table(item), dict) for item in passes):
        return "torch._inductor.fx_passes.joint_graph.pass_patterns is not a list of pattern matcher passes"
    registration = _Registration(registers)
    fuse_attention._sfdp_init = registration  # type: ignore[assignment]
    for item in passes:
        item.apply = functools.partial(_apply, item, item.apply, passes, registration)
    return None


def _table(item: Any) -> Any:
    return getattr(item, "patterns", None)


class _Registration:
    """`_sfdp_init`, put off while the thread is shielded."""

    def __init__(self, register: Callable[..., Any]) -> None:
        self.register = register
        self.lock = threading.RLock()
        self.put_off: dict[tuple[Any, ...], None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        with self.lock:
            if _SHIELDED.get():
                self.put_off[args, tuple(sorted(kwargs.items()))] = None
            else:
                self.register(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.register, name)  # `cache_clear` and the like

    def catch_up(self) -> None:
        """Register what was put off, as Inductor's `init_once_fakemode` would have."""
        from torch._dynamo.utils import counters

        with self.lock:
            while self.put_off:
                args, kwargs = next(iter(self.put_off))
                before = counters["inductor"].copy()
                with tracing(None), unset_fake_temporarily(), FakeTensorMode():  # type: ignore[no-untyped-call, unused-ignore]
                    self.register(*args, **dict(kwargs))
                counters["inductor"] = before  # tracing the replacements counts as fusing
                del self.put_off[args, kwargs]

    def nothing_registered(self) -> bool:
        """Whether the patterns are certain not to be there."""
        info = getattr(self.register, "cache_info", None)
        return info is not None and info().currsize == 0


def _apply(item: Any, original: Callable[..., Any], passes: list[Any], registration: _Registration, graph: Any) -> Any:
    """`PatternMatcherPass.apply` of `item`, one of `passes`, without attention patterns if the thread is shielded."""
    if not _SHIELDED.get():
        registration.catch_up()
        return original(graph)
    with registration.lock:
        kept, dropped = _without_attention(_table(item))
        certain = dropped or registration.nothing_registered() or any(_without_attention(_table(p))[1] for p in passes)
    if not certain:
        _warn_once()
        return 0  # no pattern of Inductor's at all: they only make graphs faster
    if not dropped:
        return original(graph)
    clone = copy.copy(item)
    clone.__dict__.pop("apply", None)
    clone.patterns = kept
    return clone.apply(graph)


def _without_attention(table: Any) -> tuple[Any, bool]:
    """A copy of a table of patterns without those of the attention matcher, and whether there were any."""
    kept = copy.copy(table)
    dropped = False
    for key, entries in list(table.items()):
        others = [entry for entry in entries if not is_attention_pattern(entry)]
        dropped = dropped or len(others) < len(entries)
        if others:
            kept[key] = others
        else:
            del kept[key]
    return kept, dropped


def is_attention_pattern(entry: Any) -> bool:
    """Whether a pattern is one of `fuse_attention`: its check closes over functions of that module."""
    check = getattr(entry, "extra_check", None)
    for cell in getattr(check, "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        if getattr(value, "__module__", None) == _MODULE:
            return True
    return getattr(check, "__module__", None) == _MODULE


@functools.cache
def _warn_once() -> None:
    log.warning(
        "Inductor's attention patterns, which can change results, cannot be told from its other joint-graph patterns "
        "in this torch: all of those are left out"
    )
