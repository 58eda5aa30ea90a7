"""Every error optpass raises on purpose. Nothing here may import torch or the rest of the package.

Each message says what was wrong, where, and what to do. The CLI prints it as one line and exits with `exit_code`.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class OptPassError(Exception):
    """Base of all deliberate errors. `exit_code` is what the CLI exits with when it meets one."""

    exit_code = 2


class ConfigError(OptPassError):
    """An option, a configuration file, a device name or a target that cannot be used as given."""


class TraceError(OptPassError):
    """A model that could not be captured as graphs; the message carries the tracer's own first line."""


class PassError(OptPassError):
    """A pass failed, or left a graph that is not well formed. Raised to the user only with `strict=True`."""


class BudgetInfeasibleError(OptPassError):
    """No plan of the training step fits the budget.

    Attributes:
        floor_bytes: the smallest peak that a plan reaches.
        budget_bytes: what was asked for.
        helps: what would help, most useful first, each with its bytes.
    """

    def __init__(self, message: str, *, floor_bytes: int, budget_bytes: int, helps: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.floor_bytes = floor_bytes
        self.budget_bytes = budget_bytes
        self.helps: tuple[str, ...] = ()
        for one in reversed(tuple(helps)):
            self.add_help(one)

    def add_help(self, first: str) -> None:
        """Name something that would help, before what was named already."""
        said = str(self.args[0]).removesuffix(self._help())
        self.helps = (first, *self.helps)
        self.args = (said + self._help(), *self.args[1:])

    def _help(self) -> str:
        return f". What would help: {'; '.join(self.helps)}" if self.helps else ""


class AuditError(OptPassError):
    """A script, a baseline or an audit file that cannot be used as given."""


class ReportError(OptPassError):
    """A report that cannot be written, read or merged."""


def told(error: BaseException) -> str:
    """What an exception says; where its own `__str__` raises, what Python's tracebacks say of it."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  # it is somebody else's, and is about to be told as an error anyway
        return "<exception str() failed>"


def first_line(error: BaseException) -> str:
    """The first line of what an exception says."""
    return next((line.strip() for line in told(error).splitlines() if line.strip()), "no message")


def deliberate(error: BaseException | None) -> OptPassError | None:
    """The deliberate error behind an exception, if there is one: Dynamo wraps what a backend raises."""
    while error is not None and not isinstance(error, OptPassError):
        error = getattr(error, "inner_exception", None) or error.__cause__
    return error


@contextlib.contextmanager
def sizes_of(what: str) -> Iterator[None]:
    """Raises ConfigError, beginning with `what`, where a tensor that is made inside has more elements than torch can
    count, or than there is memory for."""
    try:
        yield
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        # A TypeError is torch's for a size that is no 64-bit integer, and says so in a dozen lines of C++.
        why = "a size is more than 64 bits" if isinstance(error, TypeError | OverflowError) else first_line(error)
        raise ConfigError(f"{what}: tensors of these sizes cannot be made: {why}; make it smaller") from error


def nearest(value: str, valid: Iterable[str], n: int = 3) -> tuple[str, ...]:
    """The valid names closest to `value`, best first; empty when none is close.

    >>> nearest("inductr", ["inductor", "eager"])
    ('inductor',)
    """
    names = list(valid)
    folded = {name.casefold(): name for name in names}
    return tuple(folded[m] for m in difflib.get_close_matches(value.casefold(), folded, n=n, cutoff=0.5))


def did_you_mean(value: str, valid: Iterable[str]) -> str:
    """A sentence naming the nearest valid names, or all of them when none is close."""
    names = list(valid)
    close = nearest(value, names)
    if close:
        return "did you mean " + " or ".join(repr(name) for name in close) + "?"
    return "valid: " + ", ".join(names) if names else "there is none to choose from"
