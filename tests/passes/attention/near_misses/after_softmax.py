"""What happens to the probabilities before they meet v."""

from __future__ import annotations

import torch
from attention_near_misses.program import Inputs, Suite, plus
from torch.nn import functional as F

suite = Suite("after_softmax")


def plain(r: Inputs) -> list[torch.Tensor]:
    return r.qkv()


def keep(r: Inputs) -> list[torch.Tensor]:
    return [*r.qkv(), r.bools(6, 6)]


def _after(kind: str, name: str, why: str, change, inputs=plain, **more) -> None:
    def program(q, k, v, *rest):
        return change((q @ k.mT * 8**-0.5).softmax(-1), *rest) @ v

    getattr(suite, kind)(inputs, name=name, why=why, **more)(program)


_after("decline", "noise", "noise on the probabilities", lambda p: p + 0.1 * torch.randn_like(p), random=True)
_after("decline", "multiplied noise", "noise times the probabilities", lambda p: p * torch.rand_like(p), random=True)
_after("decline", "bernoulli", "probabilities drawn", lambda p: torch.bernoulli(p.detach()) * p, random=True)
_after("equal", "dropped rows", "whole queries dropped", lambda p: p * (torch.rand(2, 3, 6, 1) > 0.3), random=True)
_after("equal", "dropped heads", "whole heads dropped", lambda p: p * (torch.rand(2, 3, 1, 1) > 0.3), random=True)
_after("decline", "dropped keys", "whole keys dropped (DropKey after)", lambda p: p * (torch.rand(2, 3, 1, 6) > 0.3),
       random=True)  # fmt: skip
_after("decline", "feature dropout", "dropout2d on (batch, heads, ...) drops maps", lambda p: F.dropout2d(p, 0.5),
       random=True)  # fmt: skip
_after("decline", "alpha dropout", "alpha_dropout keeps mean and variance, not zeros",
       lambda p: F.alpha_dropout(p, 0.5, training=True), random=True)  # fmt: skip
_after("decline", "dropout without rescaling", "dropped and not rescaled", lambda p: p * (torch.rand_like(p) > 0.1),
       random=True)  # fmt: skip
_after("decline", "dropout renormalised", "dropped, then normalised to one",
       lambda p: (d := F.dropout(p, 0.3, True)) / (d.sum(-1, keepdim=True) + 1e-6), random=True)  # fmt: skip
_after("decline", "dropout twice", "two dropouts", lambda p: F.dropout(F.dropout(p, 0.3, True), 0.3, True), random=True)
_after("decline", "dropout", "dropout draws another stream in a kernel, and nobody asked for the swap",
       lambda p: F.dropout(p, 0.5, True), random=True)  # fmt: skip
_after("equal", "dropout of 1", "everything is dropped", lambda p: F.dropout(p, 1.0, True))
_after("equal", "dropout of 0", "nothing is dropped", lambda p: F.dropout(p, 0.0, True))
_after("equal", "dropout not training", "nothing is dropped", lambda p: F.dropout(p, 0.5, False))
_after("decline", "mask", "a mask on the probabilities, not normalised again", lambda p, m: p * m, keep)
_after("decline", "mask by fill", "masked_fill(0) on the probabilities", lambda p, m: p.masked_fill(~m, 0.0), keep)
_after("decline", "mask by fill of 1", "masked_fill(1) on the probabilities", lambda p, m: p.masked_fill(~m, 1.0), keep)
_after("decline", "mask by where", "where(mask, p, 0.01)", lambda p, m: torch.where(m, p, 0.01), keep)
_after("equal", "mask renormalised", "masked and normalised, which is masking the scores",
       lambda p, m: (x := p * m) / x.sum(-1, keepdim=True), keep)  # fmt: skip
_after("equal", "normalised twice", "divided by its sum once more, which is 1", lambda p: p / p.sum(-1, keepdim=True))
_after("decline", "normalised over queries too", "by keys, then by queries", lambda p: p / p.sum(-2, keepdim=True))
_after("decline", "normalised over heads too", "by keys, then by heads", lambda p: p / p.sum(1, keepdim=True))
_after("decline", "normalised twice with epsilon", "the sum and 0.1", lambda p: p / (p.sum(-1, keepdim=True) + 0.1))
_after("decline", "mask renormalised with epsilon", "masked and divided by the sum plus 0.1",
       lambda p, m: (x := p * m) / (x.sum(-1, keepdim=True) + 0.1), keep)  # fmt: skip
_after("decline", "mask renormalised over queries", "masked and normalised over the wrong axis",
       lambda p, m: (x := p * m) / x.sum(-2, keepdim=True), keep)  # fmt: skip
_after("decline", "tril", "tril of the probabilities: causal without normalising", lambda p: p.tril())
_after("decline", "tril renormalised over all", "tril, then over the sum of all",
       lambda p: (x := p.tril()) / x.sum((-1, -2), keepdim=True))  # fmt: skip
_after("decline", "plus bias", "a bias after the softmax", lambda p, b: p + b, plus((6, 6)))
_after("decline", "times weights", "learned weights on the map", lambda p, b: p * b, plus((6, 6)))
_after("decline", "times key weights", "learned weights by key", lambda p, b: p * b, plus((6,)))
_after("equal", "times head weights", "a weight per head: it passes through the product", lambda p, b: p * b,
       plus((3, 1, 1)))  # fmt: skip
_after("equal", "times row weights", "a weight per query: it passes through the product", lambda p, b: p * b,
       plus((6, 1)))  # fmt: skip
_after("equal", "times head mask", "a head mask of zeros and ones", lambda p, b: p * b,
       lambda r: [*r.qkv(), r.bools(1, 3, 1, 1)])  # fmt: skip
_after("equal", "scaled", "probabilities times two", lambda p: p * 2)
_after("equal", "negated", "minus p", lambda p: -p)
_after("equal", "divided", "probabilities over the number of keys", lambda p: p / p.shape[-1])
_after("decline", "shifted", "probabilities plus 0.1", lambda p: p + 0.1)
_after("decline", "less the uniform", "probabilities less 1/n", lambda p: p - 1 / 6)
_after("decline", "clamped", "no probability under 0.1", lambda p: p.clamp(min=0.1))
_after("decline", "logarithm", "log p", lambda p: p.log())
_after("decline", "square root", "the root of p", lambda p: p.sqrt())
_after("decline", "exp", "exp p", lambda p: p.exp())
_after("decline", "sigmoid", "sigmoid of p", torch.sigmoid)
_after("decline", "normalised again by L2", "rows of length one", lambda p: F.normalize(p, dim=-1))
_after("equal", "normalised again", "p over its sum, which is 1", lambda p: p / p.sum(-1, keepdim=True))
_after("decline", "normalised over queries", "p over its sum over queries, as in slot attention",
       lambda p: p / p.sum(-2, keepdim=True))  # fmt: skip
_after("decline", "normalised over heads", "p over its sum over heads", lambda p: p / p.sum(1, keepdim=True))
_after("decline", "layer norm", "layer norm of the rows", lambda p: F.layer_norm(p, (6,)))
_after("decline", "cumsum", "cumulative probabilities", lambda p: p.cumsum(-1))
_after("decline", "sorted", "probabilities in order", lambda p: p.sort(-1).values)
_after("equal", "flipped", "probabilities in reverse: v is", lambda p: p.flip(-1))
_after("equal", "rolled", "probabilities moved on by a key", lambda p: p.roll(1, -1))
_after("equal", "rolled over queries", "every query takes its neighbour's", lambda p: p.roll(1, -2))
_after("equal", "rolled over heads", "every head takes its neighbour's", lambda p: p.roll(1, 1))
_after("decline", "mean of heads", "every head takes the mean of all",
       lambda p: p.mean(1, keepdim=True).expand(2, 3, 6, 6))  # fmt: skip
_after("equal", "first head's", "every head takes the first's", lambda p: p[:, :1].expand(2, 3, 6, 6))
_after("decline", "talking heads", "heads mixed after the softmax", lambda p, w: torch.einsum("bhqk,hg->bgqk", p, w),
       plus((3, 3)))  # fmt: skip
_after("decline", "convolved", "a convolution over the map", lambda p, w: F.conv2d(p, w, padding=1, groups=3),
       plus((3, 1, 3, 3)))  # fmt: skip
_after("decline", "pooled", "the map pooled over keys", lambda p: F.avg_pool2d(p, (1, 3), (1, 1), (0, 1)))
_after("decline", "top two", "all but two set to zero", lambda p: p * (p >= p.topk(2, -1).values[..., -1:]))
_after("decline", "top two normalised", "all but two set to zero, then normalised",
       lambda p: (x := p * (p >= p.topk(2, -1).values[..., -1:])) / x.sum(-1, keepdim=True))  # fmt: skip
_after("decline", "one row replaced", "the first query is given the uniform average",
       lambda p: torch.cat([torch.full_like(p[..., :1, :], 1 / 6), p[..., 1:, :]], -2))  # fmt: skip
_after("decline", "one column zeroed", "the first key gets nothing, and nothing is normalised",
       lambda p: torch.cat([torch.zeros_like(p[..., :1]), p[..., 1:]], -1))  # fmt: skip
_after("decline", "diagonal zeroed", "nobody takes from itself, and nothing is normalised",
       lambda p: p * (1 - torch.eye(6, dtype=p.dtype)))  # fmt: skip
_after("equal", "cast to float32", "a cast that changes nothing",
       lambda p: p.float() if p.dtype == torch.float32 else p)  # fmt: skip
_after("equal", "cast to bfloat16 and back", "rounded probabilities", lambda p: p.bfloat16().to(p.dtype),
       through=torch.bfloat16)  # fmt: skip
_after("decline", "cast to int8 and back", "quantised probabilities",
       lambda p: (p * 127).to(torch.int8).to(p.dtype) / 127 + 0 * p)  # fmt: skip
_after("equal", "contiguous", "a copy", lambda p: p.mT.contiguous().mT)
_after("equal", "cloned", "a clone", lambda p: p.clone())
_after("equal", "plus zero", "p + 0", lambda p: p + 0)
_after("equal", "times one", "p * 1", lambda p: p * 1.0)
