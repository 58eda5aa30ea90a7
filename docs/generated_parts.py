"""What `generate.py` writes into the documents: one function per part, its name the part's name.

What a part says is decided where the thing itself is defined (field descriptions, docstrings, tables), never here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from markdown_text import default, records_in, table, type_name

ROOT = Path(__file__).resolve().parent.parent


def options() -> str:
    """Options of the backend."""
    from optpass.option_tables import TABLES
    from optpass.options import ENV_PREFIX, Options

    rows: list[tuple[object, ...]] = []
    for key, field in Options.model_fields.items():
        inside = TABLES[key].model_fields if key in TABLES else {}
        # A word alone sets the first key of such an option, so that key's default is the default.
        kind = "word or table" if inside else type_name(field.annotation)
        value = default(next(iter(inside.values()), field))
        rows.append((f"`{key}`", kind, value, f"`{ENV_PREFIX}{key.upper()}`", field.description))
        rows += [
            (f"`{key}.{name}`", type_name(item.annotation), default(item), "", item.description)
            for name, item in inside.items()
        ]
    return table(("option", "type", "default", "variable", "meaning"), rows)


def training() -> str:
    """Keys of a training file."""
    from optpass.training.config import keys

    rows = ((f"`{key}`", type_name(f.annotation), default(f), f.description) for key, f in keys().items())
    return table(("key", "type", "default", "meaning"), rows)


def passes() -> str:
    """The passes, in the order in which they run."""
    from optpass.passes.order import ordered
    from optpass.passes.registry import PASSES

    by_name = {item.name: item for item in PASSES}
    built = [item.from_options(_default_options()) for item in PASSES]
    running = [item.name for item in ordered([item for item in built if item is not None])]
    names = [*running, *(name for name in by_name if name not in running)]
    return table(
        ("pass", "stage", "tier", "what it does"),
        ((f"`{name}`", by_name[name].stage, by_name[name].tier, by_name[name].summary) for name in names),
    )


def _default_options() -> Any:
    from optpass.options import Options

    return Options()


def models() -> str:
    """The reference models."""
    from optpass.models import registry

    return table(
        ("model", "sizes", "what it is"),
        (
            (f"`{name}`", ", ".join(f"`{size}`" for size in registry.sizes(name)), registry.describe(name))
            for name in registry.names()
        ),
    )


def conventions() -> str:
    """How FLOPs are counted."""
    from optpass.passes.roofline.flops import conventions as listed

    return table(("topic", "convention"), listed())


def devices() -> str:
    """Every figure of every device with its source; the sources are numbered in order of first use."""
    from optpass.passes.devices import table as specs

    numbers: dict[str, int] = {}
    parts = []
    for spec in specs().values():
        by_source: dict[str, list[str]] = {}
        for figure, source in _figures(spec):
            by_source.setdefault(source, []).append(figure)
        rows = [
            (", ".join(figures), f"[{numbers.setdefault(source, len(numbers) + 1)}](#sources)")
            for source, figures in by_source.items()
        ]
        parts.append(f"### {spec.key}: {spec.name}\n\n{table(('figures', 'source'), rows)}")
    listed = "\n".join(f"{number}. {source}" for source, number in numbers.items())
    return "\n".join([*parts, f"### Sources\n\n{listed}\n"])


#: Field of a spec -> what a figure of it is called, factor to the unit of datasheets, unit. `{}` is the dtype.
_FIGURES: dict[str, tuple[str, float, str]] = {
    "peak_flops": ("{}", 1e-12, " TFLOP/s"),
    "efficiency": ("{} reaches", 100, "%"),
    "bandwidth": ("memory", 1e-9, " GB/s"),
    "bandwidth_efficiency": ("copies reach", 100, "%"),
    "memory_bytes": ("memory", 2**-30, " GiB"),
    "l2_bytes": ("shared cache", 2**-20, " MiB"),
    "sm_count": ("multiprocessors", 1, ""),
    "launch_s": ("launch", 1e6, " us"),
    "nvlink_bytes_per_s": ("links to other devices", 1e-9, " GB/s each way"),
    "pcie_bytes_per_s": ("link to the host", 1e-9, " GB/s each way"),
    "capability": ("compute capability", 1, ""),
}


def _figures(spec: Any) -> Iterator[tuple[str, str]]:
    """(figure with its unit, source) of everything known of a device, e.g. 'bfloat16 989.5 TFLOP/s'."""
    for field, (label, factor, unit) in _FIGURES.items():
        value = getattr(spec, field)
        if field == "capability" and value is not None:
            yield f"{label} {value[0]}.{value[1]}", spec.sources[field]
        elif isinstance(value, Mapping):
            for dtype, rate in value.items():
                yield f"{label.format(dtype)} {rate * factor:.5g}{unit}", spec.sources[f"{field}.{dtype}"]
        elif value is not None:
            yield f"{label} {value * factor:.5g}{unit}", spec.sources[field]


def cli() -> str:
    """Every verb: usage, what it does, its arguments and options, as `optpass VERB --help` has them."""
    import typer

    from optpass.cli.app import app

    group: Any = typer.main.get_command(app)
    top = typer.Context(group, info_name="optpass", **group.context_settings)
    parts = [f"{group.help}\n\n{_flags(group, top)}"]
    for name, command in group.commands.items():
        context = typer.Context(command, info_name=name, parent=top)
        usage = " ".join(["optpass", name, *command.collect_usage_pieces(context)])
        help_text = inspect.cleandoc(command.help or "")
        parts.append(f"## optpass {name}\n\n```text\n{usage}\n```\n\n{help_text}\n\n{_flags(command, context)}")
    return "\n".join(parts)


def _flags(command: Any, context: Any) -> str:
    """Arguments and options as the help names them, ranges and defaults included."""
    records = (parameter.get_help_record(context) for parameter in command.get_params(context))
    return table(("argument or option", "meaning"), ((f"`{names}`", text) for names, text in filter(None, records)))


def schema() -> str:
    """The records of reports and analyses, outermost first."""
    from optpass.reporting import model

    return _records(model.Report, model.Analysis)


def plan_records() -> str:
    """The records of memory plans, outermost first."""
    from optpass.reporting.plan.model import PlanReport

    return _records(PlanReport)


def optimizers() -> str:
    """The optimizers of the memory ledger, and what they keep for a float32 matrix of 1000 x 1000 on a CPU."""
    import torch

    from optpass.passes.memory.optimizers import optimizers as listed
    from optpass.passes.memory.optimizers.rehearsal import ParameterSize

    matrix = ParameterSize((1000, 1000), torch.float32)
    rows = []
    for name, entry in listed.entries().items():
        cost = listed.cost(name, [matrix], gpu=False)
        each = (f"{size / matrix.nbytes:.3g}" for size in (cost.state_bytes, cost.step_bytes))
        rows.append((f"`{name}`", *each, entry.source))
    return table(("optimizer", "state", "temporaries of a step", "source"), rows)


def _records(*outermost: type[BaseModel]) -> str:
    found: dict[str, type[BaseModel]] = {}

    def visit(record: type[BaseModel]) -> None:
        if record.__name__ not in found:
            found[record.__name__] = record
            for field in record.model_fields.values():
                for inner in records_in(field.annotation):
                    visit(inner)

    for record in outermost:
        visit(record)
    parts = []
    for name, shown in found.items():
        rows = (
            (f"`{field.alias or key}`", type_name(field.annotation), field.description or "")
            for key, field in shown.model_fields.items()
        )
        parts.append(
            f"### {name}\n\n{' '.join((shown.__doc__ or '').split())}\n\n{table(('key', 'type', 'meaning'), rows)}"
        )
    return "\n".join(parts)


def benchmarks() -> str:
    """One line per committed result: the claim, what was found, where, and the command that measures it again."""
    rows = [
        (
            f"{result.claim}",
            f"**{_verdict(result)}**: {result.finding}",
            _conditions(result),
            f"`{_rerun(result)}`",
        )
        for result in _results()
    ]
    return table(("claim", "measured", "on", "again with"), rows) if rows else ""


#: Rows of a result beyond which a page has those alone that fall short, and the totals.
_MANY = 100


def measurements() -> str:
    """Every committed result; of very long ones the totals and what falls short of the whole."""
    from optpass.bench.table import columns

    parts = []
    for result in _results():
        short = [row for row in result.rows if row.group == "all" or row.median is None or row.median < 1.0]
        rows = result.rows if len(result.rows) <= _MANY else tuple(short)
        headers, lines = columns(rows)
        notes = "".join(f"- {note}\n" for note in result.notes)
        head = f"## {result.name}, {result.environment.kind}\n\n{result.claim}\n\n"
        found = f"**{_verdict(result)}**: {result.finding}\n\n"
        conditions = f"{_conditions(result)}; {result.created[:10]}. Again with `{_rerun(result)}`.\n\n"
        if len(rows) < len(result.rows):
            conditions += f"{len(result.rows) - len(rows)} more rows, with nothing missing, are in `bench/results`.\n\n"
        parts.append(head + found + conditions + table(headers, lines) + (f"\n{notes}" if notes else ""))
    return "\n".join(parts)


def _results() -> list[Any]:
    from optpass.bench.result import from_json

    paths = sorted((ROOT / "bench" / "results").glob("*.json"))
    return [from_json(path.read_text(encoding="utf-8"), path.name) for path in paths]


def _verdict(result: Any) -> str:
    return {True: "holds", False: "does not hold", None: "undecided"}[result.passed]


def _conditions(result: Any) -> str:
    from optpass.bench.table import conditions

    return conditions(result)


def _rerun(result: Any) -> str:
    """The command with everything that was chosen, so that a later change of defaults does not change its meaning."""
    command = f"optpass bench {result.name} --device {result.environment.device_kind}"
    if result.config.get("inner") not in (None, "inductor"):
        command += f" --inner {result.config['inner']}"
    for key, flag in (("rounds", "--rounds"), ("budget_s", "--budget"), ("seed", "--seed")):
        value = result.config.get(key)
        if value is not None:
            command += f" {flag} {value:g}"
    return command


PARTS: dict[str, Callable[[], str]] = {
    part.__name__: part
    for part in (
        options, training, passes, models, conventions, devices, cli, schema, benchmarks, measurements,
        plan_records, optimizers,
    )
}  # fmt: skip
