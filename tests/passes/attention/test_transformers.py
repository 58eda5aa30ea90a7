"""Attention as transformers writes it, eager, with random weights: every site fused, and outputs and gradients right.

The models are shrunk from their default configurations; how a site is counted is `optpass.bench.attention_sites`.
"""

from __future__ import annotations

from functools import lru_cache

import pytest

pytest.importorskip("transformers")

from optpass.bench.attention_measure import DROPOUT, Case, coverage, inference, training
from optpass.bench.tiny_models import Tiny, build

#: Sites of the tiny models: two layers each; an encoder's, and a decoder's of two kinds; two in each of four stages.
SITES = {"bert": 2, "gpt2": 2, "llama": 2, "t5": 6, "gemma2": 2, "gpt_oss": 2, "swin": 8, "bloom": 2}
PADDED = [name for name in SITES if name != "swin"]


@lru_cache(maxsize=4)
def tiny(name: str, dropout: float) -> Tiny:
    return build(name, dropout=dropout)


def holds(case: Case, name: str) -> None:
    assert case.sites == SITES[name] and case.graphs == 1
    assert not case.wrong
    assert case.fused == case.sites, case.declined


@pytest.mark.slow
@pytest.mark.by_turns
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", SITES)
def test_inference(name: str, padded: bool) -> None:
    model = tiny(name, 0.0)
    given = model.padded if padded and name in PADDED else model.inputs
    assert given is not None
    if given is model.padded:
        assert int(given["attention_mask"].sum()) < given["attention_mask"].numel()
    holds(inference(model.model, given), name)


@pytest.mark.slow
@pytest.mark.by_turns
@pytest.mark.parametrize("dropout", [False, True], ids=["padded", "dropout"])
@pytest.mark.parametrize("name", SITES)
def test_training(name: str, dropout: bool) -> None:
    """With padding and all gradients, which dropout leaves nothing to compare with."""
    if dropout:
        active = tiny(name, DROPOUT)
        holds(coverage(active.model.train(), active.inputs)[0], name)
    else:
        holds(training(name, tiny(name, 0.0), padded=name in PADDED, seed=0), name)
