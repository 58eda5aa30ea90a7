"""The report of this process: records as they were filed, and the roofline of each graph, priced for a device."""

from __future__ import annotations

import logging
from pathlib import Path

from optpass.backend.audit.standing import STANDING
from optpass.backend.session import SESSIONS
from optpass.errors import ConfigError, ReportError
from optpass.passes.roofline.price import device_record, price
from optpass.reporting import store
from optpass.reporting.audit.source import annotate, project_root
from optpass.reporting.model import Report

log = logging.getLogger(__name__)


def build_report(name: str = "") -> Report:
    """Everything compiled so far. Graphs that a cache hit kept us from seeing are traced now, not compiled."""
    collected = store.current()
    for session in SESSIONS.all():
        program = session.product("roofline")
        if program is None:
            continue
        try:
            spec = session.device()
        except ConfigError as error:
            collected.warn(f"no roofline: {error}")
            continue
        priced = price(program, spec)
        collected.set_device(device_record(spec))
        try:
            collected.add_analysis(session.record.id, priced.ops, priced.groups, dict(program.unknown), priced.totals)
        except ReportError as error:  # `reset_report` ran in another thread while this graph was being compiled
            log.debug("graph %s left out of the report: %s", session.record.id, error)
    report = collected.snapshot(name)
    audit = STANDING.result()
    if audit is not None:
        report.audit = annotate(audit, project_root(Path.cwd()))
    return report


def reset_report() -> None:
    """Forget every graph compiled so far in this process."""
    SESSIONS.clear()
    STANDING.clear()
    store.current().clear()
