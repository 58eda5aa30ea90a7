"""What a form is: an attention program as a person writes it, its inputs, and what is to become of it.

The programs stand in the other modules of this folder. Nothing here compiles or compares: the tests do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

#: 'sdpa' and 'flex': the kernel that the site must run on; 'decline': it must stay as it is; 'either': it may be
#: swapped or declined, and must be right.
Target = Literal["sdpa", "flex", "fused", "decline", "either"]
#: How the mask must reach the kernel. 'none': no mask at all; 'causal': `is_causal=True` and no operand; 'operand': an
#: `attn_mask`, or what stands for one in FlexAttention; 'free': not checked.
MaskForm = Literal["none", "causal", "operand", "free"]


@dataclass(frozen=True)
class Sizes:
    """Sizes that differ from each other, so that a confusion of axes cannot cancel out."""

    batch: int = 3
    heads: int = 4
    kv_heads: int = 2
    length: int = 20
    keys: int = 28
    dim: int = 16

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.dim


@dataclass(frozen=True)
class Form:
    """One program.

    Attributes:
        name: the function or class.
        program: the function, or the module class, which is made with the sizes.
        inputs: makes the inputs, in float32; those that require a gradient get one compared.
        target: what must become of each site without a gradient; `train` the same where a backward follows.
        sites: attention sites in the program.
        mask: how the mask reaches the kernel.
        scale: factor of the scores as the kernel's `scale`, from the sizes; None where it is not checked.
        gqa: True where the kernel must read shared key heads itself (`enable_gqa`).
        reason: pattern that the reason of a decline must match; empty where no site need be mentioned.
        group: 'form', or 'mask' and 'almost' for `test_mask_idioms`.
        dynamic: also compiled once with dynamic shapes and called at several lengths.
        dropout: drops attention weights with this probability while training.
    """

    name: str
    program: Any
    inputs: Callable[[Sizes], list[Any]]
    target: Target = "sdpa"
    train: Target = "sdpa"
    sites: int = 1
    mask: MaskForm = "none"
    scale: Callable[[Sizes], float] | None = None
    gqa: bool = False
    reason: str = ""
    group: str = "form"
    dynamic: bool = False
    dropout: float = 0.0

    @property
    def file(self) -> str:
        """Where the program stands."""
        return inspect.getsourcefile(self.program) or ""

    def build(self, dtype: torch.dtype, training: bool, sizes: Sizes | None = None) -> tuple[Any, list[Any]]:
        """The program and fresh inputs in `dtype`; without `training` nothing requires a gradient."""
        sizes = sizes or Sizes()
        program = self.program(sizes) if isinstance(self.program, type) else self.program
        if isinstance(program, nn.Module):
            program = program.to(dtype).train(training).requires_grad_(training)
        return program, [_cast(t, dtype, training) for t in self.inputs(sizes)]


def _cast(value: Any, dtype: torch.dtype, training: bool) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().to(dtype).requires_grad_(training and value.requires_grad)


#: Filled by `form` when the modules of this folder are imported.
FORMS: list[Form] = []


def heads_first(s: Sizes) -> list[Any]:
    """q, k, v of (batch, heads, length, dim)."""
    return [rand(s.batch, s.heads, s.length, s.dim) for _ in range(3)]


def heads_last(s: Sizes) -> list[Any]:
    """q, k, v of (batch, length, heads, dim)."""
    return [rand(s.batch, s.length, s.heads, s.dim) for _ in range(3)]


def flat(s: Sizes) -> list[Any]:
    """q, k, v of (batch x heads, length, dim)."""
    return [rand(s.batch * s.heads, s.length, s.dim) for _ in range(3)]


def crossed(s: Sizes) -> list[Any]:
    """q of (batch, heads, length, dim); k and v of (batch, heads, keys, dim)."""
    q, k, v = (s.batch, s.heads, s.length, s.dim), *[(s.batch, s.heads, s.keys, s.dim)] * 2
    return [rand(*q), rand(*k), rand(*v)]


def grouped(s: Sizes) -> list[Any]:
    """q of (batch, heads, length, dim); k and v of (batch, kv_heads, length, dim)."""
    q, k, v = (s.batch, s.heads, s.length, s.dim), *[(s.batch, s.kv_heads, s.length, s.dim)] * 2
    return [rand(*q), rand(*k), rand(*v)]


def tokens(s: Sizes) -> list[Any]:
    """x of (batch, length, width)."""
    return [rand(s.batch, s.length, s.width)]


def keep(s: Sizes) -> torch.Tensor:
    """A padding mask of (batch, length), True where a token is real; every row has some."""
    lengths = torch.randint(s.length // 2, s.length + 1, (s.batch, 1))
    return torch.arange(s.length)[None, :] < lengths


def rand(*shape: int) -> torch.Tensor:
    """Normal numbers that get a gradient."""
    return torch.randn(*shape).requires_grad_()


def root(s: Sizes) -> float:
    """1 / sqrt(head dim)."""
    return float(s.dim**-0.5)


def one(_: Sizes) -> float:
    """No scale."""
    return 1.0


def form(inputs: Callable[[Sizes], list[Any]] = heads_first, **expected: Any) -> Callable[[Any], Any]:
    """Registers a function or a module class; `train` is `target` unless given."""

    def register(program: Any) -> Any:
        train = expected.get("train", expected.get("target", "sdpa"))
        FORMS.append(Form(program.__name__, program, inputs, **{**expected, "train": train}))
        return program

    return register
