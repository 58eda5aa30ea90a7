"""One cell of the attention benchmark, in a process of its own: the op or the GPT by each of the ways compared.

What eager takes on a CPU depends on the C library's heap: buffers above 32 MiB are mapped anew at every call, and their
pages faulted in, unless something that the process did before has left as much room in the heap. So every cell has a
fresh process, and `kept` asks for the other state (`attention_heap`). Claims and verdicts are `attention`'s.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optpass.bench import attention_heap
from optpass.bench.attention import ALONE, EAGER, GPT, HAND, INDUCTOR, OP, OPTPASS, OURS
from optpass.bench.attention_gpu import COMPILE, TIME, WHOLE
from optpass.bench.attention_programs import ByHand, GPTCell, Handwritten, OpCell, by_hand, gpt_call, op_call
from optpass.bench.clocks import Call
from optpass.bench.gpu_lock import GpuLock
from optpass.bench.harness import Case, compare

WARMUP = {"cpu": 1, "cuda": 3}
#: Of this process, by path.
_LOCKS: dict[str, GpuLock] = {}


def measure(
    kind: str,
    cell: Mapping[str, Any],
    *,
    kept: bool,
    rounds: int,
    budget_s: float,
    tolerance: float,
    seed: int,
    far: float,
    always: Sequence[str],
    lock: str | None = None,
    part: str = WHOLE,
) -> dict[str, Any]:
    """Time all cases of a cell.

    Args:
        kind: `OP` or `GPT`.
        cell: fields of an `OpCell` or a `GPTCell`.
        far, always: see `compare`.
        lock: on a GPU, the file that whoever runs there has locked.
        kept: on a CPU, with buffers kept by the C library's heap rather than as a fresh process has them.
        part: on a GPU, what of it is to be done: `attention_gpu`'s `WHOLE`, `COMPILE` or `TIME`.

    Returns:
        `samples`: seconds per call, by case, the baseline's first; empty where less than optpass and one other fit.
        `stopped`: see `Comparison`. `left_out`: cases that a GPU's memory does not hold. Nothing for `COMPILE`.
    """
    device: str = cell["device"]
    if kept:
        attention_heap.keep()
    cases = CASES[kind](cell, seed)
    torch.manual_seed(seed)
    if device == "cpu":
        found = compare(
            cases, rounds=rounds, budget_s=budget_s, tolerance=tolerance, device=device, warmup=WARMUP[device],
            seed=seed, far=far, always=always,
        )  # fmt: skip
        return {"samples": found.samples, "stopped": found.stopped, "left_out": []}
    assert lock is not None
    alone = _LOCKS.get(lock) or _LOCKS.setdefault(lock, GpuLock(lock))
    name = json.dumps([kind, dict(cell)])
    try:
        if part != TIME:
            _HELD[name] = _Compiled.of(cases, alone)
        if part == COMPILE:
            return {}
        return _timed(
            _HELD.pop(name), alone, rounds=rounds, budget_s=budget_s, tolerance=tolerance, device=device,
            warmup=WARMUP[device], seed=seed, far=far, always=always,
        )  # fmt: skip
    finally:
        alone.leave()
        if not _HELD:  # the process goes on to the next cell
            torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class _Compiled:
    """The cases of a cell that were compiled and run, and those that a GPU's memory does not hold."""

    cases: list[Case]
    left_out: list[str]

    @classmethod
    def of(cls, cases: Sequence[Case], alone: GpuLock) -> _Compiled:
        fitting = [ready for case in cases if (ready := _ready(case, alone)) is not None]
        return cls(fitting, [case.name for case in cases if case.name not in [ready.name for ready in fitting]])

    @property
    def is_enough(self) -> bool:
        return OURS not in self.left_out and len(self.cases) > 1


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """What there is, kept from the collector, which runs before each round: going through it takes longer than one."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _timed(ready: _Compiled, alone: GpuLock, **how: Any) -> dict[str, Any]:
    """What `measure` returns, of cases that are compiled."""
    if not ready.is_enough:
        return {"samples": {}, "stopped": "budget", "left_out": ready.left_out}
    with alone:
        with _frozen():
            found = compare(ready.cases, **how)
        torch.cuda.empty_cache()  # all scores of one cell may be half of the memory, and the next process needs it
    return {"samples": found.samples, "stopped": found.stopped, "left_out": ready.left_out}


#: Of this process, by the cell, compiled and not timed yet.
_HELD: dict[str, _Compiled] = {}


def op_cases(cell: OpCell, seed: int) -> Sequence[Case]:
    """The op written out, by each compiler and by none, and as SDPA."""

    def written() -> Handwritten:
        return Handwritten(cell.length, cell.causal)

    return [
        Case(EAGER, lambda: op_call(cell, written(), None, seed)),
        Case(ALONE, lambda: op_call(cell, written(), dict(INDUCTOR), seed)),
        Case(HAND, lambda: op_call(cell, ByHand(cell.causal), dict(INDUCTOR), seed)),
        Case(OURS, lambda: op_call(cell, written(), dict(OPTPASS), seed)),
    ]


def gpt_cases(cell: GPTCell, seed: int) -> Sequence[Case]:
    """The GPT with SDPA written in by hand, and as it is, by Inductor alone and with optpass."""

    def make(compiler: Mapping[str, Any], *, hand: bool) -> Call:
        model, inputs = cell.build(seed)
        return gpt_call(cell, by_hand(model) if hand else model, inputs, dict(compiler))

    return [
        Case(HAND, lambda: make(INDUCTOR, hand=True)),
        Case(ALONE, lambda: make(INDUCTOR, hand=False)),
        Case(OURS, lambda: make(OPTPASS, hand=False)),
    ]


#: The cases of a cell from its fields, by kind.
CASES: Mapping[str, Callable[[Mapping[str, Any], int], Sequence[Case]]] = {
    OP: lambda cell, seed: op_cases(OpCell(**cell), seed),
    GPT: lambda cell, seed: gpt_cases(GPTCell(**cell), seed),
}


def _ready(case: Case, alone: GpuLock) -> Case | None:
    """A case that has been compiled and run; None where it does not run in the GPU's memory: all scores may not."""
    try:
        if case.name == EAGER:
            alone.take()
        call = case.make()
        call()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()
        alone.leave()
    return Case(case.name, lambda: call)
