"""Runs one scripted change and gives the recompiles that the collector explains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from optpass.backend.audit.recompiles import RecompileCollector
from optpass.backend.compat.audit_trace import TraceListener
from optpass.reporting.audit.model import Recompile


@pytest.fixture
def compiled() -> Callable[..., Any]:
    """`torch.compile` without an inner compiler: guards and recompiles are Dynamo's."""

    def wrap(function: Any, **options: Any) -> Any:
        return torch.compile(function, **({"backend": "eager"} | options))

    return wrap


@pytest.fixture
def recompiles() -> Iterator[Callable[[], list[Recompile]]]:
    """Records of what is compiled again during the test."""
    torch._dynamo.reset()
    collector = RecompileCollector()
    collector.install()
    try:
        yield collector.records
    finally:
        collector.uninstall()
        torch._dynamo.reset()


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Recompiles that torch itself tells of."""
    found: list[str] = []
    log = TraceListener(lambda name, _, payload: found.append(payload) if name == "recompile_reasons" else None)
    log.start()
    yield found
    log.stop()


@pytest.fixture
def check(
    compiled: Callable[..., Any], recompiles: Callable[[], list[Recompile]], logged: list[str]
) -> Callable[..., None]:
    """Runs a script with `compiled` and asserts that one recompile is told, with this cause, place and values."""

    def run(script: Callable[[Any], None], cause: str, source: str, before: str, after: str) -> None:
        script(compiled)
        told = [(r.cause, r.source, r.before, r.after) for r in recompiles()]
        if not logged and not told and not torch.__version__.startswith("2.13."):
            return  # this torch does not guard on it
        assert told == [(cause, source, before, after)], [r.guards for r in recompiles()]
        assert recompiles()[0].fix.text
        assert recompiles()[0].count == 1

    return run
