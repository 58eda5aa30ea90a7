"""The kernels of the tables (`kernels_*.toml`, one file per device type) and what each of them refuses.

Table format, one TOML table per kernel. Its fields:

- `title`, `target` ('sdpa', 'flex' or 'blocks'), `backend` (its name in `torch.nn.attention.SDPBackend`), `sources`
  (keys of `sources.toml`), `dtypes`;
- `head_dim`: `min`, `max` and `multiple` (a number, or one by dtype), for queries and values alike; `value_dim`: 'same'
  as `head_dim`, or 'any';
- `masks` of `Problem.mask` and `score_ops` of `Problem.score_ops` that it can do; `mask_grad`, `gqa`, `training`,
  `dropout`: whether it has them; `same_dropout_stream`: it draws what `F.dropout` on the probabilities would;
- `skips`: masked blocks that it does not compute; `fused`: it makes no tensor of batch x heads x queries x keys;
- `masked_rows`: what a query without keys gives under a mask of minus infinity, "" where that was not measured;
- `unit_stride`: the last dim of q, k and v must have stride 1;
- `refuses`, `materialises`: lists of `when` (see `conditions`), `why`, `source`; `checked = false` marks what not every
  supported torch looks for, so that SDPA may take the kernel there;
- `widens`: such a list, each with `to`, the dtype that the operands are given in where they would be less exact in
  their own than the written program.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal

import torch

from optpass.errors import ConfigError
from optpass.passes.attention.targets.conditions import Situation, check, hold

#: Device type -> file of its kernels.
FILES = MappingProxyType({"cpu": "kernels_cpu.toml", "cuda": "kernels_cuda.toml"})
SOURCES = "sources.toml"

Target = Literal["sdpa", "flex", "blocks"]

_REQUIRED = (
    "title target sources dtypes head_dim value_dim masks mask_grad gqa training dropout score_ops skips fused "
    "unit_stride".split()
)
_OPTIONAL = {
    "backend": "", "masked_rows": "", "same_dropout_stream": False, "refuses": [], "materialises": [], "widens": [],
}  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """Where something holds of a kernel, why, and who says so.

    Attributes:
        checked: every supported torch looks for it.
        to: dtype of the operands where it holds; None for their own.
    """

    when: Mapping[str, Any]
    why: str
    source: str
    checked: bool = True
    to: torch.dtype | None = None

    def says(self, at: Situation) -> str:
        """The reason with the figures of the problem in it; empty where the rule does not hold."""
        return self.why.format_map(asdict(at.problem)) if hold(self.when, at) else ""


@dataclass(frozen=True)
class HeadDim:
    """Head dims that a kernel takes: from `min` to `max` (None: no limit), multiples by dtype."""

    min: int
    max: int | None
    multiple: Mapping[str, int]

    def refusal(self, size: int, dtype: str, name: str) -> str:
        """Why it does not take a `name` of `size`; empty where it does."""
        step = self.multiple.get(dtype, 1)
        if size < self.min:
            return f"takes no {name} under {self.min}: {size}"
        if self.max is not None and size > self.max:
            return f"takes no {name} above {self.max}: {size}"
        return f"needs a {name} that is a multiple of {step}: {size}" if size % step else ""


@dataclass(frozen=True)
class Kernel:
    """One kernel on one device type; the fields are those of the tables (see the module)."""

    name: str
    device: str
    title: str
    target: Target
    backend: str
    sources: tuple[str, ...]
    dtypes: frozenset[str]
    head_dim: HeadDim
    value_dim: Literal["same", "any"]
    masks: frozenset[str]
    mask_grad: bool
    gqa: bool
    training: bool
    dropout: bool
    same_dropout_stream: bool
    score_ops: frozenset[str]
    skips: frozenset[str]
    fused: bool
    masked_rows: str
    unit_stride: bool
    refuses: tuple[Rule, ...]
    materialises: tuple[Rule, ...]
    widens: tuple[Rule, ...]

    def refusal(self, at: Situation, *, by_torch: bool = False) -> str:
        """Why it cannot compute the problem, beginning with a verb; empty where it can.

        Args:
            by_torch: look only at what every supported torch checks before it takes the kernel.
        """
        found = self._sizes(at) or self._features(at)
        rules = (rule.says(at) for rule in self.refuses if rule.checked or not by_torch)
        return found or next(filter(None, rules), "")

    def _sizes(self, at: Situation) -> str:
        problem = at.problem
        if at.dtype not in self.dtypes:
            return f"does not compute in {at.dtype}"
        if self.fused and not all((problem.batch, problem.heads, problem.queries, problem.keys)):
            return "takes no empty tensor"
        found = self.head_dim.refusal(problem.head_dim, at.dtype, "head dim")
        if self.value_dim == "same" and problem.value_dim != problem.head_dim:
            return found or f"needs one head dim for keys and values, not {problem.head_dim} and {problem.value_dim}"
        return found or self.head_dim.refusal(problem.value_dim, at.dtype, "head dim of values")

    def _features(self, at: Situation) -> str:
        problem = at.problem
        if problem.mask not in self.masks:
            return "takes no mask operand" if problem.mask in ("bool", "float") else f"has no {problem.mask} mask"
        if problem.mask_grad and not self.mask_grad:
            return "gives no gradient for the mask"
        if problem.heads != problem.kv_heads and (not self.gqa or not _groups(problem.heads, problem.kv_heads)):
            return f"needs as many key heads as query heads, not {problem.kv_heads} and {problem.heads}"
        if problem.training and not self.training:
            return "has no backward"
        if problem.dropout > 0 and not self.dropout:
            return "has no dropout"
        missing = sorted(problem.score_ops - self.score_ops)
        return f"cannot change scores by {' or '.join(missing)}" if missing else ""

    def made(self, at: Situation) -> str:
        """What of batch x heads x queries x keys it puts in memory, in words; empty for nothing."""
        if not self.fused:
            return "the scores of all queries and keys are put in memory"
        return next(filter(None, (rule.says(at) for rule in self.materialises)), "")

    def widened(self, at: Situation) -> Rule | None:
        """Why it is given operands of a wider dtype, and which; None for their own."""
        return next((rule for rule in self.widens if rule.says(at)), None)


def _groups(heads: int, kv_heads: int) -> bool:
    return kv_heads > 0 and heads % kv_heads == 0


@cache
def sources() -> Mapping[str, str]:
    """Every source by its key."""
    return MappingProxyType(read(SOURCES))


@cache
def kernels(device: str) -> Mapping[str, Kernel]:
    """The kernels of a device type by name, in the order of the table; none for a type without a table.

    Raises:
        ConfigError: a table is malformed; the message names the kernel and the key.
    """
    if device not in FILES:
        return MappingProxyType({})
    found = {name: from_toml(name, device, raw) for name, raw in read(FILES[device]).items()}
    return MappingProxyType(found)


def read(file: str) -> dict[str, Any]:
    """A table that lies beside this module."""
    return tomllib.loads(resources.files(__package__).joinpath(file).read_text(encoding="utf-8"))


def from_toml(name: str, device: str, raw: Mapping[str, Any]) -> Kernel:
    """One kernel from its TOML table.

    Raises:
        ConfigError: a key that is missing or unknown, a source or a condition that does not exist.
    """
    where = f"kernel {name!r} ({device})"
    for key in (*(k for k in _REQUIRED if k not in raw), *(k for k in raw if k not in {*_REQUIRED, *_OPTIONAL})):
        raise ConfigError(f"{where}: {'missing' if key in _REQUIRED else 'unknown'} key {key!r}")
    fields: dict[str, Any] = {**_OPTIONAL, **raw}
    for key in ("dtypes", "masks", "score_ops", "skips"):
        fields[key] = frozenset(fields[key])
    fields["sources"] = tuple(cited(source, where) for source in fields["sources"])
    fields["head_dim"] = _head_dim(fields["head_dim"], fields["dtypes"])
    for key in ("refuses", "materialises", "widens"):
        fields[key] = tuple(_rule(item, where) for item in fields[key])
    return Kernel(name=name, device=device, **fields)


def cited(source: str, where: str) -> str:
    """The key of a source, checked: `ConfigError` where `sources.toml` lacks it."""
    if source not in sources():
        raise ConfigError(f"{where}: source {source!r} is not in {SOURCES}")
    return source


def _head_dim(raw: Mapping[str, Any], dtypes: frozenset[str]) -> HeadDim:
    step = raw.get("multiple", 1)
    by_dtype = step if isinstance(step, dict) else dict.fromkeys(dtypes, step)
    return HeadDim(raw["min"], raw.get("max"), MappingProxyType(by_dtype))


def _rule(raw: Mapping[str, Any], where: str) -> Rule:
    check(raw["when"], where)
    to = getattr(torch, raw["to"]) if "to" in raw else None
    return Rule(MappingProxyType(raw["when"]), raw["why"], cited(raw["source"], where), raw.get("checked", True), to)
