"""Masks that enter the scores by arithmetic, and masks that depend on the scores."""

from __future__ import annotations

import math

import torch
from attention_near_misses.program import Inputs, Suite, attend, square
from torch.nn import functional as F

suite = Suite("mask_arithmetic")


def keep(r: Inputs) -> list[torch.Tensor]:
    return [*r.qkv(), r.bools(6, 6)]


def ints(r: Inputs) -> list[torch.Tensor]:
    return [*r.qkv(), r.bools(2, 1, 1, 6).long()]


def _of_mask(name: str, why: str, change, inputs=keep, kind: str = "equal", **more) -> None:
    def program(q, k, v, m):
        return attend(q, k, v, lambda s: change(s, m))

    getattr(suite, kind)(inputs, name=name, why=why, **more)(program)


def _of_scores(name: str, why: str, change, kind: str = "decline", **more) -> None:
    def program(q, k, v):
        return attend(q, k, v, change)

    getattr(suite, kind)(square, name=name, why=why, **more)(program)


_of_mask("plus bool", "scores + True: one more", lambda s, m: s + m)
_of_mask("minus bool as int", "scores minus 0 or 1", lambda s, m: s - m.int())
_of_mask("times mask", "scores times 0 or 1: a hidden key has score 0", lambda s, m: s * m)
_of_mask("times mask plus fill", "s m - 1e4 (1 - m), as BERT's forerunners",
         lambda s, m: s * m - 1e4 * (1 - m.to(s.dtype)))  # fmt: skip
_of_mask("times mask plus small fill", "s m - 4 (1 - m)", lambda s, m: s * m - 4 * (1 - m.to(s.dtype)))
_of_mask("log of mask", "log(mask): 0 or -inf", lambda s, m: s + m.to(s.dtype).log())
_of_mask("log of mask plus epsilon", "log(mask + 1e-6): -13.8", lambda s, m: s + (m.to(s.dtype) + 1e-6).log())
_of_mask("(1 - mask) * -10000", "an int mask", lambda s, m: s + (1 - m) * -10000, ints, allow=2e-3)
_of_mask("(1 - mask) * 10000", "the sign is missing: hidden keys get everything", lambda s, m: s + (1 - m) * 10000,
         ints, allow=2e-3)  # fmt: skip
_of_mask("minus (1 - mask) * 10000", "the sign is in the subtraction", lambda s, m: s - (1 - m) * 10000, ints,
         allow=2e-3)  # fmt: skip
_of_mask("mask * -10000", "what is to be kept is hidden", lambda s, m: s + m * -10000, ints, allow=2e-3)
_of_mask("(mask - 1) * 1e4", "another spelling", lambda s, m: s + (m - 1) * 1e4, ints, allow=2e-3)
_of_mask("(1 - mask) * -10", "too small to hide", lambda s, m: s + (1 - m) * -10.0, ints)
_of_mask("(1 - 2 mask) * 1e4", "plus and minus ten thousand", lambda s, m: s + (1 - 2 * m) * 1e4, ints, allow=2e-3)
_of_mask("(2 - mask) * -1e4", "every key is moved, some further", lambda s, m: s + (2 - m) * -1e4, ints, allow=2e-3)
_of_mask("0 times minus infinity", "NaN where a key is seen, and in no gradient of what the fill hides",
         lambda s, m: (s + (1 - torch.ones(6, 6).tril()) * -math.inf).masked_fill(m, -math.inf),
         kind="decline")  # fmt: skip
_of_mask("divided by mask", "scores over 1 or 0: infinities of both signs", lambda s, m: s / m.to(s.dtype))
_of_mask("maximum with mask", "no score below the mask's", lambda s, m: torch.maximum(s, m.to(s.dtype)))
_of_mask("masked_scatter", "scores written by masked_scatter", lambda s, m: s.masked_scatter(m, -s), kind="equal")
_of_mask("exp of mask", "scores plus exp(mask)", lambda s, m: s + m.to(s.dtype).exp())
_of_mask("mask of mask", "the mask masks itself", lambda s, m: s + torch.where(m, 0.0, -math.inf).masked_fill(m, -1.0))
_of_mask("bool and causal", "both masks",
         lambda s, m: s.masked_fill(~(m & torch.ones(6, 6, dtype=torch.bool).tril()), -math.inf))  # fmt: skip
_of_mask("bool or causal", "either mask",
         lambda s, m: s.masked_fill(~(m | torch.ones(6, 6, dtype=torch.bool).tril()), -math.inf))  # fmt: skip
_of_mask("bool xor causal", "one of the masks and not the other: rows may be empty",
         lambda s, m: s.masked_fill(~(m ^ torch.ones(6, 6, dtype=torch.bool).tril()), -math.inf))  # fmt: skip
_of_mask("tril of the mask", "tril of an input that is not all ones",
         lambda s, m: s.masked_fill(~m.tril(), torch.finfo(s.dtype).min))  # fmt: skip
_of_mask("triu of the mask", "triu(1) of an input that is not all ones",
         lambda s, m: s.masked_fill(m.triu(1), -math.inf))  # fmt: skip
_of_mask("index_put", "scores written by index",
         lambda s, m: s.index_put((torch.tensor([0]),), torch.zeros(1, dtype=s.dtype)))  # fmt: skip
_of_mask("scatter", "scores written by scatter",
         lambda s, m: s.scatter(-1, torch.zeros(2, 3, 6, 1, dtype=torch.long), -math.inf))  # fmt: skip

_of_scores("causal by multiplication", "scores times tril: the future has score 0",
           lambda s: s * torch.ones(6, 6).tril(), "equal")  # fmt: skip
_of_scores("tril of scores", "tril of the scores: the future has score 0", lambda s: s.tril(), "equal")
_of_scores("triu of scores", "triu of the scores", lambda s: s.triu(), "equal")
_of_scores("tril and zeros hidden", "tril, then every 0 hidden: a score of 0 would be too",
           lambda s: s.tril().masked_fill(s.tril() == 0, -math.inf))  # fmt: skip
_of_scores("negative scores hidden", "masked by the scores' own sign",
           lambda s: s.masked_fill(s < 0, torch.finfo(s.dtype).min), "equal")  # fmt: skip
_of_scores("negative scores hidden, -inf", "masked by the scores' own sign; empty rows",
           lambda s: s.masked_fill(s < 0, -math.inf), "equal")  # fmt: skip
_of_scores("small scores hidden", "masked by size", lambda s: torch.where(s.abs() < 0.3, torch.finfo(s.dtype).min, s),
           "equal")  # fmt: skip
_of_scores("below the mean hidden", "masked by the row's mean",
           lambda s: s.masked_fill(s < s.mean(-1, keepdim=True), -math.inf))  # fmt: skip
_of_scores("top three", "all but the three largest hidden",
           lambda s: s.masked_fill(s < s.topk(3, -1).values[..., -1:], -math.inf))  # fmt: skip
_of_scores("top three by scatter", "the three largest scattered into -inf",
           lambda s: torch.full_like(s, -math.inf).scatter(-1, (t := s.topk(3, -1)).indices, t.values))  # fmt: skip
_of_scores("k-th value", "all below the k-th value hidden",
           lambda s: s.masked_fill(s < s.kthvalue(3, -1, keepdim=True).values, -math.inf))  # fmt: skip
_of_scores("sorted scores", "scores in order: values no longer belong to them", lambda s: s.sort(-1).values)
_of_scores("scores permuted by a sort of themselves", "gathered by their own order",
           lambda s: s.gather(-1, s.argsort(-1)))  # fmt: skip
_of_scores("scores rolled", "scores moved on by one key", lambda s: s.roll(1, -1), "equal")
_of_scores("scores flipped", "keys in reverse", lambda s: s.flip(-1), "equal")
_of_scores("scores by index", "keys taken by index", lambda s: s[..., torch.tensor([5, 0, 1, 2, 3, 4])], "equal")
_of_scores("scores transposed", "scores of the transposed pair", lambda s: s.mT, "equal")
_of_scores("symmetric scores", "scores plus their transposition", lambda s: s + s.mT, "equal")
_of_scores("scores with the diagonal hidden", "no query sees its own key",
           lambda s: s.masked_fill(torch.eye(6, dtype=torch.bool), -math.inf), "equal")  # fmt: skip
_of_scores("row mean removed", "a constant per row does nothing", lambda s: s - s.mean(-1, keepdim=True), "equal")
_of_scores("column mean removed", "a constant per key counts", lambda s: s - s.mean(-2, keepdim=True))
_of_scores("standardised", "scores over their standard deviation", lambda s: s / (s.std(-1, keepdim=True) + 1e-3))
_of_scores("layer norm", "scores through layer norm over the keys", lambda s: F.layer_norm(s, (6,)))
_of_scores("RMS norm", "scores through RMS norm over the keys",
           lambda s: s * (s.pow(2).mean(-1, keepdim=True) + 1e-3).rsqrt())  # fmt: skip
_of_scores("over the largest", "scores over the largest of their row",
           lambda s: s / (s.abs().amax(-1, keepdim=True) + 1))  # fmt: skip
_of_scores("relu", "softmax of relu", torch.relu, "equal")
_of_scores("leaky relu", "softmax of leaky relu, as in graph attention", lambda s: F.leaky_relu(s, 0.2), "equal")
_of_scores("gelu", "softmax of gelu", F.gelu, "equal")
_of_scores("abs", "softmax of the absolute value", torch.abs, "equal")
_of_scores("square", "softmax of the square", torch.square, "equal")
_of_scores("cube", "softmax of the cube", lambda s: s**3, "equal")
_of_scores("negated square", "a Gaussian of the scores", lambda s: -s.square(), "equal")
_of_scores("log sigmoid", "softmax of log sigmoid", F.logsigmoid, "equal")
_of_scores("sum of two functions", "scores plus their sine", lambda s: s + s.sin(), "equal")
_of_scores("scores times scores", "a gate of themselves", lambda s: s * s.sigmoid(), "equal")
_of_scores("cumulative scores", "cumulative sums over the keys", lambda s: s.cumsum(-1))
_of_scores("differences", "scores minus the next key's", lambda s: s - s.roll(-1, -1))
_of_scores("forget gate", "scores plus cumulative log gates of the scores' first row",
           lambda s: s + F.logsigmoid(s[..., :1, :]).cumsum(-1))  # fmt: skip
_of_scores("mean of heads", "every head takes the mean scores", lambda s: s.mean(1, keepdim=True).expand_as(s), "equal")
_of_scores("first head's", "every head takes the first head's scores", lambda s: s[:, :1].expand_as(s), "equal")
_of_scores("heads rolled", "every head takes its neighbour's scores", lambda s: s.roll(1, 1), "equal")
_of_scores("heads flipped", "heads in reverse", lambda s: s.flip(1), "equal")
_of_scores("batch rolled", "every sequence takes its neighbour's scores", lambda s: s.roll(1, 0), "equal")
_of_scores("log n", "scale by log of the number of keys", lambda s: s * math.log(s.shape[-1]), "equal")
_of_scores("scale 0", "every key alike", lambda s: s * 0, "equal")
_of_scores("scale minus", "a negative scale", lambda s: s * -0.5, "equal")
_of_scores("scale huge", "a scale of 1e4: one key takes all", lambda s: s * 1e4, "equal", allow=2e-2)
_of_scores("plus scale", "a constant added to every score", lambda s: s + 0.125, "equal")
_of_scores("cosine", "the scores' cosine", torch.cos, "equal")
_of_scores("dropout of scores", "dropout before the softmax", lambda s: F.dropout(s, 0.3, True), random=True)
_of_scores("noise", "Gaussian noise on the scores", lambda s: s + torch.randn_like(s), random=True)
_of_scores("random mask", "scores hidden at random", lambda s: s.masked_fill(torch.rand_like(s) < 0.2, -1e9), "equal",
           random=True)  # fmt: skip


def _several(r: Inputs) -> list[torch.Tensor]:
    return [*r.qkv(), r.ints(0, 3, 2, 1, 6, 6)]


def _shares(r: Inputs) -> list[torch.Tensor]:
    return [*r.qkv(), r.ints(0, 3, 2, 1, 6, 6) / 2.0]


# A mask that holds more than 0 and 1 is another one after each cast.
_of_mask("ints cast to bool and int", "s bool(m) - 1e9 (1 - m), m of 0, 1 and 2",
         lambda s, m: s * m.bool() + (1 - m.int()) * -1e9, _several, "decline")  # fmt: skip
_of_mask("ints cast to bool", "the same, m as it is", lambda s, m: s * m.bool() + (1 - m) * -1e9, _several, "decline")
_of_mask("floats cast to bool", "the same, m of 0, 1/2 and 1",
         lambda s, m: s * m.bool() + (1.0 - m) * -1e9, _shares, "decline")  # fmt: skip
_of_mask("floats cast to int", "s m - 1e9 (1 - int(m)), m of 0, 1/2 and 1",
         lambda s, m: s * m + (1 - m.int()) * -1e9, _shares, "decline")  # fmt: skip
_of_mask("mask in small integers", "-10 (1 - m) is 246 in uint8",
         lambda s, m: s * m + (1 - m.to(torch.uint8)) * -10)  # fmt: skip
_of_mask("fill cast to int", "half of 1 - m is 0 as an integer",
         lambda s, m: s * m + ((1 - m.to(s.dtype)) * -0.5).int())  # fmt: skip
_of_mask("mask cast twice", "0 and 1 in every dtype", lambda s, m: s * m.int() + (1 - m.to(s.dtype)) * -1e9)
