"""The audit as SARIF 2.1.0, for code review and code scanning (OASIS, "Static Analysis Results Interchange Format").

A rule per GB id, cause of recompile and kind of silent eager. Fingerprints do not change when lines move.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from optpass.reporting.audit import words
from optpass.reporting.audit.baseline import Difference, Finding, findings
from optpass.reporting.audit.model import Audit, Break, Fix, Recompile, SilentEager
from optpass.reporting.audit.patches import replacements
from optpass.reporting.audit.source import line_text, relative

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_ROOT = "SRCROOT"
_PRINT = "optpassFinding/v1"
#: The one name under which GitHub looks for a fingerprint.
_PRINT_GITHUB = "primaryLocationLineHash"
_GB_PAGE = "https://meta-pytorch.github.io/compile-graph-break-site/gb/{0}.html"  # as Dynamo's own messages name it
_KINDS = {
    "break": "Dynamo ended a graph before the function ended: what stands behind it is another graph, or runs eager.",
    "recompile": "A compiled function was compiled again, since what it was called with or reads had changed.",
    "silent eager": "Code that is to be compiled runs uncompiled, and nothing tells.",
}
_LEVELS = {"user": "warning", "library": "note", "torch": "note"}


def render_sarif(audit: Audit, *, difference: Difference | None = None, version: str = "") -> str:
    """The SARIF log as text: one run, one result per finding that a gate counts.

    Args:
        difference: from a baseline; results then carry `baselineState`, and those that are gone are listed as absent.
        version: of optpass.
    """
    writer = _Writer(audit)
    results = [writer.result(finding, _state(finding, difference)) for finding in findings(audit)]
    results += [writer.result(f, "absent") for f in (difference.gone if difference else ()) if f.record is not None]
    driver: dict[str, Any] = {"name": "optpass audit", "rules": list(writer.rules.values())}
    if version:
        driver["version"] = version
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "invocations": [_invocation(audit)],
        "results": results,
        "properties": {"summary": audit.summary.model_dump(), "target": audit.target},
    }
    if audit.root:
        run["originalUriBaseIds"] = {_ROOT: {"uri": Path(audit.root).absolute().as_uri().rstrip("/") + "/"}}
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _invocation(audit: Audit) -> dict[str, Any]:
    invocation: dict[str, Any] = {"executionSuccessful": audit.partial is None and not audit.exit_code}
    if audit.exit_code is not None:
        invocation["exitCode"] = audit.exit_code
    told = [*([f"partial: {audit.partial}"] if audit.partial else []), *audit.notes]
    if told:
        level = "warning" if audit.partial else "note"
        invocation["toolExecutionNotifications"] = [{"level": level, "message": {"text": text}} for text in told]
    return invocation


def _state(finding: Finding, difference: Difference | None) -> str | None:
    if difference is None:
        return None
    return "new" if any(f.record is finding.record for f in difference.new) else "unchanged"


def rule_id(record: Break | Recompile | SilentEager) -> str:
    """`GB0170`; a kind of break without an id, a recompile's cause or a kind of silent eager as a path of words."""
    if isinstance(record, Break):
        return record.gb_id or f"graph-break/{_slug(record.gb_type)}"
    if isinstance(record, Recompile):
        return f"recompile/{_slug(record.cause)}"
    return f"silent-eager/{_slug(record.kind)}"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "other"


class _Writer:
    """Results of one audit, and the rules that they name, in the order of their first use."""

    def __init__(self, audit: Audit) -> None:
        self.audit = audit
        self.rules: dict[str, dict[str, Any]] = {}
        self._seen: Counter[str] = Counter()

    def result(self, finding: Finding, state: str | None) -> dict[str, Any]:
        record = finding.record
        assert record is not None, "the share of operations captured has no place in the source"
        self._rule(record)
        result: dict[str, Any] = {
            "ruleId": rule_id(record),
            "ruleIndex": list(self.rules).index(rule_id(record)),
            "level": _LEVELS[record.owner] if isinstance(record, Break) else "warning",
            "message": {"text": _message(record)},
            "partialFingerprints": dict.fromkeys((_PRINT, _PRINT_GITHUB), self._fingerprint(finding)),
            "properties": _properties(record),
        }
        location = self._location(record, finding.root)
        led = self._led(record, finding.root)
        if led is not None and location is not None:
            # The reviewer's line is the user's: code scanning shows nothing for files outside of the repository.
            result["locations"] = [led]
            result["relatedLocations"] = [{"id": 1, "message": {"text": "where the graph breaks"}, **location}]
        elif location is not None:
            result["locations"] = [location]
        if isinstance(record, Break):
            result["occurrenceCount"] = max(record.occurrences, 1)
            related = self._related(record, finding.root, result.get("relatedLocations", []))
            if related:
                result["relatedLocations"] = related
        if state is not None:
            result["baselineState"] = state
        if changes := self._fixes(record, finding.root):
            result["fixes"] = changes
        return result

    def _rule(self, record: Break | Recompile | SilentEager) -> None:
        name = rule_id(record)
        if name in self.rules:
            return
        kind = (
            "break" if isinstance(record, Break) else "recompile" if isinstance(record, Recompile) else "silent eager"
        )
        short = record.gb_type if isinstance(record, Break) else name.replace("/", ": ").replace("-", " ")
        rule: dict[str, Any] = {
            "id": name,
            "name": "".join(word.capitalize() for word in re.findall(r"[A-Za-z0-9]+", short)),
            "shortDescription": {"text": short},
            "fullDescription": {"text": f"{_KINDS[kind]} Here: {short}."},
            "defaultConfiguration": {"level": "warning"},
            "properties": {"tags": ["performance", "torch.compile", kind]},
        }
        if isinstance(record, Break) and record.gb_id:
            rule["helpUri"] = _GB_PAGE.format(record.gb_id.lower())
        self.rules[name] = rule

    def _fingerprint(self, finding: Finding) -> str:
        """Of the finding's key, and its number among equal ones."""
        digest = hashlib.sha256("\0".join(finding.key).encode()).hexdigest()[:32]
        self._seen[digest] += 1
        return f"{digest}:{self._seen[digest]}"

    def _artifact(self, file: str, root: str) -> dict[str, Any]:
        path = relative(file, root)
        if root and not Path(path).is_absolute() and Path(file).is_absolute() and Path(root, path) == Path(file):
            return {"uri": _quoted(path), "uriBaseId": _ROOT}
        return {"uri": Path(file).as_uri() if Path(file).is_absolute() else _quoted(path)}

    def _location(self, record: Break | Recompile | SilentEager, root: str) -> dict[str, Any] | None:
        if not record.file:
            return None
        physical: dict[str, Any] = {"artifactLocation": self._artifact(record.file, root)}
        if record.line:
            physical["region"] = _region(record)
        location: dict[str, Any] = {"physicalLocation": physical}
        if record.function:
            location["logicalLocations"] = [{"fullyQualifiedName": record.function, "kind": "function"}]
        return location

    def _led(self, record: Break | Recompile | SilentEager, root: str) -> dict[str, Any] | None:
        """The user's line that led to a break in other code."""
        if not isinstance(record, Break) or record.owner == "user" or not (record.user_file and record.user_line):
            return None
        region: dict[str, Any] = {"startLine": record.user_line}
        if code := line_text(record.user_file, record.user_line):
            region["snippet"] = {"text": code}
        artifact = self._artifact(record.user_file, root)
        return {"physicalLocation": {"artifactLocation": artifact, "region": region}}

    def _related(self, record: Break, root: str, result: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Behind `result`: the breaks that follow from this one, and the one that it follows from."""
        index = next((i for i, b in enumerate(self.audit.breaks) if b is record), None)
        followers = [b for b in self.audit.breaks if index is not None and b.caused_by == index]
        others = [(b, "follows from this break") for b in followers]
        if record.caused_by is not None and record.caused_by < len(self.audit.breaks):
            others.append((self.audit.breaks[record.caused_by], "this break follows from it"))
        for other, how in others:
            location = self._location(other, root)
            if location is not None:
                message = {"text": f"{how}: {words.kind(other)}"}
                result = [*result, {"id": len(result) + 1, "message": message, **location}]
        return result

    def _fixes(self, record: Break | Recompile | SilentEager, root: str) -> list[dict[str, Any]]:
        changes = replacements(record.fix.diff) if record.fix.diff and record.file else []
        if not changes:
            return []
        edits = []
        for change in changes:
            # A whole line ends where the next one begins; a region without length is a place to insert at.
            end = change.line + change.deleted
            region = {"startLine": change.line, "startColumn": 1, "endLine": end, "endColumn": 1}
            edits.append({"deletedRegion": region, "insertedContent": {"text": change.inserted}})
        artifact = {"artifactLocation": self._artifact(_target(record.fix, record), root), "replacements": edits}
        text = " ".join(filter(None, (record.fix.text or "Replace these lines.", record.fix.note)))
        return [{"description": {"text": text}, "artifactChanges": [artifact]}]


def _target(fix: Fix, record: Break | Recompile | SilentEager) -> str:
    """The file that a diff is against: the record's own, or the user's line's that led there where it names that."""
    if isinstance(record, Break) and record.user_file and record.owner != "user":
        return record.user_file
    return record.file


def _region(record: Break | Recompile | SilentEager) -> dict[str, Any]:
    assert record.line is not None
    region: dict[str, Any] = {"startLine": record.line}
    if isinstance(record, Break) and record.column is not None:
        region["startColumn"] = record.column
        if record.end_column is not None and record.end_line is not None:
            region |= {"endLine": record.end_line, "endColumn": record.end_column}
    if record.code:
        region["snippet"] = {"text": record.code}
    return region


def _message(record: Break | Recompile | SilentEager) -> str:
    if isinstance(record, Break):
        text = f"Graph break: {record.reason.rstrip('.')}."
        if told := words.effect(record):
            text += f" Effect: {told}."
        if told := words.cost(record.cost):
            text += f" Cost: {told}."
    elif isinstance(record, Recompile):
        text = f"Recompiled {words.count(record.count, 'time')}, {words.changed(record).rstrip('.')}."
    else:
        text = f"Runs eager: {words.silent(record)}. {record.reason}".strip()
    return f"{text} Fix: {record.fix.text}" if record.fix.text else text


def _properties(record: Break | Recompile | SilentEager) -> dict[str, Any]:
    if isinstance(record, Break):
        cost = {name: value for name, value in record.cost.model_dump().items() if value is not None}
        return {"kind": "break", "owner": record.owner, "module": record.module or "", **cost}
    if isinstance(record, Recompile):
        return {"kind": "recompile", "before": record.before, "after": record.after, "count": record.count}
    return {"kind": "silent eager", **({"calls": record.calls} if record.calls is not None else {})}


def _quoted(path: str) -> str:
    from urllib.parse import quote

    return quote(path)
