"""Samples of programs compiled and called with and without an audit, in this process; `audit_overhead` judges them."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

from optpass.bench.clocks import clock, cpu_seconds
from optpass.bench.harness import schedule

CASES = ("plain", "audited", "plain again")
MODES = ("inference", "training")
SMALLEST = "smallest program"
STEADY_S = 0.4
_LEAST = 2  #: rounds, however little time there is

Samples = dict[str, list[float]]


def compiling(
    model: str, size: str, modes: Sequence[str], backend: str, rounds: int, seconds: float, device: str, seed: int
) -> dict[str, Samples]:
    """Samples of compiling, in this process, which must be fresh: processor seconds per mode and case, by round."""
    import torch

    def mode_samples(mode: str, until: float) -> Samples:
        module, inputs = _program(model, size, mode, device, seed)

        def once(audited: bool) -> float:
            torch.compiler.reset()
            gc.collect()
            with _recording(audited):
                start = sum(cpu_seconds())
                _call(torch.compile(module, backend=backend), inputs, mode)
                return sum(cpu_seconds()) - start

        for audited in (True, False):  # what is paid once in a process, and the C++ that every sample uses
            once(audited)
        return _interleaved(once, rounds, seed, until)

    return _each(mode_samples, modes, seconds)


def steady(
    model: str, size: str, modes: Sequence[str], backend: str, rounds: int, seconds: float, device: str, seed: int
) -> dict[str, Samples]:
    """Samples of steady calls, in this process, which must be fresh: wall seconds per call, per mode and case."""
    import torch

    tick = clock(device)

    def mode_samples(mode: str, until: float) -> Samples:
        torch.compiler.reset()
        module, inputs = _program(model, size, mode, device, seed)
        compiled = torch.compile(module, backend=backend)

        def call() -> None:
            _call(compiled, inputs, mode)

        for audited in (True, False, True):
            with _recording(audited):
                tick(call, 5)
        iterations = max(5, int(STEADY_S / max(tick(call, 5), 1e-7)))

        def once(audited: bool) -> float:
            gc.collect()
            with _recording(audited):
                call()  # the first under a recording notes which function it is
                return tick(call, iterations)

        return _interleaved(once, rounds, seed, until)

    return _each(mode_samples, modes, seconds)


def _each(measure: Callable[[str, float], Samples], modes: Sequence[str], seconds: float) -> dict[str, Samples]:
    """What is measured of each mode, with an equal share of the time."""
    from optpass.backend.compat.stack import run_with_room

    begun = time.monotonic()
    return {
        mode: run_with_room(measure, mode, begun + seconds * (index + 1) / len(modes))
        for index, mode in enumerate(modes)
    }


def _interleaved(once: Callable[[bool], float], rounds: int, seed: int, until: float) -> Samples:
    taken: Samples = {case: [] for case in CASES}
    for number, order in schedule(list(CASES), rounds, seed):
        if number >= _LEAST and time.monotonic() >= until:
            break
        for case in order:
            taken[case].append(once(case == "audited"))
    return taken


@contextlib.contextmanager
def _recording(audited: bool) -> Any:
    if not audited:
        yield
        return
    from optpass.backend.audit.recording import Recording

    with Recording() as recording:
        yield
    recording.result()


def _program(model: str, size: str, mode: str, device: str, seed: int) -> tuple[Any, Any]:
    import torch

    from optpass import models

    torch.manual_seed(seed)
    if model == SMALLEST:
        return (lambda x: x + 1), (torch.zeros(1, device=device),)
    module, inputs = models.build(model, size)
    return module.to(device).train(mode == "training"), _moved(inputs, device)


def _moved(value: Any, device: str) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, device) for item in value)
    return value


def _call(compiled: Any, inputs: Any, mode: str) -> None:
    import torch

    from optpass import models

    with torch.set_grad_enabled(mode == "training"):
        out = compiled(*inputs)
    if mode == "training":
        torch.autograd.backward(models.loss(out))
