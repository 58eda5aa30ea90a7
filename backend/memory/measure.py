"""What a run allocates, measured: the peak that the device's own allocator counts.

On CPU the profiler reports every allocation and release of torch's allocator, from compiled code too (a dispatch mode
sees only eager ops, and the resident set is no measure at all). On CUDA the caching allocator keeps the peak itself.
What is predicted lives in `replay`.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from optpass.backend.compat.memory_elsewhere import allocations_elsewhere, profiling
from optpass.passes.wrappers import plain_tensors


@dataclass(frozen=True)
class Peak:
    """One measured run.

    Attributes:
        bytes_above_start: most bytes allocated at one time, above what was allocated before the run.
        bytes_left: bytes still allocated after it, above the same start; on CUDA negative where it freed more than it
            made.
        timeline: CPU only: bytes above the start after each allocation and release, in order of time.
    """

    bytes_above_start: int
    bytes_left: int
    timeline: tuple[int, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class StepPeak:
    """One measured training step; every storage is counted once, in bytes.

    `inputs` are the tensors among the arguments of the step that are neither parameters nor buffers; `gradients` are
    those that were there when the step began (those that it makes are in `above`). `beside` is what was allocated on a
    GPU and is none of these: libraries' workspaces, what blocks are larger than tensors, and tensors of others.
    """

    parameters: int
    buffers: int
    optimizer: int
    gradients: int
    inputs: int
    above: int
    beside: int = 0

    @property
    def held(self) -> int:
        """Bytes that are there before the step and throughout it."""
        return self.parameters + self.buffers + self.optimizer + self.gradients + self.inputs + self.beside

    @property
    def total(self) -> int:
        """The peak of the step, bytes."""
        return self.held + self.above


def measure_peak(fn: Callable[[], Any], device: torch.device | str = "cpu", *, collect: bool = True) -> Peak:
    """Call `fn` once and measure what it allocates on `device` (CPU or CUDA).

    What `fn` returns is released after the measurement, so that it counts as left. Compile and warm up before: what a
    compiler allocates counts like everything else. `collect` runs the cycle collector first, because what a cycle of
    an earlier run holds would otherwise be released in the middle of this one.

    On CPU the release of what was there before is not seen, since the profiler does not know its size: drop gradients
    before the measurement, not in `fn`, or the bytes that replace them count on top of theirs.

    Raises:
        RuntimeError: on CPU, where a profiler is running already.
    """
    device = torch.device(device)
    if collect:
        gc.collect()
    return _measure_cuda(fn, device) if device.type == "cuda" else _measure_cpu(fn)


def _measure_cuda(fn: Callable[[], Any], device: torch.device) -> Peak:
    torch.cuda.synchronize(device)
    start = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = fn()
    torch.cuda.synchronize(device)
    peak, end = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    del result
    return Peak(peak - start, end - start)


def _measure_cpu(fn: Callable[[], Any]) -> Peak:
    if profiling():  # starting another would end it, and lose what it holds
        raise RuntimeError("a profiler is running; what a run allocates on a CPU is measured with one, outside of it")
    profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=False
    )
    with _quiet_kineto():
        profile.start()
    try:
        result = fn()
    finally:
        profile.stop()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr, unused-ignore]
    # Releases by other threads may be reported out of order: time is the truth.
    changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]")
    del result
    return _of([nbytes for _, _, nbytes in changes])


def measure_elsewhere(fn: Callable[[], Any]) -> Peak:
    """As `measure_peak` on CPU, where a profiler of the program's own is running; `fn` runs in another thread.

    Raises:
        RuntimeError: torch cannot tell.
    """
    return _of(allocations_elsewhere(fn))


def _of(changes: Iterable[int]) -> Peak:
    """Of the bytes of each allocation, and each release below 0."""
    timeline = tuple(itertools.accumulate(changes))
    return Peak(max((0, *timeline)), timeline[-1] if timeline else 0, timeline)


@contextlib.contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Kineto reads its level when it is first used, and at any other writes a line for each start and stop."""
    name = "KINETO_LOG_LEVEL"
    given = os.environ.get(name)
    os.environ[name] = given or "99"
    try:
        yield
    finally:
        if given is None:
            del os.environ[name]


def step_peak(
    model: nn.Module,
    step: Callable[[], Any],
    optimizer: torch.optim.Optimizer | None = None,
    inputs: Iterable[Any] | Mapping[Any, Any] = (),
    device: torch.device | str | None = None,
    *,
    alone: bool = False,
) -> StepPeak:
    """Run `step()` once and measure its peak with everything that it holds.

    Args:
        model: whose parameters and buffers count.
        step: one training step, called without arguments: forward, backward, and the optimizer's where it has one.
        optimizer: whose state counts. State that it makes in this step is in `above`.
        inputs: what else the step reads: tensors, or containers of them, a dictionary by itself too.
        device: the device that is measured; by default the parameters'. Tensors elsewhere do not count.
        alone: nothing else of this process is on a GPU: the peak is what its allocator says, `beside` included.
    """
    if device is None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
    device = torch.device(device)
    seen: set[int] = set()
    parameters = storage_bytes(model.parameters(), device, seen)
    gradients = storage_bytes((p.grad for p in model.parameters()), device, seen)
    buffers = storage_bytes(model.buffers(), device, seen)
    state = storage_bytes(optimizer.state.values() if optimizer is not None else (), device, seen)
    others = storage_bytes(inputs.values() if isinstance(inputs, Mapping) else inputs, device, seen)
    beside = 0
    if alone and device.type == "cuda":
        gc.collect()
        beside = max(0, torch.cuda.memory_allocated(device) - parameters - gradients - buffers - state - others)
    peak = measure_peak(step, device)
    return StepPeak(parameters, buffers, state, gradients, others, peak.bytes_above_start, beside)


def storage_bytes(values: Iterable[Any], device: torch.device | None = None, seen: set[int] | None = None) -> int:
    """Bytes of the storages behind all tensors in `values` (nested containers too), each once.

    `device` restricts to tensors of its type; `seen` holds storages already counted, and is added to.
    """
    seen = set() if seen is None else seen
    total = 0
    for value in torch.utils._pytree.tree_leaves(list(values)):
        if not isinstance(value, torch.Tensor) or (device is not None and value.device.type != device.type):
            continue
        for part in plain_tensors(value):
            storage = part.untyped_storage()
            key = storage.data_ptr() or storage._cdata  # fake tensors have no address
            if key not in seen:
                seen.add(key)
                total += storage.nbytes()
    return total
