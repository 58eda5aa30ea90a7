"""The committed schemas: up to date, and what is written satisfies them."""

from __future__ import annotations

import json

import jsonschema
import pytest

from optpass.errors import ReportError
from optpass.reporting.files import to_json
from optpass.reporting.model import ANALYSIS_SCHEMA, REPORT_SCHEMA, Analysis, Report
from optpass.reporting.schema import load_schema, main, make_schema


def test_schemas_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", [REPORT_SCHEMA, ANALYSIS_SCHEMA])
def test_schemas_are_schemas(name: str) -> None:
    schema = load_schema(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema == make_schema(name) and schema["$id"] and name.split("/")[0].split(".")[1] in schema["title"]
    assert {"schema", "ops", "totals", "graphs"} <= set(schema["required"])


def test_what_the_issue_names_is_required() -> None:
    defs = load_schema(REPORT_SCHEMA)["$defs"]
    wanted = {
        "Op": "name target phase module file line flops bytes_read bytes_written intensity bound aligned time_us",
        "Totals": "flops bytes_unfused bytes_fused time_us mfu",
        "GraphRecord": "id t_compile_s passes",
        "PassRecord": "name seconds applied declined",
        "Site": "kind file line module reason before after cost",
    }
    for record, keys in wanted.items():
        assert set(keys.split()) <= set(defs[record]["required"]), record


def test_written_objects_satisfy_them(report: Report, analysis: Analysis) -> None:
    for obj, name in ((report, REPORT_SCHEMA), (analysis, ANALYSIS_SCHEMA), (Report(), REPORT_SCHEMA)):
        data = json.loads(to_json(obj))
        validator = jsonschema.Draft202012Validator(load_schema(name))
        validator.validate(data)
        data["unheard_of"] = 1
        assert not validator.is_valid(data)
        del data["unheard_of"], data["totals"]
        assert not validator.is_valid(data)


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ReportError, match=r"optpass\.report/1"):
        load_schema("optpass.reporting/9")
