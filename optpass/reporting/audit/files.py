"""Audits as files: written atomically, read with errors that name the cause. Ranks of one run share one file."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pydantic import ValidationError

from optpass.errors import AuditError, ReportError
from optpass.reporting import files
from optpass.reporting.audit.merge import merge
from optpass.reporting.audit.model import AUDIT_SCHEMA, Audit

Path_ = str | os.PathLike[str]


def to_json(audit: Audit) -> str:
    """The audit as JSON text that `read` takes back.

    Raises:
        AuditError: a record was changed after it was made into something the schema does not allow.
    """
    text = audit.model_dump_json(by_alias=True, indent=1)
    try:
        Audit.model_validate_json(text)
    except ValidationError as error:
        raise AuditError(f"the audit does not fit its own schema: {_first(error)}; please report this bug") from None
    return text + "\n"


def write(audit: Audit, path: Path_) -> None:
    """Write an audit as JSON, atomically; parent folders are made.

    Raises:
        AuditError: the path cannot be written; nothing is left behind.
    """
    write_text(to_json(audit), path)


def write_text(text: str, path: Path_) -> None:
    """As `optpass.reporting.files.write_text`, with an AuditError."""
    try:
        files.write_text(text, path)
    except ReportError as error:
        raise AuditError(str(error).replace("cannot write the report", "cannot be written")) from None


def read(path: Path_, what: str = "audit") -> Audit:
    """An audit from its file.

    Args:
        what: how errors call the file, e.g. 'baseline'.

    Raises:
        AuditError: no such file, not JSON, another schema or version, or content the schema does not allow.
    """
    name = f"{what} {os.fspath(path)}"
    made = "make it with optpass audit --json PATH"
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AuditError(f"{name}: no such file; {made}") from None
    except IsADirectoryError:
        raise AuditError(f"{name}: is a folder; give the file in it") from None
    except json.JSONDecodeError as error:
        raise AuditError(f"{name}: not JSON: {error.msg} at line {error.lineno} column {error.colno}; {made}") from None
    except (UnicodeDecodeError, RecursionError):
        raise AuditError(f"{name}: not JSON text; {made}") from None
    except (OSError, ValueError) as error:
        raise AuditError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    found = data.get("schema") if isinstance(data, dict) else None
    if found != AUDIT_SCHEMA:
        what_it_is = f"its schema is {found!r}" if found is not None else "it names no schema"
        raise AuditError(
            f"{name}: not an audit that this version reads: {what_it_is}, expected {AUDIT_SCHEMA!r}; "
            "make it again with this version"
        )
    try:
        return Audit.model_validate(data)
    except ValidationError as error:
        raise AuditError(f"{name}: not a valid {AUDIT_SCHEMA} file: {_first(error)}; make it again") from None


def is_audit(path: Path_) -> bool:
    """Whether a file says that it is an audit, of this version or another; False for what cannot be read."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    found = data.get("schema") if isinstance(data, dict) else None
    return isinstance(found, str) and found.startswith(AUDIT_SCHEMA.partition("/")[0] + "/")


def _first(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_input=False)
    at = ".".join(str(part) for part in problems[0]["loc"]) or "the whole"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{at}: {problems[0]['msg']}{more}"


def write_merged(audit: Audit, path: Path_) -> Audit:
    """Write a rank's audit to a path that the other ranks of the run write too; returns what the file now holds.

    Under a lock, an audit of the same run found at `path` is merged with this one; anything else there is overwritten,
    and so is one that holds this rank already: a run that was started again under the same id.

    Raises:
        AuditError: the path cannot be written.
    """
    target = Path(path)
    try:
        with files.locked(target):
            merged = audit
            try:
                found = None if files.is_special(target) else read(target)
            except AuditError:
                found = None  # none there, not ours, or of another version: the caller named this path for this run
            if found is not None and found.run_id and found.run_id == audit.run_id and not _shares_rank(found, audit):
                merged = merge([found, audit])
            write(merged, target)
            return merged
    except ReportError as error:
        raise AuditError(str(error).replace("cannot write the report", "cannot be written")) from None


def _shares_rank(a: Audit, b: Audit) -> bool:
    return not {process.rank for process in a.processes}.isdisjoint(process.rank for process in b.processes)
