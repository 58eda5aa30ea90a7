"""Each point that the audit watches, missing or with another signature: programs run, the report says what is lost.

Absence is played by giving the point the name that it would have had, had torch renamed it: torch itself stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import optpass
from optpass.backend.audit import selftest
from optpass.backend.audit.breaks import only_roots
from optpass.backend.audit.recording import Recording
from optpass.backend.audit.standing import STANDING
from optpass.backend.audit.watch import WATCH
from optpass.backend.compat import audit as dynamo
from optpass.backend.compat import audit_trace, hooks, self_test
from optpass.backend.compat.audit_entry import INLINED
from optpass.backend.compat.audit_frames import FRAME
from optpass.backend.compat.audit_guards import COMPILE
from optpass.reporting.audit.model import Audit, Recompile

POINTS = {point.name.rpartition(".torch.")[2]: point for point in selftest._POINTS}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No recording of the backend's own: hooks are installed by the test's."""
    STANDING.end()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def scaled(x: torch.Tensor, k: float) -> torch.Tensor:
    y = x * k
    print("scaled")  # BREAK
    return y + 1


def early(x: torch.Tensor, leave: bool) -> torch.Tensor | None:
    if leave:
        return None
    return x + 1


BREAK = scaled.__code__.co_firstlineno + 2


def lose(point: hooks.HookPoint, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "missing":
        monkeypatch.setattr(point, "path", f"{point.path}_of_old")
    else:
        monkeypatch.setattr(point, "parameters", ("self", "an_argument_of_a_later_torch"))


def audited() -> Audit:
    """A break, a recompile, and code that runs eager without a word; results are those of eager code."""
    ones = torch.ones(3)
    with Recording() as recording:
        compiled = torch.compile(scaled, backend="eager")
        for k in (2, 3, 3):
            torch.testing.assert_close(compiled(ones, k), ones * k + 1)
        quiet = torch.compile(early, backend="eager")
        assert quiet(ones, True) is None
        for _ in range(2):
            torch.testing.assert_close(quiet(ones, False), ones + 1)
    STANDING.end()
    return recording.result()


@pytest.mark.parametrize("how", ["missing", "signature"])
@pytest.mark.parametrize("name", POINTS)
def test_without_a_point(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point = POINTS[name]
    if how == "signature" and not point.parameters:
        how = "missing"  # nothing is asked of its signature
    lose(point, how, monkeypatch)
    audit = audited()
    assert [(b.line, b.gb_id, b.file) for b in only_roots(audit.breaks)] == [(BREAK, "GB0059", __file__)]
    assert [(r.cause, r.source, r.before) for r in audit.recompiles] == [("int", "k", "2")]
    assert audit.recompiles[0].line == scaled.__code__.co_firstlineno
    # Why it runs eager is known from its compile, that it does from Dynamo's callback, which may not say that it skips.
    silent = [(r.kind, r.function) for r in audit.silent_eager]
    expected = {FRAME: [], COMPILE: [("frame skipped", "early")]}.get(point, [("skip poisoned", "early")])
    assert silent == expected or (point is COMPILE and not silent and not torch.__version__.startswith("2.13."))
    assert not audit.notes
    told = [text for text in audit.hooks.values() if text != "ok"]
    assert told and all(f"{point.module}.{point.path}" in text and point.loses in text for text in told)
    assert any(point.loses in text for text in self_test())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", POINTS)
def test_the_backend_compiles_without_a_point(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lose(POINTS[name], "missing", monkeypatch)
    x = torch.randn(4, 4, requires_grad=True)
    compiled = torch.compile(lambda x: (x @ x).softmax(-1).sum(), backend="optpass", options={"inner": "aot_eager"})
    (gradient,) = torch.autograd.grad(compiled(x), x)
    torch.testing.assert_close(gradient, torch.autograd.grad((x @ x).softmax(-1).sum(), x)[0])
    STANDING.end()
    assert len(optpass.report().graphs) == 1


def test_without_any_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch in which everything has moved: the trace log alone still gives the breaks and the recompiles."""
    for point in POINTS.values():
        lose(point, "missing", monkeypatch)
    audit = audited()
    assert [(b.line, b.gb_id) for b in only_roots(audit.breaks)] == [(BREAK, "GB0059")]
    assert [(r.cause, r.source, r.before) for r in audit.recompiles] == [("int", "k", "2")]
    assert not audit.functions and not audit.silent_eager
    assert audit.hooks["breaks"].startswith("the structured trace log")
    assert all(text != "ok" for text in audit.hooks.values())
    assert not WATCH._listeners


def test_without_any_point_nor_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    for point in POINTS.values():
        lose(point, "missing", monkeypatch)
    monkeypatch.setattr(audit_trace, "trace_log", lambda: None)
    monkeypatch.setattr(dynamo, "trace_log", lambda: None)
    audit = audited()
    assert not audit.breaks and not audit.recompiles
    assert audit.hooks["breaks"].startswith("not observed")
    assert all(text != "ok" for text in audit.hooks.values())


def test_the_log_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    log = dynamo.trace_log()
    assert log is not None
    before = (log.level, list(log.handlers))
    lose(COMPILE, "missing", monkeypatch)
    lose(dynamo.LOG_GRAPH_BREAK, "missing", monkeypatch)
    first, second = Recording(), Recording()
    first.start()
    second.start()
    first.stop()
    assert len(log.handlers) > len(before[1])
    second.stop()
    assert (log.level, log.handlers) == before


def test_names_of_the_registry_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "gb_ids", dict)
    audit = audited()
    assert [(b.line, b.gb_id, b.gb_type) for b in audit.breaks] == [(BREAK, None, "Failed to trace builtin operator")]
    assert any("GB id" in text for text in self_test())


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.scale = 2.0

    def forward(self, x: torch.Tensor, k: Any = 1, name: str = "a") -> torch.Tensor:
        return self.linear(x) * self.scale * k


def logged(*calls: Any, monkeypatch: pytest.MonkeyPatch) -> list[Recompile]:
    """Recompiles that the trace log tells of, for one module and what is done to it between calls."""
    lose(COMPILE, "missing", monkeypatch)
    module = Scale()
    with Recording() as recording:
        compiled = torch.compile(module, backend="eager")
        for call in calls:
            call(module, compiled)
    STANDING.end()
    return recording.result().recompiles


X = torch.ones(4, 3)
CHANGES = {
    "size": (lambda m, c: c(torch.ones(5, 3)), ("shape", "x.size(0)", "4", "5")),
    "rank": (lambda m, c: c(torch.ones(3)), ("shape", "x.dim()", "2", "1")),
    "stride": (lambda m, c: c(torch.ones(3, 4).t()), ("stride", "x.stride(0)", "3", "1")),
    "grad": (lambda m, c: c(X.clone().requires_grad_()), ("requires_grad", "x.requires_grad", "False", "True")),
    "number": (lambda m, c: c(X, 2), ("int", "k", "1", "")),
    "text": (lambda m, c: c(X, name="b"), None),
    "attribute": (lambda m, c: (setattr(m, "scale", 3.0), c(X)), ("float", "self.scale", "2.0", "")),
    "no grad": (lambda m, c: torch.no_grad()(c)(X), ("grad mode", "torch.is_grad_enabled()", "", "")),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_recompiles_from_the_log(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, expected = CHANGES[name]
    found = logged(lambda m, c: c(X), change, monkeypatch=monkeypatch)
    assert [(r.cause, r.source, r.before, r.after) for r in found] == ([expected] if expected else [])
    for record in found:
        assert (record.function, record.line) == ("Scale.forward", Scale.forward.__code__.co_firstlineno)
        assert record.seconds is None and record.count == 1 and record.fix.text


def test_an_inlined_function_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two points that take one argument are patched otherwise: they say when that would not do."""
    monkeypatch.setattr(INLINED, "path", "InliningInstructionTranslator.inline_call")
    problem = INLINED.problem()
    assert problem is not None and "not one argument" in problem


@pytest.mark.slow
def test_without_dynamos_decisions_by_name(python: Any) -> None:
    """A torch whose C++ part names Dynamo's decisions otherwise: imports work, the trace log tells the rest."""
    told = python("""
        import json, torch, torch._dynamo.convert_frame, torch._dynamo.eval_frame
        from torch._C._dynamo import eval_frame

        del eval_frame._FrameAction, eval_frame._FrameExecStrategy, eval_frame.set_code_exec_strategy
        import optpass
        from optpass.backend.compat import self_test

        def broken(x):
            y = x + 1
            print("broken")
            return y * 2

        with optpass.audit() as audit:
            out = torch.compile(broken, backend="optpass", options={"inner": "eager"})(torch.ones(3))
        print(json.dumps({
            "out": out.tolist(), "breaks": [(b.line, b.gb_id) for b in audit.breaks], "missing": len(self_test()),
            "hooks": audit.result().hooks,
        }))
    """).json
    assert told["out"] == [4.0] * 3
    assert told["breaks"] == [[11, "GB0059"]]
    assert told["missing"] >= len(POINTS)
    assert "ok" not in told["hooks"].values()
