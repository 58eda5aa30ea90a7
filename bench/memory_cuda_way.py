"""One way to train the Llama of `memory_cuda`, in this process: set up at the first call, timed at the later ones.

Compiling is left to go on beside other processes; whoever runs on the GPU holds a lock, so that no two steps share its
memory. Between calls nothing is kept there but what lives between steps.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from optpass.bench import memory_ways
from optpass.bench.clocks import clock
from optpass.bench.gpu_lock import GpuLock

#: Steps before the peak is measured, and before each visit's samples.
WARM, AGAIN = 3, 2


@dataclass
class _Way:
    step: Callable[[], None]
    lock: GpuLock


#: The way of this process, once it is set up.
_STANDING: list[_Way] = []


def serve(samples: int = 0, **how: Any) -> Any:
    """With `samples`, seconds of so many steps of the way that stands, by a caller who has the lock; else sets one up,
    see `prepare`."""
    if not samples:
        return prepare(**how)
    (way,) = _STANDING
    tick = clock("cuda")
    with way.lock.lent(), _tidied():
        for _ in range(AGAIN):
            way.step()
        return [tick(way.step, 1) for _ in range(samples)]


def prepare(
    overrides: Mapping[str, Any], seed: int, lock: str, *, checkpoint: bool = False, compiled: bool = True,
    ratio: float = 1.0, budget: int | str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Build and compile a way, and run it.

    Args:
        lock: path of the file.
        checkpoint: every block is checkpointed.
        compiled: not eager.
        ratio: PyTorch's budget.
        budget: optpass's, bytes or text, for the model with its attention written out; None for the compiler alone,
            or no compiler, and SDPA by hand.

    Returns:
        `peak`: bytes of a step, everything counted; `predicted` where optpass said so.
    """
    locked = GpuLock(lock)
    try:
        return _prepared(locked, overrides, seed, checkpoint, compiled, ratio, budget)
    except BaseException:
        locked.leave()  # the process lives on
        raise


def _prepared(
    locked: GpuLock, overrides: Mapping[str, Any], seed: int, checkpoint: bool, compiled: bool, ratio: float,
    budget: int | str | None,
) -> dict[str, Any]:  # fmt: skip
    import torch

    import optpass
    from optpass.backend.compat.activation_budget import activation_memory_budget
    from optpass.bench.memory_cuda_model import build

    torch.manual_seed(seed)
    module, inputs = build(overrides, device="cuda", by_hand=budget is None)
    if checkpoint:
        module = memory_ways.checkpoint_blocks(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    call: Any = module
    if compiled:
        options: Any = None if budget is None else {"memory_budget": budget, "optimizer": "adamw"}
        call = torch.compile(module, backend="inductor" if budget is None else "optpass", options=options)
    else:
        locked.take()

    def step() -> None:
        call(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with activation_memory_budget(ratio):
        for _ in range(WARM):
            step()
    locked.take()
    with _tidied():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    locked.leave()
    _STANDING[:] = [_Way(step, locked)]
    sites = [*optpass.report().sites(), *optpass.report().declined()]
    predicted = [site.cost["predicted_peak_bytes"] for site in sites if site.kind == "memory budget"]
    return {"peak": peak, "predicted": max(predicted, default=None)}


@contextlib.contextmanager
def _tidied() -> Iterator[None]:
    """Afterwards what a step needs is given back."""
    import torch

    try:
        yield
    finally:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
