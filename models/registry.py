"""The reference models by name: what there is, in which sizes, and how to build one.

Names, sizes and descriptions are data, so that listing them imports neither torch nor a model; a test holds the sizes
against each module's own `SIZES`. No model lives here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from optpass.errors import sizes_of
from optpass.models.presets import unknown

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Entry:
    """One model: the sizes its module builds, in its order, and one line on what it is."""

    sizes: tuple[str, ...]
    description: str


# The key is also the module's name in this package.
ENTRIES: Mapping[str, Entry] = {
    "gpt": Entry(
        ("tiny", "small", "gpt2", "gpt2-xl"),
        "decoder in the manner of nanoGPT: tril mask, learned positions, GELU, dropout, tied head",
    ),
    "llama": Entry(
        ("tiny", "small", "8b", "70b"),
        "Llama-style decoder: grouped-query attention, rotary positions, RMSNorm, SwiGLU",
    ),
    "bert": Entry(
        ("tiny", "small", "base", "large"),
        "encoder with padding mask, token types and masked-language-model head",
    ),
    "vit": Entry(("tiny", "small", "base", "large"), "vision transformer with a class token: 197 tokens at 224 pixels"),
    "t5": Entry(
        ("tiny", "small", "base", "large"),
        "encoder-decoder with relative-position bias, unscaled attention and cross-attention",
    ),
    "unet": Entry(
        ("tiny", "small", "sd15"),
        "one level of a diffusion U-Net: group norm, SiLU, time embedding, self- and cross-attention",
    ),
    "mlp": Entry(("tiny", "small", "base", "large"), "chain of linear layers of width 1001 with GELU between"),
    "dlrm": Entry(("tiny", "small", "criteo"), "click-through model: embedding bags, MLPs, pairwise dot products"),
}


def names() -> tuple[str, ...]:
    """The names of the models, in the order in which they are listed."""
    return tuple(ENTRIES)


def sizes(name: str) -> tuple[str, ...]:
    """The sizes of the model `name`, smallest first. Raises ConfigError for an unknown name."""
    return _entry(name).sizes


def describe(name: str) -> str:
    """One line on what the model `name` is. Raises ConfigError for an unknown name."""
    return _entry(name).description


def build(
    name: str, size: str = "small", *, dtype: torch.dtype | None = None, **overrides: object
) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model `name` in training mode, and a tuple of example inputs to call it with.

    "tiny" is for unit tests, "small" takes 5 to 50 ms forward on one CPU core; the other sizes are real ones, meant
    to be built inside a `FakeTensorMode(allow_non_fake_inputs=True)` or `torch.device("meta")`, where they allocate
    nothing. Parameters and float inputs are `dtype` (float32 where None). Weights and inputs are drawn from torch's
    global generator. `overrides` replace single fields of the size by name (batch, seq, layers, ...), from values or
    strings. Raises ConfigError for an unknown name, size or setting, for values the model cannot have, and for tensors
    that are larger than can be.
    """
    _entry(name)
    module = import_module(f"optpass.models.{name}")
    if dtype is not None:
        overrides["dtype"] = dtype
    said = "".join(f" {key}={value}" for key, value in overrides.items())
    with sizes_of(f"{name}:{size}{said}"):
        built: tuple[nn.Module, tuple[Any, ...]] = module.build(size, **overrides)
    return built


def _entry(name: str) -> Entry:
    if name not in ENTRIES:
        raise unknown("model", name, ENTRIES)
    return ENTRIES[name]
