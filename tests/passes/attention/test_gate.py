"""The cost gate: tables read at and between their points, the verdict, and what was published of GPUs."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from optpass.errors import ConfigError
from optpass.passes import devices, processor
from optpass.passes.attention import gate
from optpass.passes.attention.gate import Figures, Found, Table, adapt, decide, fused, heap, unfused
from optpass.passes.attention.gate.table import Axes, Base, along, from_json, per_score
from optpass.passes.attention.problem import Problem
from optpass.passes.processor import instructions
from optpass.reporting.environment import cpu_model

AXES = Axes((1.0, 64.0, 1024.0), (64.0, 1024.0), (64.0, 1024.0), (64.0, 128.0), (2.0**20, 2.0**24))
PLAIN = ((9.0, 8.0), (7.0, 6.0), (6.0, 5.0))
UNFUSED = Figures(
    plane=PLAIN,
    dims=((7.0, 5.0), (10.0, 8.0)),
    masks={
        "none": (7.0, 5.0),
        "loaded": (11.0, 9.0),
        "computed": (7.5, 5.5),
        "operand": (7.5, 5.5),
        "full": (8.5, 7.5),
    },
    scores={"1": (5.0, 9.0), "4": (5.0, 6.0)},
)
FLASH = Figures(
    plane=tuple(tuple(value - 1 for value in row) for row in PLAIN),
    masks={"none": (6.0, 4.0), "causal": (6.0, 2.0), "operand": (6.5, 4.5), "full": (7.0, 5.0)},
)
CPU = devices.resolve("cpu")


def table(**changes: Any) -> Table:
    """A table with figures that are easy to add up, for this processor unless said otherwise."""
    made = Table(
        device=cpu_model(), kind="cpu", instructions=instructions(), threads=1, torch="2.13.0", command="a test",
        created="2026-01-01", load=(0.0, None), axes=AXES, base=Base(64, 2**20, 64), copy=0.1,
        figures={f"float32 {mode}": {"unfused": UNFUSED, "cpu_flash": FLASH} for mode in ("forward", "training")},
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


KNOWN = Found(table(), "measured")


def problem(length: int = 1024, heads: int = 1, **changes: Any) -> Problem:
    """Causal float32 attention with 2**20 scores unless said otherwise."""
    made = Problem(
        device="cpu", dtype=torch.float32, batch=1, heads=heads, kv_heads=heads, queries=length, keys=length,
        head_dim=64, value_dim=64,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def alone_ns(asked: Problem, **options: Any) -> float:
    """Nanoseconds per score on one thread."""
    return _ns(asked, unfused(asked, CPU, table=KNOWN, **options).us)


def fused_ns(asked: Problem, kernel: str = "cpu_flash") -> float:
    price = fused(asked, kernel, CPU, table=KNOWN)
    assert price is not None
    return _ns(asked, price.us)


def _ns(asked: Problem, us: float) -> float:
    return us * 1e3 / (asked.batch * asked.heads * asked.queries * asked.keys)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- tables --------------------------------------------------------------------------------------------------------


def test_json_there_and_back() -> None:
    text = table().to_json()
    assert from_json(text, "x") == table()
    assert "[9.0, 8.0]" in text  # figures on one line, so that a change of one is one line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(schema="other/1"), "not an optpass.attention/1 file"),
        (lambda raw: raw.pop("axes"), "not an optpass.attention/1 file: 'axes'"),
        (lambda raw: raw.update(more=1), "unexpected keyword argument 'more'"),
        (lambda raw: raw["axes"].update(keys=[1024, 64]), "axis 'keys' do not rise"),
        (lambda raw: raw["base"].update(dim=65), "is not on the axes"),
        (lambda raw: _unfused(raw)["plane"].pop(), "plane has not 3 rows of 2 figures"),
        (lambda raw: _unfused(raw)["plane"][0].__setitem__(0, 0.0), "plane has the figure 0.0"),
        (lambda raw: _unfused(raw)["masks"].pop("none"), "masks were measured, but not 'none'"),
        (lambda raw: _unfused(raw)["scores"]["1"].append(2.0), "scores has not 2 rows of 2"),
    ],
)
def test_a_malformed_table_is_refused_by_name(change: Any, message: str) -> None:
    raw = json.loads(table().to_json())
    change(raw)
    with pytest.raises(ConfigError, match=r"odd\.json") as caught:
        from_json(json.dumps(raw), "odd.json")
    assert message in str(caught.value)


def _unfused(raw: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = raw["figures"]["float32 forward"]["unfused"]
    return found


def test_points_are_met_and_between_them_it_runs_with_the_logarithm() -> None:
    sizes, values = (64.0, 256.0, 1024.0), (8.0, 2.0, 5.0)
    assert [along(sizes, values, size) for size in (1, 64, 128, 256, 512, 1024, 9999)] == [8, 8, 5, 2, 3.5, 5, 5]
    rng = random.Random(random.getrandbits(32))
    drawn = sorted(rng.uniform(64, 256) for _ in range(50))
    assert all(a >= b for a, b in pairwise(along(sizes, values, size) for size in drawn))


def test_effects_add_up() -> None:
    def read(figures: Figures, **changes: Any) -> float:
        asked = {"queries": 1024, "keys": 1024, "dim": 64.0, "extra": {}, "scores": 2**20, "regions": 1} | changes
        return per_score(table(), figures, **asked)

    assert read(UNFUSED) == 5.0
    assert read(UNFUSED, keys=64) == 6.0
    assert read(UNFUSED, dim=128.0) == 8.0
    assert read(UNFUSED, dim=256.0) == 14.0  # the last slope goes on
    assert read(UNFUSED, extra={"loaded": 1.0}) == 9.0
    assert read(UNFUSED, extra={"operand": 0.5, "full": 0.5}) == 6.5
    assert read(UNFUSED, scores=2**24) == 9.0
    assert read(UNFUSED, scores=2**24, regions=4) == pytest.approx(6.0)
    assert 5.0 < read(UNFUSED, scores=2**24, regions=1000) < 6.0
    cached = dataclasses.replace(UNFUSED, masked_scores={"loaded": (6.0, 13.0)})  # beside 5 and 9 without a mask
    assert read(cached, extra={"loaded": 1.0}) == 9.0
    assert read(cached, extra={"loaded": 1.0}, scores=2**24) == 16.0
    assert read(cached, extra={"computed": 1.0}, scores=2**24) == read(UNFUSED, extra={"computed": 1.0}, scores=2**24)
    faulting = dataclasses.replace(UNFUSED, faults={"1": 3.0, "4": 1.5})
    assert read(faulting) == 5.0 and read(faulting, mapped=True) == 8.0
    assert read(faulting, mapped=True, regions=4) == pytest.approx(6.5)
    assert 6.0 < read(faulting, mapped=True, regions=1000) < 6.1  # what every region pays: 1, and 2 once
    assert read(FLASH, dim=128.0) == 8.0  # without a line for head dims, in proportion
    assert read(Figures(masks={"none": (4.0, 2.0)}, lengths=(64.0, 1024.0)), keys=64) == 3.0  # between the squares


# ---- the verdict ---------------------------------------------------------------------------------------------------


def test_a_verdict_has_both_figures_and_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPTPASS_CACHE_DIR", str(tmp_path))
    gate.folder().mkdir()
    (gate.folder() / "mine.json").write_text(table().to_json(), encoding="utf-8")
    verdict = decide(problem(mask="causal"), "sdpa", "cpu_flash", CPU)
    assert verdict.pays
    assert (verdict.fused_us, verdict.unfused_us) == pytest.approx((2.0 * 2**20 / 1e3, 9.0 * 2**20 / 1e3))
    assert verdict.reason.startswith(
        "SDPA cpu_flash takes 2.1 ms forward, the inner compiler alone 9.44 ms (float32, 1024"
    )
    assert verdict.source == f"measured on {cpu_model()}, 1 thread, with torch 2.13.0 (a test)"
    assert decide(problem(mask="causal"), "sdpa", "cpu_flash", CPU) == verdict


def test_another_processor_is_extrapolated_and_must_be_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def verdict(flash: float) -> gate.Verdict:
        figures = Figures(plane=((flash,) * 2,) * 3, masks={"none": (flash, flash)})
        other = table(device="another CPU", instructions="VSX", figures={"float32 forward": {
            "unfused": Figures(plane=((10.0,) * 2,) * 3), "cpu_flash": figures}})  # fmt: skip
        monkeypatch.setattr("optpass.passes.attention.gate.lookup._tables", lambda user: (other,))
        return decide(problem(), "sdpa", "cpu_flash", CPU)

    assert verdict(7.9).pays
    assert "extrapolated from another CPU" in verdict(7.9).source
    assert not verdict(8.1).pays
    assert verdict(8.1).reason.startswith("it may not pay: ")
    assert "must be 1.25 times as fast" in verdict(8.1).reason
    assert verdict(10.1).reason.startswith("it does not pay: ")


@pytest.mark.parametrize("training", [False, True])
def test_a_narrow_processor_is_told_by_what_others_took(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 on AVX2 by a table of AVX-512: kernels that were measured on both stand nearer to the truth."""
    figures = {f"float32 {mode}": {"unfused": UNFUSED, "cpu_flash": FLASH, "blocks": FLASH, "flex": FLASH}
               for mode in ("forward", "training")}  # fmt: skip
    wide = Found(table(instructions="AVX512 bfloat16", figures=figures), "extrapolated")
    asked = problem(training=training)

    def taken(found: Found) -> dict[str, tuple[float, str]]:
        ways = {name: gate.fused(asked, name, CPU, table=found) for name in ("cpu_flash", "blocks", "flex")}
        prices = {**ways, "unfused": gate.unfused(asked, CPU, table=found)}
        return {name: (price.us, price.fit) for name, price in prices.items() if price is not None}

    monkeypatch.setattr(adapt, "instructions", lambda: "VSX")
    other = taken(wide)
    assert {fit for _, fit in other.values()} == {"extrapolated"}
    monkeypatch.setattr(adapt, "instructions", lambda: "AVX2")
    narrow = taken(wide)
    assert {name: fit for name, (_, fit) in narrow.items()} == {
        "cpu_flash": "adapted", "blocks": "adapted", "unfused": "adapted", "flex": "extrapolated"
    }  # fmt: skip
    times = {name: us / other[name][0] for name, (us, _) in narrow.items()}
    assert 1.0 < times["cpu_flash"] < times["unfused"] < times["blocks"]
    assert times["flex"] == pytest.approx(times["unfused"])
    assert taken(dataclasses.replace(wide, fit="measured"))["cpu_flash"] == (other["cpu_flash"][0], "measured")


def test_the_math_kernel_never_pays() -> None:
    for device, spec in (("cpu", CPU), ("cuda", devices.resolve("h100"))):
        verdict = decide(problem(4096, 32, device=device, training=True), "sdpa", "math", spec)
        assert not verdict.pays
        assert verdict.fused_us == verdict.unfused_us > 0
        assert "saves nothing" in verdict.reason


def test_a_kernel_that_nobody_measured_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optpass.passes.attention.gate.lookup._tables", lambda user: (table(),))
    verdict = decide(problem(), "flex", "flex", CPU)
    assert not verdict.pays
    assert verdict.reason == "nothing is known of what FlexAttention flex takes for float32 on this device"


def test_masks_cost_what_they_are() -> None:
    whole = problem(512, 4).queries ** 2 * 4
    assert alone_ns(problem(mask="causal")) == pytest.approx(9.0)
    assert alone_ns(problem(mask="causal"), mask_form="computed") == pytest.approx(5.5)
    assert alone_ns(problem(mask="bool", mask_numel=1024)) == pytest.approx(9.0)
    assert alone_ns(problem(mask="float", mask_numel=1024)) == pytest.approx(5.5)
    shared, each = (alone_ns(problem(512, 4, mask="float", mask_numel=n)) for n in (512 * 512, whole))
    assert each > shared
    assert fused_ns(problem(mask="causal")) == pytest.approx(0.5 * fused_ns(problem()))
    assert fused_ns(problem(mask="bool", mask_numel=1024)) == pytest.approx(fused_ns(problem()) + 0.5)


def test_rows_that_end_in_part_of_a_vector_cost_more() -> None:
    """A vector has 16 numbers of float32: 71 keys end in part of one, 72 in half of one."""
    rough = dataclasses.replace(FLASH, ragged=(9.0,))
    known = Found(table(figures={"float32 forward": {"unfused": UNFUSED, "cpu_flash": rough}}), "measured")

    def more(keys: int) -> float:
        asked = problem(71, heads=208, keys=keys)
        price = fused(asked, "cpu_flash", CPU, table=known)
        assert price is not None
        return _ns(asked, price.us) / fused_ns(asked) - 1

    assert more(80) == 0
    assert more(71) == pytest.approx(9 / fused_ns(problem(71, heads=208)) - 1)
    assert more(72) == pytest.approx(more(71) / 2)


def test_fewer_keys_than_were_measured_must_pay_clearly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPTPASS_CACHE_DIR", str(tmp_path))
    gate.folder().mkdir()
    (gate.folder() / "mine.json").write_text(table().to_json(), encoding="utf-8")
    verdicts = {n: decide(problem(64, heads=2**14 // n, keys=n), "sdpa", "cpu_flash", CPU) for n in (64, 48, 8)}
    assert [verdict.pays for verdict in verdicts.values()] == [True, True, False]
    assert "must be 1.56 times as fast" in verdicts[8].reason


@pytest.mark.parametrize(("training", "least"), [(False, 0.82), (True, 0.86)])
def test_few_scores_stay_in_the_caches(training: bool, least: float) -> None:
    """Fewer than the table has: the inner compiler alone is faster than it says, but where it reads a mask."""
    few = problem(128, training=training)
    told = per_score(table(), UNFUSED, queries=128, keys=128, dim=64.0, extra={}, scores=2**14, regions=1)
    assert alone_ns(problem(1024, training=training)) == pytest.approx(5.0)
    assert alone_ns(few) == pytest.approx(least * told)
    causal = dataclasses.replace(few, mask="causal")
    assert alone_ns(causal, mask_form="computed") == pytest.approx(least * (told + 0.5))
    assert alone_ns(causal) == pytest.approx(told + 4.0)
    assert alone_ns(dataclasses.replace(few, mask="float", mask_numel=128 * 128)) > told
    measured = table(axes=dataclasses.replace(AXES, scores=(2.0**14, 2.0**20)))
    told = per_score(measured, UNFUSED, queries=128, keys=128, dim=64.0, extra={}, scores=2**14, regions=1)
    assert _ns(few, unfused(few, CPU, table=Found(measured, "measured")).us) == pytest.approx(told)


def test_blocks_are_not_extrapolated_to_few_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to where its table begins, and never below a number that no table began at when it was written."""
    for least, declined, taken in ((2**17, 2**16, 2**18), (2**20, 2**18, 2**20)):
        made = table(axes=dataclasses.replace(AXES, scores=(float(least), 2.0**24)))
        monkeypatch.setattr("optpass.passes.attention.gate.lookup._tables", lambda user, made=made: (made,))
        few, enough = (decide(problem(128, n // 128**2), "blocks", "blocks", CPU) for n in (declined, taken))
        assert "longer to call" in few.reason and not few.pays
        assert "longer to call" not in enough.reason


def test_repeated_keys_are_copied_by_the_inner_compiler_only() -> None:
    asked = problem(64, 256)
    shared = dataclasses.replace(asked, kv_heads=32)
    copied = 256 * 64 * 128 * 4 * 0.1 * 1e-3  # heads, keys, both head dims, bytes, ns per byte
    assert unfused(shared, CPU, table=KNOWN).us == pytest.approx(unfused(asked, CPU, table=KNOWN).us + copied)
    assert fused_ns(shared) == fused_ns(asked)


def test_layers_reuse_buffers_of_the_inner_compiler_only() -> None:
    asked = problem(1024, 16)
    assert alone_ns(asked, regions=12) < alone_ns(asked, regions=1)
    one, many = (fused(asked, "cpu_flash", CPU, regions=regions, table=KNOWN) for regions in (1, 12))
    assert one == many


def test_large_buffers_are_mapped_anew() -> None:
    """glibc keeps no buffer above 32 MiB; half precision in a forward is met with faults from 8 MiB on."""
    faulting = dataclasses.replace(UNFUSED, faults={"1": 3.0})
    known = Found(table(figures={"float32 forward": {"unfused": faulting}}), "measured")

    def ns(heads: int) -> float:
        asked = problem(1024, heads)
        return _ns(asked, unfused(asked, CPU, table=known).us)

    below, above = (alone_ns(problem(1024, heads)) for heads in (7, 8))
    assert ns(7) == below and ns(8) == pytest.approx(above + 3.0)
    for itemsize, training, size in ((2, False, 2**23), (2, True, 2**25), (4, False, 2**25), (4, True, 2**25)):
        at = [heap.mapped(scores / itemsize, itemsize, training=training) for scores in (size - itemsize, size)]
        assert at == [False, True]


def test_threads_share_what_there_is_to_share() -> None:
    whole, single = problem(1024, 16), problem(64, 1)
    before = unfused(whole, CPU, table=KNOWN).us, unfused(single, CPU, table=KNOWN).us
    torch.set_num_threads(2)
    after = unfused(whole, CPU, table=KNOWN).us, unfused(single, CPU, table=KNOWN).us
    assert after == pytest.approx((before[0] / 2, before[1]))


@pytest.mark.parametrize(
    ("length", "threads", "shared"), [(4096, 4, 0.9), (4096, 16, 0.9), (4096, 32, 0.5), (1024, 4, 0.5)]
)
def test_blocks_share_their_heads(length: int, threads: int, shared: float) -> None:
    """What pays on one thread need not on many: where heads or scores are few, each operator is waited for."""
    figures = {"float32 forward": {"unfused": UNFUSED, "cpu_flash": FLASH, "blocks": FLASH}}
    known, asked = Found(table(figures=figures), "measured"), problem(length, 16)
    before = fused(asked, "blocks", CPU, table=known)
    torch.set_num_threads(threads)
    after, other = (fused(asked, kernel, CPU, table=known) for kernel in ("blocks", "cpu_flash"))
    assert before is not None and after is not None and other is not None
    assert after.us == pytest.approx(before.us * (1 - shared + shared / threads))
    assert other.us == pytest.approx(before.us / threads)


def test_float64_stands_on_float32() -> None:
    wide = problem(dtype=torch.float64)
    assert alone_ns(wide) == pytest.approx(2 * alone_ns(problem()))
    assert fused_ns(wide) == pytest.approx(2 * fused_ns(problem()))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_without_instructions_stands_on_float32(
    dtype: torch.dtype, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever another kind of processor makes of it; one that was measured itself says so itself."""
    figures = {f"{name} {mode}": {"unfused": UNFUSED, "cpu_flash": FLASH, "flex": FLASH}
               for name in ("float32", "bfloat16", "float16") for mode in ("forward", "training")}  # fmt: skip
    other = Found(table(figures=figures), "extrapolated")
    half, single = (problem(dtype=d, training=training) for d in (dtype, torch.float32))

    def times(found: Found, kernel: str) -> float:
        one, base = (gate.fused(p, kernel, CPU, table=found) for p in (half, single))
        assert one is not None and base is not None
        return one.us / base.us

    monkeypatch.setattr(processor, "instructions", lambda: "AVX2")
    assert times(other, "cpu_flash") > 1.1
    unfused = gate.unfused(half, CPU, table=other).us / gate.unfused(single, CPU, table=other).us
    assert unfused > 1.25 * times(other, "cpu_flash")
    assert gate.fused(half, "flex", CPU, table=other) is None  # nobody measured it there
    assert times(dataclasses.replace(other, fit="measured"), "cpu_flash") == 1.0
    monkeypatch.setattr(processor, "instructions", lambda: "AVX512 bfloat16 float16")
    assert times(other, "cpu_flash") == 1.0


def test_the_table_of_the_nearest_processor_and_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {threads: table(threads=threads) for threads in (1, 8)}
    near = table(device="other", instructions=instructions())
    far = table(device="other", instructions="SVE256")

    def source(*tables: Table) -> Table:
        monkeypatch.setattr("optpass.passes.attention.gate.lookup._tables", lambda user: tables)
        found = gate.find(CPU, "cpu")
        assert found is not None
        return found.table

    assert source(far, own[8], own[1], near) is own[1]
    torch.set_num_threads(6)
    assert source(far, own[1], own[8], near) is own[8]
    assert source(near, far) is near
    assert source(far) is far
    monkeypatch.setattr("optpass.passes.attention.gate.lookup._tables", lambda user: ())
    assert gate.find(CPU, "cpu") is None


def test_the_fingerprint_follows_the_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = []
    for name, threads in (("a", None), ("b", 1), ("c", 1), ("d", 2)):
        monkeypatch.setenv("OPTPASS_CACHE_DIR", str(tmp_path / name))
        if threads:
            gate.folder().mkdir(parents=True)
            (gate.folder() / "t.json").write_text(table(threads=threads).to_json(), encoding="utf-8")
        found.append(gate.fingerprint())
    assert found[1] == found[2]
    assert len(set(found)) == 3


# ---- what comes with the package -----------------------------------------------------------------------------------


def packaged() -> list[Table]:
    folder = resources.files("optpass.passes.attention.gate").joinpath("tables")
    texts = [(item.read_text(encoding="utf-8"), item.name) for item in folder.iterdir() if item.name.endswith(".json")]
    return [from_json(*item) for item in texts]


def test_there_is_a_measured_table_with_its_provenance() -> None:
    assert packaged()
    for one in packaged():
        assert one.device and one.torch and "optpass bench attention_table" in one.command and one.created


@pytest.mark.parametrize("one", [t for t in packaged() if t.kind == "cpu"], ids=lambda t: t.device)
def test_a_processors_table_says_what_is_known_of_processors(one: Table) -> None:
    known = Found(one, "measured")

    def gain(length: int, heads: int, kernel: str = "cpu_flash", **changes: Any) -> float:
        asked = problem(length, heads, **changes)
        price = fused(asked, kernel, CPU, table=known)
        assert price is not None
        return unfused(asked, CPU, table=known).us / price.us

    assert gain(1024, 16, mask="causal") > 2  # facts: 2.7 and more
    assert gain(2048, 8, mask="causal") > gain(2048, 8) > 1
    assert gain(1024, 16, mask="causal", training=True) > 1.2
    if "bfloat16" in one.instructions:
        assert gain(128, 64, dtype=torch.bfloat16, training=True) < 0.7
        assert gain(128, 64, dtype=torch.bfloat16) < 0.9
    slow = unfused(problem(1024, 16, mask="causal"), CPU, table=known).us
    assert slow > unfused(problem(1024, 16, mask="causal"), CPU, table=known, mask_form="computed").us


# ---- GPUs ----------------------------------------------------------------------------------------------------------


def test_a_measured_gpu_is_preferred_to_what_was_published(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = devices.resolve("h200")
    figures = {"bfloat16 forward": {"unfused": UNFUSED, "flash": FLASH}}
    asked = problem(1024, 16, device="cuda", dtype=torch.bfloat16, batch=16, head_dim=128, value_dim=128)
    mine = table(device=spec.name, kind="cuda", instructions="", figures=figures)
    monkeypatch.setattr("optpass.passes.attention.gate.lookup._tables", lambda user: (mine,))
    assert "measured on NVIDIA H200" in decide(asked, "sdpa", "flash", spec).source
    assert "published" in decide(asked, "sdpa", "cudnn", spec).source
    assert "published" in decide(asked, "sdpa", "flash", devices.resolve("h100")).source


def test_every_verdict_is_a_number() -> None:
    """Whatever the sizes: no crash, and figures above zero."""
    rng = random.Random(random.getrandbits(32))
    specs = [devices.resolve(key) for key in ("h100", "a100", "cpu")]
    for _ in range(300):
        device = rng.choice(("cpu", "cuda"))
        heads = rng.choice((1, 2, 8, 40))
        asked = Problem(
            device=device, dtype=rng.choice((torch.float32, torch.bfloat16, torch.float16)),
            batch=rng.choice((1, 3, 64)),
            heads=heads, kv_heads=rng.choice((1, heads)), queries=rng.choice((1, 7, 77, 512, 5000)),
            keys=rng.choice((1, 77, 1024, 70000)), head_dim=rng.choice((1, 8, 64, 576)), value_dim=rng.choice((8, 64)),
            mask=rng.choice(("none", "causal", "bool", "float")), mask_numel=rng.choice((0, 1024, 10**9)),
            window=rng.choice((None, 128)), score_ops=frozenset(rng.sample(["softcap", "clamp"], rng.randint(0, 2))),
            dropout=rng.choice((0.0, 0.1)), training=rng.random() < 0.5,
        )  # fmt: skip
        spec = next(s for s in specs if s.kind == device)
        for kernel in ("cpu_flash", "flash", "cudnn", "mem_efficient", "flex", "math"):
            verdict = decide(asked, "sdpa", kernel, spec, regions=rng.choice((1, 12)))
            assert math.isfinite(verdict.fused_us) and verdict.fused_us > 0, (asked, kernel)
            assert math.isfinite(verdict.unfused_us) and verdict.unfused_us > 0, (asked, kernel)
            assert verdict.reason and verdict.source
