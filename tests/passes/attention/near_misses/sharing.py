"""Several attentions in one program that share a mask, scores, weights or a result."""

from __future__ import annotations

import math

import torch
from attention_near_misses.program import Inputs, Suite, attend
from torch import nn

suite = Suite("sharing")


def two(r: Inputs) -> list[torch.Tensor]:
    return [*r.qkv(), *r.qkv()]


def two_with_mask(r: Inputs) -> list[torch.Tensor]:
    return [*two(r), r.bools(6, 6)]


@suite.equal(two_with_mask)
def one_mask_two_fills(a, b, c, x, y, z, keep):
    """One mask, filled with -inf in one and with 0 in the other."""
    first = attend(a, b, c, lambda s: s.masked_fill(~keep, -math.inf))
    return first, attend(x, y, z, lambda s: s.masked_fill(~keep, 0.0))


@suite.equal(two_with_mask)
def one_mask_two_polarities(a, b, c, x, y, z, keep):
    """One mask, and its negation: rows may be empty."""
    return attend(a, b, c, lambda s: s.masked_fill(~keep, -1e9)), attend(x, y, z, lambda s: s.masked_fill(keep, -1e9))


@suite.equal(two)
def one_causal_mask_one_transposed(a, b, c, x, y, z):
    """One causal mask, and its transposition in the second."""
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    first = attend(a, b, c, lambda s: s.masked_fill(hidden, -math.inf))
    return first, attend(x, y, z, lambda s: s.masked_fill(hidden.mT, -math.inf))


@suite.equal(two, modes=("inference",))
def mask_written_between_two(a, b, c, x, y, z):
    """A causal mask; the second attention sees it with one element changed."""
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    first = attend(a, b, c, lambda s: s.masked_fill(hidden, -math.inf))
    hidden[0, 5] = False
    return first, attend(x, y, z, lambda s: s.masked_fill(hidden, -math.inf))


@suite.equal(two)
def keys_exchanged(a, b, c, x, y, z):
    """Two attentions with each other's keys."""
    return attend(a, y, c), attend(x, b, z)


@suite.equal(two)
def values_exchanged(a, b, c, x, y, z):
    """Two attentions with each other's values."""
    return attend(a, b, z), attend(x, y, c)


@suite.equal(two)
def maps_multiplied(a, b, c, x, y, z):
    """The product of two maps on one value: the second map is the first's value."""
    return ((a @ b.mT).softmax(-1) @ (x @ y.mT).softmax(-1).mT) @ c


@suite.equal(two)
def maps_added(a, b, c, x, y, z):
    """Differential attention: two maps subtracted, one value."""
    return ((a @ b.mT * 0.3).softmax(-1) - 0.8 * (x @ y.mT * 0.3).softmax(-1)) @ (c + z)


@suite.equal(two)
def outputs_subtracted(a, b, c, x, y, z):
    """Differential attention after the products: two attentions."""
    return attend(a, b, c) - 0.8 * attend(x, y, c)


@suite.equal(two)
def scores_added(a, b, c, x, y, z):
    """Two products in one softmax."""
    return (a @ b.mT + x @ y.mT).softmax(-1) @ c


@suite.equal(two)
def one_softmax_over_both_keys(a, b, c, x, y, z):
    """Joint attention: one softmax over the keys of both."""
    p = torch.cat([a @ b.mT, a @ y.mT], -1).softmax(-1)
    return p[..., :6] @ c + p[..., 6:] @ z


@suite.equal(two)
def one_softmax_values_exchanged(a, b, c, x, y, z):
    """One softmax over the keys of both, the values of the other."""
    p = torch.cat([a @ b.mT, a @ y.mT], -1).softmax(-1)
    return p[..., 6:] @ c + p[..., :6] @ z


@suite.equal(two)
def one_softmax_one_value(a, b, c, x, y, z):
    """One softmax over the keys of both, and half of the shares is dropped."""
    p = torch.cat([a @ b.mT, a @ y.mT], -1).softmax(-1)
    return p[..., :6] @ c


@suite.equal(two)
def batched_by_stack(a, b, c, x, y, z):
    """Two attentions as one with an axis more."""
    return attend(torch.stack([a, x]), torch.stack([b, y]), torch.stack([c, z]))


@suite.equal(two)
def batched_by_stack_unequally(a, b, c, x, y, z):
    """Two attentions as one, the values in the other order."""
    return attend(torch.stack([a, x]), torch.stack([b, y]), torch.stack([z, c]))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 3, 3, 8).permute(2, 0, 3, 1, 4)
        return x + self.out(attend(q, k, v, lambda s: s + bias).transpose(1, 2).flatten(2))


def hidden_states(r: Inputs) -> list[torch.Tensor]:
    return [r.randn(2, 6, 24)]


@suite.equal(hidden_states)
class TwoLayersOneMask(nn.Module):
    """Two layers, one causal bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        bias = torch.full((6, 6), -math.inf, dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(x, bias)
        return x


@suite.equal(hidden_states)
class OneLayerTwice(nn.Module):
    """One layer's weights used twice, with two masks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x):
        bias = torch.full((6, 6), -math.inf, dtype=x.dtype)
        return self.layer(self.layer(x, bias.triu(1)), bias.triu(2))


@suite.equal(hidden_states)
class LearnedBiasShared(nn.Module):
    """Two layers share a learned bias, whose gradient has two parts (T5)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.bias = nn.Parameter(torch.randn(3, 6, 6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, self.bias)
        return x


@suite.equal(hidden_states)
class BiasGrows(nn.Module):
    """Every layer adds to the bias it was given, in place of a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        bias = torch.zeros(6, 6, dtype=x.dtype)
        for layer in self.layers:
            bias += 0.5 * torch.eye(6, dtype=x.dtype)
            x = layer(x, bias.clone())
        return x


@suite.decline(hidden_states)
class MapsOfAllLayers(nn.Module):
    """output_attentions=True."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(24, 72)

    def forward(self, x):
        maps = []
        for _ in range(2):
            q, k, v = self.project(x).view(2, 6, 3, 3, 8).permute(2, 0, 3, 1, 4)
            maps.append((q @ k.mT * 8**-0.5).softmax(-1))
            x = x + (maps[-1] @ v).transpose(1, 2).flatten(2)
        return x, maps


@suite.equal(hidden_states)
class OneMapOfTwo(nn.Module):
    """The map of the second layer alone is returned: the first may be swapped."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(24, 72)

    def forward(self, x):
        p = None
        for _ in range(2):
            q, k, v = self.project(x).view(2, 6, 3, 3, 8).permute(2, 0, 3, 1, 4)
            p = (q @ k.mT * 8**-0.5).softmax(-1)
            x = x + (p @ v).transpose(1, 2).flatten(2)
        return x, p


@suite.equal()
def bias_doubled_forty_times(q, k, v):
    """u + u, forty times over: a search that follows both sides takes 2 to the 40 steps."""
    u = k[..., :1].mT * 1e-12
    for _ in range(40):
        u = u + u
    return (u + q @ k.mT).softmax(-1) @ v
