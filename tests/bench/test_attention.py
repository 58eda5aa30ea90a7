"""The attention benchmarks: how cells are judged (on figures we choose), what they time, and the table they write."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optpass import models
from optpass.bench import attention, attention_cell, attention_grid, attention_heap, attention_table, attention_ways
from optpass.bench.attention_grid import GRIDS, Grid
from optpass.bench.attention_programs import ByHand, ByHandSelfAttention, GPTCell, Handwritten, OpCell, by_hand, op_call
from optpass.bench.attention_ways import Meter, Point
from optpass.bench.harness import Case, Comparison
from optpass.bench.progress import NoProgress
from optpass.bench.registry import BenchConfig
from optpass.bench.result import BenchError, Result, from_json
from optpass.errors import ConfigError
from optpass.passes.attention.gate import Found, fused
from optpass.passes.attention.gate.table import Axes, Base
from optpass.passes.attention.gate.table import from_json as table_from_json

NOISE = (1.0, 1.004, 0.996, 1.002, 0.998, 1.0)


class Machine:
    """Cells whose cases take as long as we say, by name, in place of processes that measure them."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self.seconds = {attention.EAGER: 4.0, attention.ALONE: 2.0, attention.HAND: 1.0, attention.OURS: 1.0} | seconds
        self.cells: list[dict[str, Any]] = []

    def __call__(self, target: str, cell: dict[str, Any], *, environ: Mapping[str, str]) -> dict[str, Any]:
        assert target == "optpass.bench.attention_cell:measure" and Path(environ["TORCHINDUCTOR_CACHE_DIR"]).is_dir()
        self.cells.append(json.loads(json.dumps(cell)))
        cases = attention_cell.CASES[cell["kind"]](cell["cell"], cell["seed"])
        samples = {case.name: [self.seconds[case.name] * noise for noise in NOISE] for case in cases}
        return {"samples": samples, "stopped": "rounds", "left_out": []}


@pytest.fixture
def claim(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setattr(attention, "LENGTHS", {"cpu": (128, 1024)})
    monkeypatch.setattr(attention, "HEAD_DIMS", {"cpu": (64,)})
    monkeypatch.setattr(attention, "GPT_LENGTHS", (512,))

    def run(config: BenchConfig | None = None, **seconds: float) -> Result:
        machine = Machine({name.replace("_", " "): s for name, s in seconds.items()})
        monkeypatch.setattr(attention, "run_isolated", machine)
        return attention.run(config or BenchConfig(), NoProgress())

    return run


@pytest.mark.parametrize(
    ("seconds", "passed"),
    [
        ({}, True),
        ({"optpass": 0.5}, True),
        ({"optpass": 1.02}, True),
        ({"optpass": 1.03}, None),
        ({"optpass": 1.05}, False),
        ({"inductor": 0.9}, False),  # the inner compiler alone is the best there is
        ({"eager": 0.9}, False),
        ({"eager": 2.9}, False),  # not three times as fast as eager
    ],
)
def test_the_worst_cell_decides(claim: Callable[..., Result], seconds: dict[str, float], passed: bool | None) -> None:
    result = claim(**seconds)
    assert result.passed is passed
    assert from_json(result.to_json()).rows == result.rows


def test_every_cell_says_what_was_best(claim: Callable[..., Result]) -> None:
    ours = [row for row in claim(optpass=1.1, inductor=0.8).rows if row.case == attention.OURS]
    ours = [row for row in ours if not row.group.endswith("buffers kept")]
    assert len(ours) == 2 * 2 * 2 * 2 + 2
    ops = [row for row in ours if not row.group.startswith("gpt")]
    assert all(row.extra["best"] == "inductor" for row in ops)
    assert all(float(row.extra["of best"]) == pytest.approx(1.1 / 0.8) for row in ops)
    gpts = [row for row in ours if row.group.startswith("gpt")]
    assert all(float(row.extra["speed of sdpa by hand"]) == pytest.approx(1 / 1.1) for row in gpts)


def test_the_cells_of_the_claim() -> None:
    assert len(attention.op_cells(BenchConfig())) == 2 * 4 * 2 * 2
    assert {cell.length for cell in attention.op_cells(BenchConfig())} == {256, 512, 1024, 2048}
    assert {cell.head_dim for cell in attention.op_cells(BenchConfig(device="cuda"))} == {64, 128}
    assert {cell.dtype for cell in attention.op_cells(BenchConfig(device="cuda"))} >= {"bfloat16", "float16"}
    assert {(cell.length, cell.training) for cell in attention.gpt_cells(BenchConfig())} == {
        (length, training) for length in (512, 1024, 2048) for training in (False, True)
    }
    assert len(attention.op_cells(BenchConfig(quick=True))) == 2 * 2 * 2 * 2


def test_a_part_proves_nothing_but_can_refute(claim: Callable[..., Result]) -> None:
    assert claim(BenchConfig(models=("gpt",))).passed is None
    assert claim(BenchConfig(models=("gpt",)), optpass=1.2).passed is False
    assert claim(BenchConfig(quick=True)).passed is None
    assert claim(BenchConfig(quick=True), optpass=1.2).passed is None  # a quick look has no verdict


def test_the_gpt_alone(claim: Callable[..., Result]) -> None:
    groups = dict.fromkeys(row.group for row in claim(BenchConfig(models=("gpt",))).rows)
    assert list(groups) == ["gpt inference T=512", "gpt training T=512"]


def test_time_running_out_is_said(claim: Callable[..., Result]) -> None:
    result = claim(BenchConfig(budget_s=0.0))
    assert result.passed is None and not result.rows
    assert result.notes[-1].startswith("not measured, time ran out: gpt inference T=512")
    assert "float32 forward causal S=128 hd=64" in result.notes[-1] and "more of these cells" in result.notes[-1]


def test_a_longer_budget_gives_every_cell_more_time(
    claim: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, given = Machine.__call__, []

    def noted(machine: Machine, target: str, cell: dict[str, Any], **how: Any) -> dict[str, Any]:
        given.append((cell["rounds"], cell["budget_s"]))
        return timed(machine, target, cell, **how)

    monkeypatch.setattr(Machine, "__call__", noted)
    for budget_s, patience in ((100.0, 1), (3 * attention.BUDGET_S["cpu"], 3)):
        given.clear()
        claim(BenchConfig(budget_s=budget_s))
        assert set(given) == {
            (patience * attention.ROUNDS, patience * seconds)
            for seconds in (attention.GPT_S["cpu"], attention.OP_S["cpu"])
        }


def test_a_kept_heap_is_shown_and_not_judged(claim: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Machine.__call__

    def slow_if_kept(machine: Machine, target: str, cell: dict[str, Any], **how: Any) -> dict[str, Any]:
        answer = timed(machine, target, cell, **how)
        if cell["kept"]:
            answer["samples"]["eager"] = [second / 2 for second in answer["samples"]["eager"]]
        return answer

    monkeypatch.setattr(Machine, "__call__", slow_if_kept)
    result = claim()
    assert result.passed is True
    assert {row.group for row in result.rows if "buffers kept" in row.group} == {
        "float32 forward causal S=1024 hd=64, buffers kept"
    }
    assert result.notes[-1].endswith(": float32 forward causal S=1024 hd=64 2.00")


def test_a_cell_that_fails_or_does_not_fit_is_said(
    claim: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(machine: Machine, target: str, cell: dict[str, Any], **how: Any) -> dict[str, Any]:
        if cell["kind"] == attention.GPT:
            raise BenchError("killed by SIGKILL")
        return {"samples": {}, "stopped": "budget", "left_out": [attention.OURS]}

    monkeypatch.setattr(Machine, "__call__", fails)
    result = claim()
    assert result.passed is None and not result.rows
    assert "gpt training T=512 (killed by SIGKILL)" in result.notes[-1]
    assert "float32 forward full S=128 hd=64: optpass (out of memory)" in result.notes[-1]


def test_a_cell_times_all_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def timed(cases: Sequence[Case], **how: Any) -> Comparison:
        seen.append(how)
        return Comparison({case.name: (1.0, 2.0) for case in cases}, how["tolerance"], how["seed"], "narrow")

    monkeypatch.setattr(attention_cell, "compare", timed)
    monkeypatch.setattr(attention_heap, "keep", lambda: seen.append("kept"))
    cell = dataclasses.asdict(OpCell("float32", 32, True, True, 64, "cpu"))
    how: dict[str, Any] = {"rounds": 4, "budget_s": 2.0, "tolerance": 0.03, "seed": 1, "far": 2.0, "always": []}
    answer = attention_cell.measure(attention.OP, cell, kept=True, **how)
    assert answer["stopped"] == "narrow" and not answer["left_out"]
    assert list(answer["samples"]) == [attention.EAGER, attention.ALONE, attention.HAND, attention.OURS]
    assert seen == ["kept", how | {"device": "cpu", "warmup": 1}]


def test_what_it_cannot_measure_is_refused() -> None:
    for config in (BenchConfig(size="tiny"), BenchConfig(models=("mlp",)), BenchConfig(device="tpu")):
        with pytest.raises(ConfigError):
            attention.run(config, NoProgress())
        with pytest.raises(ConfigError):
            attention_table.run(config, NoProgress())


# ---- programs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_both_spellings_of_the_op_are_one_function(causal: bool) -> None:
    q, k, v = (torch.randn(2, 3, 37, 16, dtype=torch.float64) for _ in range(3))
    written = Handwritten(37, causal).double()
    torch.testing.assert_close(written(q, k, v), ByHand(causal)(q, k, v))


@pytest.mark.parametrize("training", [True, False])
def test_a_call_of_the_op_runs_what_it_says(training: bool) -> None:
    cell = OpCell("float32", 32, training, True, 64, "cpu")
    assert cell.shape == (64, 8, 32, 64)
    result: Any = op_call(cell, Handwritten(32, True), None, seed=0)()
    other: Any = op_call(cell, ByHand(True), None, seed=0)()
    torch.testing.assert_close(result, other)
    assert len(result) == 3 if training else not result.requires_grad


def test_the_gpt_by_hand_is_the_same_gpt() -> None:
    model, inputs = GPTCell(33, True, "cpu").build(seed=1)
    written = by_hand(model)
    assert not any(isinstance(module, ByHandSelfAttention) for module in model.modules())
    results = [_loss_and_gradients(one, inputs) for one in (model, written)]
    torch.testing.assert_close(*results)


def _loss_and_gradients(model: nn.Module, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
    loss = models.loss(model(*inputs))
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


# ---- the table -----------------------------------------------------------------------------------------------------

SMALL = Grid(
    axes=Axes((1.0, 16.0, 32.0), (16.0, 32.0), (16.0, 32.0), (16.0, 32.0), (2.0**11, 2.0**12)),
    base=Base(dim=16, scores=2**12, length=32),
    dtypes=("float32",),
    brief=(),
    kernels=("cpu_flash",),
    flex_lengths=(32.0,),
    flex_dtypes=(),
    operand_bytes=2**20,
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A grid of a few small sizes, a sample or two of each, and nothing written into the checkout."""
    monkeypatch.setattr(attention_grid, "GRIDS", {"cpu": SMALL})
    monkeypatch.setattr(attention_ways, "SAMPLES", (1, 1))
    monkeypatch.setattr(attention_ways, "REPEAT_S", 0.0)
    monkeypatch.setattr(attention_ways, "STEADY", 1e9)
    monkeypatch.setattr(attention_table, "checkout", lambda: None)
    monkeypatch.setattr(attention_grid, "run_isolated", lambda *_, **__: {"ns": 1e9})  # a process of its own
    monkeypatch.setattr(attention_heap, "keep", lambda: True)  # this process keeps its allocator
    monkeypatch.setattr(attention_table, "LENGTHS", {"cpu": (17, 31)})
    monkeypatch.setattr(attention_table, "SCORES", {"cpu": (2**11, 2**12)})
    monkeypatch.setenv("OPTPASS_CACHE_DIR", str(tmp_path))


def test_a_table_is_measured_written_and_read(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # its speed is not what is tested
    result = attention_table.run(BenchConfig(), NoProgress())
    (path,) = (tmp_path / "attention").iterdir()
    assert str(path) in result.notes[0]
    table = table_from_json(path.read_text(encoding="utf-8"), path.name)
    assert table.threads == torch.get_num_threads() and table.load[1] is not None
    assert set(table.figures) == {"float32 forward", "float32 training"}
    for kernels in table.figures.values():
        assert set(kernels["unfused"].masks) == set(attention_grid.UNFUSED_MASKS)
        assert set(kernels["cpu_flash"].masks) == set(attention_grid.FUSED_MASKS)
        assert set(kernels["unfused"].scores) == {"1"}
        assert set(kernels["unfused"].faults) == {"1", str(attention_grid.MANY)}
        assert kernels["unfused"].faults["1"] > 1e8 and not kernels["cpu_flash"].faults
    assert len(result.rows) == 2 * attention_table.CHECKS
    assert all(row.extra["regret"] >= 0 for row in result.rows)


def test_a_quick_look_writes_nothing(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    result = attention_table.run(BenchConfig(quick=True), NoProgress())
    assert result.passed is None and not list(tmp_path.iterdir())


def test_an_unsteady_machine_writes_nothing(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(attention_ways, "STEADY", -1.0)
    result = attention_table.run(BenchConfig(), NoProgress())
    assert result.passed is None and not list(tmp_path.iterdir())
    assert "100% of the points did not give the same time twice" in result.notes[1]


def test_the_least_time_is_sought_until_it_is_met_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([9.0, 5.0, 3.0, 4.0, 3.1, 1.0])
    monkeypatch.setattr(attention_ways, "clock", lambda device: lambda call, count: next(times))
    found, steady = attention_ways.least({"a": lambda: None}, "cpu")
    assert found == {"a": 3.0} and steady
    assert next(times) == 1.0  # the fifth sample was the last


def test_a_choice_is_judged_by_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table says that the kernel is faster; the machine says that it takes half as long again."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    asked = attention_table._problem(Meter("cpu", "float32", False), Point(20, 20, 16, 8), "none")
    figures = {"unfused": _flat(10.0), "cpu_flash": _flat(8.0)}
    from optpass.passes.attention.gate import Table

    table = Table(
        "x", "cpu", "", 1, "2.13.0", "test", "2026-01-01", (None, None), SMALL.axes, SMALL.base, 0.1,
        {"float32 forward": figures},
    )  # fmt: skip
    price = fused(asked, "cpu_flash", attention_table._spec("cpu"), table=Found(table, "measured"))
    assert price is not None
    meter = Meter("cpu", "float32", False)
    monkeypatch.setattr(meter, "measure", lambda *_: {"unfused": 10.0, "cpu_flash": 15.0})
    mask = attention_table.MASKS[0]
    (row,) = attention_table._check(meter, table, attention_table._spec("cpu"), Point(20, 20, 16, 8), mask, SMALL)
    assert row.extra["regret"] == pytest.approx(0.5)
    assert (row.median, row.extra["unfused predicted"]) == (15.0, pytest.approx(10.0))


def _flat(value: float) -> Any:
    from optpass.passes.attention.gate import Figures

    return Figures(plane=((value, value),) * 3, dims=((value, value),) * 2)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("mask", attention_grid.UNFUSED_MASKS)
def test_what_is_timed_is_attention(mask: str, training: bool) -> None:
    """The unfused ways against float64, before any compiler sees them."""
    point = Point(24, 24, 16, 3)
    q, k, v = (torch.randn(3, 24, 16, dtype=torch.float64) for _ in range(3))
    operand = attention_ways._operand(mask, point, q)
    if operand.dim() and operand.dtype != torch.bool:
        operand = torch.randn_like(operand)
    scores = q @ k.mT / 4
    if mask == "softcap":
        scores = attention_ways.CAP * torch.tanh(scores / attention_ways.CAP)
    elif mask in ("computed", "loaded"):
        scores = scores.masked_fill(torch.ones(24, 24).triu(1).bool(), -torch.inf)
    elif operand.dim():
        scores = scores + operand
    once = scores.softmax(-1) @ v
    torch.testing.assert_close(attention_ways._written(mask, 1)(q, k, v, operand), once)
    if mask in attention_grid.FUSED_MASKS:
        torch.testing.assert_close(attention_ways._sdpa("cpu_flash", False)(q, k, v, operand), once)


def test_slow_calls_are_measured_on_fewer_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_ways, "CALL_S", 0.0)
    meter = Meter("cpu", "float32", False)
    ways = {"cpu_flash": ("cpu_flash", "causal")}
    assert meter._bearable(Point(16, 16, 16, 64), ways, 1) == Point(16, 16, 16, 4)
    monkeypatch.setattr(attention_ways, "CALL_S", 1e9)
    assert meter._bearable(Point(16, 16, 16, 64), ways, 1) == Point(16, 16, 16, 64)


def test_what_a_device_refuses_is_said_and_left_out() -> None:
    meter = Meter("cpu", "float32", False)
    taken = meter.measure(Point(16, 16, 16, 4), {"no": ("cudnn", "none"), "yes": ("cpu_flash", "none")})
    assert set(taken) == {"yes"} and taken["yes"] > 0
    assert any(line.startswith("cudnn float32: ") for line in meter.skipped)


def test_the_grids_are_whole() -> None:
    for grid in GRIDS.values():
        assert grid.base.dim in grid.axes.dims and grid.base.scores in grid.axes.scores
        for queries in grid.axes.queries:
            for keys in grid.axes.keys:
                point = grid.point(queries, keys, grid.base.dim)
                assert point.scores <= max(grid.base.scores, queries * keys)
        assert all(grid.masked_lengths(kernel) for kernel in ("unfused", *grid.kernels))
    assert dataclasses.asdict(GRIDS["cpu"].base)["scores"] == 2**22
