"""Claim: an audit costs at most 3% of compile CPU time with an eager inner, 1% under Inductor, and 1% of steady calls.

One process per model, mode and part (`compiling`, `steady`), so that nothing one program left behind is in another's
figure; inside it the cases alternate in the order that `harness.schedule` gives: plain, audited (a `Recording` as
`optpass.audit()` makes it), and plain once more, whose ratio to the first shows the noise (its true value is 1).

Compiling: before each sample Dynamo is reset and garbage collected; a sample is the processor time of this process
from `torch.compile` to the end of the first call (training: with the backward). Inductor's caches are switched off,
and the C++ that it writes is compiled once, before the first sample: the compiler's own time would only dilute the
ratio, which is therefore an upper bound of what a user sees. The recording is made before, and read after, a sample.

Steady: the program is compiled once; a sample is wall time per call over some hundred milliseconds of calls.
The row "smallest program" is one addition, for the cost in nanoseconds; the claim is not about it.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from optpass.bench.clocks import check_device, clock, cpu_seconds
from optpass.bench.environment import environment
from optpass.bench.harness import schedule
from optpass.bench.isolate import run_isolated
from optpass.bench.progress import Progress
from optpass.bench.registry import BenchConfig
from optpass.bench.result import Result, Row, mean_row, sample_rows
from optpass.bench.stats import median

STEADY = "steady calls"
#: Part: (backend, what is measured, most that the audited case may take of the plain one).
PARTS = {
    "compile, eager inner": ("eager", "compiling", 1.03),
    "compile, Inductor": ("inductor", "compiling", 1.01),
    STEADY: ("inductor", "steady", 1.01),
}
CLAIM = "An audit adds at most 3% to compile CPU time with an eager inner, 1% under Inductor, and 1% to steady calls."

ROUNDS = 10
#: Sizes of the models: to compile, where the programs' own work would only hide the audit's, and to call.
SIZES = {"compiling": "tiny", "steady": "small"}
BUDGET_S = 3600.0
MODES = ("inference", "training")
CASES = ("plain", "audited", "plain again")
SMALLEST = "smallest program"
STEADY_S = 0.2
_ENVIRON = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
_SUMMARY = "all, geometric mean"

Samples = dict[str, list[float]]


def run(config: BenchConfig, progress: Progress) -> Result:
    """Measure the parts over the models and judge each by the interval of its geometric mean.

    Raises:
        ConfigError: an unknown model or size, or no such device.
        BenchError: a model failed to compile; the line names it.
    """
    check_device(config.device)
    models = _chosen(config)
    modes = MODES[:1] if config.quick else MODES
    rounds = config.rounds or (4 if config.quick else ROUNDS)
    budget_s = config.budget_s if config.budget_s is not None else BUDGET_S
    before = environment(config.device)
    cells = [(part, model, mode) for part in PARTS for model in models for mode in modes]
    cells.append((STEADY, SMALLEST, MODES[0]))
    begun = time.monotonic()
    progress.start(len(cells))
    measured: dict[tuple[str, str, str], Samples] = {}
    for part, model, mode in cells:
        if measured and time.monotonic() - begun >= budget_s:
            break
        progress.step(f"{part}: {model} {mode}", count=1 if measured else 0)
        backend, kind, _ = PARTS[part]
        measured[part, model, mode] = run_isolated(
            f"optpass.bench.audit_overhead:{kind}",
            {"model": model, "size": config.size or SIZES[kind], "mode": mode, "backend": backend, "rounds": rounds}
            | {"device": config.device, "seed": config.seed},
            environ=_ENVIRON,
        )
    rows = _rows(measured, config)
    passed, finding = _judge(rows, complete=len(measured) == len(cells))
    return Result(
        name="audit_overhead",
        claim=CLAIM,
        environment=before.finished(),
        config=asdict(config)
        | {
            "models": models,
            "sizes": SIZES if config.size is None else config.size,
            "rounds": rounds,
            "budget_s": budget_s,
            "modes": modes,
        }
        | {"goals": {part: goal for part, (_, _, goal) in PARTS.items()}, "environ": _ENVIRON},
        rows=tuple(rows),
        passed=passed,
        finding=finding,
        notes=_notes(cells, list(measured)),
    )


def compiling(model: str, size: str, mode: str, backend: str, rounds: int, device: str, seed: int) -> Samples:
    """Samples of compiling, in this process, which must be fresh: processor seconds per case, by round."""
    import torch

    settings: Any = torch.compiler.config
    module, inputs = _program(model, size, mode, device, seed)

    def once(audited: bool) -> float:
        torch.compiler.reset()
        gc.collect()
        with _recording(audited):
            start = sum(cpu_seconds())
            _call(torch.compile(module, backend=backend), inputs, mode)
            return sum(cpu_seconds()) - start

    with settings.patch(force_disable_caches=True):
        for audited in (True, False):  # what is paid once in a process, and the C++ that every sample uses
            once(audited)
        return _interleaved(once, rounds, seed)


def steady(model: str, size: str, mode: str, backend: str, rounds: int, device: str, seed: int) -> Samples:
    """Samples of steady calls, in this process, which must be fresh: wall seconds per call."""
    import torch

    module, inputs = _program(model, size, mode, device, seed)
    compiled = torch.compile(module, backend=backend)
    tick = clock(device)

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

    return _interleaved(once, rounds, seed)


def _interleaved(once: Callable[[bool], float], rounds: int, seed: int) -> Samples:
    taken: Samples = {case: [] for case in CASES}
    for _, order in schedule(list(CASES), rounds, seed):
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


def _chosen(config: BenchConfig) -> tuple[str, ...]:
    """Models, checked with their sizes before anything runs for minutes."""
    from optpass import models
    from optpass.errors import ConfigError, did_you_mean

    chosen = config.models or (("mlp",) if config.quick else models.names())
    for name in chosen:
        for size in (config.size,) if config.size is not None else SIZES.values():
            if size not in models.sizes(name):  # raises for an unknown name
                raise ConfigError(f"model {name!r} has no size {size!r}; {did_you_mean(size, models.sizes(name))}")
    return tuple(chosen)


def _rows(measured: dict[tuple[str, str, str], Samples], config: BenchConfig) -> list[Row]:
    """Every cell's cases, then for each part the geometric means: what it is judged by, and the noise."""
    rows: list[Row] = []
    for (part, model, mode), samples in measured.items():
        values = {case: tuple(samples[case]) for case in CASES}
        rows += sample_rows(values, tolerance=config.tolerance, seed=config.seed, group=f"{part}: {model} {mode}")
    for part in PARTS:
        cells = [samples for (p, model, _), samples in measured.items() if p == part and model != SMALLEST]
        for case in CASES[1:]:
            if cells:
                pairs = [(tuple(s["plain"]), tuple(s[case])) for s in cells]
                label = f"{part}: {case}" + (" (noise)" if case == "plain again" else "")
                rows.append(mean_row(label, pairs, tolerance=config.tolerance, seed=config.seed, group=_SUMMARY))
    smallest = measured.get((STEADY, SMALLEST, MODES[0]))
    if smallest is not None:
        added = (median(smallest["audited"]) - median(smallest["plain"])) * 1e9
        rows[-1] = rows[-1].model_copy(update={"extra": {"smallest program, ns added": added}})
    return rows


def _judge(rows: Sequence[Row], *, complete: bool) -> tuple[bool | None, str]:
    """True when every part's upper bound is within its goal, False when a lower bound is beyond, else None."""
    verdicts: list[bool | None] = []
    texts = []
    for part, (_, _, goal) in PARTS.items():
        mean = next((row for row in rows if row.group == _SUMMARY and row.case == f"{part}: audited"), None)
        if mean is None or mean.ratio is None:
            verdicts.append(None)
            continue
        text = f"{part} {mean.ratio:.3f}"
        if mean.ratio_ci is None:
            verdicts.append(None)
        else:
            low, high = mean.ratio_ci
            text += f" [{low:.3f}, {high:.3f}]"
            verdicts.append(True if high <= goal else False if low > goal else None)
        texts.append(f"{text} (goal at most {goal})")
    finding = "; ".join(texts)
    if not complete:
        return None, f"{finding}; time ran out before everything was measured"
    if False in verdicts:
        return False, finding
    return (None if None in verdicts else True), finding


def _notes(cells: Sequence[tuple[str, str, str]], measured: Sequence[tuple[str, str, str]]) -> tuple[str, ...]:
    left_out = [" ".join(cell) for cell in cells if cell not in measured]
    notes = ["processor time of compiling, in one process per program, cases interleaved; the C++ compiler left out"]
    return (*notes, *([f"not measured, time ran out: {', '.join(left_out)}"] if left_out else []))
