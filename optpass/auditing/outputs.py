"""Which view goes into which file. The views themselves are `optpass.reporting.audit`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from optpass import __version__
from optpass.errors import AuditError, did_you_mean
from optpass.reporting.audit import files
from optpass.reporting.audit.baseline import Difference
from optpass.reporting.audit.model import Audit


def _json(audit: Audit, difference: Difference | None) -> str:
    return files.to_json(audit)


def _html(audit: Audit, difference: Difference | None) -> str:
    from optpass.reporting.audit.html import render_html

    return render_html(audit, difference=difference)


def _sarif(audit: Audit, difference: Difference | None) -> str:
    from optpass.reporting.audit.sarif import render_sarif

    return render_sarif(audit, difference=difference, version=__version__)


def _markdown(audit: Audit, difference: Difference | None) -> str:
    from optpass.reporting.audit.markdown import render_markdown

    return render_markdown(audit, difference=difference)


VIEWS: dict[str, Callable[[Audit, Difference | None], str]] = {
    "json": _json,
    "html": _html,
    "sarif": _sarif,
    "markdown": _markdown,
}
_SUFFIXES = {".json": "json", ".html": "html", ".htm": "html", ".sarif": "sarif", ".md": "markdown"}


def view_of(path: str | Path) -> str:
    """The view that a path's suffix names.

    Raises:
        AuditError: it names none.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise AuditError(f"{path}: no view is written as {suffix or 'a path without suffix'!r}; "
                         f"{did_you_mean(suffix, _SUFFIXES)}")  # fmt: skip
    return _SUFFIXES[suffix]


def write_as(audit: Audit, path: str | Path, view: str | None = None, difference: Difference | None = None) -> None:
    """Write one view, atomically; which one, the path's suffix says where `view` does not.

    Raises:
        AuditError: no such view, or the path cannot be written.
    """
    files.write_text(VIEWS[view or view_of(path)](audit, difference), path)
