"""Measuring against allocations that are known."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Generator

import pytest
import torch
from torch import nn

from optpass.backend.memory import measure, probe
from optpass.backend.memory.measure import measure_elsewhere, measure_peak, step_peak, storage_bytes

_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
KB = 256  # float32 elements in 1 KiB


def test_the_peak_is_what_lived_at_one_time() -> None:
    def work() -> torch.Tensor:
        first = torch.empty(4 * KB)
        second = torch.empty(2 * KB)
        del first
        third = torch.empty(KB)
        del second
        return third

    peak = measure_peak(work)
    assert peak.bytes_above_start == 6 * 1024
    assert peak.bytes_left == 1024
    assert peak.timeline == (4096, 6144, 2048, 3072, 1024)


def test_what_was_there_before_does_not_count() -> None:
    for _ in range(20):  # the profiler may know the place: it keeps what was allocated while it ran and released later
        held = [torch.empty(8 * KB)]
        place = held[0].data_ptr()
        measure_peak(held.clear)  # so that it forgets that
        held.append(torch.empty(8 * KB))
        if held[0].data_ptr() == place:
            break

    def work() -> None:
        small = torch.empty(KB)
        held.clear()  # the profiler does not know how large this was
        del small

    peak = measure_peak(work)
    assert (peak.bytes_above_start, peak.bytes_left) == (1024, 0)


def test_an_operator_s_own_temporaries_count() -> None:
    x, mask = torch.randn(100, 64), torch.rand(100, 64) > 0.5
    assert measure_peak(lambda: x * mask).bytes_above_start == 2 * x.numel() * 4  # the mask as float, and the product


def test_an_error_ends_the_measurement() -> None:
    with pytest.raises(ZeroDivisionError):
        measure_peak(lambda: 1 // 0)
    assert measure_peak(lambda: torch.empty(KB)).bytes_above_start == 1024


def test_a_profiler_that_is_running_goes_on() -> None:
    def work() -> torch.Tensor:
        return torch.empty(2 * KB)[:KB] + 1

    probe._measured.cache_clear()
    x, w = torch.ones(2, 3, 16, 16), torch.ones(4, 3, 3, 3)
    values = (x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    frozen = tuple((name, probe._frozen(value)) for name, value in zip(_CONVOLUTION, values, strict=True))
    convolution = torch.ops.aten.convolution.default
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.ones(5)
        with pytest.raises(RuntimeError, match="profiler is running"):
            measure_peak(work)
        beside = measure_elsewhere(work)
        workspace = probe._measured(convolution, frozen, torch.get_num_threads())
        torch.ones(7)
    assert beside == measure_peak(work)
    probe._measured.cache_clear()
    assert workspace == probe._measured(convolution, frozen, torch.get_num_threads())
    assert {20, 28} <= {event.cpu_memory_usage for event in profile.events()}
    with pytest.raises(ZeroDivisionError):
        measure_elsewhere(lambda: 1 // 0)


def test_storages_count_once() -> None:
    base = torch.empty(10, 10)
    seen: set[int] = set()
    assert storage_bytes([base, base.t(), base[:2], {"k": (base.view(-1), 3, None)}], seen=seen) == 400
    assert storage_bytes([base[5:]], seen=seen) == 0
    assert storage_bytes([base.clone()], seen=seen) == 400
    assert storage_bytes([base], torch.device("cuda")) == 0


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_step_with_everything_it_holds(accumulated: bool) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))
    model[2].weight = nn.Parameter(torch.randn(8, 64))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    x = torch.randn(16, 32)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()

    step()
    if not accumulated:
        optimizer.zero_grad(set_to_none=True)
    weights = sum(p.numel() for p in model.parameters()) * 4
    peak = step_peak(model, step, optimizer, inputs=[x])
    assert peak.parameters == weights
    assert peak.optimizer == 2 * weights + 4 * len(list(model.parameters()))  # two moments, and a step count each
    assert peak.buffers == 2 * 64 * 4 + 8
    assert peak.inputs == 16 * 32 * 4
    assert peak.gradients == (weights if accumulated else 0)
    assert peak.above > (0 if accumulated else weights)
    assert peak.total == peak.held + peak.above


def test_tied_weights_are_one_storage() -> None:
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    model[1].weight = model[0].weight
    assert step_peak(model, lambda: None).total == 16 * 16 * 4


def test_inputs_are_tensors_and_containers_of_them() -> None:
    model, x, y = nn.Linear(8, 8), torch.randn(16, 8), torch.randn(4, 8)
    for inputs in ((x, y), [x, [y]], {"x": x, "more": {"y": y}}, UserDict(x=x, y=y)):
        assert step_peak(model, lambda: None, inputs=inputs).inputs == (16 + 4) * 8 * 4


def test_what_a_gpu_has_allocated_beside_tensors_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries' workspaces are in its allocator's figure, and in a budget; others' tensors where they are not told."""
    model = nn.Linear(8, 8)
    monkeypatch.setattr(measure, "storage_bytes", lambda values, *_: 100 if isinstance(values, Generator) else 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1000)
    monkeypatch.setattr(measure, "measure_peak", lambda *_: measure.Peak(50, 0))
    for alone, beside in ((False, 0), (True, 700)):
        found = measure.step_peak(model, lambda: None, device="cuda", alone=alone)
        assert (found.beside, found.total) == (beside, 350 + beside)
