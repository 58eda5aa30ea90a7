"""Scores or probabilities that the program needs for something else, or that somebody watches."""

from __future__ import annotations

import torch
from attention_near_misses.program import TRAINING, Inputs, Suite, plus, square
from torch.nn import functional as F

suite = Suite("uses")


def _probabilities(name: str, why: str, use, **more) -> None:
    """A program that returns attention and `use(probabilities)`."""

    def program(q, k, v):
        p = (q @ k.mT * 8**-0.5).softmax(-1)
        return p @ v, use(p)

    suite.decline(square, name=f"p, {name}", why=why, **more)(program)


def _scores(name: str, why: str, use, **more) -> None:
    """A program that returns attention and `use(scores)`."""

    def program(q, k, v):
        s = q @ k.mT * 8**-0.5
        return s.softmax(-1) @ v, use(s)

    suite.decline(square, name=f"s, {name}", why=why, **more)(program)


_probabilities("returned", "the probabilities are returned", lambda p: p)
_probabilities("detached", "the probabilities are returned detached", lambda p: p.detach())
_probabilities("mean over heads", "as nn.MultiheadAttention returns them", lambda p: p.mean(1))
_probabilities("mean of all", "a scalar for the log, and so a gradient", lambda p: p.mean())
_probabilities("entropy", "an entropy loss", lambda p: -(p * (p + 1e-9).log()).sum(-1).mean())
_probabilities("one row", "one row of the map", lambda p: p[:, :, 0])
_probabilities("one key", "what goes to the first key", lambda p: p[..., 0])
_probabilities("to the keys", "how much each key got (heavy hitters)", lambda p: p.sum(-2))
_probabilities("largest", "the largest probability", lambda p: p.amax(-1))
_probabilities("argmax", "the key looked at most", lambda p: p.argmax(-1))
_probabilities("diagonal", "each query's own key", lambda p: p.diagonal(dim1=-2, dim2=-1))
_probabilities("squared norm", "a penalty on p pᵀ - 1, as in structured self-attention",
               lambda p: ((p @ p.mT - torch.eye(6, dtype=p.dtype)) ** 2).sum())  # fmt: skip
_probabilities("convolved", "pooled over the queries", lambda p: F.avg_pool1d(p.flatten(0, 2), 2))
_probabilities("view", "a view of the probabilities", lambda p: p.view(-1))
_probabilities("transposed", "pᵀ is returned", lambda p: p.mT)
_probabilities("compared", "where they exceed a threshold", lambda p: p > 0.2)
_probabilities("sum is one", "sums of the rows, which are 1 but for rounding", lambda p: p.sum(-1) > 0.5)
_scores("returned", "the scores are returned", lambda s: s)
_scores("detached", "the scores are returned detached", lambda s: s.detach())
_scores("logsumexp", "a z-loss on the scores", lambda s: s.logsumexp(-1).square().mean())
_scores("max", "the largest score, as for QK-clip", lambda s: s.amax((-1, -2)))
_scores("mean", "the mean score", lambda s: s.mean())
_scores("sigmoid", "another map of the same scores", torch.sigmoid)
_scores("softmax over queries", "the other softmax of the same scores", lambda s: s.softmax(-2))
_scores("diagonal", "each query's own score", lambda s: s.diagonal(dim1=-2, dim2=-1).sum(-1))


@suite.equal()
def shapes_of_probabilities_used(q, k, v):
    """Only the shape of the probabilities is used elsewhere."""
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    return p @ v / p.shape[-1], torch.zeros(p.shape[:2])


@suite.equal()
def zeros_like_probabilities(q, k, v):
    """zeros_like(p) needs no values of p."""
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    return p @ v, torch.zeros_like(p)


@suite.equal()
def probabilities_computed_and_dropped(q, k, v):
    """A mean of the probabilities that nobody takes."""
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    mean = p.mean()
    del mean
    return p @ v


@suite.equal()
def probabilities_in_a_dead_branch(q, k, v):
    """The probabilities are wanted only if asked for, and nobody asks."""
    wanted = False
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    return (p @ v, p) if wanted else (p @ v, None)


@suite.decline()
def raw_scores_kept(q, k, v):
    """The unscaled scores are returned, as RealFormer hands them to the next layer."""
    s = q @ k.mT
    return (s * 8**-0.5).softmax(-1) @ v, s


@suite.equal(plus((2, 3, 6, 6)))
def residual_scores_taken(q, k, v, previous):
    """Scores of the layer before added, and not handed on."""
    return (q @ k.mT * 8**-0.5 + previous).softmax(-1) @ v


@suite.decline(plus((2, 3, 6, 6)))
def residual_scores_handed_on(q, k, v, previous):
    """RealFormer: scores of the layer before added, the sum handed on."""
    s = q @ k.mT * 8**-0.5 + previous
    return s.softmax(-1) @ v, s


@suite.equal()
def probabilities_used_twice(q, k, v):
    """One map on v and on 2 v: as one product or as two."""
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    return p @ v, p @ (2 * v)


@suite.equal(plus((2, 3, 6, 5)))
def probabilities_on_two_values(q, k, v, w):
    """One map on two values of different width."""
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    return p @ v, p @ w


@suite.decline()
def probabilities_applied_twice(q, k, v):
    """p (p v): two steps of a random walk."""
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    return p @ (p @ v)


@suite.decline()
def probabilities_squared_matrix(q, k, v):
    """(p p) v."""
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    return (p @ p) @ v


@suite.equal()
def one_scores_two_softmaxes(q, k, v):
    """The same scores at two temperatures."""
    s = q @ k.mT
    return (s * 0.3).softmax(-1) @ v, (s * 0.6).softmax(-1) @ v


@suite.equal()
def one_scores_two_masks(q, k, v):
    """The same scores, causal and not."""
    s = q @ k.mT * 8**-0.5
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    return s.softmax(-1) @ v, s.masked_fill(~causal, -1e9).softmax(-1) @ v


@suite.decline()
def rows_rescaled_by_their_sum(q, k, v):
    """A gate from the probabilities: the output times the largest probability of its row."""
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    return (p @ v) * p.amax(-1, keepdim=True)


def _log(grad: torch.Tensor) -> torch.Tensor:
    return grad * 2


@suite.equal(square)
def hook_on_probabilities(q, k, v):
    """A hook that doubles the gradient of the probabilities."""
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    if p.requires_grad:
        p.register_hook(_log)
    return p @ v


@suite.equal(square)
def hook_on_scores(q, k, v):
    """A hook that doubles the gradient of the scores."""
    s = q @ k.mT * 8**-0.5
    if s.requires_grad:
        s.register_hook(_log)
    return s.softmax(-1) @ v


@suite.equal(square)
def hook_on_key(q, k, v):
    """A hook that doubles the gradient of k, which attention sees as well."""
    if k.requires_grad:
        k = k * 1.0
        k.register_hook(_log)
    return (q @ k.mT * 8**-0.5).softmax(-1) @ v


def _hooked_inputs(r: Inputs) -> list[torch.Tensor]:
    q, k, v = r.qkv()
    if r.grad:
        k.register_hook(_log)
    return [q, k, v]


@suite.equal(_hooked_inputs)
def hook_on_an_input(q, k, v):
    """An input that came with a hook."""
    return (q @ k.mT * 8**-0.5).softmax(-1) @ v


@suite.equal(square)
def retained_gradient(q, k, v):
    """retain_grad on the probabilities."""
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    if p.requires_grad:
        p.retain_grad()
    return p @ v


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p):
        return p.clone()

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


@suite.decline(square, modes=(TRAINING,))
def custom_function_between(q, k, v):
    """An autograd.Function between softmax and product, with a backward of its own."""
    return _Watched.apply((q @ k.mT * 8**-0.5).softmax(-1)) @ v


@suite.decline(square, modes=(TRAINING,))
def custom_function_on_scores(q, k, v):
    """An autograd.Function on the scores."""
    return _Watched.apply(q @ k.mT * 8**-0.5).softmax(-1) @ v
