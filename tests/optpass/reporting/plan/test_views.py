"""The views of a plan: sentences, terminal, page, files and schema say what the record holds."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
from pydantic import ValidationError
from rich.console import Console

from optpass.reporting.files import read_json, to_json, write_json
from optpass.reporting.html import LIMIT_BYTES
from optpass.reporting.model import DeviceRecord
from optpass.reporting.plan import svg, words
from optpass.reporting.plan.html import render_plan_html, write_plan_html
from optpass.reporting.plan.model import (
    BatchRecord,
    LedgerRecord,
    OffloadedTensor,
    OffloadRecord,
    Overhead,
    ParetoPoint,
    PlannedTensor,
    PlanReport,
    RecomputedTensor,
    ShardRecord,
)
from optpass.reporting.plan.terminal import render_plan
from optpass.reporting.schema import load_schema

G = 2**30


def tensor(layer: int, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "tensor": f"softmax_{layer}", "bytes": G, "op": "aten._softmax.default", "shape": "f32[8, 128, 128]",
        "flops": 1e9, "time_us": 2_000.0, "file": "/home/me/model.py", "line": 41, "module": f"layers.{layer}.attn",
    }  # fmt: skip
    return base | changes


def make(**changes: Any) -> PlanReport:
    base: dict[str, Any] = {
        "target": "llama:8b",
        "device": DeviceRecord(key="h200", name="H200", bandwidth=4e12, memory_bytes=141 * G),
        "dtype": "bfloat16",
        "parameter_count": 8_030_261_248,
        "inputs": "int64[1, 8192]",
        "optimizer": "adamw",
        "budget_bytes": 80 * G,
        "predicted_peak_bytes": 79 * G,
        "floor_bytes": 60 * G,
        "unconstrained_bytes": 100 * G,
        "optimizer_step_bytes": 50 * G,
        "ledger": LedgerRecord(parameters=15 * G, optimizer=30 * G, activations=34 * G),
        "saved": [PlannedTensor(**tensor(i)) for i in range(12)],
        "recomputed": [RecomputedTensor(**tensor(i, op="aten.mm.default", line=50), copies=2) for i in range(4)],
        "overhead": Overhead(
            recompute_flops_fraction=0.1, predicted_slowdown=1.05, recompute_us=50_000, step_us=1_000_000
        ),
        "pareto": [ParetoPoint(peak_bytes=(100 - 4 * i) * G, slowdown=1 + i / 50) for i in range(11)],
        "notes": ["a note <b>"],
    }
    return PlanReport(**(base | changes))


def terminal(plan: PlanReport, top: int = 10) -> str:
    stream = io.StringIO()
    render_plan(plan, Console(file=stream, width=200), top=top)
    return stream.getvalue()


# ---- words ----------------------------------------------------------------------------------------------------------


def test_repeated_layers_are_one_sentence() -> None:
    plan = make()
    (row,) = words.rows(plan.saved)
    assert words.sentence(row, plan) == (
        "layers.*.attn softmax, model.py:41, 1 GiB saved x 12; recomputing them frees 12 GiB and costs 2.4% of the step"
    )
    (row,) = words.rows(plan.recomputed)
    assert words.sentence(row, plan) == (
        "layers.*.attn mm, model.py:50, 1 GiB recomputed x 4, each 2 times; this frees 4 GiB and costs 1.6% of the step"
    )


def test_what_differs_is_told_apart_and_the_largest_comes_first() -> None:
    tensors = [tensor(0), tensor(1, bytes=3 * G), tensor(2, line=42), tensor(3, module=None, file=None, line=None)]
    rows = words.rows([PlannedTensor(**t) for t in tensors])
    assert [row.count for row in rows] == [1, 1, 1, 1] and rows[0].bytes == 3 * G
    said = [words.sentence(row, make()) for row in rows]
    assert any(text.startswith("softmax, 1 GiB saved; recomputing it frees 1 GiB") for text in said)


@pytest.mark.parametrize(
    ("op", "short"),
    [
        ("aten._softmax.default", "softmax"),
        ("aten.convert_element_type", "convert_element_type"),
        ("prims.iota.default", "iota"),
        ("mylib.fused_norm.default", "default"),
        ("flex_attention", "flex_attention"),
        ("", "tensor"),
    ],
)
def test_short_names_of_operators(op: str, short: str) -> None:
    assert words.short_op(op) == short


def test_verdicts() -> None:
    assert "79 GiB of 80 GiB (98.8%), and a step takes 5.0% longer" in words.verdict(make())
    assert "nothing is recomputed" in words.verdict(make(recomputed=[]))
    assert words.verdict(make(budget_bytes=None)).startswith("No budget: the peak is 79 GiB")


def test_offload_is_one_sentence() -> None:
    assert words.offload_sentence(make()) == ""
    link = {"link_bytes_per_s": 5e10}
    assert "no gain" in words.offload_sentence(make(offload=OffloadRecord(**link)))
    moved = OffloadRecord(
        **link, frees_bytes=G, transfer_us=2e5, hidden_us=2e5, replaces_us=4e4, pays=True,
        tensors=[OffloadedTensor(**tensor(0), transfer_us=2e5)],
    )  # fmt: skip
    assert "it pays: it would replace 40 ms of recomputing" in words.offload_sentence(make(offload=moved))
    runs = moved.model_copy(update={"runs": True})
    assert "a run with this budget does that, and spares 40 ms" in words.offload_sentence(make(offload=runs))
    idle = moved.model_copy(update={"replaces_us": 0.0, "pays": False})
    assert "not needed" in words.offload_sentence(make(offload=idle))


# ---- terminal -------------------------------------------------------------------------------------------------------


def test_the_terminal_has_every_part() -> None:
    plan = make(
        batch=BatchRecord(size=4, searched=True, tried=[(1, 50 * G), (4, 79 * G)]),
        shard=ShardRecord(kind="fsdp", world_size=8, layer="layers.0", gathered_bytes=G, gradient_bytes=G),
        accumulation=2,
    )
    text = terminal(plan)
    for part in (
        "llama:8b", "bfloat16", "optimizer adamw", "micro-batch 4, the largest that fits", "fsdp over 8 devices",
        "2 micro-batches a step", "141 GiB of memory", "It fits", "parameters   15 GiB, 19.0%",
        "layers.0, 2 GiB with its gradients", "1: 50 GiB, 4: 79 GiB",
        "softmax, model.py:41", "20.0% longer", "a note <b>",
    ):  # fmt: skip
        assert part in text, part
    assert re.search(r"while the optimizer steps +50 GiB", text)
    assert text.index("Recomputed") < text.index("Saved") < text.index("Curve") < text.index("Notes")


def test_lists_are_cut_and_say_so() -> None:
    saved = [PlannedTensor(**tensor(0, tensor=f"t{i}", line=i + 1)) for i in range(30)]
    text = terminal(make(saved=saved), top=3)
    assert "... and 27 more kinds of tensor" in text and text.count("GiB saved") == 3


# ---- page -----------------------------------------------------------------------------------------------------------


def test_the_page_is_one_offline_file_with_the_curve() -> None:
    page = render_plan_html(make())
    assert "<script" not in page and not re.search(r'(?:src|href)="(?!#)', page)
    assert "a note &lt;b&gt;" in page and "fastest plan at each peak" in page
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.S)
    assert len(drawings) == 2
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    assert sum(drawing.count("<circle") for drawing in drawings) == 11 + 1 and "budget 80 GiB" in page


def test_a_huge_plan_is_cut_to_size() -> None:
    saved = [PlannedTensor(**tensor(0, tensor=f"t{i}", line=i, module="m" * 300)) for i in range(4000)]
    page = render_plan_html(make(saved=saved))
    assert len(page.encode()) <= LIMIT_BYTES and "more kinds of tensor not shown" in page


@pytest.mark.parametrize("points", [0, 1, 2, 500])
def test_curves_of_any_length(points: int) -> None:
    pareto = [ParetoPoint(peak_bytes=(1000 - i) * G, slowdown=1 + i / 7) for i in range(points)]
    drawing = svg.curve_chart(make(pareto=pareto, budget_bytes=None))
    assert bool(drawing) is (points > 1)
    if drawing:
        ElementTree.fromstring(drawing)


def test_the_curve_of_a_tiny_step_has_its_ticks() -> None:
    pareto = [ParetoPoint(peak_bytes=1000 - 10 * i, slowdown=1 + i / 100) for i in range(3)]
    drawing = svg.curve_chart(make(pareto=pareto, predicted_peak_bytes=990, budget_bytes=995))
    assert drawing.count('class="axis"') >= 3


def test_a_name_cannot_break_out_of_a_drawing() -> None:
    plan = make(target="</svg><script>alert(1)</script>", notes=["</main><script>"])
    assert "<script" not in render_plan_html(plan)


# ---- files and schema -----------------------------------------------------------------------------------------------


def test_written_and_read_back(tmp_path: Path) -> None:
    plan = make()
    write_json(plan, tmp_path / "plan.json")
    assert read_json(tmp_path / "plan.json") == plan
    write_plan_html(plan, tmp_path / "deep" / "plan.html")
    assert (tmp_path / "deep" / "plan.html").read_text().startswith("<!DOCTYPE html>")


def test_the_committed_schema_takes_what_is_written() -> None:
    import json

    data = json.loads(to_json(make()))
    assert data["schema"] == "optpass.plan/1"
    jsonschema.validate(data, load_schema("optpass.plan/1"))
    wanted = {
        "budget_bytes", "predicted_peak_bytes", "floor_bytes", "ledger", "saved", "recomputed", "overhead", "pareto",
    }  # fmt: skip
    assert wanted <= data.keys()
    assert list(data["ledger"]) == [
        "parameters", "gradients", "optimizer", "buffers", "inputs", "activations", "temporaries",
    ]  # fmt: skip
    assert {"tensor", "bytes", "flops", "file", "line", "module"} <= data["recomputed"][0].keys()
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data | {"floor_bytes": "small"}, load_schema("optpass.plan/1"))


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValidationError):
        make(surprise=1)
