"""Pricing: times and bounds against hand-derived figures, on a table device and on an invented calibration."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch

from optpass.passes.devices import resolve
from optpass.passes.roofline import calibration
from optpass.passes.roofline.calibration_data import CpuCalibration, Curve, GemmFit
from optpass.passes.roofline.cpu_model import CpuModel, function_class, unrolled
from optpass.passes.roofline.flops import OpCost
from optpass.passes.roofline.gpu_model import RooflineModel
from optpass.passes.roofline.price import device_record, price
from optpass.passes.roofline.program import GroupInfo, OpInfo, Program

H200 = resolve("h200")


def invented(**changes: Any) -> CpuCalibration:
    """A processor with round figures: 100 GFLOP/s, 10 GB/s, 1 ns per element for every class but arithmetic."""
    classes = (
        "divide exp erf tanh log sqrt sin pow random half reduce_inner reduce_outer transpose gather scatter load "
        "sort bag unroll"
    ).split()
    fields: dict[str, Any] = {
        "cpu": "invented", "instructions": "AVX2", "cores": 4, "threads": 4, "torch": "2.13.0",
        "gemm": {
            "float32": GemmFit(1e11, 0.0, 0.0, 0.0, 0.0),
            "bfloat16": GemmFit(4e11, 0.0, 0.0, 0.0, 0.0),
        },
        "conv": GemmFit(2e11, 0.0, 0.0, 0.0, 0.0), "conv_backward": 0.5,
        "attention": dict.fromkeys(("forward", "forward_tail", "backward", "backward_tail"), 1e-9),
        "bandwidth": Curve((1e4, 1e9), (1e10, 1e10)),
        "element_s": dict.fromkeys(classes, 1e-9) | {"arithmetic": 1e-10}, "kernel_s": 1e-6, "graph_s": 1e-5,
        "backward_s": 5e-5, "region_s": 1e-6, "cold_s": 1e-9, "fault_s": 0.0,
    }  # fmt: skip
    return CpuCalibration(**{**fields, **changes})


def op(name: str, cost: OpCost | None, reads: int = 0, writes: int = 0, **more: Any) -> OpInfo:
    values: dict[str, Any] = {
        "name": name.partition(".")[0], "target": f"aten.{name}", "phase": "forward", "file": None, "line": None,
        "module": None, "dtype": "float32", "shape": "",
    }  # fmt: skip
    return OpInfo(cost=cost, reads=reads, writes=writes, **{**values, **more})


def product(m: int, n: int, k: int, dtype: str = "bfloat16", batch: int = 1, **more: Any) -> OpInfo:
    size = getattr(torch, dtype).itemsize
    cost = OpCost(2 * m * n * k * batch, "matmul", (m, n, k), batch)
    return op("mm.default", cost, size * batch * (m * k + k * n), size * batch * m * n, dtype=dtype, **more)


def program(*ops: OpInfo, kinds: dict[int, str] | None = None) -> Program:
    """Every op that moves something as a kernel of its own."""
    made = Program(ops=list(ops))
    for number, info in enumerate(ops):
        if info.reads or info.writes:
            info.group = len(made.groups)
            kind = info.cost.kind if info.cost is not None else "other"
            made.groups.append(
                GroupInfo(len(made.groups), info.phase, kind, [number], info.reads, info.writes, info.writes // 4)
            )
    return made


def test_a_large_product_reaches_the_attainable_peak_and_an_addition_the_bandwidth() -> None:
    add = op("add.Tensor", OpCost(1 << 28, "pointwise"), 1 << 31, 1 << 30)
    priced = price(program(product(8192, 8192, 8192), add), H200)
    matmul, pointwise = priced.ops
    assert matmul.flops / (matmul.time_us * 1e-6) == pytest.approx(H200.attainable_flops("bfloat16"), rel=0.05)
    assert matmul.bound == "compute"
    assert matmul.intensity == pytest.approx(8192 / 3)
    expected = 3 * (1 << 30) / H200.attainable_bandwidth + H200.launch_s
    assert pointwise.time_us == pytest.approx(expected * 1e6)
    assert pointwise.bound == "memory"
    assert pointwise.intensity == pytest.approx(1 / 12)


def test_a_kernel_that_does_next_to_nothing_is_bound_by_its_launch() -> None:
    (tiny,) = price(program(op("add.Tensor", OpCost(16, "pointwise"), 128, 64)), H200).groups
    assert tiny.bound == "launch"
    assert tiny.time_us == pytest.approx(H200.launch_s * 1e6, rel=0.01)


def test_views_take_no_time_and_unknown_ops_are_not_free() -> None:
    view, unknown = op("view.default", OpCost(0, "view")), op("mystery.default", None, 1 << 20, 1 << 20)
    priced = price(program(view, unknown), H200)
    assert (priced.ops[0].bound, priced.ops[0].time_us, priced.ops[0].group) == ("none", 0.0, None)
    assert (priced.ops[1].bound, priced.ops[1].flops) == ("unknown", 0.0)
    assert priced.ops[1].time_us > H200.launch_s * 1e6
    assert priced.groups[0].bound == "unknown"


@pytest.mark.parametrize(
    ("dtype", "step"),
    [("int8", 16), ("float8_e4m3fn", 16), ("float16", 8), ("bfloat16", 8), ("float32", 4), ("float64", 2)],
)
def test_alignment_follows_the_table(dtype: str, step: int) -> None:
    fits, misses = (step * 3, step * 5, step * 7), step * 5 + step // 2
    ops = [op("mm.default", OpCost(2, "matmul", mnk), 4, 4, dtype=dtype) for mnk in (
        fits, (misses, *fits[1:]), (fits[0], misses, fits[2]), (*fits[:2], misses))]  # fmt: skip
    assert [o.aligned for o in price(program(*ops), H200).ops] == [True, False, False, False]


def test_alignment_is_unknown_where_there_is_no_product_and_ignores_pixels() -> None:
    relu = op("relu.default", OpCost(8, "pointwise"), 32, 32)
    conv = op("convolution.default", OpCost(2, "conv", (49, 64, 576)), 4, 4, dtype="float16")
    priced = price(program(relu, conv), H200)
    assert [o.aligned for o in priced.ops] == [None, True]


def test_recomputed_work_costs_time_but_is_no_model_flops() -> None:
    ops = [product(512, 512, 512), product(512, 512, 512, phase="backward"),
           product(512, 512, 512, phase="backward", recomputed=True)]  # fmt: skip
    totals = price(program(*ops), H200).totals
    one = 2.0 * 512**3
    assert (totals.flops, totals.flops_forward, totals.flops_backward) == (2 * one, one, one)
    assert totals.kernels == 3
    assert totals.mfu == pytest.approx(2 * one / (totals.time_us * 1e-6 * H200.peak_flops["bfloat16"]))


def test_totals_are_the_sums() -> None:
    priced = price(program(product(256, 256, 256), op("add.Tensor", OpCost(99, "pointwise"), 4096, 2048)), H200)
    assert priced.totals.time_us == pytest.approx(sum(g.time_us for g in priced.groups))
    assert priced.totals.time_unfused_us == pytest.approx(sum(o.time_us for o in priced.ops))
    assert priced.totals.bytes_unfused == priced.totals.bytes_fused == 4096 + 2048 + 3 * 2 * 256 * 256


def test_tf32_is_used_only_where_torch_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, reduced = RooflineModel(H200, tf32=False), RooflineModel(H200, tf32=True)
    big = product(4096, 4096, 4096, "float32")
    times = [m.kernel("matmul", [big], big.reads, big.writes, 1).compute_s for m in (exact, reduced)]
    assert times[0] / times[1] == pytest.approx(H200.attainable_flops("float32") ** -1 * H200.attainable_flops("tf32"))
    assert reduced.dtype("pointwise", "float32") == "float32"
    assert RooflineModel(resolve("mi300x"), tf32=True).dtype("matmul", "float32") == "float32"


def test_tiles_and_waves_are_quantised() -> None:
    model = RooflineModel(H200)

    def seconds(m: int, n: int, k: int, batch: int = 1) -> float:
        info = product(m, n, k, batch=batch)
        return model.kernel("matmul", [info], 0, 0, 1).compute_s

    units = H200.sm_count or 0
    full = seconds(128, 128, 4096, batch=units)
    assert seconds(128, 128, 4096, batch=units + 1) > 1.3 * full  # one block more, a wave more
    assert seconds(128, 129, 4096, batch=units) > 1.3 * full  # one column more, a tile more
    assert seconds(128, 128, 1 << 20) < 0.2 * seconds(128, 128, 1 << 20, batch=units)  # split along K
    ideal = 2 * 512**3 / H200.attainable_flops("bfloat16")
    assert seconds(512, 512, 512) > 3 * ideal  # 16 tiles cannot fill 132 units


def test_a_spec_without_units_falls_back_to_the_plain_roofline() -> None:
    cpu = resolve("cpu")
    (priced,) = price(program(product(512, 512, 512, "float32")), cpu).ops
    assert priced.time_us == pytest.approx((2 * 512**3 / cpu.attainable_flops("float32") + cpu.launch_s) * 1e6)


def test_twenty_thousand_ops_are_priced_in_a_second() -> None:
    ops = [product(100 + i % 70, 200, 300) if i % 5 == 0 else op("add.Tensor", OpCost(9, "pointwise"), 99, 99)
           for i in range(20_000)]  # fmt: skip
    made = program(*ops)
    for spec in (H200, calibration.spec_of(invented())):
        begun = time.process_time()
        price(made, spec)
        assert time.process_time() - begun < 2.0  # 0.5 s on a machine that is not busy


def test_the_device_record_shows_what_is_attainable() -> None:
    record = device_record(H200)
    assert record.attainable_flops["bfloat16"] == pytest.approx(H200.attainable_flops("bfloat16"))
    assert not record.calibrated
    assert device_record(calibration.spec_of(invented())).calibrated


# ---- a calibrated processor -----------------------------------------------------------------------------------------


def cpu_time(*ops: OpInfo, **changes: Any) -> float:
    """Microseconds of the one kernel that `ops` fuse into, called aside."""
    model = CpuModel(invented(**changes))
    reads, writes = ops[0].reads, ops[-1].writes
    kind = ops[-1].cost.kind if ops[-1].cost is not None else "other"
    estimate = model.kernel(kind, ops, reads, writes, writes // 4)
    return (estimate.total_s - estimate.launch_s) * 1e6


def test_library_calls_take_the_slower_of_arithmetic_and_memory() -> None:
    assert cpu_time(product(1000, 1000, 1000, "float32")) == pytest.approx(2e9 / 1e11 * 1e6)
    assert cpu_time(product(1000, 1000, 1000, "bfloat16")) == pytest.approx(2e9 / 4e11 * 1e6)
    assert cpu_time(product(1, 1000, 1000, "float32")) == pytest.approx(4 * 1_002_000 / 1e10 * 1e6)


def test_weights_of_a_large_step_are_read_from_memory() -> None:
    curve = Curve((1e6, 6.4e7), (1e11, 1e10))
    small, large = (CpuModel(invented(bandwidth=curve), traffic) for traffic in (10**5, 10**9))
    info = product(64, 1000, 1000, "float32")
    times = [m.kernel("matmul", [info], info.reads, info.writes, 1).total_s for m in (small, large)]
    assert times[1] - times[0] == pytest.approx(4 * (1000 * 1000 + 64 * 1000) * 1e-9)  # the weight and the result
    many = product(64, 1000, 1000, "float32", batch=8)  # attention: both operands were just computed, the result is far
    again = [m.kernel("matmul", [many], many.reads, many.writes, 1).total_s for m in (small, large)]
    assert again[1] - again[0] == pytest.approx(4 * 8 * 64 * 1000 * 1e-9)


def test_fused_loops_add_their_operations_to_their_traffic() -> None:
    n = 1_000_000
    exp = op("exp.default", OpCost(n, "pointwise", transcendental=n), 4 * n, 4 * n)
    add = op("add.Tensor", OpCost(n, "pointwise"), 4 * n, 4 * n)
    moved = 8 * n / 1e10
    assert cpu_time(exp) == pytest.approx((n * 1e-9 + moved) * 1e6)
    assert cpu_time(add) == pytest.approx((n * 1e-10 + moved) * 1e6)
    assert cpu_time(exp, add) == pytest.approx((n * 1.1e-9 + moved) * 1e6)


def test_short_loops_run_on_one_thread() -> None:
    n = 1000
    exp = op("exp.default", OpCost(n, "pointwise", transcendental=n), 4 * n, 4 * n)
    assert cpu_time(exp) == pytest.approx((4 * n * 1e-9 + 8 * n / 1e10) * 1e6)


def test_random_numbers_are_drawn_once_however_many_kernels_read_them() -> None:
    n = 1_000_000
    draw = op("inductor_random.default", OpCost(n, "rng"), 0, 4 * n, target="prims.inductor_random.default", group=0)
    made = Program(ops=[draw], groups=[GroupInfo(i, "forward", "pointwise", [0], 0, 4 * n, n) for i in range(2)])
    first, second = price(made, calibration.spec_of(invented())).groups
    assert first.time_us - second.time_us == pytest.approx(n * 1e-9 * 1e6)
    assert second.ops == ["inductor_random"]


def test_training_pays_for_two_graph_calls() -> None:
    spec = calibration.spec_of(invented())
    forward, backward = product(64, 64, 64, "float32"), product(64, 64, 64, "float32", phase="backward")
    inference = price(program(forward), spec)
    training = price(program(forward, backward), spec)
    assert inference.totals.time_us - inference.groups[0].time_us == pytest.approx(10.0)
    assert training.totals.time_us - sum(g.time_us for g in training.groups) == pytest.approx(60.0)


@pytest.mark.parametrize(
    ("shape", "reads", "dtype", "expected"),
    [
        ("f32[1, 64, 16, 16]", 4 * (16384 + 9 * 64 * 64), "float32", True),
        ("f32[1, 64, 32, 32]", 4 * (65536 + 9 * 64 * 64), "float32", False),  # a large image
        ("f32[2, 64, 16, 16]", 4 * (32768 + 9 * 64 * 64), "float32", False),  # two images
        ("bf16[1, 64, 16, 16]", 2 * (16384 + 9 * 64 * 64), "bfloat16", False),
    ],
)
def test_small_convolutions_of_one_image_are_unrolled(shape: str, reads: int, dtype: str, expected: bool) -> None:
    cost = OpCost(2 * 256 * 64 * 576, "conv", (256, 64, 576))
    assert unrolled(op("convolution.default", cost, reads, 1, shape=shape, dtype=dtype), 64 * 576) is expected


@pytest.mark.parametrize(
    ("target", "expected"),
    [("aten.exp.default", "exp"), ("aten.tanh.default", "tanh"), ("aten.gelu.default", "erf"),
     ("aten.rsqrt.default", "sqrt"), ("aten.log1p.default", "log"), ("aten.cos.default", "sin"),
     ("aten.sigmoid.default", "exp"), ("aten.pow.Tensor_Scalar", "pow")],
)  # fmt: skip
def test_library_functions_have_classes(target: str, expected: str) -> None:
    assert function_class(target) == expected


def test_gradients_of_convolutions_run_at_their_own_rate() -> None:
    cost = OpCost(4 * 4096 * 64 * 576, "conv", (4096, 576, 64))
    shape = "f32[4, 64, 32, 32], f32[64, 64, 3, 3]"
    info = op("convolution_backward.default", cost, 1 << 20, 1 << 20, shape=shape)
    assert cpu_time(info) == pytest.approx(cost.flops / (2e11 * 0.5) * 1e6)
    slower = dataclasses.replace(invented(), conv_backward=0.25)
    estimate = CpuModel(slower).kernel("conv", [info], info.reads, info.writes, 1)
    assert estimate.compute_s == pytest.approx(cost.flops / (2e11 * 0.25))


@pytest.mark.parametrize(
    ("kind", "mnk"), [("matmul", (0, 16, 32)), ("attention", (8, 0, 16)), ("conv", (0, 64, 576))]
)  # fmt: skip
def test_an_empty_batch_takes_its_call_alone(kind: str, mnk: tuple[int, int, int]) -> None:
    info = op("empty.default", OpCost(0, kind, mnk), 0, 0)
    estimate = CpuModel(invented()).kernel(kind, [info], 0, 0, 0)
    assert estimate.compute_s == estimate.memory_s == 0 < estimate.total_s
