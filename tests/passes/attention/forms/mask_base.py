"""An attention around a mask idiom, so that an idiom is written as what it does to the scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from attention_forms.base import FORMS, Form, Sizes, heads_first
from torch import Tensor, nn


def idiom(mask: str, inputs: Callable[[Sizes], list[Any]] = heads_first, **expected: Any) -> Callable[[Any], Any]:
    """Registers `function(scores, *more)`; `scores` are (batch, heads, queries, keys), scaled."""

    def register(function: Any) -> Any:
        def program(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
            return F.softmax(function(q @ k.mT * q.shape[-1] ** -0.5, *more), dim=-1) @ v

        _add(function.__name__, program, inputs, mask, expected)
        return function

    return register


class Masked(nn.Module):
    """Base of idioms that keep a buffer: `made` gives it, `mask(scores)` uses it."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.register_buffer("bias", self.made(64))

    def made(self, size: int) -> Tensor:
        """The buffer, for at most `size` positions."""
        raise NotImplementedError

    def mask(self, scores: Tensor) -> Tensor:
        """The scores, masked."""
        raise NotImplementedError

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(self.mask(q @ k.mT * q.shape[-1] ** -0.5), dim=-1) @ v


def buffer_idiom(
    mask: str, inputs: Callable[[Sizes], list[Any]] = heads_first, **expected: Any
) -> Callable[[Any], Any]:
    """Registers a subclass of `Masked`."""

    def register(program: Any) -> Any:
        _add(program.__name__, program, inputs, mask, expected)
        return program

    return register


def _add(name: str, program: Any, inputs: Callable[[Sizes], list[Any]], mask: str, expected: dict[str, Any]) -> None:
    given = {"target": "fused", "train": "fused", "group": "mask", **expected}
    FORMS.append(Form(name, program, inputs, mask=mask, **given))  # type: ignore[arg-type]
