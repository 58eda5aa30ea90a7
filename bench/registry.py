"""The benchmarks by name, and the protocol that each follows. A new benchmark is one new file and one line here.

A benchmark's module may import torch only inside functions, so that listing the claims stays quick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from optpass import models
from optpass.bench.progress import Progress
from optpass.bench.result import Result
from optpass.errors import ConfigError, did_you_mean

MODULES: Mapping[str, str] = {
    "attention": "optpass.bench.attention",
    "attention_compile": "optpass.bench.attention_compile",
    "attention_coverage": "optpass.bench.attention_coverage",
    "attention_table": "optpass.bench.attention_table",
    "audit_overhead": "optpass.bench.audit_overhead",
    "compile_time": "optpass.bench.compile_time",
    "fusion_bytes": "optpass.bench.fusion_bytes",
    "memory": "optpass.bench.memory",
    "memory_graphs": "optpass.bench.memory_graphs",
    "memory_models": "optpass.bench.memory_models",
    "roofline": "optpass.bench.roofline",
}


@dataclass(frozen=True)
class BenchConfig:
    """What a run of a benchmark may choose. None and () mean the benchmark's own default."""

    models: tuple[str, ...] = ()
    """Names from `Bench.models`; () is all of them, or a few with `quick`."""
    size: str | None = None
    """Size of every model."""
    rounds: int | None = None
    """Samples of each case, at most."""
    budget_s: float | None = None
    """Wall time after which no new round begins."""
    quick: bool = False
    """A look in a minute or so, too short for a verdict."""
    device: str = "cpu"
    """'cpu' or 'cuda'."""
    tolerance: float = 0.03
    """Ratios within 1 +- tolerance count as the same."""
    seed: int = 0
    """Of the order within rounds, the models' weights and the bootstrap."""
    inner: str = "inductor"
    """Inner compiler, for the benchmarks that can measure 'aot_eager' too."""

    @property
    def full(self) -> bool:
        """Whether this is the run that the claim speaks of, rather than a look at a part."""
        return not (self.quick or self.models or self.size or self.inner != "inductor")


@dataclass(frozen=True)
class Bench:
    """One benchmark: its module holds `CLAIM: str` and `run(config, progress) -> Result`.

    Attributes:
        models: what `BenchConfig.models` may name: the module's own `model_names()`, or the names of `optpass.models`.
    """

    name: str
    claim: str
    run: Callable[[BenchConfig, Progress], Result]
    models: Callable[[], Sequence[str]] = models.names


def names() -> tuple[str, ...]:
    """The names of the benchmarks."""
    return tuple(MODULES)


def load(name: str) -> Bench:
    """The benchmark called `name`; a dash stands for an underscore. Raises ConfigError for an unknown name."""
    key = name.replace("-", "_")
    if key not in MODULES:
        raise ConfigError(f"unknown benchmark {name!r}; {did_you_mean(key, MODULES)}")
    module = import_module(MODULES[key])
    return Bench(key, module.CLAIM, module.run, getattr(module, "model_names", models.names))
