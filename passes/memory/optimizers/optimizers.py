"""The optimizers that a budget can count: by name from `optimizers.toml`, by class from `torch.optim`.

What a step needs beside parameters and gradients: the state, and the temporaries of `step()`. Which optimizer a user's
program has is `search`'s business.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

import torch

from optpass.errors import ConfigError, did_you_mean
from optpass.options import Options
from optpass.passes.memory.optimizers.rehearsal import ParameterSize, rehearse
from optpass.passes.memory.workspace.workspace import Library

NONE = "none"


@dataclass(frozen=True)
class OptimizerEntry:
    """One row of `optimizers.toml`; the file's head says what the fields are."""

    name: str
    source: str
    kind: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    only: int | None = None
    others: str | None = None
    states: float = 0.0
    states_per: Mapping[str, float] = field(default_factory=dict)
    bytes_per_element: float | None = None
    own: float = 0.0
    carried: float = 0.0
    every: float = 0.0


@dataclass(frozen=True)
class OptimizerCost:
    """Bytes that an optimizer adds to a training step.

    Attributes:
        name: as in the table, or the class where it is in no table.
        state_bytes: held from one step to the next, on the parameters' device.
        step_bytes: most that `step()` has allocated beside parameters, gradients and state.
        source: where the figures come from.
    """

    name: str
    state_bytes: int
    step_bytes: int
    source: str = ""


@cache
def entries() -> Mapping[str, OptimizerEntry]:
    """Every optimizer of the table, by name. Read once."""
    text = resources.files(__package__).joinpath("optimizers.toml").read_text(encoding="utf-8")
    found = {}
    for name, raw in tomllib.loads(text).items():
        kind = raw.pop("class", None)
        found[name] = OptimizerEntry(name=name, kind=kind, **raw)
    return MappingProxyType(found)


def names() -> tuple[str, ...]:
    """The names that the option `optimizer` takes."""
    return tuple(entries())


def check(options: Options) -> str | None:
    """The option `optimizer` as the table has it; None where it is not set.

    Raises:
        ConfigError: no optimizer of that name; names the nearest.
    """
    if options.optimizer is None:
        return None
    return named(options.optimizer, options.where("optimizer")).name


def named(name: str, where: str = "optimizer") -> OptimizerEntry:
    """The entry called `name`, as `AdamW`, `adam-w` or `torch.optim.AdamW` are 'adamw'.

    Raises:
        ConfigError: no such optimizer; the message begins with `where`.
    """
    folded = _folded(name)
    for entry in entries().values():
        if folded == _folded(entry.name):
            return entry
    raise ConfigError(f"{where}={name!r}: no such optimizer; {did_you_mean(name, names())}")


def by_formula(name: str) -> bool:
    """Whether the table has a formula for an optimizer of this name, rather than a class of torch."""
    return any(_folded(name) == _folded(entry.name) and entry.states for entry in entries().values())


def _folded(name: str) -> str:
    return name.strip().rpartition(".")[2].casefold().replace("_", "").replace("-", "")


def cost(
    name: str,
    parameters: Sequence[ParameterSize],
    *,
    gpu: bool,
    settings: Mapping[str, Any] | None = None,
    where: str = "optimizer",
    library: Library | None = None,
) -> OptimizerCost:
    """What the optimizer `name` needs for these parameters.

    Args:
        name: a name of the table.
        parameters: those that are trained, each once.
        gpu: they are on a GPU, where torch's optimizers work on all of them at once unless told otherwise.
        settings: what it is constructed with, beyond the table's, e.g. {"fused": True}; for a formula, those that
            its state is made of.
        where: what a message begins with.
        library: as for `rehearse`.

    Raises:
        ConfigError: no optimizer of that name.
    """
    entry = named(name, where)
    given = {**entry.settings, **(settings or {})}
    if entry.kind is None or entry.states:
        return OptimizerCost(entry.name, _formula_state(entry, given, parameters),
                             _formula_step(entry, parameters, gpu), entry.source)  # fmt: skip
    mine = [p for p in parameters if entry.only is None or len(p.shape) == entry.only]
    state, step = rehearse(torch_class(entry.kind), [{**given, "params": mine}], gpu=gpu, library=library)
    found = OptimizerCost(entry.name, state, step, entry.source)
    rest = [p for p in parameters if entry.only is not None and len(p.shape) != entry.only]
    if rest and entry.others is not None:
        other = cost(entry.others, rest, gpu=gpu, settings=settings, library=library)
        # Two optimizers step one after another, so their temporaries never meet.
        return replace(
            found, state_bytes=state + other.state_bytes, step_bytes=max(step, other.step_bytes)
        )  # fmt: skip
    return found


def state_bytes(name: str, parameters: Sequence[ParameterSize], *, gpu: bool = False) -> int:
    """Bytes of the state of the optimizer `name`, held from step to step. Raises ConfigError for an unknown name."""
    return cost(name, parameters, gpu=gpu).state_bytes


def step_bytes(name: str, parameters: Sequence[ParameterSize], *, gpu: bool = False) -> int:
    """Most bytes that a step of `name` has allocated beside its state. Raises ConfigError for an unknown name."""
    return cost(name, parameters, gpu=gpu).step_bytes


def torch_class(kind: str) -> type[torch.optim.Optimizer]:
    """A class of `torch.optim` by name.

    Raises:
        ConfigError: this torch does not have it.
    """
    found = getattr(torch.optim, kind, None)
    if found is None:
        raise ConfigError(f"torch {torch.__version__} has no torch.optim.{kind}; name another optimizer")
    return found  # type: ignore[no-any-return]


def _formula_state(entry: OptimizerEntry, settings: Mapping[str, Any], parameters: Sequence[ParameterSize]) -> int:
    width = entry.bytes_per_element
    states = entry.states + sum(each * _number(settings[name]) for name, each in entry.states_per.items())
    return int(sum(states * p.numel * (p.dtype.itemsize if width is None else width) for p in parameters))


def _number(setting: Any) -> float:
    """A setting that is no number counts once where it is set."""
    return setting if isinstance(setting, (int, float)) else float(bool(setting))


def _formula_step(entry: OptimizerEntry, parameters: Sequence[ParameterSize], gpu: bool) -> int:
    if gpu:
        return int(entry.every * sum(p.nbytes for p in parameters))
    before = [0, *(p.nbytes for p in parameters)]
    peaks = [entry.own * p.nbytes + entry.carried * last for p, last in zip(parameters, before, strict=False)]
    return int(max(peaks, default=0))
