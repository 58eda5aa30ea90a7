"""Keys without a place: sinks, null keys, registers, and columns that are joined to the scores or taken from them."""

from __future__ import annotations

import math

import torch
from attention_near_misses.program import Inputs, Suite, plus, square
from torch.nn import functional as F

suite = Suite("sinks")


def with_sink(r: Inputs) -> list[torch.Tensor]:
    """One learned score per head."""
    return [*r.qkv(), r.randn(3)]


def causal(s: torch.Tensor) -> torch.Tensor:
    """Scores of the future hidden, whatever the number of columns."""
    return s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -math.inf)


def joined(s: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """The sink as the last column, dropped after the softmax."""
    return torch.cat([s, sink], -1).softmax(-1)[..., :-1]


def _joined(name: str, why: str, change, kind: str = "equal", inputs=with_sink, **more) -> None:
    def program(q, k, v, sink):
        s = q @ k.mT * 8**-0.5
        return change(s, sink.view(1, 3, 1, 1).expand(2, 3, 6, 1), v)

    getattr(suite, kind)(inputs, name=name, why=why, **more)(program)


_joined("dropped", "gpt-oss: a column joined, dropped after the softmax",
        lambda s, c, v: torch.cat([s, c], -1).softmax(-1)[..., :-1] @ v)  # fmt: skip
_joined("in front", "the sink's column is the first", lambda s, c, v: torch.cat([c, s], -1).softmax(-1)[..., 1:] @ v)
_joined("in front, last dropped",
        "the sink is first, and the last column is dropped: the sink's share meets v's first row",
        lambda s, c, v: torch.cat([c, s], -1).softmax(-1)[..., :-1] @ v)  # fmt: skip
_joined("behind, first dropped", "the sink is last, and the first column is dropped",
        lambda s, c, v: torch.cat([s, c], -1).softmax(-1)[..., 1:] @ v)  # fmt: skip
_joined("not dropped", "the sink has a value: a row of zeros",
        lambda s, c, v: torch.cat([s, c], -1).softmax(-1) @ F.pad(v, (0, 0, 0, 1)))  # fmt: skip
_joined("not dropped, value of ones", "the sink has a value: a row of ones",
        lambda s, c, v: torch.cat([s, c], -1).softmax(-1) @ F.pad(v, (0, 0, 0, 1), value=1.0))  # fmt: skip
_joined("dropped before", "joined and dropped before the softmax: no sink",
        lambda s, c, v: torch.cat([s, c], -1)[..., :-1].softmax(-1) @ v)  # fmt: skip
_joined("twice", "two sinks", lambda s, c, v: torch.cat([s, c, c], -1).softmax(-1)[..., :-2] @ v)
_joined("twice, one dropped", "two sinks, of which one meets a value of zeros",
        lambda s, c, v: torch.cat([s, c, c], -1).softmax(-1)[..., :-1] @ F.pad(v, (0, 0, 0, 1)))  # fmt: skip
_joined("two keys dropped", "one sink, two columns dropped: a key's share is lost",
        lambda s, c, v: torch.cat([s, c], -1).softmax(-1)[..., :-2] @ v[:, :, :-1])  # fmt: skip
_joined("multiplied", "the sink multiplies the scores", lambda s, c, v: (s * c).softmax(-1) @ v)
_joined("added", "the sink is added to the scores: nothing", lambda s, c, v: (s + c).softmax(-1) @ v)
_joined("scaled with scores", "joined before the scale",
        lambda s, c, v: (torch.cat([s, c], -1) * 2).softmax(-1)[..., :-1] @ v)  # fmt: skip
_joined("after max", "joined after the maximum was taken off: gpt-oss's own spelling",
        lambda s, c, v: ((x := torch.cat([s, c], -1)) - x.amax(-1, True)).softmax(-1)[..., :-1] @ v)  # fmt: skip
_joined("after max of scores", "the maximum of the scores alone is taken off, the sink stays",
        lambda s, c, v: torch.cat([s - s.amax(-1, keepdim=True), c], -1).softmax(-1)[..., :-1] @ v)  # fmt: skip
_joined("in the denominator", "exp / (sum + exp(sink))",
        lambda s, c, v: (e := s.exp()) / (e.sum(-1, keepdim=True) + c.exp()) @ v)  # fmt: skip
_joined("by sigmoid", "attention times sigmoid(logsumexp - sink)",
        lambda s, c, v: (s.softmax(-1) @ v) * torch.sigmoid(s.logsumexp(-1, keepdim=True) - c))  # fmt: skip
_joined("by sigmoid of the weights", "weights times sigmoid(logsumexp - sink)",
        lambda s, c, v: (s.softmax(-1) * torch.sigmoid(s.logsumexp(-1, True) - c)) @ v)  # fmt: skip
_joined("by sigmoid, sign", "sigmoid(sink - logsumexp): the sink's share, not the rest", kind="decline",
        change=lambda s, c, v: (s.softmax(-1) @ v) * torch.sigmoid(c - s.logsumexp(-1, keepdim=True)))  # fmt: skip
_joined("by sigmoid over queries", "the logarithm of the sum over queries", kind="decline",
        change=lambda s, c, v: (s.softmax(-1) @ v) * torch.sigmoid(s.logsumexp(-2, keepdim=True).mT - c))  # fmt: skip
_joined("by sigmoid over heads", "the logarithm of the sum over heads", kind="decline",
        change=lambda s, c, v: (s.softmax(-1) @ v) * torch.sigmoid(s.logsumexp(1, True)[..., :1] - c))  # fmt: skip
_joined("by sigmoid of other scores", "the logarithm of the sum before the last scale", kind="decline",
        change=lambda s, c, v: ((s * 0.5).softmax(-1) @ v) * torch.sigmoid(s.logsumexp(-1, True) - c))  # fmt: skip
_joined("by sigmoid, scaled", "half of the logarithm", kind="decline",
        change=lambda s, c, v: (s.softmax(-1) @ v) * torch.sigmoid(s.logsumexp(-1, True) * 0.5 - c))  # fmt: skip
_joined("by sigmoid, alpha", "twice the sink is taken off",
        lambda s, c, v: (s.softmax(-1) @ v) * torch.sigmoid(s.logsumexp(-1, True).sub(c, alpha=2)))  # fmt: skip
_joined(
    "by sigmoid of a shift",
    "the logarithm of shifted scores: another sink than the softmax would have",
    lambda s, c, v: ((x := s - s.amax(-1, True)).softmax(-1) @ v) * torch.sigmoid(x.logsumexp(-1, True) - c),
)
_joined("by sigmoid twice", "two gates: only one of them is a sink",
        lambda s, c, v: (s.softmax(-1) @ v) * (g := torch.sigmoid(s.logsumexp(-1, True) - c)) * g)  # fmt: skip
_joined(
    "by sigmoid, returned",
    "the gate is returned as well",
    kind="decline",
    change=lambda s, c, v: ((s.softmax(-1) @ v) * (g := torch.sigmoid(s.logsumexp(-1, True) - c)), g),
)
_joined("by sigmoid, result too", "the result without the gate is used as well", kind="decline",
        change=lambda s, c, v: (o := s.softmax(-1) @ v) * torch.sigmoid(s.logsumexp(-1, True) - c) + o)  # fmt: skip
_joined("by sigmoid, rows of NaN", "a row without a key is NaN before the sink is there",
        lambda s, c, v: ((x := s.masked_fill(torch.arange(6)[:, None] == 2, -math.inf)).softmax(-1) @ v)
        * torch.sigmoid(x.logsumexp(-1, True) - c))  # fmt: skip
_joined("by sigmoid, lowest rows", "a row of the lowest numbers: its sink takes all",
        lambda s, c, v: ((x := s.masked_fill(torch.arange(6)[:, None] == 2, torch.finfo(s.dtype).min)).softmax(-1) @ v)
        * torch.sigmoid(x.logsumexp(-1, True) - c))  # fmt: skip
_joined("minus one key", "the sink replaces the first key",
        lambda s, c, v: torch.cat([c, s[..., 1:]], -1).softmax(-1) @ v)  # fmt: skip
_joined("renormalised", "dropped, and normalised again: no sink",
        lambda s, c, v: (p := torch.cat([s, c], -1).softmax(-1)[..., :-1]) / p.sum(-1, keepdim=True) @ v)  # fmt: skip
_joined("detached", "a sink without a gradient",
        lambda s, c, v: torch.cat([s, c.detach()], -1).softmax(-1)[..., :-1] @ v)  # fmt: skip
_joined("share returned", "the sink's share is returned", kind="decline",
        change=lambda s, c, v: ((p := torch.cat([s, c], -1).softmax(-1))[..., :-1] @ v, p[..., -1]))  # fmt: skip
_joined("softmax over queries", "joined, softmax over the queries", kind="decline",
        change=lambda s, c, v: torch.cat([s, c], -1).softmax(-2)[..., :-1] @ v)  # fmt: skip
_joined("masked", "causal, then joined: the sink is seen by all", lambda s, c, v: joined(causal(s), c) @ v)
_joined("masked with it", "joined, then causal over seven columns: the sink is seen by none",
        lambda s, c, v: causal(torch.cat([s, c], -1)).softmax(-1)[..., :-1] @ v)  # fmt: skip
_joined("full rows", "hidden keys in a row with a sink: zero, not NaN",
        lambda s, c, v: joined(s.masked_fill(torch.arange(6)[:, None] == 3, -math.inf), c) @ v)  # fmt: skip


@suite.equal(plus((6,)))
def sink_per_query(q, k, v, sink):
    """A sink per query, not per head."""
    s = torch.cat([q @ k.mT, sink.view(1, 1, 6, 1).expand(2, 3, 6, 1)], -1)
    return s.softmax(-1)[..., :-1] @ v


@suite.equal()
def sink_of_zero(q, k, v):
    """A column of zeros: quiet softmax."""
    return F.pad(q @ k.mT, (0, 1)).softmax(-1)[..., :-1] @ v


@suite.equal()
def sink_of_minus_infinity(q, k, v):
    """A column of -inf: none."""
    return F.pad(q @ k.mT, (0, 1), value=-math.inf).softmax(-1)[..., :-1] @ v


@suite.equal()
def null_key(q, k, v):
    """A key of zeros with a value of zeros (add_zero_attn)."""
    return (q @ F.pad(k, (0, 0, 0, 1)).mT).softmax(-1) @ F.pad(v, (0, 0, 0, 1))


@suite.equal(plus((1, 3, 2, 8), (1, 3, 2, 8)))
def memory_tokens(q, k, v, a, b):
    """Two learned keys and values in front."""
    k, v = torch.cat([a.expand(2, 3, 2, 8), k], -2), torch.cat([b.expand(2, 3, 2, 8), v], -2)
    return (q @ k.mT * 8**-0.5).softmax(-1) @ v


@suite.equal(plus((1, 3, 2, 8), (1, 3, 2, 8)))
def memory_tokens_at_other_ends(q, k, v, a, b):
    """The learned keys in front, their values behind."""
    k, v = torch.cat([a.expand(2, 3, 2, 8), k], -2), torch.cat([v, b.expand(2, 3, 2, 8)], -2)
    return (q @ k.mT * 8**-0.5).softmax(-1) @ v


@suite.equal(square)
def softmax_over_one_column_more_than_values(q, k, v):
    """Seven scores, six values: the last share is cut by narrow."""
    p = F.pad(q @ k.mT, (0, 1), value=0.5).softmax(-1)
    return p.narrow(-1, 0, 6) @ v


@suite.equal(square)
def split_off(q, k, v):
    """Seven scores: the sink is split off."""
    p, _ = F.pad(q @ k.mT, (0, 1), value=0.5).softmax(-1).split([6, 1], -1)
    return p @ v


def _low_rows(name: str, number: float) -> None:
    """Rows all of whose keys carry a large number beside which scores are not lost: no column is shifted with them."""

    def program(q, k, v, sink):
        seen = torch.arange(6)[:, None] > torch.arange(6)
        s = q @ k.mT * 8**-0.5 + torch.where(seen, 0.0, number).to(q.dtype)
        s = torch.cat([s, sink.view(1, 3, 1, 1).expand(2, 3, 6, 1)], -1)
        return s.softmax(-1)[..., :-1] @ v

    for dtype in (torch.float64, torch.float32):
        text = str(dtype).removeprefix("torch.")
        suite.equal(
            plus((3,)), name=f"{name}, {text}", dtype=dtype, why="a row of large numbers and a column", allow=1e-3
        )(program)


_low_rows("rows of -1e4", -1e4)
_low_rows("rows of -1e6", -1e6)
_low_rows("rows of +1e4", 1e4)


@suite.decline(
    plus((3,), (6,)), dtype=torch.bfloat16, why="beside +1e4 the scores of the keys that count are rounded off"
)
def raised_beside_a_column(q, k, v, sink, bias):
    """The mask is subtracted, not added."""
    low = torch.where(torch.ones(6, 6, dtype=torch.bool).tril(), 0.0, torch.full([], -1e4, dtype=q.dtype))
    s = bias - (q @ k.mT * 8**-0.5 + low)
    s = torch.cat([s, sink.view(1, 3, 1, 1).expand(2, 3, 6, 1)], -1)
    return s.softmax(-1)[..., :-1] @ v


@suite.decline(
    plus((3,), (2, 3, 6, 4), (2, 3, 4, 6)), dtype=torch.float16, why="the mask that is subtracted is part of a bias"
)
def raised_in_a_bias_beside_a_column(q, k, v, sink, other_q, other_k):
    """Another product less masked scores: it is the product that is attended by, and the rest is added to it."""
    low = torch.zeros(6, 6, dtype=q.dtype).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -6e4)
    s = (other_q @ other_k) / 2 - (q @ k.mT + low)
    s = torch.cat([s, sink.view(1, 3, 1, 1).expand(2, 3, 6, 1)], -1)
    return s.softmax(-1)[..., :-1] @ v


@suite.decline()
def a_number_off_and_a_key_dropped(q, k, v):
    """No column was appended: it is the first key that is dropped after the softmax."""
    return (q @ k.mT - 5.0).softmax(-1)[..., 1:] @ v[:, :, 1:]
