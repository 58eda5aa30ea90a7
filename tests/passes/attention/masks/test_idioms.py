"""Masks as people write them (`idioms/`), each proved to be what it is, with static and with symbolic sizes."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from optpass.passes.attention.masks import MaskFacts, Prover


def _load() -> Any:
    """`idioms/` as a package, to which no import path leads; its base, with all idioms registered."""
    if "attention_mask_idioms" not in sys.modules:
        spec = importlib.machinery.ModuleSpec("attention_mask_idioms", None, is_package=True)
        spec.submodule_search_locations = [str(Path(__file__).parent / "idioms")]
        sys.modules["attention_mask_idioms"] = importlib.util.module_from_spec(spec)
    for name in ("causal", "others"):
        importlib.import_module(f"attention_mask_idioms.{name}")
    return importlib.import_module("attention_mask_idioms.base")


base = _load()
NAMES = ("b", "h", "q", "k")


class Masks(torch.nn.Module):
    """All idioms, and the buffers that some of them read."""

    def __init__(self) -> None:
        super().__init__()
        ones = torch.ones(1, 1, 32, 32, dtype=torch.bool)
        self.register_buffer("tril", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))
        self.register_buffer("infinite", torch.full((32, 32), base.INF).triu(1))
        self.register_buffer("places", torch.arange(32).expand(1, -1))
        self.register_buffer("window", ones.tril() ^ ones.tril(-4))

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> list[torch.Tensor]:
        held = {"tril": self.tril, "infinite": self.infinite, "places": self.places, "window": self.window}
        return [idiom.function(x, past, held) for idiom in base.IDIOMS.values()]


@pytest.fixture(scope="module", params=[False, True], ids=["static", "dynamic"])
def graph(request: Any, lowered: Any) -> Any:
    """All idioms in one graph, its prover, and the masks themselves."""
    x, past, masks = (
        torch.randn(base.BATCH, base.LENGTH, 4) * 3,
        torch.randn(base.BATCH, base.LENGTH + base.PAST, 4),
        Masks(),
    )
    found = lowered(masks, x, past, dynamic=request.param)
    held = {id(buffer) for buffer in masks.buffers()}
    prover = Prover(lambda value: data if id(data := found.contents(value)) in held else None)
    return found, prover, dict(zip(base.IDIOMS, masks(x, past), strict=True))


def facts(graph: Any, name: str) -> MaskFacts:
    found, prover, _ = graph
    value = found.outputs[list(base.IDIOMS).index(name)]
    return prover.prove(value, NAMES[-value.dim :], *value.shape[-2:], keep_when=base.IDIOMS[name].keep)


@pytest.mark.parametrize("name", base.IDIOMS)
def test_idiom_is_proved(graph: Any, name: str, concrete: Any) -> None:
    found, idiom = facts(graph, name), base.IDIOMS[name]
    assert found.kind == idiom.kind, found
    assert found.fill == idiom.fill
    assert found.finite == (idiom.fill != base.INF)
    assert found.row_never_empty == idiom.never_empty
    assert bool(found.buffers) == idiom.buffer
    assert found.words
    if idiom.window:
        assert (found.left, found.right) == idiom.window
    if idiom.parts:
        assert sorted(part.kind for part in found.parts) == sorted(idiom.parts)


@pytest.mark.parametrize("name", base.IDIOMS)
def test_predicate_is_what_the_mask_keeps(graph: Any, name: str, concrete: Any) -> None:
    low, _, masks = graph
    value, mask = low.outputs[list(base.IDIOMS).index(name)], masks[name]
    kept = mask == base.IDIOMS[name].keep if mask.dtype == torch.bool else mask == 0
    predicate = concrete(facts(graph, name).predicate, value, NAMES[-value.dim :], low)
    assert (predicate == kept.numpy()).all()
