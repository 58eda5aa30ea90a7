"""Scores that come from something else than a product of q and k, and outputs that are more than p v."""

from __future__ import annotations

import math

import torch
from attention_near_misses.program import Inputs, Suite, attend, plus, square
from torch import nn
from torch.nn import functional as F

suite = Suite("products")


def pairs(x: torch.Tensor) -> torch.Tensor:
    """The features as complex numbers."""
    return torch.view_as_complex(x.view(2, 3, 6, 4, 2))


def baddbmm(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor, **numbers: float) -> torch.Tensor:
    """Scores by baddbmm."""
    return torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, **numbers).view(2, 3, 6, 6)


#: Place of the distance from query i to key j in a table of eleven.
DISTANCE = (torch.arange(6) - torch.arange(6)[:, None] + 5).expand(2, 3, 6, 6)


def _score(kind: str, name: str, why: str, score, inputs=square, **more) -> None:
    def program(q, k, v, *rest):
        return score(q, k, *rest).softmax(-1) @ v

    getattr(suite, kind)(inputs, name=name, why=why, **more)(program)


_score("decline", "cdist", "minus the distance", lambda q, k: -torch.cdist(q, k), quiet=True)
_score("equal", "squared distance", "minus the squared distance, by broadcasting",
       lambda q, k: -((q[..., None, :] - k[..., None, :, :]) ** 2).sum(-1))  # fmt: skip
_score("equal", "expanded squared distance", "2 q k - k², written out (minus q² does nothing)",
       lambda q, k: 2 * q @ k.mT - (k * k).sum(-1)[..., None, :] - (q * q).sum(-1, keepdim=True))  # fmt: skip
_score("equal", "L1 distance", "minus the L1 distance",
       lambda q, k: -(q[..., None, :] - k[..., None, :, :]).abs().sum(-1))  # fmt: skip
_score("equal", "outer sum", "additive scores, as in graph attention",
       lambda q, k, a, b: F.leaky_relu((q @ a)[..., :, None] + (k @ b)[..., None, :], 0.2),
       plus((8,), (8,)))  # fmt: skip
_score("equal", "Bahdanau", "additive scores: v tanh(q + k)",
       lambda q, k, w: torch.tanh(q[..., :, None, :] + k[..., None, :, :]) @ w, plus((8,)))  # fmt: skip
_score("equal", "outer sum plain", "q summed plus k summed: q does nothing",
       lambda q, k: q.sum(-1)[..., :, None] + k.sum(-1)[..., None, :])  # fmt: skip
_score("equal", "bilinear", "q W kᵀ: attention with q W", lambda q, k, w: q @ w @ k.mT, plus((8, 8)))
_score("equal", "bilinear on the other side", "q (W kᵀ)", lambda q, k, w: q @ (w @ k.mT), plus((8, 8)))
_score("equal", "elementwise and sum", "(q * k).sum by broadcasting: a product in other words",
       lambda q, k: (q[..., :, None, :] * k[..., None, :, :]).sum(-1))  # fmt: skip
_score("equal", "elementwise and mean", "(q * k).mean: a product with scale 1/8",
       lambda q, k: (q[..., :, None, :] * k[..., None, :, :]).mean(-1))  # fmt: skip
_score("equal", "elementwise, rounded down", "the products are rounded before they are summed",
       lambda q, k: torch.div(q[..., None, :] * k[..., None, :, :], 0.5, rounding_mode="floor").sum(-1))  # fmt: skip
_score("equal", "elementwise over a head too", "summed over heads and features: one product of longer vectors",
       lambda q, k: (q[..., None, :] * k[..., None, :, :]).sum((-1, 1))[:, None].expand(2, 3, 6, 6))  # fmt: skip
_score("equal", "elementwise with a third", "(q * k * w).sum, w for each pair and feature",
       lambda q, k, w: (q[..., :, None, :] * k[..., None, :, :] * w).sum(-1), plus((6, 6, 8)))  # fmt: skip
_score("equal", "elementwise and max", "(q * k).amax: no product",
       lambda q, k: (q[..., :, None, :] * k[..., None, :, :]).amax(-1))  # fmt: skip
_score("equal", "cosine", "cosine similarity", lambda q, k: 5 * F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT)
_score("equal", "cosine along the wrong axis", "normalised over positions", lambda q, k: F.normalize(q, dim=-2) @ k.mT)
_score("equal", "cosine of scores", "scores over both norms afterwards",
       lambda q, k: q @ k.mT / (q.norm(dim=-1, keepdim=True) * k.norm(dim=-1)[..., None, :] + 1e-6))  # fmt: skip
_score("equal", "cosine_similarity", "F.cosine_similarity by broadcasting",
       lambda q, k: F.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1))  # fmt: skip
_score("equal", "sum of two products", "q kᵀ + q' k'ᵀ, as DeBERTa and MLA add them",
       lambda q, k, a, b: q @ k.mT + a @ b.mT, plus((2, 3, 6, 4), (2, 3, 6, 4)))  # fmt: skip
_score("equal", "difference of two products", "q kᵀ - q' k'ᵀ", lambda q, k, a, b: q @ k.mT - a @ b.mT,
       plus((2, 3, 6, 4), (2, 3, 6, 4)))  # fmt: skip
_score("equal", "product of two products", "q kᵀ times q' k'ᵀ", lambda q, k, a, b: (q @ k.mT) * (a @ b.mT) / 8,
       plus((2, 3, 6, 4), (2, 3, 6, 4)))  # fmt: skip
_score("equal", "half the features", "scores of the first four features alone", lambda q, k: q[..., :4] @ k[..., :4].mT)
_score("equal", "other half", "q's first four features with k's last", lambda q, k: q[..., :4] @ k[..., 4:].mT)
_score("equal", "biased product", "baddbmm with a bias", lambda q, k, b: baddbmm(q, k, b, beta=0.5, alpha=0.3),
       plus((6, 6, 6)))  # fmt: skip
_score("equal", "baddbmm beta 0", "baddbmm with beta 0: the bias is not read, not even its NaN",
       lambda q, k: baddbmm(q, k, torch.full((6, 6, 6), math.nan, dtype=q.dtype), beta=0))  # fmt: skip
_score("equal", "baddbmm beta 1 of NaN", "baddbmm with beta 1: the NaN is read",
       lambda q, k: baddbmm(q, k, torch.full((6, 6, 6), math.nan, dtype=q.dtype)), modes=("inference",))  # fmt: skip
_score("equal", "of q alone", "scores by a layer from q (synthesizer): its weight is a key as good as any",
       lambda q, k, w: q @ w, plus((8, 6)))  # fmt: skip
_score("decline", "of nothing", "scores are learned alone (random synthesizer)", lambda q, k, w: w, plus((2, 3, 6, 6)),
       quiet=True)  # fmt: skip
_score("decline", "of integers", "scores are looked up by distance alone",
       lambda q, k, w: w[(torch.arange(6)[:, None] - torch.arange(6)).abs()], plus((6,)), quiet=True)  # fmt: skip
_score("equal", "relative shift", "Transformer-XL: a product with positions, skewed by pad and view",
       lambda q, k, e: q @ k.mT + F.pad(q @ e.mT, (1, 0)).view(2, 3, 7, 6)[:, :, 1:], plus((6, 8)))  # fmt: skip
_score("equal", "relative gather", "a product with positions, gathered by distance",
       lambda q, k, e: q @ k.mT + (q @ e.mT).gather(-1, DISTANCE), plus((11, 8)))  # fmt: skip
_score("equal", "relative einsum", "Shaw: a key per pair of positions",
       lambda q, k, e: q @ k.mT + torch.einsum("bhqd,qkd->bhqk", q, e), plus((6, 6, 8)))  # fmt: skip
_score("equal", "convolved", "a convolution over the scores",
       lambda q, k, w: F.conv2d(q @ k.mT, w, padding=1, groups=3),
       lambda r: [*r.qkv(), r.randn(3, 1, 3, 3, scale=0.3)])  # fmt: skip
_score("equal", "heads mixed", "talking heads before the softmax",
       lambda q, k, w: torch.einsum("bhqk,hg->bgqk", q @ k.mT, w), plus((3, 3)))  # fmt: skip
_score("equal", "heads mixed by Linear", "talking heads as a layer over the last axis",
       lambda q, k, w: ((q @ k.mT).permute(0, 2, 3, 1) @ w).permute(0, 3, 1, 2), plus((3, 3)))  # fmt: skip
_score("equal", "complex", "the real part of a complex product", lambda q, k: (pairs(q) @ pairs(k).mH).real)
_score("equal", "complex not conjugated", "the same without the conjugate", lambda q, k: (pairs(q) @ pairs(k).mT).real)
_score("equal", "complex magnitude", "the magnitude of a complex product", lambda q, k: (pairs(q) @ pairs(k).mH).abs())
_score("equal", "interpolated", "scores at half resolution, interpolated",
       lambda q, k: F.interpolate(q[:, :, ::2] @ k[:, :, ::2].mT, size=(6, 6)))  # fmt: skip
_score("equal", "padded with zeros", "two keys of score 0 are padded on, v with rows of ones",
       lambda q, k: F.pad(q @ k[:, :, :4].mT, (0, 2)))  # fmt: skip
_score("equal", "two blocks", "scores of two blocks of keys, joined",
       lambda q, k: torch.cat([q @ k[:, :, :2].mT, q @ k[:, :, 2:].mT], -1))  # fmt: skip
_score("equal", "two blocks exchanged", "scores of two blocks of keys, joined in the other order",
       lambda q, k: torch.cat([q @ k[:, :, 2:].mT, q @ k[:, :, :2].mT], -1))  # fmt: skip


def _output(kind: str, name: str, why: str, product, inputs=square, **more) -> None:
    def program(q, k, v, *rest):
        return product((q @ k.mT * 8**-0.5).softmax(-1), v, *rest)

    getattr(suite, kind)(inputs, name=name, why=why, **more)(program)


_output("equal", "v sliced", "half of v's features", lambda p, v: p @ v[..., :4])
_output("equal", "v widened", "a column of ones on v: it counts the keys", lambda p, v: p @ F.pad(v, (0, 1), value=1.0))
_output("equal", "v of ones", "v is all ones: the sum of each row", lambda p, v: p @ torch.ones_like(v))
_output("equal", "v repeated", "v twice side by side", lambda p, v: p @ torch.cat([v, v], -1))
_output("equal", "v gated", "v times a gate", lambda p, v: p @ (v * v.sigmoid()))
_output("equal", "output gated", "the output times a gate", lambda p, v: (p @ v) * v.sigmoid())
_output("equal", "v rolled", "every key hands out its neighbour's value", lambda p, v: p @ v.roll(1, -2))
_output("equal", "v by index", "values in another order than keys", lambda p, v, i: p @ v[:, :, i],
        lambda r: [*r.qkv(), r.permutation(6)])  # fmt: skip
_output("equal", "p by index", "probabilities in another order than keys", lambda p, v, i: p[..., i] @ v,
        lambda r: [*r.qkv(), r.permutation(6)])  # fmt: skip
_output("equal", "both by index", "both in another order, the same: nothing changes",
        lambda p, v, i: p[..., i] @ v[:, :, i], lambda r: [*r.qkv(), r.permutation(6)])  # fmt: skip
_output("decline", "first four keys", "two keys' shares are dropped", lambda p, v: p[..., :4] @ v[:, :, :4])
_output("decline", "last four keys", "the first two keys' shares are dropped", lambda p, v: p[..., 2:] @ v[:, :, 2:])
_output("decline", "every second key", "half the keys' shares are dropped", lambda p, v: p[..., ::2] @ v[:, :, ::2])
_output("decline", "other keys' values", "the first four shares with the last four values",
        lambda p, v: p[..., :4] @ v[:, :, 2:])  # fmt: skip
_output("equal", "values of later keys", "four keys, and the values of other four", lambda p, v: p @ v,
        lambda r: (lambda q, k, v: [q, k[:, :, :4], v[:, :, 2:]])(*r.qkv()))  # fmt: skip
_output("equal", "values of every second key", "three keys, and the values of each second",
        lambda p, v: p @ v, lambda r: (lambda q, k, v: [q, k[:, :, :3], v[:, :, ::2]])(*r.qkv()))  # fmt: skip
_output("equal", "first queries", "two of the queries", lambda p, v: p[:, :, :2] @ v)
_output("equal", "one head", "one of the heads", lambda p, v: p[:, 1] @ v[:, 1])
_output("equal", "other head's values", "every head takes the first's values", lambda p, v: p @ v[:, :1])
_output("equal", "plus p of v again", "p v + v", lambda p, v: p @ v + v)
_output("equal", "baddbmm", "0.5 x + 2 p v",
        lambda p, v: torch.baddbmm(v.flatten(0, 1), p.flatten(0, 1), v.flatten(0, 1), beta=0.5, alpha=2.0))  # fmt: skip
_output("decline", "elementwise max", "the largest share times value, not the sum",
        lambda p, v: (p[..., None] * v[:, :, None]).amax(-2), quiet=True)  # fmt: skip
_output("equal", "values by broadcasting and sum", "the product by broadcasting and sum",
        lambda p, v: (p[..., None] * v[:, :, None]).sum(-2))  # fmt: skip
_output("decline", "relative values", "Shaw: a value per pair of positions added",
        lambda p, v, e: p @ v + torch.einsum("bhqk,qkd->bhqd", p, e), plus((6, 6, 8)))  # fmt: skip
_output("equal", "value per query", "a value per pair of positions alone: attention of single queries",
        lambda p, v, e: torch.einsum("bhqk,qkd->bhqd", p, e), plus((6, 6, 8)))  # fmt: skip
_output("equal", "summed over queries", "the mean over queries of the output", lambda p, v: (p @ v).mean(-2))
_output("decline", "mean p first", "the mean of p over queries, then v", lambda p, v: p.mean(-2, keepdim=True) @ v)
_output("equal", "rank one", "v as a matrix of rank one", lambda p, v: p @ (v[..., :1] @ v[..., :1, :]))


@suite.equal()
class HeadsSummedByProjection(nn.Module):
    """One einsum from p, v and the output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 5) / 3)

    def forward(self, q, k, v):
        p = (q @ k.mT * 8**-0.5).softmax(-1)
        return torch.einsum("bhqk,bhkd,hde->bqe", p, v, self.weight)


@suite.equal()
def chained(q, k, v):
    """The output of one attention is the query of the next."""
    return attend(attend(q, k, v), k, v)


@suite.equal()
def nested(q, k, v):
    """The keys are an attention's output."""
    return attend(q, attend(k, v, v), v)


def _half(r: Inputs) -> list[torch.Tensor]:
    return [*r.qkv(), r.randn(2, 3, 6, 6)]


@suite.decline(_half)
def p_of_one_softmax_and_another(q, k, v, other):
    """The mean of two maps, one of them given."""
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    return (0.5 * p + 0.5 * other.softmax(-1)) @ v


@suite.decline()
def elementwise_under_autocast(q, k, v):
    """Autocast narrows products of matrices, and leaves sums of products as they are."""
    with torch.autocast("cpu", torch.bfloat16):
        scores = (q[..., None, :] * k[..., None, :, :]).sum(-1)
        return (scores.softmax(-1)[..., None] * v[..., None, :, :]).sum(-2)


@suite.decline(lambda r: [*r.qkv(), r.randn(3, 6, 6)], modes=("training",), why="its gradient is zeros, not none")
def an_unread_input_that_learns_too(q, k, v, base):
    """`baddbmm` with beta 0 of an input that learns, beside q, k and v."""
    s = torch.baddbmm(base.repeat(2, 1, 1), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=0.3)
    return s.view(2, 3, 6, 6).softmax(-1) @ v


def _integers(r: Inputs) -> list[torch.Tensor]:
    return [r.ints(-3, 4, 2, 3, 6, 8), r.ints(-3, 4, 2, 3, 6, 8), *r.qkv()]


@suite.equal(_integers, dtype=torch.float32)
def integers(i, j, q, k, v):
    """Integers are multiplied, and cast to floats before the softmax; beside an attention of floats."""
    counts = (i @ j.mT).to(v.dtype) * 0.125
    return counts.softmax(-1) @ v + attend(q, k, v)
