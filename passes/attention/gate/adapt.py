"""Figures of a table for a problem: its own, those of a dtype that stands in, or, on a processor of another kind than
the one that was measured, multiplied by what such processors were seen to take.

Ratios that were measured live here with their source; whether a kernel pays is decided in `decide`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optpass.passes.attention.gate.lookup import Found
from optpass.passes.attention.gate.table import Figures
from optpass.passes.attention.problem import Problem
from optpass.passes.processor import instructions, multiplied_in

#: The name under which a table has the inner compiler's own way.
UNFUSED = "unfused"
#: What stands in for dtypes that were not measured, and how much longer their scores take.
_STAND_IN: Mapping[str, tuple[str, float]] = {"float64": ("float32", 2.0), "float16": ("bfloat16", 1.0)}
#: What half precision takes, forward and in training, in float32's figures of another processor, on one that has no
#: instructions for it: medians, and the least of the inner compiler's, of 72 sizes on an AVX2 processor
#: (bench/results/amd-epyc-avx2-attention_table.json), by what float32's flash attention takes there.
_WITHOUT: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "bfloat16": {UNFUSED: (12.0, 9.0), "cpu_flash": (1.2, 5.0), "blocks": (2.3, 1.75)},
    "float16": {UNFUSED: (12.0, 9.0), "cpu_flash": (2.0, 6.6), "blocks": (2.3, 1.75)},
}
#: What float32 takes on a processor with AVX2, forward and in training, by what a table of one with AVX-512 says of the
#: same sizes: medians of the 12 sizes of that file. What is not named was not measured, and takes what the inner
#: compiler does.
_NARROW: Mapping[str, tuple[float, float]] = {
    UNFUSED: (2.2, 2.0), "cpu_flash": (1.7, 1.65), "blocks": (3.3, 3.5),
}  # fmt: skip


@dataclass(frozen=True)
class Known:
    """Figures of one kernel.

    Attributes:
        times: how much longer the problem's scores take than the figures say.
        fit: 'measured' or 'extrapolated', as the table; 'adapted' where `times` was measured on another processor that
            is like the one at hand.
    """

    figures: Figures
    times: float
    fit: str


def known(found: Found | None, problem: Problem, kernel: str) -> Known | None:
    """What a table says of a kernel in the problem's dtype; None where it says nothing that can stand for it."""
    if found is None:
        return None
    dtype = str(problem.dtype).removeprefix("torch.")
    elsewhere = found.fit == "extrapolated" and problem.device == "cpu"
    if elsewhere and multiplied_in(problem.dtype) != problem.dtype:
        figures = found.table.of("float32", problem.training, kernel)
        without = _WITHOUT[dtype].get(kernel)
        return None if figures is None or without is None else Known(figures, without[problem.training], found.fit)
    for name, times in ((dtype, 1.0), _STAND_IN.get(dtype, (dtype, 1.0))):
        figures = found.table.of(name, problem.training, kernel)
        if figures is not None and elsewhere and name == "float32" and _narrow(found):
            fit = "adapted" if kernel in _NARROW else found.fit
            return Known(figures, times * _NARROW.get(kernel, _NARROW[UNFUSED])[problem.training], fit)
        if figures is not None:
            return Known(figures, times, found.fit)
    return None


def _narrow(found: Found) -> bool:
    """A processor with AVX2, and a table of one with AVX-512."""
    return "AVX2" in instructions().split() and "AVX512" in found.table.instructions.split()
