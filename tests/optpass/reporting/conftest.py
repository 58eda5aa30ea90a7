"""Reports and analyses made by hand, in the size and shape that a small GPT gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from optpass.reporting import merge
from optpass.reporting.model import (
    Analysis,
    Bound,
    DeviceRecord,
    GraphRecord,
    Group,
    Op,
    PassRecord,
    ProcessRecord,
    Report,
    Site,
    Totals,
)

DEVICE = DeviceRecord(
    key="h200",
    name="NVIDIA H200",
    peak_flops={"bfloat16": 989e12, "float32": 67e12},
    attainable_flops={"bfloat16": 794e12, "float32": 60e12},
    bandwidth=4.8e12,
    attainable_bandwidth=4.3e12,
    memory_bytes=141 * 10**9,
    launch_us=2.5,
)


def make_op(index: int, target: str, module: str, line: int, flops: float, moved: float, **fields: Any) -> Op:
    dtype = str(fields.pop("dtype", "bfloat16"))
    compute, memory = flops / DEVICE.attainable_flops[dtype] * 1e6, moved / DEVICE.attainable_bandwidth * 1e6
    bound: Bound = "compute" if compute > memory else "memory"
    if max(compute, memory) < DEVICE.launch_us:
        bound = "launch"
    return Op(
        name=f"{target.split('.')[1]}_{index}",
        target=target,
        module=module,
        file="/srv/project/models/gpt.py",
        line=line,
        flops=flops,
        bytes_read=moved * 0.7,
        bytes_written=moved * 0.3,
        intensity=flops / moved,
        dtype=dtype,
        bound=bound,
        time_us=max(compute, memory) + DEVICE.launch_us,
        group=index,
        **fields,
    )


def make_ops(layers: int, tokens: int = 16384, width: int = 1024, vocab: int = 50257) -> list[Op]:
    ops: list[Op] = []

    def matmul(module: str, line: int, m: int, n: int, k: int, phase: str = "forward") -> None:
        aligned = all(d % 8 == 0 for d in (m, n, k))
        ops.append(
            make_op(
                len(ops), "aten.mm.default", module, line, 2.0 * m * n * k, 2.0 * (m * n + n * k + m * k),
                mnk=(m, n, k), aligned=aligned, phase=phase, shape=f"bf16[{m}, {n}]",
            )
        )  # fmt: skip

    def pointwise(name: str, module: str, line: int, size: float, per: float, dtype: str = "bfloat16") -> None:
        ops.append(make_op(len(ops), name, module, line, size * per, size * 4, shape=f"bf16[{size:.0f}]", dtype=dtype))

    for phase in ("forward", "backward"):
        for i in range(layers):
            pointwise("aten.native_layer_norm.default", f"blocks.{i}.ln1", 31, tokens * width, 8, "float32")
            matmul(f"blocks.{i}.attn.qkv", 40, tokens, 3 * width, width, phase)
            pointwise("aten._softmax.default", f"blocks.{i}.attn", 44, tokens * 2048 * 4, 5, "float32")
            matmul(f"blocks.{i}.attn.proj", 47, tokens, width, width, phase)
            matmul(f"blocks.{i}.mlp.up", 52, tokens, 4 * width, width, phase)
            pointwise("aten.gelu.default", f"blocks.{i}.mlp", 53, tokens * width * 4, 14)
            matmul(f"blocks.{i}.mlp.down", 54, tokens, width, 4 * width, phase)
            pointwise("aten.add.Tensor", f"blocks.{i}", 60, tokens * width, 1)
            pointwise("aten.mul.Tensor", f"blocks.{i}", 61, 4096, 1)
        matmul("lm_head", 80, tokens, vocab, width, phase)
    pointwise("aten.embedding.default", "wte", 70, tokens * width, 0)
    return ops


def make_groups(ops: list[Op]) -> list[Group]:
    return [
        Group(
            index=i, kind="matmul" if op.mnk else "pointwise", ops=[op.name], phase=op.phase, flops=op.flops,
            bytes_read=op.bytes_read, bytes_written=op.bytes_written, bound=op.bound, time_us=op.time_us * 0.9,
        )
        for i, op in enumerate(ops)
    ]  # fmt: skip


def make_totals(ops: list[Op], groups: list[Group]) -> Totals:
    forward = sum(op.flops for op in ops if op.phase == "forward")
    flops = sum(op.flops for op in ops)
    totals = Totals(
        flops=flops,
        flops_forward=forward,
        flops_backward=flops - forward,
        bytes_unfused=sum(op.bytes_read + op.bytes_written for op in ops),
        bytes_fused=0.6 * sum(op.bytes_read + op.bytes_written for op in ops),
        time_us=sum(group.time_us for group in groups),
        time_unfused_us=sum(op.time_us for op in ops),
        kernels=len(groups),
    )
    totals.mfu = merge.mfu(totals, ops, DEVICE)
    return totals


def make_analysis(layers: int = 4) -> Analysis:
    ops = make_ops(layers)
    groups = make_groups(ops)
    return Analysis(
        target="gpt --size small",
        train=True,
        dtype="bfloat16",
        device=DEVICE.model_copy(deep=True),
        totals=make_totals(ops, groups),
        ops=ops,
        groups=groups,
        unknown_ops={"mylib.fancy.default": 3},
        parameters=124_439_808,
        notes=["dropout counted as pointwise"],
    )


def site(reason: str, line: int, module: str, **fields: Any) -> Site:
    return Site(
        kind="redundant", file="/srv/project/models/gpt.py", line=line, module=module, reason=reason, **fields
    )  # fmt: skip


def attention_sites(layers: int) -> tuple[list[Site], list[Site]]:
    """Sites applied and declined in the words of an attention pass: one kind of change, two reasons."""

    def of_layer(layer: int, node: str, reason: str, **fields: Any) -> Site:
        return Site(
            kind="attention", file="/srv/project/models/gpt.py", line=44, module=f"blocks.{layer}.attn",
            node=f"{node}_{2 * layer + 1}", reason=reason, **fields,
        )  # fmt: skip

    times = {"unfused_us": 1500.0, "fused_us": 500.0, "gain": 3.0}
    applied = [
        of_layer(
            i, "matmul", "the fastest that takes this mask", before="softmax(q·kᵀ·0.125 + causal) v",
            after="SDPA flash, is_causal", cost={"bytes_not_saved": 128.0 * 2**20} | times,
        )
        for i in range(layers)
    ]  # fmt: skip
    declined = [
        of_layer(i, "softmax", "the probabilities are returned", before="softmax(q·kᵀ·0.125) v") for i in range(layers)
    ]
    cost = {"unfused_us": 80.0, "fused_us": 120.0}
    place = {"file": "/srv/project/models/encoder.py", "line": 9, "module": "encoder.attn", "node": "bmm_1"}
    declined.append(Site(kind="attention", reason="does not pay", before="softmax(q·kᵀ) v", cost=cost, **place))
    return applied, declined


def make_report(run_id: str = "run-1", pid: int = 100, rank: int = 0, layers: int = 2, graphs: int = 2) -> Report:
    report = Report(
        run_id=run_id,
        created="2030-01-02T03:04:05+00:00",
        name="gpt-demo",
        environment={"torch": "2.13.0", "python": "3.11.4"},
        options={"inner": "inductor"},
        processes=[ProcessRecord(pid=pid, host="node0", rank=rank, world_size=4)],
        device=DEVICE.model_copy(deep=True),
        warnings=["no C++ compiler: aot_eager serves instead"],
    )
    for g in range(graphs):
        ops = make_ops(layers)
        groups = make_groups(ops)
        applied = [
            site("the tensor is contiguous already", 47, f"blocks.{i}.attn", before="contiguous(x)", after="x")
            for i in range(layers)
        ]
        declined = [site("the cast changes the values: float32 -> bfloat16 -> float32", 44, "blocks.0.attn")]
        report.graphs.append(
            GraphRecord(
                id=str(g), function="models/gpt.py:62 forward", training=True, inner="inductor", cache="miss",
                nodes=214, t_compile_s=8.4, t_passes_s=0.21, t_first_s=9.1, t_steady_s=0.0123, calls=40,
                passes=[
                    PassRecord(name="redundant", stage="dynamo", seconds=0.012, applied=applied, declined=declined),
                    PassRecord(name="roofline", stage="joint", seconds=0.198),
                ],
                totals=make_totals(ops, groups), unknown_ops={"mylib.fancy.default": 3},
            )
        )  # fmt: skip
        report.ops += [op.model_copy(update={"graph": str(g)}) for op in ops]
        report.groups += [group.model_copy(update={"graph": str(g)}) for group in groups]
    report.compile = merge.compile_cost(report.graphs)
    report.totals = merge.totals(report.graphs, report.ops, report.device)
    report.unknown_ops = merge.unknown_ops(report.graphs)
    return report


@pytest.fixture
def analysis() -> Analysis:
    return make_analysis()


@pytest.fixture
def report() -> Report:
    return make_report()


@pytest.fixture
def attention_report() -> Report:
    """A report with twelve layers of attention in each of two graphs, as one pass left them."""
    made = make_report()
    for graph in made.graphs:
        applied, declined = attention_sites(12)
        graph.passes.append(PassRecord(name="attention", stage="dynamo", applied=applied, declined=declined))
    return made


@pytest.fixture
def new_report() -> Callable[..., Report]:
    return make_report


@pytest.fixture
def new_analysis() -> Callable[..., Analysis]:
    return make_analysis
