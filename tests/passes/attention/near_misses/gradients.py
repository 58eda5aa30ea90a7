"""Where the gradient is cut, scaled or wanted in odd places. The forward alone is attention in all of these."""

from __future__ import annotations

import math

import torch
from attention_near_misses.program import TRAINING, Inputs, Suite, attend
from torch import nn
from torch.utils.checkpoint import checkpoint

suite = Suite("gradients")
ONLY = (TRAINING,)


@suite.equal(modes=ONLY)
def key_detached(q, k, v):
    """No gradient for k."""
    return (q @ k.detach().mT * 8**-0.5).softmax(-1) @ v


@suite.equal(modes=ONLY)
def query_detached(q, k, v):
    """No gradient for q."""
    return (q.detach() @ k.mT * 8**-0.5).softmax(-1) @ v


@suite.equal(modes=ONLY)
def value_detached(q, k, v):
    """No gradient for v."""
    return (q @ k.mT * 8**-0.5).softmax(-1) @ v.detach()


@suite.equal(modes=ONLY)
def scores_detached(q, k, v):
    """No gradient through the scores: v alone learns."""
    return (q @ k.mT * 8**-0.5).detach().softmax(-1) @ v


@suite.equal(modes=ONLY)
def probabilities_detached(q, k, v):
    """No gradient through the probabilities."""
    return (q @ k.mT * 8**-0.5).softmax(-1).detach() @ v


@suite.equal(modes=ONLY)
def output_detached(q, k, v):
    """No gradient at all from attention, one around it."""
    return ((q @ k.mT * 8**-0.5).softmax(-1) @ v).detach() + v


@suite.equal(modes=ONLY)
def scores_data(q, k, v):
    """.data instead of detach()."""
    return (q @ k.mT * 8**-0.5).data.softmax(-1) @ v


@suite.decline(modes=ONLY)
def gradient_halved(q, k, v):
    """0.5 p + 0.5 p.detach(): the forward is attention's, the gradient half."""
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    return (0.5 * p + 0.5 * p.detach()) @ v


@suite.decline(modes=ONLY)
def gradient_of_scores_doubled(q, k, v):
    """2 s - s.detach(): the forward is attention's, the gradient double."""
    s = q @ k.mT * 8**-0.5
    return (2 * s - s.detach()).softmax(-1) @ v


@suite.equal(modes=ONLY)
def maximum_not_detached(q, k, v):
    """s - max(s) without detach: gradients through the maximum cancel."""
    s = q @ k.mT * 8**-0.5
    return (s - s.max(-1, keepdim=True).values).softmax(-1) @ v


@suite.equal(modes=ONLY)
def scores_without_grad(q, k, v):
    """Scores under no_grad, the rest with."""
    with torch.no_grad():
        s = q @ k.mT * 8**-0.5
    return s.softmax(-1) @ v


@suite.equal(modes=ONLY)
def probabilities_without_grad(q, k, v):
    """Scores and softmax under no_grad, the product with."""
    with torch.no_grad():
        p = (q @ k.mT * 8**-0.5).softmax(-1)
    return p @ v


@suite.equal(modes=ONLY)
def softmax_without_grad(q, k, v):
    """The softmax alone under no_grad: q and k get no gradient, v does."""
    s = q @ k.mT * 8**-0.5
    with torch.no_grad():
        p = s.softmax(-1)
    return p @ v


@suite.equal(modes=ONLY)
def mask_without_grad(q, k, v):
    """The mask applied under no_grad, which cuts the gradient of the scores."""
    s = q @ k.mT * 8**-0.5
    with torch.no_grad():
        s = s.masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
    return s.softmax(-1) @ v


@suite.equal(modes=ONLY)
def product_without_grad(q, k, v):
    """The second product under no_grad."""
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    with torch.no_grad():
        out = p @ v
    return out + q


@suite.equal(modes=ONLY)
def everything_without_grad(q, k, v):
    """All of attention under no_grad, a residual with."""
    with torch.no_grad():
        out = attend(q, k, v)
    return q + out


@suite.equal(modes=ONLY)
def twice_with_and_without_grad(q, k, v):
    """The same attention twice, once under no_grad."""
    with torch.no_grad():
        target = attend(q, k, v)
    return ((attend(q, k, v) - target.detach()) ** 2).sum() + attend(q, k, v).sum()


@suite.equal(modes=ONLY)
def grad_enabled_inside(q, k, v):
    """enable_grad inside no_grad."""
    with torch.no_grad():
        w = v * 2
        with torch.enable_grad():
            out = attend(q, k, w)
    return out


@suite.equal(modes=ONLY)
def checkpointed(q, k, v):
    """Attention under activation checkpointing."""
    return checkpoint(attend, q, k, v, use_reentrant=False)


@suite.equal(modes=ONLY)
def capped_and_checkpointed(q, k, v):
    """Capped scores under activation checkpointing: FlexAttention, run as it is, does not run the same way twice."""
    return checkpoint(lambda *x: attend(*x, lambda s: 2 * torch.tanh(s / 2)), q, k, v, use_reentrant=False)


@suite.equal()
def in_a_branch(q, k, v):
    """Attention in one branch, and something else in the other: gradients of both are to be laid out alike."""

    def scores(q, k):
        return q @ k.transpose(-2, -1) * 8**-0.5

    return torch.cond(
        q.sum() > 0,
        lambda q, k, v: scores(q, k).softmax(-1) @ v,
        lambda q, k, v: scores(q, k).sigmoid() @ v,
        (q, k, v),
    )


for _which in ("q", "k", "v"):
    _flags = tuple(name == _which for name in "qkv")
    suite.equal(
        lambda r, flags=_flags: [r.randn(2, 3, 6, 8, grad=flag) for flag in flags],
        modes=ONLY, name=f"only {_which}", why=f"{_which} alone needs a gradient",
    )(attend)  # fmt: skip
    suite.equal(
        lambda r, flags=_flags: [r.randn(2, 3, 6, 8, grad=not flag) for flag in flags],
        modes=ONLY, name=f"all but {_which}", why=f"{_which} alone needs no gradient",
    )(attend)  # fmt: skip


def _biased(*shape: int, qkv: bool = True):
    def draw(r: Inputs) -> list[torch.Tensor]:
        return [*(r.randn(2, 3, 6, 8, grad=qkv) for _ in range(3)), r.randn(*shape)]

    return draw


def a_bias_alone(q, k, v, bias):
    return attend(q, k, v, lambda s: s + bias)


for _shape in ((6, 6), (3, 1, 1), (2, 3, 6, 6), (1, 3, 6, 6), (2, 1, 1, 6), (6,)):
    _inputs = _biased(*_shape, qkv=False)
    suite.equal(_inputs, modes=ONLY, name=str(_shape), why="a bias alone needs a gradient")(a_bias_alone)


@suite.equal(_biased(6, 6), modes=ONLY)
def bias_masked(q, k, v, bias):
    """A bias with a gradient, then a causal fill: the hidden places get none."""
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    return attend(q, k, v, lambda s: (s + bias).masked_fill(hidden, -math.inf))


@suite.equal(_biased(6, 6), modes=ONLY)
def bias_detached(q, k, v, bias):
    """A bias that could have a gradient and gets none."""
    return attend(q, k, v, lambda s: s + bias.detach())


@suite.equal(_biased(6, 6), modes=ONLY)
def gate_on_mask(q, k, v, gate):
    """A soft mask: log sigmoid of learned gates."""
    return attend(q, k, v, lambda s: s + torch.nn.functional.logsigmoid(gate))


@suite.equal(_biased(6, 6), modes=ONLY)
def soft_mask_as_factor(q, k, v, gate):
    """exp(s) times sigmoid(gate), normalised: log sigmoid in other words."""
    e = (q @ k.mT * 8**-0.5).exp() * gate.sigmoid()
    return e / e.sum(-1, keepdim=True) @ v


@suite.equal(lambda r: [r.randn(2, 3, 6, 8)])
def one_tensor_for_all(x):
    """q, k and v are one tensor: its gradient has three parts."""
    return attend(x, x, x)


@suite.equal(lambda r: [r.randn(2, 3, 6, 8), r.randn(2, 3, 6, 8)])
def query_is_key(x, v):
    """q is k: its gradient has two parts."""
    return attend(x, x, v)


@suite.equal(lambda r: [r.randn(2, 3, 6, 8), r.randn(2, 3, 6, 8)])
def key_is_value(q, x):
    """k is v."""
    return attend(q, x, x)


@suite.equal(lambda r: (lambda x: [x, x, x])(r.randn(2, 3, 6, 8)))
def one_input_given_thrice(q, k, v):
    """Three arguments, one tensor."""
    return attend(q, k, v)


@suite.equal(lambda r: list(r.randn(2, 3, 6, 24).chunk(3, -1)))
def inputs_are_views(q, k, v):
    """Three arguments, views of one tensor that needs the gradient."""
    return attend(q, k, v)


@suite.equal()
class Projected(nn.Module):
    """The usual module: projections whose parameters get gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, q, k, v):
        a, b, c = self.project(q + k + v).chunk(3, -1)
        return self.out(attend(a, b, c))


@suite.equal(modes=ONLY)
class FrozenProjection(nn.Module):
    """The projection of k is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, q, k, v):
        return attend(self.query(q), self.key(k.detach()), v)


@suite.equal(modes=ONLY)
class TiedProjection(nn.Module):
    """One weight for q and k."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, q, k, v):
        return attend(q @ self.weight, k @ self.weight, v @ self.weight.T)


@suite.equal(modes=ONLY)
def gradient_inside(q, k, v):
    """The program asks for a gradient of attention itself."""
    out = attend(q, k, v)
    (grad,) = torch.autograd.grad(out.sum(), v, retain_graph=True)
    return out + grad


@suite.equal(modes=ONLY)
def scaled_gradient_of_value(q, k, v):
    """v + (v * 0.5 - v.detach() * 0.5): half as much gradient more."""
    return attend(q, k, v + (v * 0.5 - v.detach() * 0.5))


@suite.equal(lambda r: [*(r.randn(6, 6, 8, grad=False) for _ in "qkv"), r.randn(6, 6, 6)], modes=ONLY)
def gradient_of_what_is_not_read(q, k, v, bias):
    """With a beta of 0 only what is not added asks for a gradient, which is zeros."""
    return torch.baddbmm(bias, q, k.mT, beta=0, alpha=0.3).softmax(-1) @ v


@suite.equal(lambda r: [*(r.randn(6, 6, 8, grad=False) for _ in "qkv"), r.randn(6, 6, 6)], modes=ONLY)
def gradient_of_what_is_not_read_beside_a_number(q, k, v, bias):
    """The same with a column that is a number."""
    s = torch.baddbmm(bias, q, k.mT, beta=0, alpha=0.3)
    return torch.nn.functional.pad(s, (0, 1)).softmax(-1)[..., :-1] @ v
