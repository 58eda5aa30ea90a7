"""What is filed for each graph, whatever compiled it, and the report that is written at exit."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optpass.backend.audit.standing import STANDING
from optpass.backend.exit_report import _AtExit
from optpass.backend.reporting import build_report, reset_report
from optpass.backend.session import SESSIONS, STEADY_CALLS
from optpass.options import Options
from optpass.passes.contract import Stage
from optpass.passes.registry import names, selected
from optpass.reporting import store
from optpass.reporting.model import Report


def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x.t().t() @ w)


def capture(gm: Any, inputs: Any) -> Callable[..., Any]:
    return gm.forward  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["eager", "aot_eager", "aot_eager_decomp_partition", capture, "inductor"])
@pytest.mark.parametrize("train", [True, False])
def test_every_inner_compiler_has_a_roofline(inner: Any, train: bool) -> None:
    x, w = torch.randn(8, 16), torch.randn(16, 4, requires_grad=train)
    step = torch.compile(f, backend="optpass", options={"inner": inner, "strict": True})
    for _ in range(3):
        out = step(x, w)
        if train:
            out.sum().backward()
    report = build_report()
    (graph,) = report.graphs
    assert graph.training is train
    assert [(p.name, p.stage, p.error) for p in graph.passes] == [
        (p.name, p.stage, None) for stage in Stage for p in selected(Options()) if p.stage is stage
    ]
    assert graph.totals.flops_forward >= 2 * 8 * 16 * 4
    assert (graph.totals.flops_backward >= 2 * 8 * 16 * 4) is train
    assert {op.phase for op in report.ops} == ({"forward", "backward"} if train else {"forward"})
    matmul = next(op for op in report.ops if op.mnk)
    assert (matmul.mnk, matmul.flops, Path(matmul.file or "").name) == ((8, 4, 16), 1024, Path(__file__).name)
    assert report.totals.flops == graph.totals.flops and report.device is not None
    assert len(report.sites("redundant")) == 1
    assert build_report().ops == report.ops  # asking twice changes nothing


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_graph_that_dynamo_takes_back_is_not_reported(inner: str) -> None:
    """A float is a symbol in the first graph with dynamic shapes; AOTAutograd has Dynamo trace again with its value."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.0)

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self.drop((q @ k.mT).softmax(-1)) @ v

    options = {"inner": inner, "strict": True, "attention": "always"}
    step = torch.compile(Attention(), backend="optpass", dynamic=True, options=options)
    step(*(torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3)))
    report = build_report()
    assert len(report.graphs) == len(SESSIONS.all()) == 1
    assert len(report.sites("attention")) == 1 and not report.declined("attention")


def test_times_and_calls() -> None:
    step = torch.compile(f, backend="optpass", options={"inner": "aot_eager"})
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    step(x, w)
    (graph,) = build_report().graphs
    assert graph.calls == 1 and graph.t_steady_s is None
    assert graph.t_first_s is not None and graph.t_first_s > graph.t_compile_s > graph.t_passes_s > 0
    for _ in range(STEADY_CALLS + 5):
        step(x, w)
    (graph,) = build_report().graphs
    assert graph.calls == STEADY_CALLS + 1  # then the timing steps aside
    assert graph.t_steady_s is not None and 0 < graph.t_steady_s < graph.t_first_s


def test_graph_state_is_the_one_of_the_compile() -> None:
    """What is traced on demand is traced as it was compiled: autocast, no gradients, inference mode with a mutation."""

    def write(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x @ w

    x, w = torch.randn(8, 16), torch.randn(16, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(f, backend="optpass", options={"inner": "eager"})(x, w)
    with torch.inference_mode():
        torch.compile(write, backend="optpass", options={"inner": "eager"})(torch.randn(8, 16), w)
    report = build_report()
    assert report.warnings == []
    first, second = ([op for op in report.ops if op.graph == g.id] for g in report.graphs)
    assert next(op for op in first if op.mnk).dtype == "bfloat16"
    assert {op.phase for op in first} == {"forward", "backward"}
    assert {op.phase for op in second} == {"forward"}


def test_dynamic_graphs_are_traced_without_noise(caplog: pytest.LogCaptureFixture) -> None:
    step = torch.compile(f, backend="optpass", dynamic=True, options={"inner": "eager"})
    step(torch.randn(8, 16), torch.randn(16, 4, requires_grad=True))
    caplog.clear()
    report = build_report()
    assert report.graphs[0].totals.flops_forward >= 1024 and report.warnings == []
    assert [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")] == []


def test_a_graph_that_cannot_be_traced_is_named() -> None:
    def inner(gm: Any, inputs: Any) -> Callable[..., Any]:
        return gm.forward  # type: ignore[no-any-return]

    torch.compile(f, backend="optpass", options={"inner": inner})(torch.randn(4, 4), torch.randn(4, 4))
    (session,) = SESSIONS.all()
    assert session._source is not None
    session._source.inputs[0] = None
    report = build_report()
    (warning,) = report.warnings
    assert warning.startswith("graph ") and "could not be traced for the report: " in warning
    assert len(report.graphs) == 1 and report.ops == []


def test_a_disabled_roofline() -> None:
    options = {"inner": "eager", "disable_passes": list(names())}
    torch.compile(f, backend="optpass", options=options)(torch.randn(4, 4), torch.randn(4, 4))
    report = build_report()
    assert report.ops == [] and report.graphs[0].passes == [] and report.warnings == []


def test_a_graph_break_inside_a_model_names_lines_and_modules() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)  # type: ignore[no-any-return]

    torch.compile(Model(), backend="optpass", options={"inner": "aot_eager"})(torch.randn(2, 4))
    report = build_report()
    assert [g.function.partition(" ")[0] for g in report.graphs] == ["[0/0]", "[1/0]"]
    assert [op.module for op in report.ops if op.mnk and op.phase == "forward"] == ["first", "second"]


def test_a_reset_during_a_compile_does_no_harm() -> None:
    def inner(gm: Any, inputs: Any) -> Callable[..., Any]:
        thread = threading.Thread(target=reset_report)
        thread.start()
        thread.join()
        return gm.forward  # type: ignore[no-any-return]

    step = torch.compile(f, backend="optpass", options={"inner": inner})
    step(torch.randn(4, 4), torch.randn(4, 4))
    assert build_report().graphs == []
    store.current().clear()  # the session outlives its record
    torch._dynamo.reset()
    torch.compile(f, backend="optpass", options={"inner": "eager"})(torch.randn(4, 4), torch.randn(4, 4))
    store.current().clear()
    assert build_report().graphs == []


def test_the_public_function() -> None:
    import optpass

    torch.compile(f, backend="optpass", options={"inner": "eager"})(torch.randn(4, 4), torch.randn(4, 4))
    assert len(optpass.report().graphs) == 1
    optpass.reset_report()
    assert optpass.report().graphs == []


def test_the_report_at_exit_says_what_to_do_about_breaks(tmp_path: Path) -> None:
    """As the user's own call does: with the text, and with the diff where there is one."""

    def breaks(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        print("one")
        return y * 2

    STANDING.begin()
    torch.compile(breaks, backend="optpass", options={"inner": "eager"})(torch.ones(3))
    at_exit = _AtExit()
    at_exit.pid, at_exit.paths = os.getpid(), {str(tmp_path / "r.json"): None}
    at_exit.write()
    report = Report.model_validate_json((tmp_path / "r.json").read_text())
    assert report.audit is not None
    (brk,) = report.audit.breaks
    assert "print" in brk.fix.text and '-        print("one")' in brk.fix.diff


@pytest.mark.parametrize("path", ["/dev/null/r.json", "afile/r.html", "folder.json"])
def test_a_path_that_cannot_be_written_is_refused_before_compiling(path: str, tmp_path: Path) -> None:
    (tmp_path / "afile").write_text("")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(Exception, match=r"options: report=.* (is a folder|.* is a file, not a folder|cannot write)"):
        torch.compile(f, backend="optpass", options={"inner": "eager", "report": path})(
            torch.ones(2, 2), torch.ones(2, 2)
        )
    assert build_report().graphs == []


EXIT = """
    import multiprocessing, os, sys
    import torch

    def f(x):
        return torch.relu(x.t().t()) * 2

    def compile_one(path):
        torch.compile(f, backend="optpass", options={"inner": "eager", "report": path})(torch.ones(2, 2))

    def child(path):
        torch._dynamo.reset()
        compile_one(path)

    if __name__ == "__main__":
        compile_one("out/r.json")
        torch._dynamo.reset()
        compile_one("page.html")
        os.makedirs("elsewhere")
        os.chdir("elsewhere")
        if os.fork() == 0:
            sys.exit(0)  # compiled nothing: has nothing to write, and must not write its parent's graphs
        os.wait()
        assert not os.path.exists("../out/r.json")
        process = multiprocessing.get_context("fork").Process(target=child, args=("../out/r.json",))
        process.start()
        process.join()
        assert process.exitcode == 0 and os.path.exists("../out/r.json")
"""


@pytest.mark.slow
def test_the_report_at_exit_with_logs_and_traces(python: Callable[..., Any], tmp_path: Path) -> None:
    done = python(EXIT, TORCH_LOGS="+optpass", TORCH_TRACE=str(tmp_path / "trace"))
    assert done.returncode == 0, done.stderr[-3000:]
    report = Report.model_validate(json.loads((tmp_path / "out" / "r.json").read_text()))
    assert sorted(sum(g.process == i for g in report.graphs) for i in range(len(report.processes))) == [1, 2]
    assert len({p.pid for p in report.processes}) == 2
    assert all(g.totals.flops > 0 and len(g.passes) == len(names()) for g in report.graphs)
    assert report.options["report"].endswith(("r.json", "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html")
    assert not (tmp_path / "elsewhere" / "out").exists() and list(tmp_path.rglob("*.lock")) == []
    assert "redundant applied 1, declined 0 in" in done.stderr and "backend/pipeline.py" in done.stderr
    traces = [p.read_text() for p in (tmp_path / "trace").rglob("*.log")]
    lines = [line for text in traces for line in text.splitlines() if "optpass_graph" in line]
    assert len(lines) == 3 and any('"redundant"' in text for text in traces)
