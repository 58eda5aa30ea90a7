"""What was measured of attention on one kind of device: nanoseconds per score over sizes, and how to read between them.

A score is one (batch, head, query, key). `optpass bench attention_table` writes these files; `decide` reads them. No
kernel is known by name here and nothing is measured.

The points of a kernel in one dtype and mode, each in nanoseconds per score:

- `plane`: by queries and keys, without a mask, at the base's head dim and number of scores; where it is empty, `masks`
  says what a square of the same area takes;
- `dims`: by head dim and length, queries and keys alike; where it is empty, time is in proportion to the head dim;
- `masks`: by what stands between scores and softmax ('none' among them), and length;
- `scores`: by how many such regions follow each other in one graph, and the number of scores of each, at the base's
  length. What a region's largest buffer costs depends on whether a cache holds it, and few scores on the call;
- `masked_scores`: the same of one region, by what stands between scores and softmax;
- `faults`: by how many such regions follow each other, what page faults add where the allocator has to ask the system
  for the buffers; a later region reuses those of an earlier one;
- `ragged`: of a square just above each length but the last (`ragged_length`), whose rows end in part of a vector.

Points off the grid are read by interpolation, linear in the logarithm of a size; beyond the grid the figure at its edge
holds, but for head dims, whose last slope goes on.
"""

from __future__ import annotations

import bisect
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from optpass.errors import ConfigError

SCHEMA: Final = "optpass.attention/1"

#: Name of the mask that is none.
NONE: Final = "none"
#: No combination of effects makes a score cheaper than this part of its plane's figure.
_LEAST = 0.2


@dataclass(frozen=True)
class Axes:
    """Sizes that were measured, rising."""

    queries: tuple[float, ...]
    keys: tuple[float, ...]
    lengths: tuple[float, ...]
    dims: tuple[float, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Base:
    """What is held fixed while another size varies."""

    dim: int
    scores: int
    length: int


@dataclass(frozen=True)
class Figures:
    """One way to compute attention, in one dtype and mode, in ns per score; see the module.

    Attributes:
        lengths: that `masks` was measured at; () for those of the table.
    """

    plane: tuple[tuple[float, ...], ...] = ()
    dims: tuple[tuple[float, ...], ...] = ()
    masks: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    scores: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    masked_scores: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    faults: Mapping[str, float] = field(default_factory=dict)
    lengths: tuple[float, ...] = ()
    ragged: tuple[float, ...] = ()


@dataclass(frozen=True)
class Table:
    """One device kind.

    Attributes:
        device: its name as the system gives it.
        kind: 'cpu' or 'cuda'.
        instructions: vector instructions that torch's kernels use, and 'bfloat16' where the processor multiplies it; ""
            for a GPU.
        threads: torch's threads while it was measured; 1 for a GPU.
        torch, command, created, load: provenance; the load averages before and after.
        copy: ns per byte written by a copy.
        figures: by 'float32 forward' (dtype and mode), then by kernel; 'unfused' is the inner compiler alone.
    """

    device: str
    kind: str
    instructions: str
    threads: int
    torch: str
    command: str
    created: str
    load: tuple[float | None, float | None]
    axes: Axes
    base: Base
    copy: float
    figures: Mapping[str, Mapping[str, Figures]]

    def of(self, dtype: str, training: bool, kernel: str) -> Figures | None:
        """The figures of a kernel; None where it was not measured."""
        return self.figures.get(key(dtype, training), {}).get(kernel)

    def to_json(self) -> str:
        """JSON text that `from_json` takes back."""
        return _compact(json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)) + "\n"


def key(dtype: str, training: bool) -> str:
    """The key of `Table.figures`; training is forward and backward together."""
    return f"{dtype} {'training' if training else 'forward'}"


def from_json(text: str, source: str) -> Table:
    """A table from its JSON text.

    Raises:
        ConfigError: not such a file, or a figure that is not a positive number; the message names `source`.
    """
    try:
        raw = json.loads(text)
        if raw.pop("schema", None) != SCHEMA:
            raise ConfigError(f"{source}: not an {SCHEMA} file")
        axes = Axes(**{name: tuple(map(float, sizes)) for name, sizes in raw.pop("axes").items()})
        figures = {
            group: {kernel: _figures(one) for kernel, one in kernels.items()}
            for group, kernels in raw.pop("figures").items()
        }
        table = Table(axes=axes, base=Base(**raw.pop("base")), load=tuple(raw.pop("load")), figures=figures, **raw)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{source}: not an {SCHEMA} file: {error}") from None
    _check(table, source)
    return table


def per_score(
    table: Table,
    figures: Figures,
    *,
    queries: int,
    keys: int,
    dim: float,
    extra: Mapping[str, float],
    scores: int,
    regions: int,
    mapped: bool = False,
    ragged: float = 0.0,
) -> float:
    """Nanoseconds per score off the grid.

    Args:
        extra: names of `Figures.masks`, and how much of each: what it adds to no mask at all.
        scores: batch * heads * queries * keys.
        regions: how many such regions the graph has.
        mapped: its buffers are mapped anew at every call.
        ragged: how much of what rows cost that end in part of a vector, from 0 to 1.
    """
    length = math.sqrt(max(1, queries) * max(1, keys))
    plain = plane(table.axes, figures, queries, keys) if figures.plane else _mask(table, figures, NONE, length)
    plain *= 1.0 if figures.dims else dim / table.base.dim
    found = plain + _dims(table, figures, dim, length) + _scores(table, figures, scores, regions)
    found *= 1.0 + ragged * _raggedness(table.axes, figures, length)
    for name, share in extra.items():
        found += share * (added(table, figures, name, length) + _added_by_scores(table, figures, name, scores))
    return max(found, _LEAST * plain) + (_faults(figures, regions) if mapped else 0.0)


def ragged_length(length: float) -> int:
    """A length above a power of two that no vector's width divides."""
    return int(length) + int(length) // 8 - 1 if length >= 16 else int(length) + 1


def added(table: Table, figures: Figures, mask: str, length: float) -> float:
    """What a mask adds per score; 0 where it was not measured."""
    return _mask(table, figures, mask, length) - _mask(table, figures, NONE, length)


def factor(table: Table, figures: Figures, mask: str, length: float) -> float:
    """What a mask multiplies the time by, for kernels that skip what it hides; 1 where it was not measured."""
    if mask not in figures.masks:
        return 1.0
    return _mask(table, figures, mask, length) / _mask(table, figures, NONE, length)


def _mask(table: Table, figures: Figures, mask: str, length: float) -> float:
    line = figures.masks.get(mask, figures.masks.get(NONE))
    return along(figures.lengths or table.axes.lengths, line, length) if line else 0.0


def plane(axes: Axes, figures: Figures, queries: float, keys: float) -> float:
    """ns per score by queries and keys alone."""
    return along(axes.queries, [along(axes.keys, row, keys) for row in figures.plane], queries)


def along(sizes: Sequence[float], values: Sequence[float], size: float) -> float:
    """`values` at `size`, linear in log2 of the size; beyond the ends, the value at the end."""
    if size <= sizes[0]:
        return values[0]
    if size >= sizes[-1]:
        return values[-1]
    right = bisect.bisect_right(sizes, size)
    part = math.log2(size / sizes[right - 1]) / math.log2(sizes[right] / sizes[right - 1])
    return values[right - 1] + part * (values[right] - values[right - 1])


def _sloped(sizes: Sequence[float], values: Sequence[float], size: float) -> float:
    """`values` at `size`, linear in the size (as products are in the head dim), and on with the last slope."""
    if size <= sizes[0] or len(sizes) == 1:
        return values[0]
    right = min(bisect.bisect_right(sizes, size), len(sizes) - 1)
    part = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
    return values[right - 1] + part * (values[right] - values[right - 1])


def _dims(table: Table, figures: Figures, dim: float, length: float) -> float:
    if not figures.dims:
        return 0.0
    line = [along(table.axes.lengths, row, length) for row in figures.dims]
    return _sloped(table.axes.dims, line, dim) - _sloped(table.axes.dims, line, table.base.dim)


def _scores(table: Table, figures: Figures, scores: int, regions: int) -> float:
    """What another number of scores, and other such regions in the graph, add: t(n) = always + once / n."""
    alone = figures.scores.get("1")
    if alone is None:
        return 0.0
    sizes = table.axes.scores
    at, base = along(sizes, alone, scores), along(sizes, alone, table.base.scores)
    return _among({n: along(sizes, line, scores) for n, line in figures.scores.items()} | {"1": at}, regions) - base


def _added_by_scores(table: Table, figures: Figures, mask: str, scores: int) -> float:
    """What another number of scores makes of what a mask adds; 0 where it was not measured."""
    masked, alone, sizes = figures.masked_scores.get(mask), figures.scores.get("1"), table.axes.scores
    if masked is None or alone is None:
        return 0.0
    at, base = (along(sizes, masked, n) - along(sizes, alone, n) for n in (scores, table.base.scores))
    return at - base


def _faults(figures: Figures, regions: int) -> float:
    return _among(figures.faults, regions) if figures.faults else 0.0


def _raggedness(axes: Axes, figures: Figures, length: float) -> float:
    """What rows that end in part of a vector add, as a part of what they cost otherwise; 0 where it was not
    measured."""
    if not figures.ragged or not figures.plane:
        return 0.0
    sizes = [float(ragged_length(n)) for n in axes.lengths[:-1]]
    even = [plane(axes, figures, n, n) for n in sizes]
    return max(0.0, along(sizes, [at / smooth - 1 for at, smooth in zip(figures.ragged, even, strict=True)], length))


def _among(measured: Mapping[str, float], regions: int) -> float:
    """What one of so many regions takes, from what it took alone and among the most that were measured."""
    alone, many = measured["1"], max(int(n) for n in measured)
    if many == 1 or regions <= 1:
        return alone
    once = (alone - measured[str(many)]) / (1 - 1 / many)
    return alone - max(0.0, once) * (1 - 1 / regions)


def _figures(raw: Mapping[str, Any]) -> Figures:
    return Figures(
        plane=tuple(tuple(map(float, row)) for row in raw.get("plane", ())),
        dims=tuple(tuple(map(float, row)) for row in raw.get("dims", ())),
        masks={name: tuple(map(float, row)) for name, row in raw.get("masks", {}).items()},
        scores={name: tuple(map(float, row)) for name, row in raw.get("scores", {}).items()},
        masked_scores={name: tuple(map(float, row)) for name, row in raw.get("masked_scores", {}).items()},
        faults={name: float(value) for name, value in raw.get("faults", {}).items()},
        lengths=tuple(map(float, raw.get("lengths", ()))),
        ragged=tuple(map(float, raw.get("ragged", ()))),
    )


def _check(table: Table, source: str) -> None:
    axes = table.axes
    for name, sizes in asdict(axes).items():
        if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] <= 0:
            raise ConfigError(f"{source}: the sizes of axis {name!r} do not rise from above 0: {sizes}")
    if table.base.dim not in axes.dims or table.base.scores not in axes.scores or table.base.length not in axes.lengths:
        raise ConfigError(f"{source}: the base {table.base} is not on the axes")
    for group, kernels in table.figures.items():
        for kernel, one in kernels.items():
            where = f"{source}: {group}, {kernel}"
            if one.plane:
                _shape(where, "plane", one.plane, len(axes.queries), len(axes.keys))
            elif NONE not in one.masks:
                raise ConfigError(f"{where}: neither a plane nor {NONE!r} among the masks")
            if one.dims:
                _shape(where, "dims", one.dims, len(axes.dims), len(axes.lengths))
            if one.masks and NONE not in one.masks:
                raise ConfigError(f"{where}: masks were measured, but not {NONE!r} beside them")
            _shape(where, "masks", tuple(one.masks.values()), len(one.masks), len(one.lengths or axes.lengths))
            for name, lines in (("scores", one.scores), ("masked_scores", one.masked_scores)):
                _shape(where, name, tuple(lines.values()), len(lines), len(axes.scores))
            if one.faults and ("1" not in one.faults or not all(0 <= ns < math.inf for ns in one.faults.values())):
                raise ConfigError(f"{where}: faults has the figures {dict(one.faults)}")


def _shape(where: str, name: str, rows: tuple[tuple[float, ...], ...], height: int, width: int) -> None:
    if len(rows) != height or any(len(row) != width for row in rows):
        raise ConfigError(f"{where}: {name} has not {height} rows of {width} figures")
    for value in (value for row in rows for value in row):
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{where}: {name} has the figure {value}")


def _compact(text: str) -> str:
    """Lists of numbers on one line each, so that a table can be read and compared."""
    return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: "[" + " ".join(m[1].split()) + "]", text)
