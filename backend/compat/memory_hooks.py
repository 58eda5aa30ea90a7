"""Hooks of saved tensors: whether some pack what autograd saves now, and whether an activation checkpoint's do."""

from __future__ import annotations

from typing import Any

import torch


def packs_what_is_saved() -> bool:
    """Whether hooks of the user's pack what autograd saves now, as those of an activation checkpoint do: in its
    forward, and where its backward runs that forward again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_checkpointed() -> bool:
    """Whether what autograd saves now is packed by an activation checkpoint, which keeps nothing of it."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and checkpoint_of(hooks[1]) is not None


def checkpoint_of(unpack: Any) -> Any | None:
    """The frame of `torch.utils.checkpoint` whose hook `unpack` is; None for another hook."""
    for cell in getattr(unpack, "__closure__", None) or ():
        try:
            held = cell.cell_contents
        except ValueError:  # empty
            continue
        if type(held).__name__ == "_CheckpointFrame":  # torch/utils/checkpoint.py
            return held
    return None
