"""The cost gate on GPUs that nobody measured: what was published of their kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from optpass.passes import devices
from optpass.passes.attention.gate import decide, fused, unfused
from optpass.passes.attention.problem import Problem


def on_gpu(length: int, *, dim: int = 128, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Problem:
    """16384 tokens, as the papers have it."""
    batch = max(1, 16384 // length)
    heads = 2048 // dim
    made = Problem(
        device="cuda", dtype=dtype, batch=batch, heads=heads, kv_heads=heads, queries=length, keys=length, head_dim=dim,
        value_dim=dim,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize("key", ["a100", "h100", "h200", "b200", "rtx-4090"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_flash_attention_pays_on_gpus(key: str, training: bool, dim: int) -> None:
    """FlashAttention-2, section 4.1: 3 to 10 times a standard implementation, which fuses less than Inductor does."""
    spec = devices.resolve(key)
    for length in (512, 1024, 2048, 4096, 8192, 16384):
        verdict = decide(on_gpu(length, dim=dim, training=training, mask="causal"), "sdpa", "flash", spec)
        assert verdict.pays
        assert 1.2 < verdict.unfused_us / verdict.fused_us < 12
        assert "published, not measured" in verdict.source and "not measured" in verdict.source.partition("unfused:")[2]


def test_published_rates_are_met() -> None:
    """FlashAttention-3, figures 5 and 6: 595 TFLOP/s forward at head dim 128 by cuDNN, 370 by FlashAttention-2."""
    asked = on_gpu(16384)
    flops = 4 * asked.batch * asked.heads * asked.queries * asked.keys * 128
    for kernel, rate in (("cudnn", 595e12), ("flash", 370e12)):
        price = fused(asked, kernel, devices.resolve("h100"))
        assert price is not None
        assert flops / (price.us * 1e-6) == pytest.approx(rate, rel=0.05)


def test_gpu_figures_follow_the_work() -> None:
    spec = devices.resolve("h200")

    def us(asked: Problem, kernel: str = "flash") -> float:
        price = fused(asked, kernel, spec)
        assert price is not None
        return price.us

    plain = on_gpu(8192)
    assert us(dataclasses.replace(plain, mask="causal")) == pytest.approx(us(plain) / 2, rel=0.05)
    assert 2.5 < us(dataclasses.replace(plain, training=True)) / us(plain) < 5
    windowed = dataclasses.replace(plain, mask="bool", window=512)
    assert us(windowed, "flex") < us(plain, "flex") / 8
    assert us(dataclasses.replace(plain, batch=4)) == pytest.approx(2 * us(plain), rel=0.1)
    single = on_gpu(1, dim=64, batch=8, keys=4096, kv_heads=8)
    assert us(single) >= 1e6 * 8 * 8 * 4096 * 128 * 2 / spec.bandwidth  # keys and values must be read
    grouped = dataclasses.replace(plain, kv_heads=plain.heads // 4)
    assert unfused(grouped, spec).us > unfused(plain, spec).us


def test_memory_efficient_attention_computes_float32_on_tensor_cores() -> None:
    verdict = decide(on_gpu(1024, dim=64, dtype=torch.float32), "sdpa", "mem_efficient", devices.resolve("a100"))
    assert verdict.pays and "OpMultiplyAddFastF32" in verdict.source
    older = decide(on_gpu(1024, dim=64, dtype=torch.float32), "sdpa", "mem_efficient", devices.resolve("v100"))
    assert not older.pays
