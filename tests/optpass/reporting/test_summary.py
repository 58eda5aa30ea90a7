"""Rankings, shares, groupings and advice."""

from __future__ import annotations

from pathlib import Path

import pytest

from optpass.reporting import summary, text
from optpass.reporting.merge import main_dtype
from optpass.reporting.model import Analysis, DeviceRecord, GraphRecord, Op, PassRecord, Report
from optpass.reporting.training import other_facts, read_training, training_facts


def matmul(m: int, n: int, k: int, dtype: str = "bfloat16") -> Op:
    return Op(name="mm", target="aten.mm.default", mnk=(m, n, k), aligned=False, dtype=dtype)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (matmul(64, 50257, 64), "N=50257 is no multiple of 8: pad to 50264 or 50304"),
        (
            matmul(64, 1001, 9),
            "N=1001 is no multiple of 8: pad to 1008 or 1024; K=9 is no multiple of 8: pad to 16 or 64",
        ),
        (matmul(64, 6, 64, "float32"), "N=6 is no multiple of 4: pad to 8 or 32"),
        (matmul(64, 120, 64, "int8"), "N=120 is no multiple of 16: pad to 128"),
        (matmul(24, 64, 64, "float8_e4m3fn"), "M=24 is no multiple of 16: pad to 32 or 128"),
        (matmul(64, 64, 64), "M, N, K = 64, 64, 64"),
    ],
)  # fmt: skip
def test_advice(op: Op, expected: str) -> None:
    assert summary.advice(op) == expected


def test_identical_ops_are_one_row_and_shares_add_up(analysis: Analysis) -> None:
    rows = summary.rank_ops(analysis.ops)
    assert sum(row.count for row in rows) == len(analysis.ops)
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert [row.time_us for row in rows] == sorted((row.time_us for row in rows), reverse=True)
    softmax = next(row for row in rows if row.op.target == "aten._softmax.default")
    assert (softmax.count, softmax.module) == (8, "blocks.*.attn")
    head = [row for row in rows if row.module == "lm_head"]
    assert {row.op.phase for row in head} == {"forward", "backward"} and len(head) == 2


def test_modules_groups_and_bounds_add_up(analysis: Analysis) -> None:
    modules = summary.hot_modules(analysis.ops)
    assert sum(row.share for row in modules) == pytest.approx(1)
    up = next(row for row in modules if row.module == "blocks.*.mlp.up")
    assert (up.instances, up.ops) == (4, 8)
    groups = summary.rank_groups(analysis.groups)
    assert sum(row.time_us for row in groups) == pytest.approx(analysis.totals.time_us)
    bounds = summary.bound_shares(analysis)
    assert sum(share.share for share in bounds) == pytest.approx(1)
    assert sum(share.time_us for share in bounds) == pytest.approx(analysis.totals.time_us)


def test_bounds_fall_back_to_ops_without_groups(analysis: Analysis) -> None:
    analysis.groups = []
    total = sum(share.time_us for share in summary.bound_shares(analysis))
    assert total == pytest.approx(analysis.totals.time_unfused_us)


def test_passes_are_summed(report: Report) -> None:
    redundant, roofline = summary.pass_rows(report)
    assert (redundant.graphs, redundant.applied, redundant.declined) == (2, 4, 2)
    assert roofline.seconds == pytest.approx(2 * 0.198)


def test_failed_passes_are_named() -> None:
    graph = GraphRecord(id="3", passes=[PassRecord(name="p", stage="dynamo", error="KeyError: x")])
    assert summary.pass_rows(Report(graphs=[graph]))[0].errors == ("graph 3: KeyError: x",)


def test_places_are_relative_below_the_working_directory() -> None:
    assert summary.place(str(Path.cwd() / "model.py"), 3) == "model.py:3"
    assert summary.place("/elsewhere/model.py", 3) == "/elsewhere/model.py:3"
    assert summary.place(None, 3) == "" and summary.place("model.py", None) == "model.py"


def test_the_main_dtype_is_that_of_the_matmuls() -> None:
    device = DeviceRecord(key="x", name="X", peak_flops={"bfloat16": 2.0, "float32": 1.0, "int8": 0.0})
    ops = [matmul(1, 1, 1).model_copy(update={"flops": 5.0})]
    ops.append(Op(name="add", target="aten.add.Tensor", dtype="float32", flops=9.0))
    ops.append(matmul(1, 1, 1, "int8").model_copy(update={"flops": 50.0}))
    assert main_dtype(ops, device) == "bfloat16"
    assert main_dtype(ops[1:], device) == "float32"
    assert main_dtype(ops, None) is None


def test_training_is_read_tolerantly() -> None:
    record = {
        "config": {"model": {"width": 8}, "sizes": list(range(20))},
        "steps": [
            {"step": 1, "loss": 4.0, "step_s": 0.2, "tokens_per_s": 10.0},
            {"step": 2, "loss": None},
            {"step": 3, "loss": 2.0, "step_s": 0.4},
            "nonsense",
        ],
        "eager_loss": [4.5, 1.0, 2.25, float("nan"), 9.0],
    }
    run = read_training(record)
    assert run.loss == ((1.0, 4.0), (3.0, 2.0)) and run.step_s == (0.2, 0.4)
    assert run.largest_gap == 0.5
    assert ("against eager", "largest difference of the loss 0.5") in training_facts(record)
    assert other_facts(record) == [("config.model.width", "8"), ("config.sizes", "20 values")]
    assert training_facts({}) == [] and training_facts({"steps": 3, "eager_loss": "x"}) == []


def test_figures_in_words() -> None:
    assert [text.percent(x) for x in (0, 0.00001, 0.5)] == ["0.0%", "<0.1%", "50.0%"]
    assert text.us(1500) == "1.5 ms" and text.seconds(None) == "-"
    assert [text.intensity(x) for x in (0.08333, 1.25, 1365.3)] == ["0.0833", "1.25", "1365"]
    assert text.aligned(matmul(8, 9, 8)) == "no N=9"
