"""Where Inductor cannot build: one warning, `aot_eager` serves, and the results are right."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from optpass.backend import compat, inner
from optpass.backend.reporting import build_report
from optpass.options import Options

MISSING = (None, "/nonexistent/compiler")


@pytest.fixture(autouse=True)
def not_warned() -> Iterator[None]:
    inner.warn_once.cache_clear()
    yield
    inner.warn_once.cache_clear()


def f(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2


def test_aot_eager_serves() -> None:
    with torch._inductor.config.patch({"cpp.cxx": MISSING}), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for width in (2, 3, 4):
            x = torch.randn(width, width, requires_grad=True)
            torch._dynamo.reset()
            out = torch.compile(f, backend="optpass")(x)
            torch.testing.assert_close(out, f(x))
            out.sum().backward()
            torch.testing.assert_close(x.grad, 2 * torch.cos(x.detach()))
    said = [str(w.message) for w in caught if "Inductor cannot build" in str(w.message)]
    assert len(said) == 1 and "Using inner='aot_eager' instead" in said[0] and "C++ compiler" in said[0]
    report = build_report()
    assert [g.inner for g in report.graphs] == ["aot_eager"] * 3
    assert [w for w in report.warnings if "aot_eager served instead" in w] != []


def test_another_compiler_is_asked_anew(tmp_path: Path) -> None:
    assert compat.cpp_compiler_problem() is None
    with torch._inductor.config.patch({"cpp.cxx": MISSING}):
        assert "C++ compiler" in (compat.cpp_compiler_problem() or "")
    assert compat.cpp_compiler_problem() is None
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    not_executable = tmp_path / "text"
    not_executable.write_text("")
    for cxx in (str(broken), str(not_executable)):
        assert compat.cpp_compiler_problem((None, cxx)) is not None
        assert compat.cpp_compiler_problem(cxx) is not None


def test_the_users_patch_is_what_counts() -> None:
    x = [torch.ones(2)]
    assert inner.serving(Options(), x) == ("inductor", None)
    served, problem = inner.serving(Options(inductor={"cpp.cxx": MISSING}), x)
    assert served == "aot_eager" and problem is not None
    with torch._inductor.config.patch({"cpp.cxx": MISSING}):
        assert inner.serving(Options(inductor={"cpp.cxx": (None, "c++")}), x)[0] == "inductor"
        assert inner.serving(Options(inner="eager"), x) == ("eager", None)


def test_a_gpu_needs_triton_and_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu(torch.Tensor):
        device = torch.device("cuda", 0)  # type: ignore[assignment]

    x = torch.ones(2).as_subclass(OnGpu)
    monkeypatch.setattr(compat, "triton_problem", lambda: "no Triton")
    assert inner.serving(Options(), [x, 3]) == ("aot_eager", "no Triton")
    monkeypatch.setattr(compat, "triton_problem", lambda: None)
    monkeypatch.setattr(compat, "cpp_compiler_problem", lambda cxx=None: "no compiler")
    assert inner.serving(Options(), [x, 3]) == ("inductor", None)
    assert inner.serving(Options(), [x, torch.ones(2)]) == ("aot_eager", "no compiler")


SCRIPT = """
    import json
    import torch
    from optpass.backend.reporting import build_report

    def f(x):
        return torch.sin(x) * 2

    for width in (2, 3):
        x = torch.randn(width, width)
        assert torch.allclose(torch.compile(f, backend="optpass", dynamic=False)(x), f(x))
    print(json.dumps([g.inner for g in build_report().graphs]))
"""


@pytest.mark.slow
def test_one_warning_a_process(python: Callable[..., Any]) -> None:
    done = python(SCRIPT, CXX="/nonexistent/compiler")
    assert done.json == ["aot_eager", "aot_eager"]
    assert done.stderr.count("Inductor cannot build here") == 1
