"""Claim: between the sizes of its table, the attention cost gate chooses right.

Measures on this device the table that the gate reads (`attention_grid`), writes it where the gate finds it, and then
times attention at sizes that are not in it: what the gate would choose there must not be much slower than the better
of the two. A processor is measured with torch's threads, and has a table for each number of them that was measured, for
not all ways share their work among the threads alike. `OMP_NUM_THREADS=1` measures one.

The table goes to `passes/attention/gate/tables` of a source checkout, and to the user's cache folder elsewhere.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from optpass.bench.clocks import check_device
from optpass.bench.environment import Environment, checkout, environment
from optpass.bench.progress import Progress
from optpass.bench.registry import BenchConfig
from optpass.bench.result import Result, Row, slug
from optpass.errors import ConfigError

if TYPE_CHECKING:
    from optpass.bench.attention_grid import Grid
    from optpass.bench.attention_ways import Meter, Point
    from optpass.passes.attention.gate import Table
    from optpass.passes.attention.problem import MaskKind, Problem
    from optpass.passes.devices import DeviceSpec

GOAL = 0.10
CLAIM = (
    f"At sizes between those of its table, what the attention cost gate chooses is at most {GOAL:.0%} slower than the "
    "better of the fused kernel and the inner compiler alone."
)

#: Sizes off the grid, drawn from these ranges, a few of each dtype and mode; on a CPU, such as are kept.
LENGTHS = {"cpu": (20, 1500), "cuda": (200, 6000)}
HEAD_DIMS = (24, 40, 64, 80, 96, 128)
SCORES = {"cpu": (2**17, 2**22), "cuda": (2**24, 2**28)}
CHECKS = 6
#: Share of points at most that may be unsteady; above it, other work on the machine is what was measured.
UNSTEADY = 0.15
#: The mask as a table calls it (unfused, fused) and as a problem does.
MASKS: Sequence[tuple[str, str, MaskKind]] = (
    ("none", "none", "none"),
    ("loaded", "causal", "causal"),
    ("operand", "operand", "float"),
)


def run(config: BenchConfig, progress: Progress) -> Result:
    """Measure the table, write it, and judge it at other sizes. `quick` measures one dtype forward and writes nothing.

    Raises:
        ConfigError: no such device here, or an option that makes no sense of a table.
    """
    from optpass.bench.attention_heap import keep

    check_device(config.device)
    if config.models or config.size:
        raise ConfigError("benchmark attention_table measures no models: leave --models and --size out")
    before = environment(config.device)
    kept = config.device != "cpu" or keep()
    table, meters = measure(config, before, progress)
    rows = list(_checks(config, table, meters, progress))
    after = before.finished()
    table = with_load(table, after)
    unsteady = sum(meter.unsteady for meter in meters) / sum(meter.points for meter in meters)
    written = None if config.quick or unsteady > UNSTEADY else write(table)
    worst = max((float(row.extra["regret"]) for row in rows), default=0.0)
    wrong = sum(float(row.extra["regret"]) > 0 for row in rows)
    skipped = sorted(set().union(*(meter.skipped for meter in meters)))
    return Result(
        name="attention_table",
        claim=CLAIM,
        environment=after,
        config=asdict(config) | {"goal": GOAL},
        rows=tuple(rows),
        passed=worst <= GOAL if written and rows else None,
        finding=f"{wrong} of {len(rows)} choices were the slower one, the worst {worst:.1%} slower (goal {GOAL:.0%})",
        notes=(
            f"table: {written}" if written else "no table was written: a quick look, or too unsteady a machine",
            f"{unsteady:.0%} of the points did not give the same time twice (at most {UNSTEADY:.0%} in a table)",
            *(() if kept else ("the allocator is not glibc: buffers may have been mapped anew in any of the figures",)),
            *(f"refused by the device: {line}" for line in skipped),
        ),
    )


def measure(config: BenchConfig, place: Environment, progress: Progress) -> tuple[Table, list[Meter]]:
    """The table of this device, and the meters it was measured with, warm."""
    import torch

    from optpass.bench.attention_grid import GRIDS, figures
    from optpass.bench.attention_ways import Meter, copy_ns
    from optpass.passes.attention.gate.table import Table, key
    from optpass.passes.processor import instructions

    grid = GRIDS[config.device]
    modes = [(dtype, training) for dtype in (*grid.dtypes, *grid.brief) for training in (False, True)]
    meters = [Meter(config.device, dtype, training) for dtype, training in (modes[:1] if config.quick else modes)]
    progress.start(len(meters) + 1)
    torch.manual_seed(config.seed)
    found = {}
    for meter in meters:
        found[key(meter.dtype, meter.training)] = figures(grid, meter, progress)
        progress.step("", count=1)
    cpu = config.device == "cpu"
    table = Table(
        device=_spec(config.device).name if not cpu else place.cpu,
        kind=config.device,
        instructions=instructions() if cpu else "",
        threads=place.threads if cpu else 1,
        torch=place.torch,
        command="optpass bench attention_table" + ("" if cpu else f" --device {config.device}"),
        created=datetime.datetime.now(datetime.UTC).date().isoformat(),
        load=(place.load_before, place.load_before),
        axes=grid.axes,
        base=grid.base,
        copy=copy_ns(config.device),
        figures=found,
    )
    return table, meters


def with_load(table: Table, place: Environment) -> Table:
    """The table with the load averages before and after."""
    import dataclasses

    return dataclasses.replace(table, load=(place.load_before, place.load_after))


def write(table: Table) -> Path:
    """Write the table where the gate finds it; the path, for people."""
    from optpass.passes.attention.gate.lookup import folder
    from optpass.reporting.files import write_text

    root = checkout()
    place = root / "passes" / "attention" / "gate" / "tables" if root else folder()
    place.mkdir(parents=True, exist_ok=True)
    threads = f" {table.threads} threads" if table.threads > 1 else ""
    target = place / f"{slug(f'{table.device} {table.instructions}{threads}')}.json"
    write_text(table.to_json(), target)
    return target.relative_to(root) if root else target


def _checks(config: BenchConfig, table: Table, meters: Sequence[Meter], progress: Progress) -> Iterator[Row]:
    """One row for each size off the grid: measured and predicted, and what choosing by the prediction costs."""
    from optpass.bench.attention_grid import GRIDS

    spec, grid = _spec(config.device), GRIDS[config.device]
    for meter in meters:
        rng = random.Random(f"{config.seed} {meter.dtype} {meter.training}")
        for number in range(CHECKS):
            point, mask = _drawn(rng, config.device), MASKS[number % len(MASKS)]
            if meter.dtype in grid.brief:
                mask = MASKS[0]
            progress.step(f"{meter.dtype}: checking {point}")
            yield from _check(meter, table, spec, point, mask, grid)
    progress.step("", count=1)


def _check(
    meter: Meter, table: Table, spec: DeviceSpec, point: Point, mask: tuple[str, str, MaskKind], grid: Grid
) -> Iterator[Row]:
    from optpass.passes.attention.gate import CAUTION, Found, fused, unfused

    problem, known = _problem(meter, point, mask[2]), Found(table, "measured")
    ways = {"unfused": ("unfused", mask[0])} | {kernel: (kernel, mask[1]) for kernel in grid.kernels}
    taken = meter.measure(point, ways)
    alone = unfused(problem, spec, table=known)
    for kernel in grid.kernels:
        price = fused(problem, kernel, spec, table=known)
        if price is None or kernel not in taken or "unfused" not in taken:
            continue
        chosen, other = ("unfused", kernel) if price.us * CAUTION[price.fit] > alone.us else (kernel, "unfused")
        yield Row(
            case=f"{kernel} {mask[2]} S={point.keys} hd={point.dim} heads={point.heads}",
            group=f"{meter.dtype} {'training' if meter.training else 'forward'}",
            unit="ns/score",
            median=taken[kernel],
            extra={
                "unfused ns": taken["unfused"],
                "predicted": price.us * 1e3 / point.scores,
                "unfused predicted": alone.us * 1e3 / point.scores,
                "regret": max(0.0, taken[chosen] / taken[other] - 1),
            },
        )


def _drawn(rng: random.Random, device: str) -> Point:
    """A size between those of the grid, each extent drawn evenly in its logarithm."""
    from optpass.bench.attention_ways import Point

    def even(low: float, high: float) -> float:
        return float(low * (high / low) ** rng.random())

    length = round(even(*LENGTHS[device]))
    return Point(length, length, rng.choice(HEAD_DIMS), max(2, round(even(*SCORES[device]) / length**2)))


def _problem(meter: Meter, point: Point, mask: MaskKind) -> Problem:
    import torch

    from optpass.passes.attention.problem import Problem

    return Problem(
        device=meter.device, dtype=getattr(torch, meter.dtype), batch=1, heads=point.heads, kv_heads=point.heads,
        queries=point.queries, keys=point.keys, head_dim=point.dim, value_dim=point.dim, mask=mask,
        score_dtype=getattr(torch, meter.dtype),
        mask_numel=point.queries * point.keys if mask == "float" else 0, training=meter.training,
    )  # fmt: skip


def _spec(device: str) -> DeviceSpec:
    import torch

    from optpass.backend.device import actual

    return actual(torch.device(device))
