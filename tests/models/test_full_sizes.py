"""The real sizes: built with nothing allocated, and as large as the models they are named after."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

from optpass import models

# Published parameter counts, shared weights once (model cards and torchvision / transformers).
PARAMETERS = {
    ("gpt", "gpt2"): 124_439_808,
    ("gpt", "gpt2-xl"): 1_557_611_200,
    ("llama", "8b"): 8_030_261_248,
    ("llama", "70b"): 70_553_706_496,
    ("bert", "base"): 109_514_298,
    ("vit", "base"): 86_567_656,
    ("vit", "large"): 304_326_632,
    ("t5", "base"): 222_903_552,
    ("t5", "large"): 737_668_096,
}
FULL_SIZES = [(name, size) for name in models.names() for size in models.sizes(name) if size not in ("tiny", "small")]


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@pytest.mark.parametrize(("name", "size"), FULL_SIZES)
def test_full_size_allocates_nothing(name: str, size: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.empty(1).normal_()  # what the first fake tensor imports is not the model's
        before, start = peak_bytes(), time.perf_counter()
        module, inputs = models.build(name, size, dtype=torch.bfloat16)
        seconds = time.perf_counter() - start
    tensors = [*module.parameters(), *module.buffers(), *inputs]
    assert all(isinstance(t, FakeTensor) for t in tensors)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert peak_bytes() - before < 200 << 20
    assert seconds < 20


def test_every_named_size_is_among_the_full_ones() -> None:
    assert set(PARAMETERS) <= set(FULL_SIZES)


@pytest.mark.parametrize(("name", "size"), PARAMETERS)
def test_full_size_has_the_published_number_of_parameters(name: str, size: str) -> None:
    with torch.device("meta"):
        module, _ = models.build(name, size)
    assert sum(p.numel() for p in module.parameters()) == PARAMETERS[name, size]


@pytest.mark.parametrize(
    ("name", "size", "settings"),
    [
        ("llama", "8b", {"layers": 2}),
        ("llama", "70b", {"layers": 2}),
        ("gpt", "gpt2", {"layers": 2}),
        ("t5", "base", {"layers": 2}),
        ("unet", "sd15", {}),
        ("dlrm", "criteo", {}),
    ],
)
def test_full_width_trains_on_fake_tensors(name: str, size: str, settings: dict[str, Any]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        module, inputs = models.build(name, size, dtype=torch.bfloat16, **settings)
        models.loss(module(*inputs)).backward()
    assert all(isinstance(p.grad, FakeTensor) for p in module.parameters())


@pytest.mark.parametrize("name", models.names())
def test_tiny_runs_on_the_meta_device(name: str) -> None:
    with torch.device("meta"):
        module, inputs = models.build(name, "tiny")
    assert {t.device.type for t in (*module.parameters(), *module.buffers(), *inputs)} == {"meta"}
    assert module(*inputs).device.type == "meta"
