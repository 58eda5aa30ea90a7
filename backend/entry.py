"""The backend function that `torch.compile(backend="optpass")` finds through its entry point."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from optpass.backend import exit_report, inner
from optpass.backend.device import fingerprint, spec_for
from optpass.backend.identity import identity
from optpass.backend.session import SESSIONS, Session, Timed
from optpass.options import resolve
from optpass.passes.registry import selected
from optpass.reporting import store

log = logging.getLogger(__name__)


def optpass(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **_unused: Any,
) -> Callable[..., Any]:
    """Compile one Dynamo graph.

    Args:
        gm: the graph; ours to change.
        example_inputs: tensors and SymInts, one per placeholder.
        mode: as in `torch.compile(mode=...)`; passed on to Inductor.
        options: see `optpass.options.Options`.
        **_unused: what later versions of torch add to every backend call (2.15: `name`).

    Raises:
        ConfigError: an option is unknown, of the wrong type or impossible.
        PassError: a pass failed and `strict` is set.
    """
    start = time.perf_counter()
    resolved = resolve(options)
    ignored = inner.check(resolved, mode)
    passes = selected(resolved)
    spec = spec_for(resolved, example_inputs)
    uuid = identity(resolved, passes, fingerprint(resolved, spec))
    exit_report.register(resolved)

    session = Session(gm, resolved, passes, spec, uuid)
    SESSIONS.add(session)
    serving, problem = inner.serving(resolved, example_inputs)
    collected = store.current()
    collected.set_options(resolved.to_json())
    if problem is not None:
        inner.warn_once(problem)
        collected.warn(f"Inductor cannot build here ({problem}); aot_eager served instead")
    for text in ignored:
        inner.log_once(text)
        collected.warn(text)
    session.record.inner = inner.name_of(serving)
    session.before_autograd(gm)
    with inner.cache_outcome(session.record):
        compiled = inner.compile_with(serving, gm, example_inputs, resolved, mode, session.hooks)
    session.after_compile()
    with collected.lock:
        session.record.t_compile_s += time.perf_counter() - start
    log.info("graph %s compiled by %s in %.2f s", session.record.id, session.record.inner, session.record.t_compile_s)
    exit_report.trace(session.record)
    return Timed(compiled, session.record)


def _reset() -> None:
    """Called by `torch._dynamo.reset()`, possibly several times. The report survives: it is about what was compiled."""


optpass.reset = _reset  # type: ignore[attr-defined]
