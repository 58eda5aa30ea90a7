"""Reports as files: written atomically, read with errors that name the cause, merged over a run's processes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from optpass.errors import ReportError
from optpass.reporting.merge import merge
from optpass.reporting.model import ANALYSIS_SCHEMA, REPORT_SCHEMA, Analysis, Report
from optpass.reporting.plan.model import PLAN_SCHEMA, PlanReport

Path_ = str | os.PathLike[str]
_MODELS: dict[str, type[Report] | type[Analysis] | type[PlanReport]] = {
    REPORT_SCHEMA: Report,
    ANALYSIS_SCHEMA: Analysis,
    PLAN_SCHEMA: PlanReport,
}


def to_json(obj: Report | Analysis | PlanReport) -> str:
    """The object as JSON text that `read_json` takes back.

    Raises:
        ReportError: a record was changed after it was made into something the schema does not allow.
    """
    text = obj.model_dump_json(by_alias=True, indent=1)
    try:
        type(obj).model_validate_json(text)
    except ValidationError as error:
        raise ReportError(f"the report does not fit its own schema: {_first(error)}; please report this bug") from None
    return text + "\n"


def write_json(obj: Report | Analysis | PlanReport, path: Path_) -> None:
    """Write a report, an analysis or a plan as JSON, atomically; parent folders are made.

    Raises:
        ReportError: the path cannot be written; nothing is left behind.
    """
    write_text(to_json(obj), path)


def write_text(text: str, path: Path_) -> None:
    """Write a file so that readers see the old content or the new, never a part: temporary file, fsync, rename.

    A path that is no regular file (`/dev/null`, a pipe) is written to as it is. A link is followed.

    Raises:
        ReportError: naming the path, the cause and the remedy; nothing is left behind.
    """
    try:
        if is_special(path):
            Path(path).write_text(text, encoding="utf-8")
        else:
            _replace(Path(os.path.realpath(path)), text)
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error


def is_special(path: Path_) -> bool:
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return False  # not there, or no name for a file: writing says what is wrong with it
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _replace(target: Path, text: str) -> None:
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.parent / f".optpass-{uuid.uuid4().hex[:12]}.tmp"
    # os.open rather than mkstemp: the file gets the mode that the user's umask gives, not 0600.
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _unwritable(path: Path_, error: Exception) -> ReportError:
    code = error.errno if isinstance(error, OSError) else None
    cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    remedy = {
        errno.EISDIR: f"give a file name, such as {Path(path) / 'report.json'}",
        errno.ENOTDIR: "a part of the path is a file; give a path whose parents are folders",
        errno.EEXIST: "a part of the path is a file; give a path whose parents are folders",
        errno.ENOSPC: "free some space, or give a path on another disk",
        errno.ENAMETOOLONG: "give a shorter name",
    }.get(code or 0, "give a path in a folder that you may write to")
    return ReportError(f"{os.fspath(path)}: cannot write the report: {cause}; {remedy}")


def read_json(path: Path_) -> Report | Analysis | PlanReport:
    """A report, an analysis or a plan from its file; which one, the file's `schema` says.

    Raises:
        ReportError: no such file, not JSON, another schema or version, or content the schema does not allow.
    """
    name = os.fspath(path)
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ReportError(f"{name}: no such file; give a report that --json or the 'report' option wrote") from None
    except IsADirectoryError:
        raise ReportError(f"{name}: is a folder; give the report file in it") from None
    except json.JSONDecodeError as error:
        raise ReportError(
            f"{name}: not JSON: {error.msg} at line {error.lineno} column {error.colno}; give a report's .json file"
        ) from None
    except (UnicodeDecodeError, RecursionError):
        raise ReportError(f"{name}: not JSON text; give a report's .json file") from None
    except (OSError, ValueError) as error:
        raise ReportError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    found = data.get("schema") if isinstance(data, dict) else None
    model = _MODELS.get(found) if isinstance(found, str) else None
    if model is None:
        what = f"its schema is {found!r}" if found is not None else "it names no schema"
        raise ReportError(
            f"{name}: not a report that this version reads: {what}, expected {' or '.join(map(repr, _MODELS))}; "
            "read it with the optpass that wrote it, or make it again"
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ReportError(f"{name}: not a valid {found} file: {_first(error)}; make the report again") from None


def _first(error: ValidationError) -> str:
    """`graphs.0.t_compile_s: Input should be a valid number`, and how many more there are."""
    problems = error.errors(include_url=False, include_input=False)
    place = ".".join(str(part) for part in problems[0]["loc"]) or "the whole"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{place}: {problems[0]['msg']}{more}"


def write_merged(report: Report, path: Path_) -> Report:
    """Write a process's report to a path that other processes of the run write too; returns what the file now holds.

    Under a lock (`<path>.lock`, removed afterwards), a report of the same run found at `path` is merged with this one
    (records of the same pid and host are replaced); anything else there is overwritten. For a path ending in `.html`
    the merged report is kept in the `.json` file beside it, and the page is made from that. On a platform without
    `fcntl` there is no lock, and of processes that write at the same moment the last one wins.

    Raises:
        ReportError: the path cannot be written.
    """
    path = Path(path)
    is_page = path.suffix.lower() in (".html", ".htm")
    data_path = path.with_suffix(".json") if is_page else path
    with locked(data_path):
        merged = _merged_with(report, data_path)
        write_json(merged, data_path)
        if is_page:
            from optpass.reporting.html import write_html  # Jinja2 is not needed for JSON

            write_html(merged, path)
    return merged


def _merged_with(report: Report, path: Path) -> Report:
    if is_special(path):
        return report
    try:
        found = read_json(path)
    except ReportError:
        found = None  # none there, not ours, or of another version: the caller named this path for this run
    if isinstance(found, Report) and found.run_id == report.run_id:
        return merge([found, report])
    return report


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold `<path>.lock`. The file is removed while held, so who waited for it must check that it is still the one."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    if is_special(path):
        yield
        return
    lock = path.parent / (path.name + ".lock")
    while True:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except (OSError, ValueError) as error:
            raise _unwritable(path, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _same_file(descriptor, lock):
                break
        except OSError:
            break  # a file system without locks: go on, as on a platform without them
        os.close(descriptor)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
