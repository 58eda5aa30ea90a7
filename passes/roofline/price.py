"""Prices a program for a device: predicted time, bound and alignment of every op alone and of every fused kernel.

Models of time are `cpu_model` (a calibrated processor) and `gpu_model` (everything else); here they become records.
Nothing here measures, and nothing here knows where a program came from.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from optpass.errors import ConfigError
from optpass.passes.devices import DeviceSpec, canonical_dtype, compute_dtype
from optpass.passes.roofline.calibration_data import CpuCalibration
from optpass.passes.roofline.cpu_model import CpuModel, Estimate
from optpass.passes.roofline.gpu_model import RooflineModel
from optpass.passes.roofline.program import GroupInfo, OpInfo, Program
from optpass.reporting.model import Bound, DeviceRecord, Group, Op, Totals

#: Multiples that M, N and K of a product must be for the Tensor Cores to run at full rate: 16 bytes (NVIDIA, Matrix
#: Multiplication Background User's Guide, table 1: cuBLAS before 11.0 needs them, later versions run best with them).
ALIGNMENT = {"int8": 16, "float8": 16, "float16": 8, "bfloat16": 8, "tf32": 4, "float32": 4, "float64": 2}

_PRODUCTS = ("matmul", "conv", "attention")


@dataclass
class Priced:
    """A program with figures for one device."""

    ops: list[Op]
    groups: list[Group]
    totals: Totals


class Model(Protocol):
    """What `cpu_model` and `gpu_model` have in common."""

    def kernel(
        self, kind: str, ops: Iterable[OpInfo], reads: int, writes: int, elements: int, inner: int = 1, strided: int = 0
    ) -> Estimate:
        """Time of one kernel."""


def price(program: Program, spec: DeviceSpec) -> Priced:
    """Predicted figures of every op as its own kernel, of every kernel after fusion, and their sums.

    Times are microseconds. An op that computes and moves nothing (a view) is bound by 'none' and takes no time; one
    without a formula is bound by 'unknown', has 0 FLOPs here and a name in `Program.unknown`, and takes the time of its
    bytes. `totals.time_us` is the sum over groups, plus on a calibrated processor what calling each graph costs.
    `totals.flops` are the model's: an op that the partitioner runs again in the backward counts once.
    """
    model = _model(spec, sum(group.reads + group.writes for group in program.groups))
    ops = [_op(info, model) for info in program.ops]
    groups = [_group(info, program.ops, model) for info in program.groups]
    return Priced(ops, groups, _totals(program, ops, groups, spec))


def device_record(spec: DeviceSpec) -> DeviceRecord:
    """The device as the report shows it."""
    return DeviceRecord(
        key=spec.key,
        name=spec.name,
        peak_flops=dict(spec.peak_flops),
        attainable_flops={dtype: spec.attainable_flops(dtype) for dtype in spec.peak_flops},
        bandwidth=spec.bandwidth,
        attainable_bandwidth=spec.attainable_bandwidth,
        memory_bytes=spec.memory_bytes,
        launch_us=spec.launch_s * 1e6,
        calibrated=isinstance(spec.cpu, CpuCalibration),
    )


def _model(spec: DeviceSpec, traffic: int) -> Model:
    if isinstance(spec.cpu, CpuCalibration):
        return CpuModel(spec.cpu, traffic)
    return RooflineModel(spec, *_tf32())


def _tf32() -> tuple[bool, bool]:
    """Whether float32 products and convolutions would run as TF32 on CUDA under torch's settings of now.

    `fp32_precision` is the setting since torch 2.9; its default 'none' leaves products exact and convolutions in TF32.
    """
    found = []
    for owner, old, default in (
        (torch.backends.cuda.matmul, torch.backends.cuda.matmul, False),
        (getattr(torch.backends.cudnn, "conv", None), torch.backends.cudnn, True),
    ):
        setting: Any = getattr(owner, "fp32_precision", None)
        if isinstance(setting, str):
            found.append(default if setting == "none" else setting == "tf32")
        else:
            found.append(bool(getattr(old, "allow_tf32", default)))
    return found[0], found[1]


# ---- records --------------------------------------------------------------------------------------------------------


def _op(info: OpInfo, model: Model) -> Op:
    cost = info.cost
    moved = info.reads + info.writes
    flops = float(cost.flops) if cost is not None else 0.0
    bound: Bound = "unknown" if cost is None else "none"
    time_us = 0.0
    if moved or flops:
        elements = max(1, info.writes // 4)
        estimate = model.kernel(cost.kind if cost is not None else "other", (info,), info.reads, info.writes, elements)
        time_us = estimate.total_s * 1e6
        if cost is not None:
            bound = _bound(estimate)
    return Op(
        name=info.name, target=info.target, phase=info.phase, module=info.module, file=info.file, line=info.line,
        flops=flops, bytes_read=info.reads, bytes_written=info.writes, intensity=flops / moved if moved else 0.0,
        dtype=info.dtype, bound=bound, aligned=_aligned(info), mnk=cost.mnk if cost is not None else None,
        time_us=time_us, group=info.group, shape=info.shape,
    )  # fmt: skip


def _group(info: GroupInfo, ops: list[OpInfo], model: Model) -> Group:
    members = [ops[i] for i in info.ops if _runs_here(ops[i], info)]
    estimate = model.kernel(info.kind, members, info.reads, info.writes, info.elements, info.inner, info.strided)
    known = [op.cost for op in members if op.cost is not None]
    return Group(
        index=info.index, phase=info.phase, kind=info.kind, ops=[ops[i].name for i in info.ops],
        flops=float(sum(cost.flops for cost in known)), bytes_read=info.reads, bytes_written=info.writes,
        bound=_bound(estimate) if known or not members else "unknown", time_us=estimate.total_s * 1e6,
    )  # fmt: skip


def _runs_here(op: OpInfo, group: GroupInfo) -> bool:
    """Random numbers are drawn once and stored, unlike other cheap values, which every consumer may compute anew."""
    return op.cost is None or op.cost.kind != "rng" or op.group == group.index


def _bound(estimate: Estimate) -> Bound:
    if estimate.launch_s >= max(estimate.compute_s, estimate.memory_s):
        return "launch"
    return "compute" if estimate.compute_s >= estimate.memory_s else "memory"


def _aligned(info: OpInfo) -> bool | None:
    """Whether M, N and K are multiples of what the dtype needs; of a convolution N and K, as M only counts pixels."""
    if info.cost is None or info.cost.mnk is None:
        return None
    step = _alignment(info.dtype)
    if step is None:
        return None
    m, n, k = info.cost.mnk
    extents = (n, k) if info.cost.kind == "conv" else (m, n, k)
    return all(extent % step == 0 for extent in extents)


@functools.lru_cache(maxsize=64)
def _alignment(dtype: str) -> int | None:
    try:
        return ALIGNMENT[canonical_dtype(dtype)]
    except ConfigError:
        return None


# ---- totals ---------------------------------------------------------------------------------------------------------


def _totals(program: Program, ops: list[Op], groups: list[Group], spec: DeviceSpec) -> Totals:
    counted = [op for op, info in zip(ops, program.ops, strict=True) if not info.recomputed]
    forward = sum(op.flops for op in counted if op.phase == "forward")
    backward = sum(op.flops for op in counted if op.phase == "backward")
    calls_us = 0.0
    if isinstance(spec.cpu, CpuCalibration) and groups:
        trained = any(group.phase == "backward" for group in groups)
        calls_us = (spec.cpu.graph_s + (spec.cpu.backward_s if trained else 0.0)) * 1e6
    time_us = sum(group.time_us for group in groups) + calls_us
    return Totals(
        flops=forward + backward,
        flops_forward=forward,
        flops_backward=backward,
        bytes_unfused=sum(op.bytes_read + op.bytes_written for op in ops),
        bytes_fused=sum(group.bytes_read + group.bytes_written for group in groups),
        time_us=time_us,
        time_unfused_us=sum(op.time_us for op in ops) + calls_us,
        kernels=len(groups),
        mfu=_utilisation(program, forward + backward, time_us, spec),
    )


def _utilisation(program: Program, flops: float, time_us: float, spec: DeviceSpec) -> float:
    """FLOPs over what the device could do in that time, at the dense peak of the dtype of most product FLOPs."""
    by_dtype: Counter[str] = Counter()
    for info in program.ops:
        if info.cost is not None and info.cost.kind in _PRODUCTS:
            by_dtype[info.dtype] += int(info.cost.flops)
    if not time_us or not by_dtype:
        return 0.0
    try:
        peak = spec.peak_flops[compute_dtype(by_dtype.most_common(1)[0][0], spec.peak_flops)]
    except ConfigError:
        return 0.0
    return flops / (time_us * 1e-6 * peak)
