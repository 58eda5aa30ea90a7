"""Conditions that the tables put on a problem and its device: `when = { training = true, head_dim_above = 192 }`.

A table of conditions holds where each of them does. No kernel and no figure is named here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from optpass.errors import ConfigError
from optpass.passes.attention.problem import Problem
from optpass.passes.processor import slow_library

_SM = re.compile(r"sm_(\d+)(\d)[a-z]?")


@dataclass(frozen=True)
class Situation:
    """A problem on a device.

    Attributes:
        problem: what is to be computed.
        arch: 'cpu', 'sm_90', 'gfx942', ...; None where it is not known.
        cudnn: cuDNN's version as torch gives it, 91501 for 9.15.1; None where it is not known.
    """

    problem: Problem
    arch: str | None = None
    cudnn: int | None = None

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of an NVIDIA GPU; None for other devices and where it is not known."""
        match = _SM.fullmatch(self.arch or "")
        return (int(match[1]), int(match[2])) if match else None

    @property
    def dtype(self) -> str:
        """Dtype of q, k and v: 'bfloat16'."""
        return str(self.problem.dtype).removeprefix("torch.")


def _capability(holds: Callable[[tuple[int, int], tuple[int, int]], bool]) -> Callable[[Situation, Any], bool]:
    return lambda at, limit: at.capability is not None and holds(at.capability, (limit[0], limit[1]))


def _multiple(value: float, step: float) -> bool:
    return math.isclose(value / step, round(value / step), abs_tol=1e-9)


def _head_dims(at: Situation) -> list[int]:
    return [at.problem.head_dim, at.problem.value_dim]


#: Condition -> whether it holds, given what the table writes for it. A version of cuDNN that is not known counts as
#: one that a rule is about: rules only ever take kernels away.
CONDITIONS: Mapping[str, Callable[[Situation, Any], bool]] = MappingProxyType(
    {
        "arch": lambda at, names: at.arch in names,
        "arch_not": lambda at, names: at.arch not in names,
        "amd": lambda at, wanted: (at.arch or "").startswith("gfx") is wanted,
        "capability_below": _capability(lambda has, limit: has < limit),
        "capability_above": _capability(lambda has, limit: has > limit),
        "cudnn_below": lambda at, limit: at.cudnn is None or at.cudnn < limit,
        "cudnn_within": lambda at, limits: at.cudnn is None or limits[0] <= at.cudnn <= limits[1],
        "slow_library": lambda at, wanted: slow_library() is wanted,
        "dtype": lambda at, names: at.dtype in names,
        "training": lambda at, wanted: at.problem.training is wanted,
        "mask": lambda at, kinds: at.problem.mask in kinds,
        "mask_symbolic": lambda at, wanted: at.problem.mask_symbolic is wanted,
        "square": lambda at, wanted: (at.problem.queries == at.problem.keys) is wanted,
        "changes_scores": lambda at, wanted: bool(at.problem.score_ops) is wanted,
        "dropout": lambda at, wanted: (at.problem.dropout > 0) is wanted,
        "dropout_above": lambda at, limit: at.problem.dropout > limit,
        "dropout_step": lambda at, step: not _multiple(at.problem.dropout, step),
        "head_dim_above": lambda at, limit: max(_head_dims(at)) > limit,
        "head_dim_up_to": lambda at, limit: max(_head_dims(at)) <= limit,
        "score_dim": lambda at, dims: at.problem.head_dim in dims,
        "head_dims_not": lambda at, pairs: _head_dims(at) not in pairs,
        "value_dim_differs": lambda at, wanted: (at.problem.value_dim != at.problem.head_dim) is wanted,
        "queries": lambda at, count: at.problem.queries == count,
        "keys": lambda at, count: at.problem.keys == count,
        "keys_symbolic": lambda at, wanted: at.problem.keys_symbolic is wanted,
        "keys_multiple_of": lambda at, step: at.problem.keys % step == 0,
        "keys_not_multiple_of": lambda at, step: at.problem.keys % step != 0,
        "lengths_not_multiple_of": lambda at, step: at.problem.queries % step != 0 or at.problem.keys % step != 0,
        "batch_above": lambda at, limit: at.problem.batch > limit,
        "heads_above": lambda at, limit: at.problem.heads > limit,
    }
)


def check(when: Mapping[str, Any], where: str) -> None:
    """Raises `ConfigError` for a table of conditions that is empty or names one that does not exist."""
    if not when:
        raise ConfigError(f"{where}: 'when' has no conditions")
    for name in when:
        if name not in CONDITIONS:
            raise ConfigError(f"{where}: unknown condition {name!r}; valid: {', '.join(CONDITIONS)}")


def hold(when: Mapping[str, Any], at: Situation) -> bool:
    """Whether every condition of the table holds."""
    return all(CONDITIONS[name](at, value) for name, value in when.items())
