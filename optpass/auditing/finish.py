"""What a recorded audit gets before it is shown: source lines, the project's root, fixes. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from optpass.reporting.audit.model import Audit
from optpass.reporting.audit.source import annotate


def finish(audit: Audit, root: Path, *, fixes: bool = True) -> Audit:
    """Fill what the collectors leave open; calling it twice changes nothing more.

    Args:
        root: project folder.
        fixes: work out what to do about each break.
    """
    annotate(audit, root)
    if fixes:
        from optpass.auditing.fixes.attach import attach_diffs
        from optpass.auditing.fixes.knowledge import advise

        for brk in audit.breaks:
            brk.fix.text = brk.fix.text or advise(brk.gb_type, brk.gb_id, brk.context, brk.reason, brk.hints)
        attach_diffs(audit)
    return audit
