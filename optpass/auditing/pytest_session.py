"""The audit of a whole pytest session, compared with a baseline at its end. Workers of xdist send their parts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from optpass.auditing.deferred import WhenCompilerLoads
from optpass.auditing.outputs import view_of, write_as
from optpass.auditing.plugin import BASELINE, UPDATE, WRITE
from optpass.errors import OptPassError
from optpass.reporting.audit import files, words
from optpass.reporting.audit.baseline import Difference, compare
from optpass.reporting.audit.merge import merge
from optpass.reporting.audit.model import Audit
from optpass.reporting.environment import environment, process_record
from optpass.reporting.writable import check_file

if TYPE_CHECKING:
    from optpass.auditing.session import AuditSession

_SENT = "optpass_audit"  # key of a worker's output
_SHOWN = 10


class SessionAudit:
    """Registered as a plugin of its own where a flag asks for an audit of the session.

    Raises:
        pytest.UsageError: the baseline cannot be read, or a file cannot be written.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        base = config.invocation_params.dir
        given = config.getoption(BASELINE)
        self.baseline_path = Path(base, given) if given else None
        self.update = bool(config.getoption(UPDATE))
        self.outputs = [Path(base, path) for path in config.getoption(WRITE) or ()]
        self.before: Audit | None = None
        self._check()
        self._session: AuditSession | None = None
        self._parts: list[Audit] = []
        self._lost = 0
        self.found: Audit | None = None
        self.difference: Difference | None = None
        self.written: list[Path] = []
        self._deferred = WhenCompilerLoads(self._begin)
        self._deferred.install()

    def _check(self) -> None:
        """Everything that can be known to fail at the end is told at the start."""
        if self.update and self.baseline_path is None:
            raise pytest.UsageError(f"{UPDATE} needs {BASELINE} PATH")
        try:
            if self.baseline_path is not None and not self.update:
                self.before = files.read(self.baseline_path, "baseline")
            for path in self.outputs:
                view_of(path)
                check_file(path, f"{WRITE} {path}")
        except OptPassError as error:
            hint = "" if self.baseline_path is None or self.baseline_path.exists() else f", here: add {UPDATE}"
            raise pytest.UsageError(f"{error}{hint}") from None

    def _begin(self) -> None:
        from optpass.auditing.session import AuditSession

        self._session = AuditSession(target="pytest", root=self.config.rootpath).start()

    # ---- workers --------------------------------------------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        """A worker of pytest-xdist has ended."""
        sent = getattr(node, "workeroutput", {}).get(_SENT)
        if sent is not None:
            self._parts.append(Audit.model_validate_json(sent))
        else:
            self._lost += 1

    # ---- the end --------------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send, or merge, write and compare."""
        self._deferred.remove()
        if self._session is not None:
            self._session.stop()
        sends = getattr(self.config, "workeroutput", None)
        if sends is not None:
            sends[_SENT] = files.to_json(self._own())
            return
        self.found = merge([self._own(), *self._parts])
        if self._lost:
            self.found.partial = f"{words.count(self._lost, 'worker')} ended without sending what was recorded"
        if self.before is not None:
            self.difference = compare(self.before, self.found)
            if self.difference.new and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.update and self.baseline_path is not None:
            files.write(self.found, self.baseline_path)
            self.written.append(self.baseline_path)
        for path in self.outputs:
            write_as(self.found, path, difference=self.difference)
            self.written.append(path)

    def _own(self) -> Audit:
        if self._session is not None:
            return self._session.result()
        return Audit(
            target="pytest", root=str(self.config.rootpath), environment=environment(), processes=[process_record()]
        )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """A section of a few lines."""
        if self.found is None:
            return
        terminalreporter.section("optpass audit", sep="=")
        if self.found.partial:
            terminalreporter.write_line(f"partial: {self.found.partial}", yellow=True)
        terminalreporter.write_line(words.headline(self.found))
        if self.difference is not None:
            terminalreporter.write_line(self.difference.headline(), red=bool(self.difference.new))
            for finding in self.difference.new[:_SHOWN]:
                terminalreporter.write_line(f"new: {finding.line()}", red=True)
            if len(self.difference.new) > _SHOWN:
                terminalreporter.write_line(f"... and {len(self.difference.new) - _SHOWN} more")
        for path in self.written:
            terminalreporter.write_line(f"wrote {path}")
