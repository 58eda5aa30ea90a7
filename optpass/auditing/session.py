"""`optpass.audit()`: what compiled functions do wrong while a block of code runs. It prints nothing by itself."""

from __future__ import annotations

import html as _html
import warnings
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from optpass.auditing.finish import finish
from optpass.errors import AuditError, told
from optpass.reporting.audit import files, words
from optpass.reporting.audit.baseline import Difference, Finding, compare, findings
from optpass.reporting.audit.model import Audit, AuditSummary, Break, FunctionRecord, Recompile, SilentEager
from optpass.reporting.audit.source import project_root

if TYPE_CHECKING:
    from optpass.backend.audit.recording import Recording

_FRAME_HEIGHT = 640  # pixels of the page in a notebook


def audit(*, target: str = "", root: str | Path | None = None, reset: bool = False) -> AuditSession:
    """Watch what torch.compile does in a block: graph breaks, recompiles, and what runs eager without a word.

        with optpass.audit() as a:
            step(batch)
        a.assert_no_breaks()

    Only what is compiled inside the block is seen: a function that was compiled before it gives no break again.

    Args:
        target: name that the views show.
        root: project folder; paths are told and matched from there. Default: the nearest folder of the working
            directory that holds a version control folder or a pyproject.toml.
        reset: forget all that was compiled before (`torch.compiler.reset()`) on entry. Never done unless asked.
    """
    return AuditSession(target=target, root=root, reset=reset)


class AuditSession:
    """An audit of a block of code; also readable while it runs. See `audit`."""

    def __init__(self, *, target: str = "", root: str | Path | None = None, reset: bool = False) -> None:
        self.target = target
        self.root = Path(root).absolute() if root is not None else project_root(Path.cwd())
        self._reset = reset
        self._recording: Recording | None = None
        self._running = False
        self._partial: str | None = None
        self._result: Audit | None = None

    # ---- running --------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Watch from now on.

        Raises:
            AuditError: it runs already, or was stopped: a session is for one block.
        """
        if self._recording is not None:
            raise AuditError("this audit was started already; call optpass.audit() for each block")
        from optpass.auditing.deferred import load_compiler

        load_compiler()
        from optpass.backend.audit.recording import Recording

        if self._reset:
            import torch

            torch.compiler.reset()
        self._recording = Recording()
        self._recording.start()
        self._running = True
        return self

    def stop(self, partial: str | None = None) -> None:
        """Watch no longer; without effect where it does not run.

        Args:
            partial: why the block ended early, if it did.
        """
        if self._recording is not None and self._running:
            self._recording.stop()
            self._running = False
            self._partial = partial

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop(None if error is None else ended_by(error))

    # ---- what was seen --------------------------------------------------------------------------------------------

    def result(self) -> Audit:
        """The whole, as data; so far, while it runs.

        Raises:
            AuditError: it was never started.
        """
        if self._result is not None:
            return self._result
        made = finish(self.snapshot(costs=True), self.root)
        if not self._running:
            self._result = made
        return made

    def snapshot(self, *, costs: bool = False) -> Audit:
        """What was seen so far, without the fixes, which take longer to work out.

        Args:
            costs: with the fusion that breaks lose, which takes longer too.
        """
        if self._recording is None:
            raise AuditError("this audit has not been started; use it as 'with optpass.audit() as a:'")
        made = self._recording.result(self.target, costs=costs)
        made.partial = self._partial
        return finish(made, self.root, fixes=False)

    @property
    def breaks(self) -> list[Break]:
        """Source breaks, the costliest first."""
        return self.result().breaks

    @property
    def recompiles(self) -> list[Recompile]:
        """Recompiles by function and cause, the costliest first."""
        return self.result().recompiles

    @property
    def silent_eager(self) -> list[SilentEager]:
        """What runs eager without a word."""
        return self.result().silent_eager

    @property
    def functions(self) -> list[FunctionRecord]:
        """Compiled functions."""
        return self.result().functions

    @property
    def summary(self) -> AuditSummary:
        """The counts."""
        return self.result().summary

    # ---- gates ----------------------------------------------------------------------------------------------------

    def assert_no_breaks(self) -> None:
        """Raises AssertionError, naming each break with file, line and reason, unless there is none."""
        __tracebackhide__ = True
        made = self.result()
        _fail_with("graph break", [f for f in findings(made, all_breaks=True) if f.kind == "break"])
        self._warn_if_empty(made)

    def assert_no_recompiles(self) -> None:
        """Raises AssertionError, naming each recompile with its cause and values, unless there is none."""
        __tracebackhide__ = True
        made = self.result()
        _fail_with("recompile cause", [f for f in findings(made) if f.kind == "recompile"])
        self._warn_if_empty(made)

    def assert_no_silent_eager(self) -> None:
        """Raises AssertionError, naming each function that runs eager, unless there is none."""
        __tracebackhide__ = True
        _fail_with("silent eager function", [f for f in findings(self.result()) if f.kind == "silent eager"])

    def assert_clean(self) -> None:
        """Raises AssertionError unless there is no break, no recompile and nothing that runs eager."""
        __tracebackhide__ = True
        made = self.result()
        _fail_with("finding", findings(made, all_breaks=True))
        self._warn_if_empty(made)

    def assert_no_new(self, baseline: str | Path | Audit) -> Difference:
        """The difference from a baseline; raises AssertionError, naming each new finding, where there is one.

        Raises:
            AuditError: the baseline cannot be read.
        """
        __tracebackhide__ = True
        before = baseline if isinstance(baseline, Audit) else files.read(baseline, "baseline")
        difference = compare(before, self.result())
        _fail_with("new finding", difference.new)
        return difference

    def _warn_if_empty(self, made: Audit) -> None:
        """A gate that saw nothing has shown nothing; most often the function was compiled before the block."""
        if not (made.functions or made.breaks or made.silent_eager):
            warnings.warn(
                "nothing was compiled while the audit ran, so it shows nothing; functions compiled before it need "
                "optpass.audit(reset=True) or torch.compiler.reset()",
                stacklevel=3,
            )

    # ---- views ----------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The whole as JSON, schema `optpass.audit/1`."""
        return files.to_json(self.result())

    def save(self, path: str | Path) -> None:
        """Write it: `.json`, `.html` (the page), `.sarif` or `.md`, by the path's suffix.

        Raises:
            AuditError: another suffix, or the path cannot be written.
        """
        from optpass.auditing.outputs import write_as

        write_as(self.result(), path)

    def __repr__(self) -> str:
        if self._recording is None:
            return "<optpass.audit: not started>"
        state = "running, so far " if self._running else ""
        return f"<optpass.audit: {state}{words.headline(self.result())}>"

    def _repr_html_(self) -> str | None:
        """The page, in a frame of its own so that its style stays off the notebook's."""
        if self._recording is None:
            return None
        from optpass.reporting.audit.html import render_html

        page = _html.escape(render_html(self.result()), quote=True)
        style = f"width:100%;height:{_FRAME_HEIGHT}px;border:0"
        return f'<iframe sandbox srcdoc="{page}" style="{style}" title="optpass audit"></iframe>'


def ended_by(error: BaseException) -> str:
    """`ValueError: no luck`, in one line."""
    text = " ".join(told(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _fail_with(noun: str, found: list[Finding] | tuple[Finding, ...]) -> None:
    __tracebackhide__ = True
    if not found:
        return
    lines = [words.count(len(found), noun)]
    for finding in found:
        lines.append(f"  {finding.line()}")
        record = finding.record
        told = [record.reason] if isinstance(record, Break | SilentEager) and record.reason else []
        if record is not None and record.fix.text:
            told.append(f"fix: {record.fix.text}")
        lines += [f"    {' '.join(text.split())}" for text in told]
    raise AssertionError("\n".join(lines))
