"""What each ONNX op expands to: ATen calls on meta tensors, one file per family.

A rule emits calls through its `Call`; FLOPs are what the calls cost by the project's one convention, and the
fusion model sees the same calls. `UNSUPPORTED` names the standard ops without a rule, and why.
"""

from __future__ import annotations

from optpass.passes.onnx_roofline.rules import (
    attention,
    contrib,
    indexing,
    matmul,
    norm,
    pointwise,
    pool,
    quant,
    reduction,
    resample,
    rnn,
    signal,
    views,
)
from optpass.passes.onnx_roofline.rules.registry import registered, rule_of

#: Importing a family registers its rules.
FAMILIES = (attention, contrib, indexing, matmul, norm, pointwise, pool, quant, reduction, resample, rnn, signal, views)

_TEXT = "works on text, which has no arithmetic to count"
#: Ops of ai.onnx that no rule expands; they are named as unknown in the report.
UNSUPPORTED: dict[str, str] = {
    "ImageDecoder": "decodes a compressed image: its work hangs on the bytes",
    "MaxRoiPool": "the sizes of its windows are values of an input",
    "MelWeightMatrix": "a table that is made once; known where its inputs are constants, as then it is folded",
    "NonMaxSuppression": "how many boxes are compared hangs on the boxes",
    "RegexFullMatch": _TEXT,
    "StringConcat": _TEXT,
    "StringNormalizer": _TEXT,
    "StringSplit": _TEXT,
    "TfIdfVectorizer": "counts matches in its input: its work hangs on the values",
}

__all__ = ["FAMILIES", "UNSUPPORTED", "registered", "rule_of"]
