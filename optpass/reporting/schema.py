"""The JSON Schemas of reports, analyses, plans and audits: generated from the models, committed under `schemas/`.

python -m optpass.reporting.schema           # write them
python -m optpass.reporting.schema --check   # exit 1 if they differ from the models
"""

from __future__ import annotations

import json
import sys
from importlib import resources
from pathlib import Path
from typing import Any

from optpass.errors import ReportError, did_you_mean
from optpass.reporting.audit.model import AUDIT_SCHEMA, Audit
from optpass.reporting.model import ANALYSIS_SCHEMA, REPORT_SCHEMA, Analysis, Record, Report
from optpass.reporting.plan.model import PLAN_SCHEMA, PlanReport

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_MODELS: dict[str, tuple[type[Record], str]] = {
    REPORT_SCHEMA: (Report, "optpass report: everything the processes of a run compiled"),
    ANALYSIS_SCHEMA: (Analysis, "optpass analysis: the roofline of a target"),
    PLAN_SCHEMA: (PlanReport, "optpass plan: the memory of a training step, and what fits a budget"),
    AUDIT_SCHEMA: (Audit, "optpass audit: graph breaks, recompiles and silent eager of a run"),
}


def file_name(name: str) -> str:
    """`optpass.report/1` as `optpass.report-1.json`."""
    return name.replace("/", "-") + ".json"


def make_schema(name: str) -> dict[str, Any]:
    """The schema of what is written under `name` ("optpass.report/1"), from its model. Every key is written, so each
    is required."""
    model, title = _MODELS[name]
    schema = model.model_json_schema(by_alias=True, mode="serialization")
    return {"$schema": _DIALECT, "$id": f"urn:{name.replace('/', ':')}", **schema, "title": title}


def schema_text(name: str) -> str:
    """The schema as the committed file holds it."""
    return json.dumps(make_schema(name), indent=2) + "\n"


def load_schema(name: str) -> dict[str, Any]:
    """The committed schema by its name, e.g. "optpass.report/1".

    Raises:
        ReportError: there is no schema of that name.
    """
    if name not in _MODELS:
        raise ReportError(f"no schema {name!r}; {did_you_mean(name, _MODELS)}")
    file = resources.files("optpass.reporting") / "schemas" / file_name(name)
    schema: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return schema


def main(arguments: list[str]) -> int:
    """Write the schema files, or with `--check` name those that are out of date."""
    folder = Path(__file__).parent / "schemas"
    stale = []
    for name in _MODELS:
        path = folder / file_name(name)
        if "--check" in arguments:
            if not path.is_file() or path.read_text(encoding="utf-8") != schema_text(name):
                stale.append(str(path))
        else:
            folder.mkdir(exist_ok=True)
            path.write_text(schema_text(name), encoding="utf-8")
            print(f"wrote {path}")
    for path_name in stale:
        print(f"{path_name} is out of date; run python -m optpass.reporting.schema", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
