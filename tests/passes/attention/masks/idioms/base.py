"""What a mask idiom is, and where the idioms of the other modules are registered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

INF = float("-inf")
LOWEST = torch.finfo(torch.float32).min
BATCH, LENGTH, PAST = 2, 9, 4


@dataclass
class Idiom:
    """A mask of T queries and T keys (`past`: PAST more), and what is to be proved of it."""

    function: Callable[..., torch.Tensor]
    kind: str
    keep: bool = True
    fill: float | None = None
    never_empty: bool = True
    window: tuple[int, int] | None = None
    past: bool = False
    parts: tuple[str, ...] = ()
    buffer: bool = False


IDIOMS: dict[str, Idiom] = {}


def proves(kind: str, **facts: Any) -> Callable[[Any], Any]:
    """Registers a mask: a function of x (B, T, 4), the past x (B, T + PAST, 4), and buffers by name."""

    def register(function: Any) -> Any:
        IDIOMS[function.__name__] = Idiom(function, kind, **facts)
        return function

    return register


def steps(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return torch.arange(x.shape[1], **kwargs)


def square(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return torch.ones(x.shape[1], x.shape[1], **kwargs)
