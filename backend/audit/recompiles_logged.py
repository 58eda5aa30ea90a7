"""Recompiles read from Dynamo's structured trace log, where its function that compiles a frame cannot be watched.

Less precise: one guard, the first that fails of the newest cache entry, which may not be the entry that the call is
closest to; the value that arrived only where the text has it; no seconds; compiles that a limit refused count as well.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any

from optpass.backend.audit.findings import Finding
from optpass.backend.audit.locations import Function, code_of, code_place
from optpass.backend.audit.sources_text import condition_in_user_terms, user_terms
from optpass.backend.compat import audit as dynamo
from optpass.reporting.audit.model import Cause

_ARTIFACT = "recompile_reasons"
_ENTRY = re.compile(r"^\d+/\d+: ")
_TENSOR = re.compile(
    r"^tensor '(?P<place>.+?)' (?P<what>[a-z_ ]+?) mismatch(?: at index (?P<index>\d+))?\. "
    r"expected (?:requires_grad=)?(?P<before>.+?)(?:, actual (?P<after>.+?))?(?:\. Guard failed.*)?$"
)
_CAUSES: dict[str, tuple[Cause, str]] = {
    "size": ("shape", "{0}.size({1})"), "rank": ("shape", "{0}.dim()"), "stride": ("stride", "{0}.stride({1})"),
    "dtype": ("dtype", "{0}.dtype"), "device": ("device", "{0}.device"),
    "requires_grad": ("requires_grad", "{0}.requires_grad"),
}  # fmt: skip
_STATE: dict[str, tuple[Cause, str]] = {
    "grad_mode": ("grad mode", "torch.is_grad_enabled()"), "autocast_state": ("autocast", "torch.autocast"),
}  # fmt: skip
_KINDS: dict[type, Cause] = {bool: "bool", int: "int", float: "float", str: "str"}
#: What one record tells: the function, what changed, the guard's text.
OnRecompile = Callable[[Function, Finding, str], None]


class RecompileReader:
    """Listens to the trace log between `start` and `stop`."""

    def __init__(self, on_recompile: OnRecompile) -> None:
        self._on_recompile = on_recompile
        log = dynamo.TraceListener(self._record)
        self.start, self.stop = log.start, log.stop

    def _record(self, name: str, metadata: dict[str, Any], payload: str) -> None:
        frame = dynamo.frame_in_compile() if name == _ARTIFACT else None
        reason = first_reason(payload)
        if frame is not None and reason:
            self._on_recompile(place_of(frame), finding_of(reason), reason)


def place_of(frame: Any) -> Function:
    """File, first line and name of the user's function whose frame is compiled."""
    wrapped = dynamo.callable_inside(frame)
    code = code_of(wrapped) if wrapped is not None else None
    return code_place(code if code is not None else frame.f_code)


def first_reason(payload: str) -> str:
    """The failing guard of the newest cache entry, from a list in JSON or one text; without the entry's number."""
    try:
        reasons = json.loads(payload)
    except ValueError:
        reasons = payload
    text = reasons[0] if isinstance(reasons, list) and reasons else reasons
    line = str(text or "").partition("\n")[0].partition("  # ")[0]
    return _ENTRY.sub("", line).strip()


def finding_of(reason: str) -> Finding:
    """What a failing guard's text says that changed."""
    if (told := _TENSOR.match(reason)) is not None and told["what"] in _CAUSES:
        cause, form = _CAUSES[told["what"]]
        place, before, after = user_terms(told["place"]), told["before"], told["after"] or ""
        if cause == "requires_grad":
            before, after = ("True", "False") if before.rstrip(".") == "1" else ("False", "True")
        index = int(told["index"]) if told["index"] else None
        return Finding(cause, form.format(place, index), before, after, place, index)
    if reason.startswith("GLOBAL_STATE changed:"):
        state = reason.partition(":")[2].split()
        cause, source = _STATE.get(state[0] if state else "", ("other", reason))
        return Finding(cause, source, "", "")
    left, equal, right = reason.rpartition(" == ")
    if equal and (kind := _literal(right)) is not None:
        place = user_terms(left)
        return Finding("training flag" if place.endswith(".training") else kind, place, right, "", place)
    return Finding("other", condition_in_user_terms(reason), "", "")


def _literal(text: str) -> Cause | None:
    try:
        return _KINDS.get(type(ast.literal_eval(text)))
    except (ValueError, SyntaxError):
        return None
