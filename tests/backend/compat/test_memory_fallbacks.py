"""A torch that lacks what a memory budget stands on: one line says so, and the compile is that without a budget."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import optpass
from optpass.backend.compat import budget_problem, memory_names, self_test
from optpass.backend.memory.partition.partitioner import BudgetPartitioner

NEEDS = {need.name: need for need in (*memory_names.PARTITIONING, *memory_names.LOWERING)}


def torch_names() -> ModuleType:
    """`torch_names.py` beside this file."""
    if "optpass_test_torch_names" not in sys.modules:
        path = Path(__file__).with_name("torch_names.py")
        spec = importlib.util.spec_from_file_location("optpass_test_torch_names", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules["optpass_test_torch_names"]


@pytest.fixture(autouse=True)
def uncached() -> Any:
    memory_names._problem.cache_clear()
    yield
    memory_names._problem.cache_clear()


def step(inner: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of a small model under a budget far below what it takes, and those of eager code."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16) for _ in range(3)]
    model = torch.nn.Sequential(*(m for layer in layers for m in (layer, torch.nn.GELU())))
    x = torch.randn(64, 16)
    loss = lambda run: run(x).square().mean()  # noqa: E731
    expected = list(torch.autograd.grad(loss(model), list(model.parameters())))
    compiled = torch.compile(model, backend="optpass", options={"inner": inner, "memory_budget": "1KB"})
    return list(torch.autograd.grad(loss(compiled), list(model.parameters()))), expected


def refuse(need: memory_names.Need, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a torch that renamed the name, or that calls it otherwise."""
    changes = {"path": f"{need.path}_of_old"} if how == "missing" else {"positional": 90}
    monkeypatch.setattr(memory_names, "PARTITIONING", (memory_names.Need(**{**vars(need), **changes}),))


@pytest.mark.parametrize("how", ["missing", "called otherwise"])
def test_the_budget_is_refused_in_one_line(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(memory_names.PARTITIONING[1], how, monkeypatch)
    monkeypatch.setattr(BudgetPartitioner, "__init__", lambda *args, **kwargs: pytest.fail("planned all the same"))
    found, expected = step("aot_eager")
    torch.testing.assert_close(found, expected)
    (warning,) = [text for text in optpass.report().warnings if "memory_budget" in text]
    assert "no effect with this version of torch" in warning and how in warning and "\n" not in warning
    assert any("memory_budget" in text for text in self_test())


def test_what_inductor_lacks_is_no_matter_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_names, "LOWERING", (memory_names.Need("torch._inductor.compile_fx", "gone"),))
    assert budget_problem(inductor=False) is None
    problem = budget_problem(inductor=True)
    assert problem == "torch._inductor.compile_fx.gone is missing"


def test_needs_are_there() -> None:
    assert budget_problem(inductor=True) is None


def test_needs_are_what_is_used() -> None:
    """Every private name that the budget's modules import or patch is asked about beforehand."""
    files = ("partition.py:", "memory.py:", "memory_reuse.py:")
    used = {use for use in torch_names().uses() if use.where.startswith(files) and not use.optional}
    modules = {need.module for need in NEEDS.values()} | {need.module.rpartition(".")[0] for need in NEEDS.values()}
    known = set(NEEDS) | modules | {"torch._inductor.virtualized.V.fake_mode"}
    assert not {
        use.name for use in used if use.name.removesuffix(".") not in known | {"torch._inductor.graph.GraphLowering"}
    }
