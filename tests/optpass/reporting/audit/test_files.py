"""Audits on disk: whole again, errors in one line, ranks in one file, and the schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from optpass.errors import AuditError
from optpass.reporting.audit.files import read, to_json, write, write_merged
from optpass.reporting.audit.merge import merge
from optpass.reporting.audit.model import AUDIT_SCHEMA, Audit, BreakCost, FunctionRecord, SilentEager
from optpass.reporting.schema import load_schema, make_schema


def test_written_and_read_again(audit: Audit, tmp_path: Path) -> None:
    write(audit, tmp_path / "new" / "a.json")
    assert read(tmp_path / "new" / "a.json") == audit


def test_the_schema_holds_what_was_promised(audit: Audit) -> None:
    schema = load_schema(AUDIT_SCHEMA)
    assert schema == make_schema(AUDIT_SCHEMA)
    validator = jsonschema.Draft202012Validator(schema)
    for made in (audit, Audit()):
        validator.validate(json.loads(to_json(made)))
    assert not validator.is_valid(json.loads(to_json(audit)) | {"unheard_of": 1})
    wanted = {
        "AuditSummary": "graphs breaks recompiles silent_eager ops_captured_fraction t_first_s t_steady_s",
        "Break": "file line column function module gb_type gb_id reason owner occurrences caused_by fix cost",
        "Fix": "text diff verified",
        "BreakCost": "boundary_bytes compile_s guard_us",
        "Recompile": "file line function cause source before after guards seconds fix",
        "SilentEager": "file line function kind calls fix",
    }
    for record, keys in wanted.items():
        assert set(keys.split()) <= set(schema["$defs"][record]["required"]), record


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "no such file"),
        ("{", "not JSON: Expecting property name"),
        ("[]", "names no schema"),
        ('{"schema": "optpass.audit/2"}', "its schema is 'optpass.audit/2', expected 'optpass.audit/1'"),
        ('{"schema": "optpass.report/1"}', "its schema is 'optpass.report/1'"),
        ('{"schema": "optpass.audit/1", "breaks": [{}]}', "breaks.0.file: Field required"),
        (b"\xff\xfe\x00", "not JSON text"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path: Path, content: str | bytes | None, expected: str) -> None:
    path = tmp_path / "b.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(AuditError) as caught:
        read(path, "baseline")
    text = str(caught.value)
    assert text.startswith(f"baseline {path}: ") and expected in text and "\n" not in text


def test_a_path_that_cannot_be_written_is_an_audit_error(audit: Audit, tmp_path: Path) -> None:
    with pytest.raises(AuditError, match="Is a directory"):
        write(audit, tmp_path)
    with pytest.raises(AuditError, match="a part of the path is a file"):
        write_merged(audit, tmp_path / "train.py" / "a.json")


def test_ranks_are_merged(new_audit: Callable[..., Audit], tmp_path: Path) -> None:
    ranks = [new_audit(tmp_path, rank) for rank in (1, 0)]
    ranks[0].breaks[1].line = 7  # met by rank 1 alone
    ranks[0].breaks[0].cost = BreakCost(compile_s=2.5)
    ranks[0].partial = "killed"
    for rank in ranks:
        rank.run_id = "run"
        merged = write_merged(rank, tmp_path / "a.json")
    assert read(tmp_path / "a.json") == merged
    assert [process.rank for process in merged.processes] == [0, 1] and merged.partial == "killed"
    assert [(b.line, b.occurrences, b.caused_by, b.rank) for b in merged.breaks] == [
        (5, 6, None, 0),
        (6, 1, 0, 0),
        (7, 1, 0, 0),
    ]
    assert merged.breaks[0].cost.compile_s == 2.5 and merged.breaks[0].cost.boundary_bytes == 2**20
    assert (merged.summary.graphs, merged.summary.breaks, merged.summary.recompiles) == (8, 1, 4)
    assert merged.summary.ops_captured_fraction == pytest.approx(0.83) and merged.summary.t_first_s == 2.5
    assert merged.recompiles[0].count == 4 and merged.silent_eager[0].calls == 14
    assert [(f.function, f.calls) for f in merged.functions] == [("step", 40), ("wide", 16)]


def test_another_run_or_the_same_rank_replaces(new_audit: Callable[..., Audit], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    first, second = new_audit(tmp_path, 0), new_audit(tmp_path, 0)
    first.run_id = second.run_id = "run"
    write_merged(first, path)
    assert write_merged(second, path) == second
    other = new_audit(tmp_path, 1)
    other.run_id = "another"
    assert write_merged(other, path) == other
    with pytest.raises(AuditError, match="at least one"):
        merge([])


def test_what_one_process_calls_is_not_told_as_never_called() -> None:
    """A process that only hands a compiled function out is no loss where another one calls it."""
    here = {"file": "t.py", "line": 3, "function": "step"}
    idle = SilentEager(**here, kind="not compiled")
    alone = merge([Audit(silent_eager=[idle]), Audit(silent_eager=[idle])])
    assert [record.kind for record in alone.silent_eager] == ["not compiled"]
    called = merge([Audit(silent_eager=[idle]), Audit(functions=[FunctionRecord(**here, calls=1)])])
    assert called.silent_eager == [] and called.summary.silent_eager == 0
