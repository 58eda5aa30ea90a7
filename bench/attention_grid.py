"""The sizes that the attention cost gate's table has, and the measuring of them: what `attention_table` writes down.

How one size is timed is `attention_ways`, how figures are read between sizes `passes.attention.gate.table`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from optpass.bench.attention_heap import MAPPED
from optpass.bench.attention_ways import BLOCKS, FLEX, UNFUSED, Meter, Point, threads
from optpass.bench.isolate import run_isolated
from optpass.bench.progress import Progress
from optpass.passes.attention import targets
from optpass.passes.attention.gate.table import NONE, Axes, Base, Figures, ragged_length

#: How many regions one after another stand for a model of many layers.
MANY = 4
#: Masks between scores and softmax, as Inductor gets them, as SDPA does, our own operator and FlexAttention.
UNFUSED_MASKS = (NONE, "computed", "loaded", "operand", "full", "softcap")
FUSED_MASKS = (NONE, "causal", "operand", "full")
BLOCKS_MASKS = (*FUSED_MASKS, "softcap")
FLEX_MASKS = (NONE, "causal", "softcap")
#: Masks that cost the inner compiler other than in proportion where scores stay in a processor's caches.
CACHED_MASKS = ("computed", "loaded", "operand")
#: The unfused way without a mask, for `Meter.measure`.
UNFUSED_ALONE = {UNFUSED: (UNFUSED, NONE)}

Line = tuple[float, ...]


@dataclass(frozen=True)
class Grid:
    """What is measured on a kind of device.

    Attributes:
        axes, base: of the table.
        dtypes: measured in full.
        brief: dtypes that are slow and rarely used: measured without Inductor's masks, and at one head dim.
        kernels: fused kernels but FlexAttention, by their names in `passes.attention.targets`.
        flex_lengths, flex_dtypes: what FlexAttention is measured at.
        operand_bytes: of keys and values at most, which limits the heads of short queries.
    """

    axes: Axes
    base: Base
    dtypes: tuple[str, ...]
    brief: tuple[str, ...]
    kernels: tuple[str, ...]
    flex_lengths: Line
    flex_dtypes: tuple[str, ...]
    operand_bytes: int

    def point(self, queries: float, keys: float, dim: float) -> Point:
        """As many heads as give the base's number of scores, or as fit."""
        heads = self.base.scores // int(queries * keys)
        return Point(int(queries), int(keys), int(dim), max(1, min(heads, self.operand_bytes // int(keys * dim * 8))))

    def numbers(self) -> list[Point]:
        """Points of the base's length and dim, one for each number of scores."""
        length, dim = self.base.length, self.base.dim
        return [Point(length, length, dim, max(1, int(n) // length**2)) for n in self.axes.scores]

    def ragged(self) -> list[Point]:
        """Points of the base's dim just above each length, which no vector's width divides."""
        return [self.point(n, n, self.base.dim) for n in map(ragged_length, self.axes.lengths[:-1])]

    def masked_lengths(self, kernel: str) -> Line:
        """Lengths for masks. Inductor's code for a single head is another, and would be compiled for it alone."""
        if kernel != UNFUSED:
            return self.axes.lengths
        return tuple(length for length in self.axes.lengths if length * length < self.base.scores)


GRIDS: Mapping[str, Grid] = {
    "cpu": Grid(
        axes=Axes(
            queries=(1.0, 8.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0),
            keys=(8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0),
            lengths=(16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0),
            dims=(16.0, 32.0, 64.0, 128.0, 256.0),
            scores=tuple(2.0**power for power in range(17, 25)),
        ),
        base=Base(dim=64, scores=2**22, length=256),
        dtypes=("float32", "bfloat16"),
        brief=("float16",),
        kernels=("cpu_flash", "blocks"),
        flex_lengths=(512.0, 2048.0),
        flex_dtypes=("float32", "bfloat16"),
        operand_bytes=2**26,
    ),
    "cuda": Grid(
        axes=Axes(
            queries=(1.0, 128.0, 512.0, 2048.0, 8192.0),
            keys=(128.0, 512.0, 2048.0, 8192.0),
            lengths=(128.0, 512.0, 2048.0, 8192.0),
            dims=(64.0, 128.0, 256.0),
            scores=tuple(2.0**power for power in (20, 24, 28)),
        ),
        base=Base(dim=128, scores=2**28, length=512),
        dtypes=("bfloat16", "float16", "float32"),
        brief=(),
        kernels=("flash", "cudnn", "mem_efficient"),
        flex_lengths=(512.0, 2048.0, 8192.0),
        flex_dtypes=("bfloat16", "float16"),
        operand_bytes=2**32,
    ),
}


def figures(grid: Grid, meter: Meter, progress: Progress) -> dict[str, Figures]:
    """Everything that the table says of one dtype and mode, by kernel; without kernels that the device refuses."""
    known = targets.kernels(meter.device)
    kernels = (UNFUSED, *(name for name in grid.kernels if meter.dtype in known[name].dtypes))
    plane = _plane(grid, meter, kernels, progress)
    dims = _dims(grid, meter, kernels, progress)
    masks = {kernel: _masks(grid, meter, kernel, progress) for kernel in kernels}
    ragged = _ragged(grid, meter, kernels, progress)
    scores = _scores(grid, meter, kernels, progress)
    masked_scores = {UNFUSED: _masked_scores(grid, meter, progress)}
    faults = {UNFUSED: _faults(grid, meter, progress)}
    found = {
        kernel: Figures(
            plane[kernel],
            dims[kernel],
            masks[kernel],
            scores[kernel],
            masked_scores.get(kernel, {}),
            faults.get(kernel, {}),
            grid.masked_lengths(kernel),
            ragged.get(kernel, ()),
        )
        for kernel in kernels
        if plane[kernel] and (masks[kernel] or kernel == UNFUSED)
    }
    if meter.dtype in grid.flex_dtypes and not (meter.training and meter.device == "cpu"):
        found |= _flex(grid, meter, progress)
    return found


def _plane(grid: Grid, meter: Meter, kernels: Sequence[str], progress: Progress) -> dict[str, tuple[Line, ...]]:
    ways = {kernel: (kernel, NONE) for kernel in kernels}
    found: dict[str, list[Line]] = defaultdict(list)
    for queries in grid.axes.queries:
        _say(progress, meter, f"{queries:g} queries")
        row = _gather(meter.measure(grid.point(queries, keys, grid.base.dim), ways) for keys in grid.axes.keys)
        for kernel in kernels:
            found[kernel].append(row[kernel])
    return {kernel: _whole(found[kernel], len(grid.axes.keys)) for kernel in kernels}


def _dims(grid: Grid, meter: Meter, kernels: Sequence[str], progress: Progress) -> dict[str, tuple[Line, ...]]:
    if meter.dtype in grid.brief:
        return dict.fromkeys(kernels, ())
    ways = {kernel: (kernel, NONE) for kernel in kernels}
    found: dict[str, list[Line]] = defaultdict(list)
    for dim in grid.axes.dims:
        _say(progress, meter, f"head dim {dim:g}")
        row = _gather(meter.measure(grid.point(length, length, dim), ways) for length in grid.axes.lengths)
        for kernel in kernels:
            found[kernel].append(row[kernel])
    return {kernel: _whole(found[kernel], len(grid.axes.lengths)) for kernel in kernels}


def _masks(grid: Grid, meter: Meter, kernel: str, progress: Progress) -> dict[str, Line]:
    if kernel == UNFUSED and meter.dtype in grid.brief:
        return {}
    names = {UNFUSED: UNFUSED_MASKS, BLOCKS: BLOCKS_MASKS}.get(kernel, FUSED_MASKS)
    lengths = grid.masked_lengths(kernel)
    ways = {name: (kernel, name) for name in names}
    _say(progress, meter, f"masks of {kernel}")
    found = _gather(meter.measure(grid.point(n, n, grid.base.dim), ways) for n in lengths)
    kept = {name: found[name] for name in names if len(found[name]) == len(lengths)}
    return kept if NONE in kept else {}


def _ragged(grid: Grid, meter: Meter, kernels: Sequence[str], progress: Progress) -> dict[str, Line]:
    if meter.device != "cpu":
        return {}
    _say(progress, meter, "ragged lengths")
    found = _gather(meter.measure(point, {kernel: (kernel, NONE) for kernel in kernels}) for point in grid.ragged())
    return {kernel: line for kernel, line in found.items() if len(line) == len(grid.ragged())}


def _scores(grid: Grid, meter: Meter, kernels: Sequence[str], progress: Progress) -> dict[str, dict[str, Line]]:
    if meter.dtype in grid.brief:
        return {kernel: {} for kernel in kernels}
    ways = {kernel: (kernel, NONE) for kernel in kernels}
    _say(progress, meter, "numbers of scores")
    alone = _gather(meter.measure(point, ways) for point in grid.numbers())
    found = {kernel: {"1": line} for kernel, line in alone.items() if len(line) == len(grid.axes.scores)}
    if UNFUSED in found and meter.device != "cpu":  # of a CPU's, all that a later region saves is faults
        found[UNFUSED][str(MANY)] = _gather(meter.measure(p, UNFUSED_ALONE, MANY) for p in grid.numbers())[UNFUSED]
    return {kernel: found.get(kernel, {}) for kernel in kernels}


def _masked_scores(grid: Grid, meter: Meter, progress: Progress) -> dict[str, Line]:
    if meter.device != "cpu" or meter.dtype in grid.brief:
        return {}
    _say(progress, meter, "numbers of masked scores")
    ways = {mask: (UNFUSED, mask) for mask in CACHED_MASKS}
    found = _gather(meter.measure(point, ways) for point in grid.numbers())
    return {mask: line for mask, line in found.items() if len(line) == len(grid.axes.scores)}


def _faults(grid: Grid, meter: Meter, progress: Progress) -> dict[str, float]:
    """What page faults add to the unfused way at the largest number of scores, alone and with others after it."""
    if meter.device != "cpu" or meter.dtype in grid.brief:
        return {}
    _say(progress, meter, "page faults")
    point, found = grid.numbers()[-1], {}
    for regions in (1, MANY):
        arguments = {"dtype": meter.dtype, "training": meter.training, "point": asdict(point), "regions": regions}
        arguments |= {"workers": torch.get_num_threads()}
        faulting = run_isolated("optpass.bench.attention_grid:mapped", arguments, environ=MAPPED)["ns"]
        kept = meter.measure(point, UNFUSED_ALONE, regions)[UNFUSED]
        found[str(regions)] = float(f"{max(0.0, faulting - kept):.4g}")
    return found


def mapped(dtype: str, training: bool, point: Mapping[str, int], regions: int, workers: int) -> dict[str, float]:
    """ns per score of unfused attention with so many threads, in a process of its own whose buffers are mapped."""
    with threads(workers):
        return {"ns": Meter("cpu", dtype, training).measure(Point(**point), UNFUSED_ALONE, regions)[UNFUSED]}


def _flex(grid: Grid, meter: Meter, progress: Progress) -> dict[str, Figures]:
    ways = {name: (FLEX, name) for name in FLEX_MASKS}
    _say(progress, meter, "FlexAttention")
    found = _gather(meter.measure(grid.point(n, n, grid.base.dim), ways) for n in grid.flex_lengths)
    kept = {name: found[name] for name in FLEX_MASKS if len(found[name]) == len(grid.flex_lengths)}
    return {FLEX: Figures(masks=kept, lengths=grid.flex_lengths)} if NONE in kept else {}


def _gather(taken: Iterable[Mapping[str, float]]) -> dict[str, Line]:
    """By way, its figures in order, to three digits."""
    found: dict[str, Line] = defaultdict(tuple)
    for one in taken:
        for name, value in one.items():
            found[name] += (float(f"{value:.4g}"),)
    return found


def _whole(rows: Sequence[Line], width: int) -> tuple[Line, ...]:
    """The rows, or none where a figure is missing."""
    return tuple(rows) if all(len(row) == width for row in rows) else ()


def _say(progress: Progress, meter: Meter, what: str) -> None:
    progress.step(f"{meter.dtype} {'training' if meter.training else 'forward'}: {what}")
