"""Claim: with `attention="auto"`, attention written by hand runs as fast as the best of what a person could choose.

Two parts. The op alone: over dtypes, lengths, forward and training, causal or not, head dims, the written-out attention
of `attention_programs` compiled with `backend="optpass"` is timed against the same uncompiled ("eager"), compiled with
Inductor alone, and SDPA called by hand (compiled with Inductor). optpass may be at most `TOLERANCE` slower than the
best of the three, and for float32, causal, forward and lengths of 1024 and more must be `GAIN` times as fast as eager.
And the GPT of `models`, at three lengths, inference and training, against the same model with SDPA written in by hand:
at least `GPT_GOAL` of its speed.

The op's batch shrinks as its length grows, so that every sample has the same number of tokens and no cell is a measure
of what calling a compiled function costs. On a CPU each cell is measured in a process of its own (`attention_cell`),
whose heap is as a program finds it; what is claimed over eager is shown beside it with a heap that keeps large buffers.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from optpass.bench import attention_gpu
from optpass.bench.attention_verdict import Judged
from optpass.bench.clocks import check_device
from optpass.bench.environment import environment
from optpass.bench.harness import Comparison
from optpass.bench.isolate import run_isolated
from optpass.bench.progress import Progress
from optpass.bench.registry import BenchConfig
from optpass.bench.result import BenchError, Result, Row
from optpass.bench.stats import ratio_interval, ratio_of_medians, together
from optpass.errors import ConfigError

if TYPE_CHECKING:
    from optpass.bench.attention_programs import GPTCell, OpCell

TOLERANCE = 0.03
GAIN = 3.0
GPT_GOAL = 0.97
CLAIM = (
    f"Hand-written attention compiled with optpass is at most {TOLERANCE:.0%} slower than the best of eager, Inductor "
    f"and SDPA by hand, {GAIN:g} times as fast as eager for the float32 causal op from S = 1024 on, and a GPT with it "
    f"{GPT_GOAL} times as fast as with SDPA by hand, or faster."
)

ROUNDS = 60
#: Cases so many times slower than the fastest are timed twice: eager takes seconds where the others take milliseconds.
FAR = 2.0
#: Wall seconds of one cell of the op and of the GPT; on a CPU with compiling, and all cells end within half an hour.
#: A longer budget than the default gives each cell as many times more of them, and of the rounds; on a GPU, where
#: compiling is no part of them, a shorter one gives fewer.
OP_S = {"cpu": 22.0, "cuda": 10.0}
GPT_S = {"cpu": 60.0, "cuda": 20.0}
#: Wall seconds after which no cell begins.
BUDGET_S = {"cpu": 1500.0, "cuda": 900.0}
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16", "float16", "float32")}
#: In the order in which they are measured: what time runs out on is last.
LENGTHS = {"cpu": (1024, 2048, 512, 256), "cuda": (512, 1024, 2048, 4096, 8192, 16384)}
HEAD_DIMS = {"cpu": (64,), "cuda": (64, 128)}
GPT_LENGTHS = (512, 1024, 2048)
#: With `quick`.
QUICK_LENGTHS = {"cpu": (512, 1024), "cuda": (1024, 4096)}
QUICK_GPT = (1024,)
#: The compiler of each case.
OPTPASS: Mapping[str, Any] = {"backend": "optpass", "options": {"attention": "auto"}}
INDUCTOR: Mapping[str, Any] = {"backend": "inductor"}
EAGER, ALONE, HAND, OURS = "eager", "inductor", "sdpa by hand", "optpass"
#: Cells that a note names.
NAMED = 6
#: Lengths up to which a GPU's cells are timed while nothing compiles: a call takes about a millisecond.
SHORT = {"op": 1024, "gpt": 512}
#: What is called for a cell.
MEASURE = "optpass.bench.attention_cell:measure"
#: What a cell may be of.
OP, GPT = "op", "gpt"


@dataclass
class Run:
    """What has been measured so far."""

    config: BenchConfig
    progress: Progress
    rounds: int
    ends: float
    folder: str
    """Inductor's cache, which the cells share: what every process would compile is compiled once."""
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    """Cells that the time was over for."""
    kept: list[str] = field(default_factory=list)
    """Speeds over eager in processes whose heap keeps large buffers."""
    best: Judged = field(default_factory=lambda: Judged("time over the best", 1 + TOLERANCE))
    gain: Judged = field(default_factory=lambda: Judged("time over eager, float32 causal forward", 1 / GAIN))
    gpt: Judged = field(default_factory=lambda: Judged("GPT, time over SDPA by hand", 1 / GPT_GOAL))
    answers: Mapping[str, attention_gpu.Answer | BenchError] | None = None
    """On a GPU, what was measured, by the cells' names."""


def run(config: BenchConfig, progress: Progress) -> Result:
    """Measure the op and the GPT; `models=("gpt",)` measures the GPT alone, which can refute the claim, not prove it.

    Raises:
        ConfigError: no such device here, or a model or size that this benchmark does not have.
    """
    check_device(config.device)
    if config.size is not None or set(config.models) - {"gpt"}:
        raise ConfigError("benchmark attention has sizes of its own, and no model but gpt: leave --size out")
    budget_s = config.budget_s if config.budget_s is not None else BUDGET_S[config.device]
    patience = budget_s / BUDGET_S[config.device]
    rounds = config.rounds or (6 if config.quick else int(ROUNDS * max(1.0, patience)))
    patience = max(0.0 if config.device == "cuda" else 1.0, patience)
    before = environment(config.device)
    ops, gpts = ([] if config.models else op_cells(config)), gpt_cells(config)
    with tempfile.TemporaryDirectory(prefix="optpass-bench-", ignore_cleanup_errors=True) as folder:
        done = Run(config, progress, rounds, time.monotonic() + budget_s, folder)
        progress.start(len(ops) + len(gpts))
        gpt_s, op_s = GPT_S[config.device] * patience, OP_S[config.device] * patience
        if config.device == "cuda":
            others = {c.name for c in ops if c.dtype != DTYPES["cuda"][0]}
            cells = [attention_gpu.Cell(c.name, _arguments(done, GPT, c, gpt_s), _is_short(c)) for c in gpts]
            cells += [attention_gpu.Cell(c.name, _arguments(done, OP, c, op_s), _is_short(c)) for c in ops]
            cells.sort(key=lambda cell: not cell.short or cell.name in others)  # one wave of the dtype that matters
            done.answers = attention_gpu.measured(MEASURE, cells, folder, done.ends, progress)
        for gpt in gpts:
            _cell(done, GPT, gpt, partial(_judge_gpt, done, gpt), gpt_s)
        for op in ops:
            _cell(done, OP, op, partial(_judge_op, done, op), op_s)
        if not config.models and config.device == "cpu":
            for op in filter(_is_gain, ops):
                _beside_a_kept_heap(done, op, op_s)
    judged = [done.gpt] if config.models else [done.best, done.gain, done.gpt]
    return Result(
        name="attention",
        claim=CLAIM,
        environment=before.finished(),
        config=asdict(config) | {"rounds": rounds, "budget_s": budget_s, "compilers": [OPTPASS, INDUCTOR]},
        rows=tuple(done.rows),
        passed=None if config.quick else _passed(judged, complete=config.full and not done.left_out + done.late),
        finding="; ".join(part.finding for part in judged),
        notes=_notes(done),
    )


def op_cells(config: BenchConfig) -> list[OpCell]:
    """The cells of the op; with `quick` a few lengths and one head dim."""
    from optpass.bench.attention_programs import OpCell

    lengths = (QUICK_LENGTHS if config.quick else LENGTHS)[config.device]
    dims = HEAD_DIMS[config.device][: 1 if config.quick else None]
    dtypes = DTYPES[config.device][: 2 if config.quick else None]
    grid = product(lengths, dtypes, (False, True), (True, False), dims)
    cells = [
        OpCell(dtype, length, training, causal, dim, config.device) for length, dtype, training, causal, dim in grid
    ]
    if config.device == "cpu":
        return cells
    # What time runs out on is last.
    return sorted(cells, key=lambda cell: (cell.dtype != dtypes[0], not _is_gain(cell)))


def gpt_cells(config: BenchConfig) -> list[GPTCell]:
    """The cells of the GPT; with `quick` one length."""
    from optpass.bench.attention_programs import GPTCell

    lengths = QUICK_GPT if config.quick else GPT_LENGTHS
    return [GPTCell(length, training, config.device) for length in lengths for training in (False, True)]


def _is_short(cell: OpCell | GPTCell) -> bool:
    """Whether a call takes about as long as the processor needs to make it, on the fastest GPUs there are."""
    from optpass.bench.attention_programs import OpCell

    return cell.length <= SHORT[OP if isinstance(cell, OpCell) else GPT]


def _cell(
    done: Run, kind: str, cell: OpCell | GPTCell, judge: Callable[[Comparison], dict[str, float | str]], budget_s: float
) -> None:
    """Measure one cell, unless the time is over, and judge it."""
    done.progress.step(cell.name, count=1 if done.answers is None else 0)
    if time.monotonic() >= done.ends if done.answers is None else cell.name not in done.answers:
        done.late.append(cell.name)
        return
    found = _measured(done, kind, cell, budget_s)
    if found is None:
        return
    rows = found.rows(cell.name)
    over = judge(found)
    done.rows += [row.model_copy(update={"extra": over}) if row.case == OURS else row for row in rows]
    told = ", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in over.items())
    done.progress.step(f"{cell.name}: {told}")  # the log of a run that is broken off has what was found


def _measured(
    done: Run, kind: str, cell: OpCell | GPTCell, budget_s: float, *, kept: bool = False
) -> Comparison | None:
    """The samples of a cell, from a process of its own; None, and a note, where there are none."""
    config = done.config
    try:
        if done.answers is None:
            arguments = _arguments(done, kind, cell, budget_s, kept=kept)
            answer = run_isolated(MEASURE, arguments, environ={"TORCHINDUCTOR_CACHE_DIR": done.folder})
        elif isinstance(found := done.answers[cell.name], BenchError):
            raise found
        else:
            answer = dict(found)
    except BenchError as error:
        done.left_out.append(f"{cell.name} ({error})")
        return None
    done.left_out += [f"{cell.name}: {name} (out of memory)" for name in answer["left_out"]]
    if not answer["samples"]:
        done.left_out.append(cell.name)
        return None
    samples = {name: tuple(seconds) for name, seconds in answer["samples"].items()}
    return Comparison(samples, config.tolerance, config.seed, answer["stopped"])


def _arguments(done: Run, kind: str, cell: OpCell | GPTCell, budget_s: float, *, kept: bool = False) -> dict[str, Any]:
    """Of `MEASURE`."""
    return {
        "kind": kind, "cell": asdict(cell), "kept": kept, "rounds": done.rounds, "budget_s": budget_s,
        "tolerance": done.config.tolerance, "seed": done.config.seed, "far": FAR,
        "always": [EAGER] if _is_gain(cell) else [],
    }  # fmt: skip


def _is_gain(cell: OpCell | GPTCell) -> bool:
    """Whether `GAIN` is claimed of a cell."""
    from optpass.bench.attention_programs import OpCell

    if not isinstance(cell, OpCell) or cell.length < 1024:
        return False
    return (cell.dtype, cell.training, cell.causal) == ("float32", False, True)


def _beside_a_kept_heap(done: Run, cell: OpCell, budget_s: float) -> None:
    """Shown and not judged: a cell's time over eager in a process whose heap keeps large buffers."""
    found = None if time.monotonic() >= done.ends else _measured(done, OP, cell, budget_s, kept=True)
    if found is None or EAGER not in found.samples:
        return
    done.rows += found.rows(f"{cell.name}, buffers kept")
    done.kept.append(f"{cell.name} {1 / ratio_of_medians(found.samples[EAGER], found.samples[OURS]):.2f}")


def _judge_op(done: Run, cell: OpCell, found: Comparison) -> dict[str, float | str]:
    """Hold optpass against the best of the others, and against eager where that is claimed."""
    ours = found.samples[OURS]
    best = min((name for name in found.samples if name != OURS), key=lambda name: _median(found, name))
    interval = ratio_interval(*together(found.samples[best], ours), seed=done.config.seed)
    ratio = ratio_of_medians(*together(found.samples[best], ours))
    done.best.cells.append((cell.name, ratio, interval))
    if _is_gain(cell):
        eager = found.samples.get(EAGER)
        if eager is not None:
            over = ratio_interval(*together(eager, ours), seed=done.config.seed)
            done.gain.cells.append((cell.name, ratio_of_medians(eager, ours), over))
    spread = {"low": interval.low, "high": interval.high} if interval else {}
    return {"best": best, "of best": ratio, **spread}


def _judge_gpt(done: Run, cell: GPTCell, found: Comparison) -> dict[str, float | str]:
    interval = ratio_interval(found.samples[HAND], found.samples[OURS], seed=done.config.seed)
    done.gpt.cells.append((cell.name, found.ratio(OURS), interval))
    return {"speed of sdpa by hand": 1 / found.ratio(OURS)}


def _median(found: Comparison, name: str) -> float:
    return ratio_of_medians((1.0,) * len(found.samples[name]), found.samples[name])


def _passed(judged: Sequence[Judged], *, complete: bool) -> bool | None:
    if any(part.passed is False for part in judged):
        return False
    return True if complete and all(part.passed for part in judged) else None


def _notes(done: Run) -> tuple[str, ...]:
    notes = [
        "'best' is the fastest of the other cases; 'of best' is optpass's time over it, 'low' and 'high' its interval",
        "the op's inputs are [batch, heads, length, head dim], contiguous; its causal mask is a float tril buffer",
    ]
    if done.config.device == "cuda":
        lengths = f"S = {SHORT[OP]} and T = {SHORT[GPT]}"
        notes.append(f"up to {lengths} nothing runs beside what is timed; beyond that, other cells compile")
    if done.config.device == "cpu":
        fresh = (
            "each cell has a process of its own, so buffers above 32 MiB are mapped anew at every call, as glibc does"
        )
        notes.append(fresh)
    if done.kept:
        notes.append(f"times as fast as eager where the heap keeps such buffers: {', '.join(done.kept)}")
    if done.late:
        first, more = ", ".join(done.late[:NAMED]), len(done.late) - NAMED
        notes.append(f"not measured, time ran out: {first}" + (f" and {more} more of these cells" if more > 0 else ""))
    return (*notes, *([f"not measured: {', '.join(done.left_out)}"] if done.left_out else []))
