"""What the processor at hand multiplies fast, and by which library: asked of torch, never measured.

A leaf that every pass may ask; nothing is decided here.
"""

from __future__ import annotations

import functools
from typing import Final

import torch

from optpass.reporting.environment import cpu_family

#: Dtypes that processors without instructions for them multiply one number after another.
_HALF: Final = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


#: Of AMD's processors with AVX-512, the families of those whose vector units are 512 bits wide, and their models with
#: narrower ones all the same. Zen 4 (family 25) takes two turns for an instruction, so AVX2 is as fast there (AMD,
#: Software Optimization Guide for the AMD Zen4, and for the AMD Zen5 Microarchitecture, "Floating Point Unit").
_WIDE_FAMILIES: Final = (26,)
_NARROW_MODELS: Final = {26: (*range(0x20, 0x30), *range(0x60, 0x80))}


@functools.cache
def instructions() -> str:
    """Vector instructions that torch's attention and products use here, how wide the units below AVX-512 are where they
    are not as wide, and the half precisions that its libraries multiply with them: 'AVX2', 'AVX512 bfloat16',
    'AVX512 256-bit bfloat16'."""
    try:
        fast = {
            "bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
            "float16": torch.ops.mkldnn._is_mkldnn_fp16_supported(),
        }
    except (AttributeError, RuntimeError):  # a torch without oneDNN, or one where the questions are asked otherwise
        fast = {}
    vectors = torch.backends.cpu.get_cpu_capability()
    width = ["256-bit"] if vectors.startswith("AVX512") and _amd() and not _wide() else []
    return " ".join([vectors, *width, *(dtype for dtype, there in fast.items() if there)])


def multiplied_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products of `dtype` are the fastest: float32 for half precision that has no instructions."""
    name = _HALF.get(dtype)
    return dtype if name is None or name in instructions().split() else torch.float32


@functools.cache
def slow_library() -> bool:
    """Whether float32 products of PyTorch leave half of this processor unused, and another library is at hand.

    MKL keeps to AVX2 on AMD's processors, which is half of what the wide ones can do.
    """
    return (
        torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and _amd()
        and _wide()
        and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call, unused-ignore]
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call, unused-ignore]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _amd() -> bool:
    found = cpu_family()
    return found is not None and found[0] == "AuthenticAMD"


def _wide() -> bool:
    """Whether an AMD processor's vector units are 512 bits wide."""
    found = cpu_family()
    return found is not None and found[1] in _WIDE_FAMILIES and found[2] not in _NARROW_MODELS.get(found[1], ())
