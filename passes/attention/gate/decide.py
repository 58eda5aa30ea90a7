"""The gate: what a fused kernel takes at a site, what the inner compiler alone would take, and so whether it pays.

Pure but for the tables that are installed: the same question on the same machine has the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from optpass.passes.attention.blocks.team import workers
from optpass.passes.attention.gate import published
from optpass.passes.attention.gate.adapt import UNFUSED, known
from optpass.passes.attention.gate.heap import mapped
from optpass.passes.attention.gate.lookup import Found, find
from optpass.passes.attention.gate.table import Figures, Table, factor, per_score
from optpass.passes.attention.problem import Problem
from optpass.passes.devices import DeviceSpec
from optpass.passes.processor import multiplied_in
from optpass.units import format_seconds

#: How a causal or bool mask reaches the inner compiler: read from memory, or computed from positions. A float mask is
#: always read.
MaskForm = Literal["loaded", "computed"]

#: The kernel that is no kernel: SDPA's composition of products and a softmax.
MATH = "math"
#: What a fused kernel must be faster by, by where the figures are from. Those of this kind of device are read between
#: sizes: what is thought to be near equal may be either.
CAUTION: Mapping[str, float] = {"measured": 1.03, "adapted": 1.1, "published": 1.1, "extrapolated": 1.25}
#: Queries that a CPU kernel takes at a time: with the heads, what its threads share.
_CHUNK = 64
#: Part of the time in blocks that threads share: nearly all where workers share the heads (`team`); where it is left to
#: the operators, all threads wait for each other at the end of each. Measured on two threads, lengths 256 to 2048: 0.9
#: to 1, torch's flash attention alike; 0.2 to 0.9 in float32 where operators share, for they are of one head there.
_SHARED_HEADS = 0.9
_SHARED_OPERATORS: Mapping[str, float] = {"float32": 0.5, "bfloat16": 0.9}
#: What attention in blocks takes longer where its backward has weights in float32 (`Problem.keeps_wide`): 1.05 to 1.11
#: times, measured in bfloat16 at lengths of 256 to 2048.
_WIDE = 1.1
#: Fewer scores than this, or than a table begins at, take longer to call than to compute, whatever it extrapolates to.
_FEW: Mapping[str, int] = {"blocks": 1 << 19}
#: Scores that stay in the processor's caches, and the part of the time of more that the inner compiler alone takes of
#: them, forward and with the backward, if the table begins above. Where it reads a mask from memory it takes all of it.
#: Measured beside tables that begin at 2**20 scores, in float32 at 2**16 to 2**19.2, head dims 32 and 64: 0.76 to 0.82,
#: 0.82 to 0.92.
_CACHED_SCORES = 1 << 19
_CACHED: Mapping[bool, float] = {False: 0.82, True: 0.86}
#: The power of how many times fewer keys there are than in a table, by which a kernel must be faster (`_beyond`).
_FEWER_KEYS = 0.2
#: A vector of the processors that were measured.
_VECTOR_BYTES = 64
#: Targets in words.
_NAMES: Mapping[str, str] = {"sdpa": "SDPA", "flex": "FlexAttention", "blocks": "attention in"}
#: Score operations that a table has a figure for.
_OPS: Mapping[str, str] = {"softcap": "softcap"}


@dataclass(frozen=True)
class Price:
    """What one way to compute a site takes, and how that is known.

    Attributes:
        us: microseconds, forward, and with the backward where the problem trains.
        fit: 'measured' on this kind of device, 'adapted' or 'extrapolated' from another (see `adapt.Known`), or
            'published' (never measured by us).
        source: the same in words, with the machine or the document.
    """

    us: float
    fit: str
    source: str


@dataclass(frozen=True)
class Verdict:
    """Whether a fused kernel pays: both figures in microseconds, the reason as a sentence, and where they come from."""

    pays: bool
    fused_us: float
    unfused_us: float
    reason: str
    source: str


def decide(
    problem: Problem,
    target: str,
    kernel: str,
    spec: DeviceSpec,
    *,
    mask_form: MaskForm = "loaded",
    regions: int = 1,
    computed_in: torch.dtype | None = None,
) -> Verdict:
    """Whether `kernel` is faster than what the inner compiler would make of the site as it is.

    Args:
        target: 'sdpa', 'flex' or 'blocks', for the words.
        kernel: as in the tables of `targets`: 'cpu_flash', 'flash', 'cudnn', 'mem_efficient', 'flex', 'blocks', 'math'.
        spec: the GPU; for a CPU problem the processor at hand is looked up instead.
        mask_form: how the inner compiler alone would get a causal or bool mask.
        regions: sites like this one in the graph, which can reuse each other's buffers once these are mapped.
        computed_in: dtype that the kernel is given the operands in; None for their own.
    """
    words = f"{_NAMES.get(target, target)} {kernel}".strip()
    found = find(spec, problem.device)
    alone = unfused(problem, spec, mask_form=mask_form, regions=regions, table=found)
    if kernel == MATH:
        reason = f"{words} computes the same products and softmax one after another, and saves nothing"
        return Verdict(False, alone.us, alone.us, reason, alone.source)
    if found is not None and _scores(problem) < min(_FEW.get(kernel, 0), found.table.axes.scores[0]):
        reason = f"{words} takes longer to call than to compute so few scores"
        return Verdict(False, alone.us, alone.us, reason, alone.source)
    fast = fused(replace(problem, dtype=computed_in or problem.dtype), kernel, spec, regions=regions, table=found)
    if fast is None:
        reason = f"nothing is known of what {words} takes for {_dtype(problem)} on this device"
        return Verdict(False, alone.us, alone.us, reason, alone.source)
    doubt = max(CAUTION[alone.fit], CAUTION[fast.fit]) * (1.0 if found is None else _beyond(problem, found.table))
    pays = fast.us * doubt <= alone.us
    source = fast.source if fast.source == alone.source else f"{words}: {fast.source}; unfused: {alone.source}"
    return Verdict(pays, fast.us, alone.us, _sentence(words, problem, fast.us, alone.us, pays, doubt), source)


def fused(
    problem: Problem, kernel: str, spec: DeviceSpec, *, regions: int = 1, table: Found | None = None
) -> Price | None:
    """What a fused kernel takes; None where nothing is known of it on this device.

    Args:
        regions: as in `decide`.
        table: to read; None for the one of this device.
    """
    found = table or find(spec, problem.device)
    measured = known(found, problem, kernel)
    if found is not None and measured is not None:
        figures = measured.figures
        window = problem.window is not None and "window" in published.skipped(kernel, problem)
        extra = {} if window or problem.mask in ("none", "causal") else _operand(problem)
        ns = _per_score(found.table, figures, problem, extra | _ops(problem), regions)
        ns *= published.visited(problem, kernel) if window else _causal(problem, found.table, figures)
        shared = _shared(problem) if kernel == "blocks" else 1.0
        rounds = problem.keeps_wide and multiplied_in(problem.dtype) == problem.dtype
        ns *= _WIDE if kernel == "blocks" and rounds else 1.0
        return Price(_total(problem, found.table, ns * measured.times, shared), measured.fit, found.source)
    estimated = None if problem.device == "cpu" else published.fused_seconds(problem, kernel, spec)
    if estimated is None:
        return None
    seconds, source = estimated
    return Price(seconds * 1e6, "published", f"published, not measured: {source}")


def unfused(
    problem: Problem,
    spec: DeviceSpec,
    *,
    mask_form: MaskForm = "loaded",
    regions: int = 1,
    table: Found | None = None,
) -> Price:
    """What the inner compiler alone takes for the region; arguments as in `decide` and `fused`."""
    found = table or find(spec, problem.device)
    measured = known(found, problem, UNFUSED)
    if found is not None and measured is not None:
        ns = _per_score(found.table, measured.figures, problem, _unfused_extra(problem, mask_form), regions)
        reads_mask = problem.mask == "float" or (problem.mask != "none" and mask_form == "loaded")
        ns *= 1.0 if reads_mask else _cached(problem, found.table)
        us = _total(problem, found.table, ns * measured.times) + _repeat_us(problem, found.table)
        return Price(us, measured.fit, found.source)
    seconds = published.unfused_seconds(problem, spec)
    return Price(seconds * 1e6, "published", f"the roofline of {spec.name}, not measured")


def _per_score(table: Table, figures: Figures, problem: Problem, extra: Mapping[str, float], regions: int) -> float:
    return per_score(
        table,
        figures,
        queries=problem.queries,
        keys=problem.keys,
        dim=(problem.head_dim + problem.value_dim) / 2,
        extra=extra,
        scores=_scores(problem),
        regions=regions,
        mapped=table.kind == "cpu" and mapped(_scores(problem), problem.dtype.itemsize, training=problem.training),
        ragged=_ragged(problem) if table.kind == "cpu" else 0.0,
    )


def _beyond(problem: Problem, table: Table) -> float:
    """What a fused kernel must be faster by for fewer keys than the table has, since what it takes for a query whatever
    the keys was not measured. On a processor that was measured from 8 keys on, kernels took up to 1.6 times as much of
    their time at 64 keys there as the inner compiler's code did of its own, 1.2 times at 16 and 1.1 times at 32."""
    return float(max(1.0, table.axes.keys[0] / max(1, problem.keys)) ** _FEWER_KEYS)


def _ragged(problem: Problem) -> float:
    """How much rows of scores are not made of whole vectors: not at all, of halves, or at all."""
    whole = _VECTOR_BYTES // problem.dtype.itemsize
    return 0.0 if problem.keys % whole == 0 else 0.5 if problem.keys % (whole // 2) == 0 else 1.0


def _unfused_extra(problem: Problem, form: MaskForm) -> dict[str, float]:
    if problem.mask == "float":
        return _operand(problem) | _ops(problem)
    return ({} if problem.mask == "none" else {form: 1.0}) | _ops(problem)


def _operand(problem: Problem) -> dict[str, float]:
    """A mask operand shared by all heads, and as much of one stored for each as there is."""
    shared = problem.queries * problem.keys
    whole = max(1, _scores(problem) - shared)
    part = min(1.0, max(0.0, (problem.mask_numel - shared) / whole))
    return {"operand": 1.0 - part, "full": part}


def _ops(problem: Problem) -> dict[str, float]:
    return {_OPS[op]: 1.0 for op in sorted(problem.score_ops) if op in _OPS}


def _causal(problem: Problem, table: Table, figures: Figures) -> float:
    """What causality multiplies the time by: the measured factor of a square of as many keys."""
    return factor(table, figures, "causal", problem.keys) if problem.mask == "causal" else 1.0


def _total(problem: Problem, table: Table, ns: float, shared: float = 1.0) -> float:
    """Microseconds of all scores. On a CPU the threads share the heads and chunks of queries that there are.

    Args:
        shared: part of the time that they share.
    """
    us = ns * _scores(problem) * 1e-3
    if table.kind != "cpu":
        return us
    tasks = max(1, problem.batch * problem.heads * math.ceil(problem.queries / _CHUNK))
    measured, now = (1.0 - shared + shared / min(n, tasks) for n in (table.threads, torch.get_num_threads()))
    return us * now / measured


def _cached(problem: Problem, table: Table) -> float:
    """What scores that stay in the processor's caches multiply the time of the inner compiler alone by, where the table
    has none such: all of it at half of the fewest that it has."""
    if table.kind != "cpu":
        return 1.0
    below = math.log2(table.axes.scores[0] / max(_CACHED_SCORES, _scores(problem)))
    return 1.0 - min(1.0, max(0.0, below)) * (1.0 - _CACHED[problem.training])


def _shared(problem: Problem) -> float:
    """The part of the time in blocks that threads share."""
    computed = _scores(problem) // (2 if problem.mask == "causal" else 1)
    by_workers = workers(problem.batch * problem.heads, computed) > 1
    return _SHARED_HEADS if by_workers else _SHARED_OPERATORS.get(_dtype(problem), 1.0)


def _repeat_us(problem: Problem, table: Table) -> float:
    """Keys and values written out for every query head, and in training their gradients summed again."""
    if problem.kv_heads == problem.heads:
        return 0.0
    wide = problem.keys * (problem.head_dim + problem.value_dim) * problem.dtype.itemsize
    return problem.batch * problem.heads * wide * table.copy * 1e-3 * (2 if problem.training else 1)


def _scores(problem: Problem) -> int:
    return problem.batch * problem.heads * problem.queries * problem.keys


def _dtype(problem: Problem) -> str:
    return str(problem.dtype).removeprefix("torch.")


def _sentence(words: str, problem: Problem, fused_us: float, unfused_us: float, pays: bool, doubt: float) -> str:
    mode = "forward and backward" if problem.training else "forward"
    text = (
        f"{words} takes {format_seconds(fused_us * 1e-6)} {mode}, the inner compiler alone "
        f"{format_seconds(unfused_us * 1e-6)} ({_dtype(problem)}, {problem.queries} queries, {problem.keys} keys, "
        f"{problem.batch * problem.heads} heads in all, head dim {problem.head_dim})"
    )
    if pays:
        return text
    if fused_us > unfused_us:
        return f"it does not pay: {text}"
    return f"it may not pay: {text}; as far as the figures tell, it must be {doubt:.3g} times as fast"
