"""Which attention weights are dropped: computed from a seed and the place, so that a backward computes the same again.

`Hashed` is for a kernel that has one weight at a time, as nodes of a graph; `Seeded` fills a block of them at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, fx

#: A step of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): what is added, and what is multiplied by after shifts.
_STEP: Final = (0x9E3779B97F4A7C15, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)))


@dataclass(frozen=True)
class Seeded:
    """Blocks of weights, each from a generator of its own.

    Attributes:
        probability: of being dropped, in (0, 1).
        seed: of all blocks.
    """

    probability: float
    seed: int

    @property
    def scale(self) -> float:
        """What is kept is multiplied by it."""
        return 1.0 / (1.0 - self.probability)

    def kept(self, place: tuple[int, ...], into: Tensor) -> Tensor:
        """1 where a weight of the block at `place` is kept, 0 elsewhere."""
        state = self.seed
        for number in place:
            state = _mixed(state ^ number)
        generator = torch.Generator(into.device).manual_seed(state)
        return into.bernoulli_(1.0 - self.probability, generator=generator)


def _mixed(state: int) -> int:
    """A number of 64 bits whose every bit depends on every bit of `state`: generators take but the lower half."""
    state += _STEP[0]
    for shift, factor in _STEP[1]:
        state %= 1 << 64
        state = (state ^ state >> shift) * factor
    return state % (1 << 64)


@dataclass(frozen=True)
class Hashed:
    """Which weights are dropped: those whose place, mixed with a seed, comes out below a threshold.

    Two states of 32 bits are mixed with batch, head and query, and both with the key. Products stay below 2^63. The
    mixing is that of the hash functions found by search in github.com/skeeto/hash-prospector.

    Attributes:
        probability: of being dropped, in [0, 1).
    """

    probability: float

    def kept(self, graph: fx.Graph, seed: fx.Node, index: list[fx.Node]) -> fx.Node:
        """Whether the weight at (batch, head, query, key) is kept; `seed`: two numbers below 2^32."""
        zero = graph.call_function(torch.zeros_like, (index[0],))
        one = graph.call_function(torch.ones_like, (index[0],))
        states = [graph.call_function(torch.ops.aten.index.Tensor, (seed, [at])) for at in (zero, one)]
        for place in index[:3]:
            states = [_written(graph, graph.call_function(torch.bitwise_xor, (state, place))) for state in states]
        first = _written(graph, graph.call_function(torch.bitwise_xor, (states[0], index[3])))
        drawn = _written(graph, graph.call_function(torch.bitwise_xor, (first, states[1])))
        return graph.call_function(torch.ge, (drawn, round(self.probability * 2**32)))


def _written(graph: fx.Graph, state: fx.Node) -> fx.Node:
    """A bijection of numbers below 2^32 that looks random."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, None)):
        shifted = graph.call_function(torch.bitwise_right_shift, (state, shift))
        state = graph.call_function(torch.bitwise_xor, (state, shifted))
        if factor is not None:
            product = graph.call_function(torch.mul, (state, factor))
            state = graph.call_function(torch.bitwise_and, (product, 0xFFFFFFFF))
    return state
