"""What a GPU's allocator counts beside the bytes of tensors: blocks, and what libraries keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from optpass.backend.memory import around_gpu
from optpass.backend.memory.replay.caching import CachingAllocator, segment_bytes
from optpass.passes import devices

MIB = 1 << 20
#: A training step as torch 2.11 recorded it on an H100: bytes of each allocation, its number for a release.
RECORDED = json.loads(Path(__file__).with_name("recorded_step.json").read_text())


@pytest.mark.parametrize("model", sorted(RECORDED))
def test_blocks_of_a_recorded_step(model: str) -> None:
    """The peak above the start, from an empty pool; that of the process had room for a block or two more or less."""
    allocator, blocks, peak = CachingAllocator(), [], 0
    for change in RECORDED[model]["changes"]:
        if change[0] == "+":
            blocks.append(allocator.allocate(change[1]))
        else:
            allocator.release(blocks[change[1]])
        peak = max(peak, allocator.allocated)
    assert peak == pytest.approx(RECORDED[model]["above_start"], abs=2 * MIB)
    assert peak >= RECORDED[model]["requested"]


def test_a_block_that_is_hardly_larger_is_given_whole() -> None:
    allocator = CachingAllocator()
    first = allocator.allocate(15 * MIB + 1)
    assert allocator.size(first) == 16 * MIB  # a segment of its own; the rest is below 1 MiB
    allocator.release(first)
    second = allocator.allocate(12 * MIB)
    assert allocator.size(second) == 12 * MIB and allocator.allocated == 12 * MIB
    third = allocator.allocate(3 * MIB + 5)
    assert allocator.size(third) == 4 * MIB and segment_bytes(3 * MIB) == 20 * MIB


def test_small_blocks_are_multiples_of_512_and_neighbours_merge() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(n) for n in (1, 513, 700, 2 * MIB - 512 * 6)]
    assert [allocator.size(b) for b in blocks[:3]] == [512, 1024, 1024]
    for block in blocks[:3]:
        allocator.release(block)
    again = allocator.allocate(MIB)
    assert allocator.size(again) == MIB and again == blocks[0]


def test_workspaces_by_device_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert around_gpu.workspace_bytes(devices.resolve("H200")) == 32 * MIB
    assert around_gpu.workspace_bytes(devices.resolve("A100")) == around_gpu.workspace_bytes(None) == 8_519_680
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert around_gpu.workspace_bytes(devices.resolve("H200")) == 8_519_680


def test_nothing_on_a_cpu() -> None:
    assert around_gpu.beside(None, [torch.ones(3)], True) == 0


def test_what_blocks_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, gone = torch.ones(300), torch.ones(10), torch.ones(5)
    at = one.untyped_storage().data_ptr()

    def snapshot() -> list[dict[str, Any]]:
        behind = {"address": two.untyped_storage().data_ptr(), "blocks": [{"size": 512}]}
        return [{"address": at - 512, "blocks": [{"size": 512}, {"size": 1536}, {"size": 99}]}, behind]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    assert around_gpu.lost_in_blocks([one, two, gone, one.view(-1)]) == 1536 - 1200 + 512 - 40
