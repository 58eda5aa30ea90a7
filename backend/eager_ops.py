"""Ops that a program runs outside of every graph while it is captured: what torch.compile would leave to eager."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from optpass.backend import compat

#: Ops that do no work worth a kernel, besides views.
_IDLE = ("aten::empty", "aten::detach", "aten::alias", "aten::lift_fresh", "aten::_local_scalar_dense", "prim::")


@contextlib.contextmanager
def watched(
    mode: compat.FakeTensorMode, eager: Counter[str]
) -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Count in `eager` the ops that run outside of graphs; yields a context in which they are not counted."""

    def watch(op: Any) -> None:
        if not op.is_view and not op._schema.name.startswith(_IDLE):
            eager[str(op)] += 1

    @contextlib.contextmanager
    def unwatched() -> Iterator[None]:
        if not isinstance(mode, compat.PlanningMode):
            yield
            return
        before, mode.watch = mode.watch, None
        try:
            yield
        finally:
            mode.watch = before

    if isinstance(mode, compat.PlanningMode):
        mode.watch = watch
    try:
        yield unwatched
    finally:
        if isinstance(mode, compat.PlanningMode):
            mode.watch = None
