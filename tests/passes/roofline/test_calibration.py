"""Calibration: the fit recovers what it was made from, the cache is trusted only where it may be, the probes run."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from optpass.passes.roofline import calibration
from optpass.passes.roofline import calibration_compiled as loops
from optpass.passes.roofline import calibration_probes as probes
from optpass.passes.roofline.calibration_clock import Budget, typical
from optpass.passes.roofline.calibration_data import (
    VERSION,
    CpuCalibration,
    Curve,
    GemmFit,
    gemm_seconds,
    scaled,
)
from optpass.passes.roofline.calibration_fit import GemmSample, fit_gemm
from optpass.passes.roofline.calibration_library import Library

SHORT = Budget(run_s=1e-5, total_s=1e-3, runs=3, least=1)
FLAT = Curve((1e3, 1e9), (5e10, 5e10))


def invented(**changes: Any) -> CpuCalibration:
    """A calibration that claims to be of this machine."""
    fit = GemmFit(1e11, 1.0, 2.0, 3.0, 1e-6)
    fields: dict[str, Any] = {
        "gemm": {"float32": fit, "bfloat16": fit}, "conv": fit, "conv_backward": 1.0,
        "attention": {"forward": 1e-9, "backward": 1e-9}, "bandwidth": FLAT, "element_s": {"exp": 1e-10},
        "kernel_s": 1e-6, "graph_s": 1e-5, "backward_s": 2e-5, "region_s": 0.0, "cold_s": 0.0, "fault_s": 0.0,
        **calibration._identity(),
    }  # fmt: skip
    return CpuCalibration(**{**fields, **changes})


# ---- the fit --------------------------------------------------------------------------------------------------------


def _samples(truth: GemmFit, noise: float, seed: int) -> list[GemmSample]:
    rng, found = random.Random(seed), []
    for batch, m, n, k in probes.FLOAT32_SHAPES:
        moved = 4 * batch * (m * k + k * n + m * n)
        seconds = gemm_seconds(truth, m, n, k, batch, moved, FLAT) * math.exp(rng.gauss(0, noise))
        found.append(GemmSample(m, n, k, batch, moved, seconds))
    return found


@pytest.mark.parametrize("tile", [1, 8, 16, 32])
def test_the_fit_predicts_products_that_it_has_not_seen(tile: int) -> None:
    truth = GemmFit(3e11, 5.0, 9.0, 12.0, 2e-6, 0.4, tile)
    samples = _samples(truth, noise=0.03, seed=tile)
    samples[4] = GemmSample(*[*vars(samples[4]).values()][:-1], samples[4].seconds * 5)  # a busy moment
    fit = fit_gemm(samples, FLAT)
    rng, errors = random.Random(1), []
    for _ in range(100):
        m, n, k = (rng.choice((20, 50, 100, 198, 300, 777, 1024)) for _ in range(3))
        moved = 4 * (m * k + k * n + m * n)
        predicted, true = (gemm_seconds(which, m, n, k, 1, moved, FLAT) for which in (fit, truth))
        errors.append(abs(math.log(predicted / true)))
    assert sum(errors) / len(errors) < 0.06
    assert max(errors) < 0.3


def test_narrow_products_have_a_rate_of_their_own() -> None:
    truth = GemmFit(1e11, 1.0, 2.0, 3.0, 1e-6, 0.3, 16)
    fit = fit_gemm(_samples(truth, 0.0, 0), FLAT)
    assert fit.rate(512, 8, 128) == pytest.approx(truth.rate(512, 8, 128), rel=0.15)
    assert fit.rate(512, 1, 128) > fit.rate(512, 8, 128) / 8


def test_another_dtype_starts_from_the_first_ones_edges() -> None:
    base, truth = (GemmFit(peak, 4.0, 6.0, 8.0, 1e-6, 1.0, 16) for peak in (1e11, 4e11))
    few = [s for s in _samples(truth, 0.0, 0) if s.m == s.n == s.k]
    fit = fit_gemm(few, FLAT, base)
    assert fit.n_tile == 16
    assert fit.rate(300, 300, 300) == pytest.approx(truth.rate(300, 300, 300), rel=0.1)


def test_a_curve_is_interpolated_in_logarithms_and_flat_beyond_its_ends() -> None:
    curve = Curve((1e4, 1e6), (1e11, 1e9))
    assert curve.at(1e5) == pytest.approx(1e10)
    assert (curve.at(1.0), curve.at(1e9)) == (1e11, 1e9)


def test_the_clock_takes_the_least_and_gives_up_on_slow_calls() -> None:
    calls = []
    assert 0 <= typical(lambda: calls.append(1), SHORT) < 1e-3
    assert len(calls) > 2
    calls.clear()
    torch_sleep = Budget(total_s=1e-9)
    typical(lambda: calls.append(sum(range(10_000))), torch_sleep)
    assert len(calls) == 2  # once to warm up, once to see that it is too slow to repeat


# ---- the file -------------------------------------------------------------------------------------------------------


def test_a_calibration_survives_json() -> None:
    once = invented()
    again = CpuCalibration.from_json(once.to_json())
    assert again == once
    assert again.fingerprint() == once.fingerprint()
    assert invented(kernel_s=2e-6).fingerprint() != once.fingerprint()


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.update(version=VERSION + 1), lambda d: d.pop("gemm"), lambda d: d.update(extra=1),
        lambda d: d.update(kernel_s=-1.0), lambda d: d.update(kernel_s="fast"), lambda d: d["gemm"].pop("float32"),
        lambda d: d["gemm"].update(float32={"peak": 1.0}), lambda d: d["bandwidth"].update(sizes=[2.0, 1.0]),
        lambda d: d["bandwidth"].update(values=[1.0]), lambda d: d.update(element_s=[1.0]),
        lambda d: d["element_s"].update(exp=math.nan), lambda d: d.update(attention=None),
    ],
)  # fmt: skip
def test_a_damaged_file_is_an_error(damage: Any) -> None:
    data = json.loads(invented().to_json())
    damage(data)
    with pytest.raises(ValueError, match="calibration"):
        CpuCalibration.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00"])
def test_garbage_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        CpuCalibration.from_json(text)


# ---- the cache ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and a process that has measured nothing."""
    monkeypatch.setenv("OPTPASS_CACHE_DIR", str(tmp_path / "cache"))
    _forget()
    yield tmp_path / "cache"
    _forget()


def _forget() -> None:
    calibration._in_memory.clear()
    calibration._read.cache_clear()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stands for measuring: a figure that differs each time, and the list of times."""
    times: list[int] = []

    def measure(progress: Any = None) -> CpuCalibration:
        times.append(len(times))
        return invented(kernel_s=1e-6 * len(times))

    monkeypatch.setattr(calibration, "measure", measure)
    return times


def test_it_measures_once_and_other_processes_read_the_file(folder: Path, measured: list[int]) -> None:
    assert calibration.cached_spec() is None
    first = calibration.calibrated_spec()
    assert calibration.calibrated_spec() == first
    _forget()  # as another process would begin
    assert calibration.cached_spec() == first
    assert calibration.calibrated_spec() == first
    assert len(measured) == 1
    assert [path.suffix for path in folder.iterdir()] == [".json"]
    assert calibration.calibrated_spec(force=True) != first
    assert len(measured) == 2


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"version": 0}'])
def test_a_file_that_cannot_be_read_is_measured_anew(folder: Path, measured: list[int], content: str) -> None:
    calibration.calibrated_spec()
    (path,) = folder.iterdir()
    path.write_text(content)
    _forget()
    assert calibration.cached_spec() is None
    calibration.calibrated_spec()
    assert len(measured) == 2
    _forget()
    assert calibration.cached_spec() is not None


def test_another_thread_count_is_another_calibration(folder: Path, measured: list[int]) -> None:
    calibration.calibrated_spec()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert calibration.cached_spec() is None
    finally:
        torch.set_num_threads(threads)
    assert calibration.cached_spec() is not None


def test_a_file_of_another_machine_is_not_believed(folder: Path, measured: list[int]) -> None:
    calibration.calibrated_spec()
    (path,) = folder.iterdir()
    path.write_text(invented(cpu="another processor").to_json())
    _forget()
    assert calibration.cached_spec() is None


def test_without_a_folder_to_write_to_it_serves_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("OPTPASS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    _forget()
    with caplog.at_level(logging.WARNING):
        first = calibration.calibrated_spec()
    assert "this process only" in caplog.text
    assert calibration.cached_spec() == first
    assert len(measured) == 1
    _forget()


def test_an_estimate_of_a_busy_machine_is_not_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads = torch.get_num_threads()
    at_work: list[int] = []

    def one_thread(_: Any) -> CpuCalibration:
        at_work.append(torch.get_num_threads())
        return invented(threads=1)

    monkeypatch.setattr(probes, "contended", lambda: True)
    monkeypatch.setattr(calibration, "_measure", one_thread)
    torch.set_num_threads(3)
    try:
        with caplog.at_level(logging.WARNING):
            spec = calibration.calibrated_spec()
        assert torch.get_num_threads() == 3
        assert calibration.cached_spec() == spec
    finally:
        torch.set_num_threads(threads)
    assert at_work == [1]
    assert "busy" in caplog.text
    assert spec.attainable_flops("float32") == pytest.approx(3e11)
    assert not folder.exists()


def test_scaling_multiplies_rates_but_not_the_memory_bus() -> None:
    curve = Curve((1e4, 1e6, 1e8), (1e11, 4e10, 3e10))
    one = invented(threads=1, bandwidth=curve, element_s={"exp": 4e-9, "sort": 1e-9})
    four = scaled(one, 4)
    assert four.gemm["float32"].peak == 4 * one.gemm["float32"].peak
    assert four.bandwidth.values == (4e11, 4e10, 3e10)
    assert four.element_s == {"exp": 1e-9, "sort": 1e-9}
    assert (four.threads, four.estimated) == (4, True)
    assert scaled(one, 1) is one
    four.check()


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OPTPASS_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration.cache_folder() == tmp_path / "optpass"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert calibration.cache_folder() == Path("~/.cache/optpass").expanduser()


def test_the_spec_holds_what_was_measured() -> None:
    conv = GemmFit(2e11, 1.0, 2.0, 3.0, 1e-6)
    spec = calibration.spec_of(invented(conv=conv))
    assert spec.kind == "cpu"
    assert spec.attainable_flops("float32") == pytest.approx(1e11)
    assert spec.peak_flops["float32"] == pytest.approx(2e11)  # convolutions show what the processor can do
    assert spec.attainable_bandwidth == pytest.approx(5e10)
    assert spec.fingerprint() != calibration.spec_of(invented(kernel_s=9e-6, conv=conv)).fingerprint()


# ---- the probes -----------------------------------------------------------------------------------------------------


def test_library_probes_find_figures_of_a_sane_size() -> None:
    samples = probes.products("float32", SHORT)
    assert len(samples) == len(probes.FLOAT32_SHAPES)
    rates = [2.0 * s.m * s.n * s.k * s.batch / s.seconds for s in samples]
    assert 1e8 < max(rates) < 1e15
    (forward, backward) = probes.convolution_gradients(SHORT)[0]
    assert 0 < forward < 1
    assert 0 < backward < 1
    assert all(0 < seconds < 1 for pair in probes.attention(SHORT) for seconds in pair)
    assert 0 < probes.sort_seconds(SHORT) < 1e-4
    assert 0 < probes.bag_seconds(SHORT) < 1e-4
    assert 0 < probes.unrolled(SHORT) < 1


def test_of_two_rounds_the_faster_figures_are_kept() -> None:
    def round_of(copy: float, product: float) -> Library:
        samples = [GemmSample(64, 64, 64, 1, 1, product)]
        return Library(
            (copy,) * len(probes.COPY_SIZES), {"float32": samples}, samples, [(copy, product)], [(copy, product)] * 2,
            (copy, product), copy, product, copy, product,
        )  # fmt: skip

    best = round_of(1.0, 4.0).best(round_of(3.0, 2.0))
    assert best == round_of(1.0, 2.0)


def test_a_disturbed_small_copy_does_not_bend_the_curve() -> None:
    seconds = [size / 1e10 for size in probes.COPY_SIZES]
    seconds[2] *= 100
    fit = GemmSample(64, 64, 64, 1, 1, 1.0)
    library = Library(tuple(seconds), {}, [fit], [], [], (1.0, 1.0), 1.0, 1.0, 1.0, 1.0)
    assert library.bandwidth().values == pytest.approx([1e10] * len(probes.COPY_SIZES))


def test_a_dtype_that_the_library_refuses_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError('"addmm_impl_cpu_" not implemented for this dtype')

    monkeypatch.setattr(torch, "mm", refuse)
    assert probes.products("float16", SHORT) == []


def test_without_a_compiler_eager_kernels_stand_in(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(function: Any, **_: Any) -> Any:
        def fails(*_: Any) -> Any:
            raise RuntimeError("no C++ compiler")

        return fails

    monkeypatch.setattr(torch, "compile", no_compiler)
    with caplog.at_level(logging.WARNING), torch.no_grad():
        found, idle, real = loops.element_seconds(SHORT)
    assert not real
    assert idle > 0
    assert set(found) == set(loops.CLASSES)
    assert all(value >= 0 for value in found.values())
    assert "eager kernels stand in" in caplog.text


@pytest.mark.slow
def test_a_whole_calibration_is_valid_and_leaves_the_caller_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "Budget", lambda: Budget(total_s=0.005))
    told: list[tuple[float, str]] = []
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    found = calibration.measure(lambda fraction, label: told.append((fraction, label)))
    assert torch.equal(torch.rand(3), expected)
    assert torch.is_grad_enabled()
    found.check()
    assert CpuCalibration.from_json(found.to_json()) == found
    fractions = [fraction for fraction, _ in told]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert all(label for _, label in told)
    # A large product is faster than a small one, random numbers dearer than an addition.
    fit = found.gemm["float32"]
    assert fit.rate(512, 512, 512) > fit.rate(4, 4, 4)
    assert found.element_s["random"] > found.element_s["arithmetic"]
