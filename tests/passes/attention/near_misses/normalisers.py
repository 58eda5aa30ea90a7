"""What stands where the softmax should is none, or is one in disguise."""

from __future__ import annotations

import math

import torch
from attention_near_misses.program import Suite, attend, cross
from torch.nn import functional as F

suite = Suite("normalisers")


def _with(normalise):
    def program(q, k, v):
        return normalise(q @ k.transpose(-2, -1) / math.sqrt(8)) @ v

    return program


def _add(kind: str, name: str, why: str, normalise, **more) -> None:
    getattr(suite, kind)(name=name, why=why, **more)(_with(normalise))


_add("decline", "sigmoid", "sigmoid attention: rows do not sum to one", torch.sigmoid, quiet=True)
_add("decline", "relu", "relu attention", torch.relu, quiet=True)
_add("decline", "squared relu", "relu squared over the number of keys", lambda s: s.relu() ** 2 / 6, quiet=True)
_add("decline", "relu normalised", "relu over its sum", lambda s: s.relu() / (s.relu().sum(-1, keepdim=True) + 1e-6),
     quiet=True)  # fmt: skip
_add("decline", "softplus normalised", "softplus over its sum", lambda s: (e := F.softplus(s)) / e.sum(-1, True),
     quiet=True)  # fmt: skip
_add("decline", "squares", "squares over their sum", lambda s: s**2 / (s**2).sum(-1, keepdim=True), quiet=True)
_add("decline", "tanh", "tanh of the scores", torch.tanh, quiet=True)
_add("decline", "none", "no normaliser: linear attention written out", lambda s: s, quiet=True)
_add("decline", "L2", "rows normalised by their length", lambda s: F.normalize(s, dim=-1), quiet=True)
_add("decline", "L1 of exp over queries", "exp over its sum over the queries",
     lambda s: (e := s.exp()) / e.sum(-2, keepdim=True), quiet=True)  # fmt: skip
_add("decline", "exp without sum", "exp alone", torch.exp, quiet=True)
_add("decline", "exp over all", "exp over its sum over queries and keys",
     lambda s: (e := s.exp()) / e.sum((-1, -2), keepdim=True), quiet=True)  # fmt: skip
_add("equal", "exp over sum", "softmax written out without the maximum", lambda s: (e := s.exp()) / e.sum(-1, True))
_add("equal", "exp times reciprocal", "softmax written out with a reciprocal",
     lambda s: (e := s.exp()) * e.sum(-1, keepdim=True).reciprocal())  # fmt: skip
_add("equal", "exp minus max", "softmax written out with the maximum",
     lambda s: (e := (s - s.amax(-1, keepdim=True)).exp()) / e.sum(-1, keepdim=True))  # fmt: skip
_add("equal", "exp minus detached max", "the maximum detached, as one should",
     lambda s: (e := (s - s.detach().max(-1, keepdim=True).values).exp()) / e.sum(-1, keepdim=True))  # fmt: skip
_add("equal", "exp minus global max", "the maximum of everything changes nothing",
     lambda s: (e := (s - s.max()).exp()) / e.sum(-1, keepdim=True))  # fmt: skip
_add("equal", "exp minus head max", "that of a head's scores neither (CogView)",
     lambda s: (e := (s - s.amax((-1, -2), keepdim=True)).exp()) / e.sum(-1, keepdim=True))  # fmt: skip
_add("equal", "minus max of flat scores", "the same of scores whose rows are put behind one another",
     lambda s: (s - s.flatten(2).max(-1)[0][..., None, None]).softmax(-1))  # fmt: skip
_add("decline", "max over queries of flat scores", "scores of all heads behind one another, and the maximum of a key",
     lambda s: (s - s.reshape(s.shape[0], -1, s.shape[-1]).amax(1)[:, None, None]).softmax(-1))  # fmt: skip
_add("decline", "max over batch and heads", "the maximum of each pair of query and key does not cancel",
     lambda s: (s - s.amax((0, 1), keepdim=True)).softmax(-1))  # fmt: skip
_add("equal", "minus logsumexp", "exp(s - logsumexp)", lambda s: (s - s.logsumexp(-1, keepdim=True)).exp())
_add("decline", "minus logsumexp over queries", "exp(s - logsumexp over dim -2)",
     lambda s: (s - s.logsumexp(-2, keepdim=True)).exp(), quiet=True)  # fmt: skip
_add("decline", "max over queries", "the maximum subtracted is the key's own, which does not cancel",
     lambda s: (e := (s - s.amax(-2, keepdim=True)).exp()) / (e.sum(-1, keepdim=True)), quiet=True)  # fmt: skip
_add("decline", "max over queries minus scores", "taken off the maximum of the key, which does not cancel",
     lambda s: (s.amax(-2, keepdim=True).expand_as(s) - s).softmax(-1))  # fmt: skip
_add("decline", "max over heads", "subtracting the maximum over heads changes the softmax over keys",
     lambda s: (s - s.amax(1, keepdim=True)).softmax(-1))  # fmt: skip
_add("equal", "one added", "quiet softmax: the denominator has one more, a sink of logit 0",
     lambda s: (e := s.exp()) / (1 + e.sum(-1, True)))  # fmt: skip
_add("equal", "one added after max", "quiet softmax, kept finite: a sink of logit 0",
     lambda s: (e := (s - (m := s.amax(-1, True).clamp(min=0))).exp()) / (e.sum(-1, True) + (-m).exp()))  # fmt: skip
_add("equal", "epsilon in sum", "a denominator with 0.01 more: a sink of that logarithm",
     lambda s: (e := s.exp()) / (e.sum(-1, True) + 1e-2))  # fmt: skip
_add("decline", "clamped sum", "a denominator of at least four",
     lambda s: (e := s.exp()) / e.sum(-1, True).clamp(min=8.0), quiet=True)  # fmt: skip
_add("equal", "exp2", "base two: a scale", lambda s: (e := torch.exp2(s)) / e.sum(-1, keepdim=True))
_add("equal", "exp2 scaled", "base two with log2(e) in the scale is base e",
     lambda s: (e := torch.exp2(s * math.log2(math.e))) / e.sum(-1, keepdim=True))  # fmt: skip
_add("decline", "expm1", "exp(s) - 1", lambda s: (e := torch.expm1(s.abs())) / e.sum(-1, keepdim=True), quiet=True)
_add("decline", "mean of exp", "exp over its mean", lambda s: (e := s.exp()) / e.mean(-1, keepdim=True) / 2, quiet=True)
_add("decline", "sum of other scores", "the denominator is of scores twice as large",
     lambda s: s.exp() / (2 * s).exp().sum(-1, keepdim=True), quiet=True)  # fmt: skip
_add("decline", "power", "softmax squared, not normalised again", lambda s: s.softmax(-1) ** 2)
_add("decline", "power normalised", "softmax squared and normalised, which is softmax(2 s) and still not this one",
     lambda s: (p := s.softmax(-1) ** 2) / (p.sum(-1, keepdim=True) + 0.1))  # fmt: skip
_add("decline", "argmax", "hard attention", lambda s: F.one_hot(s.argmax(-1), 6).to(s.dtype) + 0 * s, quiet=True)
_add("decline", "straight through", "hard forward, soft backward",
     lambda s: (p := s.softmax(-1)) + (F.one_hot(s.argmax(-1), 6).to(s.dtype) - p).detach())  # fmt: skip
_add("decline", "sparsemax", "sparsemax by sorting",
     lambda s: (s - ((c := s.sort(-1, descending=True).values).cumsum(-1)[..., 2:3] - 1) / 3).clamp(min=0) + 0 * c,
     quiet=True)  # fmt: skip
_add("decline", "gumbel", "gumbel_softmax draws noise", lambda s: F.gumbel_softmax(s, dim=-1), random=True)
_add("decline", "gumbel hard", "gumbel_softmax, hard", lambda s: F.gumbel_softmax(s, hard=True, dim=-1), random=True)
_add("decline", "cumulative", "cumulative sums of the probabilities", lambda s: s.softmax(-1).cumsum(-1))
_add("decline", "double softmax", "softmax of the softmax", lambda s: s.softmax(-1).softmax(-1))
_add("decline", "double over queries", "softmax over keys of a softmax over queries",
     lambda s: s.softmax(-2).softmax(-1))  # fmt: skip
_add("decline", "sinkhorn", "keys, then queries, then keys again",
     lambda s: (p := s.softmax(-1) / s.softmax(-1).sum(-2, keepdim=True)) / p.sum(-1, keepdim=True))  # fmt: skip
_add("decline", "dual softmax", "product of the softmaxes over keys and over queries",
     lambda s: s.softmax(-1) * s.softmax(-2))  # fmt: skip
_add("equal", "difference", "differential attention on one pair of maps: two attentions",
     lambda s: s.softmax(-1) - 0.5 * (2 * s).softmax(-1))  # fmt: skip
_add("decline", "mix with uniform", "probabilities smoothed towards 1/n", lambda s: 0.9 * s.softmax(-1) + 0.1 / 6)
_add("decline", "mix with identity", "probabilities plus the identity",
     lambda s: s.softmax(-1) + torch.eye(6, dtype=s.dtype))  # fmt: skip
_add("decline", "one minus", "1 - p: attention to the others", lambda s: 1 - s.softmax(-1))
_add("decline", "round", "probabilities rounded to tenths", lambda s: (s.softmax(-1) * 10).round() / 10)
_add("decline", "threshold", "small probabilities set to zero",
     lambda s: F.threshold((p := s.softmax(-1)), 0.1, 0.0) + 0 * p)  # fmt: skip
_add("equal", "layer of views", "softmax through views that change nothing",
     lambda s: s.unsqueeze(0).softmax(-1).squeeze(0).contiguous())  # fmt: skip


@suite.decline(quiet=True)
def linear_attention(q, k, v):
    """(elu + 1) feature maps, and no scores at all."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.mT @ v) / (q @ k.sum(-2, keepdim=True).mT)


@suite.decline(quiet=True)
def efficient_attention(q, k, v):
    """Softmax of q over features and of k over positions: q' (k'ᵀ v)."""
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


@suite.decline(quiet=True)
def softmax_of_q_alone(q, k, v):
    """The softmax is of q, before the product."""
    return (q.softmax(-1) @ k.mT) @ v


@suite.decline(cross)
def softmax_then_second_product_with_k(q, k, v):
    """softmax(q kᵀ) k v: the probabilities meet k, and a square of v follows."""
    return (q @ k.mT).softmax(-2) @ k @ (v.mT @ v)


@suite.decline(random=True)
def gumbel_noise_by_hand(q, k, v):
    """-log(-log(u)) added to the scores."""
    return attend(q, k, v, lambda s: s - torch.log(-torch.log(torch.rand_like(s).clamp(1e-6, 1 - 1e-6))))


@suite.decline()
def half_of_the_maximum_taken_off(q, k, v):
    """A row that is far below 0 has no weight then that is not rounded to 0, and the quotient is 0 / 0."""
    s = q @ k.mT * 8**-0.5
    e = torch.sub(s, s.amax(-1, keepdim=True), alpha=0.5).exp()
    return e / e.sum(-1, keepdim=True) @ v
