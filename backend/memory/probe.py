"""Workspaces that only the library knows, found by running the operator once on tensors of zeros, or of ones.

oneDNN chooses layouts and scratchpads by processor, shape and thread count, kernels of a GPU their buffers by how many
multiprocessors it has. An answer is kept for the process; each costs one run of the operator (on a GPU two) and as many
bytes as that takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from optpass.backend.compat.memory_elsewhere import profiling
from optpass.backend.memory.measure import Peak, measure_elsewhere, measure_peak, storage_bytes
from optpass.passes.memory.workspace.asked import WITH_ONES
from optpass.passes.memory.workspace.call import Call, number, sizes, strides


@dataclass(frozen=True)
class Described:
    """A call without its tensors.

    Attributes:
        target: the operator.
        arguments: by name; tensors by their metadata.
    """

    target: Any
    arguments: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, call: Call) -> Described | None:
        """None where an argument cannot be made up."""
        try:
            return cls(call.target, tuple((name, _frozen(value)) for name, value in call.args.items()))
        except (TypeError, RuntimeError):
            return None


def library_workspace(call: Call) -> int | None:
    """Bytes that `call` allocates and releases inside itself on this machine; None where it cannot be run."""
    described = Described.of(call)
    return None if described is None else workspace_of(described)


def workspace_of(call: Described) -> int | None:
    """As `library_workspace`."""
    gpu = next((v.key[3] for _, v in call.arguments if isinstance(v, _Like) and v.key[3].type == "cuda"), None)
    try:
        if gpu is not None:
            return _measured_on_gpu(call.target, call.arguments, gpu) if torch.cuda.is_available() else None
        return _measured(call.target, call.arguments, torch.get_num_threads())
    except (TypeError, RuntimeError):
        return None  # an operator that zeros do not suit: the formula stands


@functools.lru_cache(maxsize=4096)
def _measured(target: Any, arguments: tuple[tuple[str, Any], ...], threads: int) -> int:
    with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        values = _values(target, arguments)
        seen: set[int] = set()
        storage_bytes([values], seen=seen)
        made: list[int] = []

        def once() -> None:
            # What it gives is released here, in the thread that allocates it: a profiler of the program's own would
            # see the one without the other, and count it as memory that came free.
            made.append(storage_bytes([target(**values)], seen=seen))

        return max(0, _peak(once).bytes_above_start - sum(made))


@functools.lru_cache(maxsize=4096)
def _measured_on_gpu(target: Any, arguments: tuple[tuple[str, Any], ...], device: torch.device) -> int:
    """What a second run of the operator requests beside its results: what libraries keep from the first is no
    workspace of it. The device's own figure of its peak is set back to what is allocated."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph is being captured")
    index = torch.cuda.current_device() if device.index is None else device.index
    with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[index]):
        values = _values(target, arguments)
        results: list[Any] = []
        for _ in range(2):
            results.clear()
            torch.cuda.synchronize(index)
            torch.cuda.reset_peak_memory_stats(index)
            start = torch.cuda.memory_stats(index)["requested_bytes.all.current"]
            results.append(target(**values))
        torch.cuda.synchronize(index)
        inside = torch.cuda.memory_stats(index)["requested_bytes.all.peak"] - start
        torch.cuda.reset_peak_memory_stats(index)
        seen: set[int] = set()
        storage_bytes([values], seen=seen)
        return max(0, int(inside) - storage_bytes(results, seen=seen))


def _peak(fn: Callable[[], Any]) -> Peak:
    """Told beside a profiler of the program's own, if one is running."""
    if not profiling():
        return measure_peak(fn, collect=False)

    def unrecorded() -> Any:
        with torch.no_grad():  # of each thread, as modes are
            return fn()

    return measure_elsewhere(unrecorded)


def _frozen(value: Any) -> Any:
    """An argument as a hashable description of it; tensors by their metadata."""
    if isinstance(value, torch.Tensor):
        return _Like(sizes(value), strides(value), value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, torch.SymInt):
        return number(value)
    hash(value)
    return value


def _values(target: Any, arguments: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """Arguments made up of their descriptions."""
    fill = 1 if target.overloadpacket.__name__ in WITH_ONES else 0
    return {name: _made(value, fill) for name, value in arguments}


def _made(value: Any, fill: int) -> Any:
    if isinstance(value, _Like):
        return value.make(fill)
    return [_made(item, fill) for item in value] if isinstance(value, tuple) else value


class _Like:
    """Metadata of a tensor, equal to others by value."""

    def __init__(
        self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.key = (size, stride, dtype, device if device.type == "cuda" else torch.device("cpu"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Like) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def make(self, fill: int) -> torch.Tensor:
        size, stride, dtype, device = self.key
        return torch.empty_strided(size, stride, dtype=dtype, device=device).fill_(fill)
