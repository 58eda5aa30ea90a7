"""SARIF: valid, with places, parents, fixes and fingerprints that moved lines do not change.

`sarif_subset.json` allows only what SARIF 2.1.0 has under these names, with its types and limits; where the variable
OPTPASS_SARIF_SCHEMA names the standard's own schema file, that is checked too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from optpass.reporting.audit.baseline import compare
from optpass.reporting.audit.model import Audit, Break
from optpass.reporting.audit.sarif import render_sarif, rule_id

SCHEMAS = [Path(__file__).with_name("sarif_subset.json"), *filter(None, [os.environ.get("OPTPASS_SARIF_SCHEMA")])]


def log_of(audit: Audit, **options: Any) -> dict[str, Any]:
    """The log, checked against every schema at hand."""
    log: dict[str, Any] = json.loads(render_sarif(audit, version="1.2.3", **options))
    for path in SCHEMAS:
        schema = json.loads(Path(path).read_text())
        kind = jsonschema.validators.validator_for(schema)
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(log)
    run: dict[str, Any] = log["runs"][0]
    return run


def fingerprints(run: dict[str, Any]) -> list[str]:
    prints = [result["partialFingerprints"] for result in run["results"]]
    assert all(one["primaryLocationLineHash"] == one["optpassFinding/v1"] for one in prints)
    return [one["optpassFinding/v1"] for one in prints]


def test_results_name_their_rule_place_and_function(audit: Audit) -> None:
    run = log_of(audit)
    assert [result["ruleId"] for result in run["results"]] == [
        "GB0170",
        "recompile/float",
        "silent-eager/skip-poisoned",
    ]
    rules = run["tool"]["driver"]["rules"]
    assert [rules[result["ruleIndex"]]["id"] for result in run["results"]] == [r["ruleId"] for r in run["results"]]
    location = run["results"][0]["locations"][0]
    assert location["physicalLocation"] == {
        "artifactLocation": {"uri": "train.py", "uriBaseId": "SRCROOT"},
        "region": {
            "startLine": 5, "startColumn": 8, "endLine": 5, "endColumn": 19, "snippet": {"text": "if y.sum() > 0:"},
        },
    }  # fmt: skip
    assert run["originalUriBaseIds"]["SRCROOT"]["uri"] == Path(audit.root).as_uri() + "/"
    assert location["logicalLocations"] == [{"fullyQualifiedName": "step", "kind": "function"}]
    related = run["results"][0]["relatedLocations"]
    assert [place["message"]["text"] for place in related] == [
        "follows from this break: GB0059 Failed to trace builtin operator"
    ]
    rule = rules[0]
    assert rule["helpUri"].endswith("/gb0170.html") and rule["properties"]["tags"] == [
        "performance", "torch.compile", "break",
    ]  # fmt: skip
    assert run["results"][0]["occurrenceCount"] == 3 and "1 MiB across" in run["results"][0]["message"]["text"]


def test_a_diff_becomes_a_fix(audit: Audit) -> None:
    audit.breaks[0].fix = audit.breaks[1].fix.model_copy(update={"note": "It prints no more."})
    (fix,) = log_of(audit)["results"][0]["fixes"]
    (change,) = fix["artifactChanges"]
    assert change["artifactLocation"]["uri"] == "train.py" and fix["description"]["text"] == (
        "Remove the print. It prints no more."
    )
    assert change["replacements"] == [
        {
            "deletedRegion": {"startLine": 6, "startColumn": 1, "endLine": 7, "endColumn": 1},
            "insertedContent": {"text": "        pass\n"},
        }
    ]


def test_fingerprints_stay_when_lines_move_and_tell_equal_lines_apart(audit: Audit) -> None:
    before = fingerprints(log_of(audit))
    for record in audit.breaks:
        record.line += 30
    assert fingerprints(log_of(audit)) == before
    audit.breaks.append(audit.breaks[0].model_copy(update={"line": 77}))
    after = fingerprints(log_of(audit))
    assert set(before) < set(after) and len(set(after)) == len(after) == 4
    audit.breaks[0].code = "another line"
    assert fingerprints(log_of(audit))[0] != before[0]


def test_a_baseline_gives_states_and_absent_results(audit: Audit) -> None:
    before = audit.model_copy(deep=True)
    audit.breaks[0].code = "another line"
    states = [result["baselineState"] for result in log_of(audit, difference=compare(before, audit))["results"]]
    assert states == ["new", "unchanged", "unchanged", "absent"]


def test_other_owners_partial_runs_and_odd_places(audit: Audit, tmp_path: Path) -> None:
    audit.breaks[0] = audit.breaks[0].model_copy(
        update={"owner": "library", "file": "/usr/lib/python3/site-packages/a b/c.py", "gb_id": None,
                "user_file": str(tmp_path / "train.py"), "user_line": 4}
    )  # fmt: skip
    audit.partial, audit.exit_code, audit.silent_eager[0].file = "killed", 3, "<ipython-input-1>"
    audit.silent_eager[0].line = None
    run = log_of(audit)
    first = run["results"][0]
    assert first["level"] == "note" and first["ruleId"] == "graph-break/data-dependent-branching"
    place = first["locations"][0]["physicalLocation"]  # the reviewer's own line, not the library's
    assert place["artifactLocation"]["uri"].endswith("train.py") and place["region"]["startLine"] == 4
    there = first["relatedLocations"][0]
    assert there["message"]["text"] == "where the graph breaks"
    assert there["physicalLocation"]["artifactLocation"] == {"uri": "file:///usr/lib/python3/site-packages/a%20b/c.py"}
    assert [one["id"] for one in first["relatedLocations"]] == [1, 2]
    assert run["invocations"][0]["executionSuccessful"] is False and run["invocations"][0]["exitCode"] == 3
    assert log_of(Audit())["results"] == []


def test_the_subset_refuses_what_sarif_does_not_have(audit: Audit) -> None:
    schema = json.loads(SCHEMAS[0].read_text() if isinstance(SCHEMAS[0], Path) else "")
    log = json.loads(render_sarif(audit))
    log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["region"]["startLine"] = 0
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(log, schema)


def test_rules_are_words(audit: Audit) -> None:
    assert rule_id(Break(file="", line=1, gb_type="A (b): c!", reason="r")) == "graph-break/a-b-c"
