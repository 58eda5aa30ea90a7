"""The pytest plugin: fixture `audit`, marker `no_graph_breaks`, and a gate over the whole session. Inert unless asked.

pytest imports this file in every session where optpass is installed, so it imports nothing but pytest at the top.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from optpass.auditing.session import AuditSession

BASELINE, UPDATE, WRITE = "--optpass-audit-baseline", "--optpass-audit-update", "--optpass-audit"
_MARKER = "no_graph_breaks"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The session's flags."""
    group = parser.getgroup("optpass", "optpass: audit of torch.compile")
    group.addoption(
        BASELINE, metavar="PATH", help="audit the session; fail it on graph breaks, recompiles or silent eager that "
        "the audit in PATH lacks",
    )  # fmt: skip
    group.addoption(UPDATE, action="store_true", help=f"write the session's audit to the path of {BASELINE} instead")
    group.addoption(
        WRITE,
        metavar="PATH",
        action="append",
        help="audit the session and write it: .json, .html, .sarif or .md; repeat",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The marker is always known; the session is audited where a flag asks for it."""
    config.addinivalue_line("markers", f"{_MARKER}: the test fails if a graph break happens while it runs (optpass)")
    if config.getoption(BASELINE) or config.getoption(WRITE):
        from optpass.auditing.pytest_session import SessionAudit

        config.pluginmanager.register(SessionAudit(config), "optpass-audit-session")
    elif config.getoption(UPDATE):
        raise pytest.UsageError(f"{UPDATE} needs {BASELINE} PATH")


@pytest.fixture
def audit() -> Iterator[AuditSession]:
    """An `optpass.audit()` of the test, from here on: `audit.assert_no_breaks()`, `audit.recompiles`, ..."""
    import optpass

    with optpass.audit() as session:
        yield session


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, None]:
    """Audits a test with the marker, and fails it where it breaks."""
    if item.get_closest_marker(_MARKER) is None:
        yield
        return
    import optpass

    with optpass.audit(target=item.nodeid) as session:
        outcome = yield
    if outcome.excinfo is None:
        try:
            session.assert_no_breaks()
        except AssertionError as error:
            outcome.force_exception(pytest.fail.Exception(str(error), pytrace=False))
