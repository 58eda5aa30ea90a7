"""Whether a fused kernel pays at an attention site: figures of what it takes and of what the inner compiler would take.

Figures come from tables measured on a kind of device (`tables/*.json`, read by `table`, found by `lookup`), and where
none was measured, from published rates and the roofline (`published`). `decide` compares. Nothing here measures, looks
at a graph or chooses a kernel; `optpass bench attention_table` measures.
"""

from __future__ import annotations

from optpass.passes.attention.gate.decide import CAUTION, MATH, MaskForm, Price, Verdict, decide, fused, unfused
from optpass.passes.attention.gate.lookup import Found, find, fingerprint, folder
from optpass.passes.attention.gate.table import Figures, Table

__all__ = [
    "CAUTION",
    "MATH",
    "Figures",
    "Found",
    "MaskForm",
    "Price",
    "Table",
    "Verdict",
    "decide",
    "find",
    "fingerprint",
    "folder",
    "fused",
    "unfused",
]
