"""What the processor at hand multiplies fast, and by which library: asked of torch, never measured.

A leaf that every pass may ask; nothing is decided here.
"""

from __future__ import annotations

import functools
from typing import Final

import torch

from optpass.reporting.environment import cpu_model

#: Dtypes that processors without instructions for them multiply one number after another.
_HALF: Final = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@functools.cache
def instructions() -> str:
    """Vector instructions that torch's attention and products use here, and the half precisions that its libraries
    multiply with them: 'AVX2', 'AVX512 bfloat16'."""
    try:
        fast = {
            "bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
            "float16": torch.ops.mkldnn._is_mkldnn_fp16_supported(),
        }
    except (AttributeError, RuntimeError):  # a torch without oneDNN, or one where the questions are asked otherwise
        fast = {}
    return " ".join([torch.backends.cpu.get_cpu_capability(), *(dtype for dtype, there in fast.items() if there)])


def multiplied_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products of `dtype` are the fastest: float32 for half precision that has no instructions."""
    name = _HALF.get(dtype)
    return dtype if name is None or name in instructions().split() else torch.float32


@functools.cache
def slow_library() -> bool:
    """Whether float32 products of PyTorch leave half of this processor unused, and another library is at hand."""
    return (
        torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and "intel" not in cpu_model().lower()
        and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call, unused-ignore]
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call, unused-ignore]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
