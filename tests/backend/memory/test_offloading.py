"""Saved tensors in host memory meanwhile: the budget holds, gradients are the same, and copies stay where a plan has
them. There is no GPU here: the device is named, the copies are done at once, and their memory is numpy's, which torch's
allocator does not count.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

import optpass
from optpass.backend.compat.memory_order import held_in_place
from optpass.backend.memory.partition import offloading
from optpass.backend.memory.partition.partitioner import BudgetPartitioner
from optpass.backend.memory.replay.storages import Operators, Storages
from optpass.errors import ConfigError
from optpass.options import resolve
from optpass.passes.memory import offload, transfers

aten = torch.ops.aten


def numpy_memory(source: torch.Tensor) -> torch.Tensor:
    bytes_ = torch.from_numpy(np.empty(source.numel() * source.element_size(), dtype=np.uint8))
    return bytes_.view(source.dtype).as_strided(source.shape, source.stride())


@pytest.fixture(autouse=True)
def linked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU is a device that hides copies of any size, and whose launches cost nothing."""
    monkeypatch.setattr(offloading, "DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(offloading, "LAUNCHES", 0)
    for module in (offload, offloading):
        monkeypatch.setattr(module, "SMALLEST", 256)
    monkeypatch.setattr(transfers, "host_memory", numpy_memory)


def settings(which: str = "auto") -> dict[str, str]:
    return {"device": "h200", "offload": which}


def moved() -> list[optpass.reporting.model.Site]:
    return [site for site in optpass.report().sites() if site.kind == "offload"]


def reference(steps, model, x, **how):
    return steps.run(model, x, settings=settings(), **how)


def check(ran, whole, steps):
    assert ran.peak <= ran.budget and ran.error <= 0.005
    assert steps.equal(ran, whole)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.2, 0.6])
def test_a_budget_holds_with_tensors_in_host_memory(share, steps, programs):
    torch.manual_seed(0)
    model, x = programs.Stack(3, 32, 2, dropout=0.1), [torch.randn(4, 48, 32)]
    whole = reference(steps, model, x)
    assert not moved() and whole.error <= 0.005
    (budget,) = steps.budgets(whole, (share,))
    without = steps.run(model, x, budget, settings=settings("off"))
    assert not moved() and without.recomputed
    check(without, whole, steps)
    ran = steps.run(model, x, budget, settings=settings())
    (said,) = [site for site in optpass.report().sites() if site.kind == "memory budget"]
    assert moved() and ran.recomputed < without.recomputed
    assert said.cost["offloaded_bytes"] == sum(site.cost["bytes"] for site in moved()) and said.cost["transfer_seconds"]
    assert said.cost["predicted_slowdown"] < without.figure("predicted_slowdown") or not ran.recomputed
    assert "in host memory between forward and backward" in said.reason
    assert all(site.line and site.module for site in moved())
    check(ran, whole, steps)


def test_a_budget_below_the_floor_of_other_plans_holds(steps, programs):
    torch.manual_seed(0)
    model, x = programs.Chain(12, 64), [torch.randn(512, 64)]
    whole = reference(steps, model, x, measure=False)
    budget = int(whole.figure("floor_bytes") * 0.98)
    with pytest.raises(optpass.BudgetInfeasibleError):
        steps.run(model, x, budget, settings=settings("off"), measure=False)
    ran = steps.run(model, x, budget, settings=settings())
    assert moved() and ran.figure("floor_bytes") <= budget
    check(ran, whole, steps)


@pytest.mark.slow
def test_what_inductor_generates_keeps_the_places_of_copies(steps, programs, monkeypatch):
    torch.manual_seed(0)
    model, x = programs.Stack(2, 32, 2), [torch.randn(4, 48, 32)]
    whole = reference(steps, model, x, inner="inductor")
    (budget,) = steps.budgets(whole, (0.4,))
    ran = steps.run(model, x, budget, inner="inductor", settings=settings())
    number = len(moved())
    assert number
    check(ran, whole, steps)
    torch._dynamo.reset()
    split, planned = BudgetPartitioner.__call__, []

    def recorded(partitioner, *args, **kwargs):
        planned.extend(split(partitioner, *args, **kwargs))
        return tuple(planned)

    monkeypatch.setattr(BudgetPartitioner, "__call__", recorded)
    options = {"inner": "inductor", "optimizer": "none", "memory_budget": budget, **settings()}
    call = torch.compile(model, backend="optpass", options=options)
    _, codes = run_and_get_code(lambda: call(*x).backward())
    for text, module, begins, ends in zip(
        codes, planned, (transfers.OFFLOAD, transfers.RELOAD), (transfers.OFFLOADED, transfers.RELOADED), strict=True
    ):
        first, last = (op.name().partition("::")[2] for op in (begins, ends))
        tickets = re.findall(rf"(\w+) = torch.ops.optpass.{first}.default\((\w+)", text)
        assert len(tickets) == number
        beside = [_between(text, ticket, source, last) for ticket, source in tickets]
        assert all(part is not None for part in beside)  # the same buffer is given to both
        wanted = [_products_behind(node, ends) for node in module.graph.find_nodes(op="call_function", target=begins)]
        assert any(wanted)
        assert [len(re.findall(r"extern_kernels\.", part)) for part in beside] == wanted


def _products_behind(ticket: fx.Node, ends: Any) -> int:
    """Products of matrices, which are never fused, from where a copy begins to where it ends."""
    between = itertools.takewhile(lambda node: not (node.target is ends and ticket in node.args), _behind(ticket))
    return sum(node.target in (aten.mm.default, aten.bmm.default, aten.addmm.default) for node in between)


def _behind(node: fx.Node) -> Iterator[fx.Node]:
    while node.op != "root":
        node = node.next
        yield node


def _between(text: str, ticket: str, source: str, ends: str) -> str | None:
    """The code from where a copy begins to where it ends."""
    (alias,) = re.findall(rf"(\w+) = {ticket}$", text, re.MULTILINE)
    found = re.search(
        rf"^ *{ticket} = torch.*?(^ *\w+ = torch.ops.optpass.{ends}.default\({alias}, {source}\b)", text, re.M | re.S
    )
    return found and found.group(0)


class Twice(nn.Module):
    """A stack with a graph break between its halves."""

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.one, self.other = one, other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        torch._dynamo.graph_break()
        return self.other(x)


def test_a_step_of_several_graphs(steps, programs):
    torch.manual_seed(0)
    model = Twice(programs.Stack(1, 32, 2, loss=False, dropout=0.1), programs.Stack(1, 32, 2, dropout=0.1))
    x = [torch.randn(4, 48, 32)]

    def step(call, inputs):
        for _ in range(3):
            call(*inputs).backward()

    whole = reference(steps, model, x, step=step, measure=False)
    (budget,) = steps.budgets(whole, (0.4,))
    ran = steps.run(model, x, budget, step=step, settings=settings(), measure=False)
    assert steps.equal(ran, whole)


def test_gradients_add_up_and_a_backward_may_run_again(steps, programs):
    torch.manual_seed(0)
    model, x = programs.Stack(2, 32, 2, dropout=0.1, loss=False), [torch.randn(4, 48, 32)]

    def step(call, inputs):
        for micro_batch in range(2):
            out = call(*inputs).square().mean()
            out.backward(retain_graph=micro_batch == 1)
        out.backward()
        with pytest.raises(RuntimeError, match="second time"):
            out.backward()
        return out.detach()

    whole = reference(steps, model, x, step=step, measure=False)
    (budget,) = steps.budgets(whole, (0.5,))
    ran = steps.run(model, x, budget, step=step, settings=settings(), measure=False)
    assert moved() and steps.equal(ran, whole)


def test_hooks_are_given_what_is_saved(steps, programs):
    torch.manual_seed(0)
    model, x = programs.Stack(2, 32, 2, dropout=0.1), [torch.randn(4, 48, 32)]

    def step(call, inputs):
        packed = []
        call(*inputs).backward()  # compiled, and its loss seen
        for p in model.parameters():
            p.grad = None
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(len(packed)) or t.clone(), lambda t: t):
            out = call(*inputs)
        out.backward()
        return out.detach(), bool(packed)

    whole = reference(steps, model, x, step=step, measure=False)
    (budget,) = steps.budgets(whole, (0.5,))
    ran = steps.run(model, x, budget, step=step, settings=settings(), measure=False)
    assert moved() and whole.result[1] and steps.equal(ran, whole)


def test_only_dense_tensors_of_one_device_are_moved(monkeypatch, programs):
    joint = programs.joint_of(programs.Chain(), torch.randn(32, 8))
    graph, problem = SimpleNamespace(graph=joint.graph), programs.problem_of(joint)
    device = optpass.passes.devices.resolve("h200")
    host = offloading.host_of(graph, problem, device)
    assert host is not None and host.memory_bytes > 0
    made = {s for o in problem.operations if o.forward for s in o.outputs}
    taken = {s.index for s in problem.storages if host.may(s.index)}
    assert taken and taken <= made and not any(problem.storages[s].given for s in taken)
    assert offloading.host_of(graph, problem, optpass.passes.devices.resolve("cpu")) is None
    monkeypatch.setattr(offloading, "runs_beside", lambda: False)
    assert offloading.host_of(graph, problem, device) is None
    monkeypatch.setattr(offloading, "runs_beside", lambda: True)
    monkeypatch.setattr(offloading, "DEVICES", frozenset({"cuda"}))
    assert offloading.host_of(graph, problem, device) is None


def test_a_replay_counts_copies_on_the_device_alone():
    storages = Storages()
    with FakeTensorMode() as mode, Operators(storages):
        x = mode.from_tensor(torch.randn(100))
        storages.add(x)
        ticket = transfers.OFFLOAD(x)
        host = transfers.OFFLOADED(ticket, x)
        assert storages.live == 400
        del x, ticket
        assert storages.live == 0
        ticket = transfers.RELOAD(host, torch.device("cpu"))
        assert storages.live == 400
        back = transfers.RELOADED(ticket, host, torch.device("cpu"))
        assert storages.live == storages.peak == 400 and not storages.unsound
        back.sin_()
        assert not storages.unsound
        del back, ticket
        assert storages.live == 0
        host.view(10, 10).sum()
        assert storages.unsound


def test_a_replay_sees_that_a_source_is_not_kept():
    storages = Storages()
    with FakeTensorMode() as mode, Operators(storages):
        x, y = (mode.from_tensor(torch.randn(100)) for _ in range(2))
        transfers.OFFLOADED(transfers.OFFLOAD(x), y)
    assert storages.unsound


def test_kernels_stay_on_their_side_of_a_copy():
    before = [frozenset(), frozenset({0}), frozenset(), frozenset({2}), frozenset(), frozenset({3})]
    held = held_in_place(before, [1, 4])
    assert held == [set(), {0}, {1}, {1, 2}, {1, 2, 3}, {3, 4}]
    assert held_in_place(before, []) == before


def test_the_option_is_one_of_two_words():
    with pytest.raises(ConfigError, match=r"offload='always' .* is not 'auto' or 'off'"):
        resolve({"offload": "always"})
    assert resolve({"offload": "off"}).offload == "off" and resolve({}).offload == "auto"
