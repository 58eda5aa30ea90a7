"""Quotients of exponentials that are almost a softmax: other sums, other masks, other shifts, divided elsewhere."""

from __future__ import annotations

import torch
from attention_near_misses.program import Suite, square
from torch.nn import functional as F

suite = Suite("quotients")
TRIANGLE = torch.ones(6, 6).tril()


def _low(s):
    return s - s.amax(-1, keepdim=True)


def _add(kind: str, name: str, why: str, weights, inputs=square, **more) -> None:
    def program(q, k, v, *rest):
        return weights(q @ k.mT * 8**-0.5, *rest) @ v

    getattr(suite, kind)(inputs, name=name, why=why, **more)(program)


_add("decline", "tiny number, maximum of all", "rows may sum to less than the tiny number",
     lambda s: (e := (s * 9 - s.max() * 9).exp()) / (e.sum(-1, keepdim=True) + 1e-9))  # fmt: skip
_add("decline", "thousandth in the sum", "the maximum is taken off, and a thousandth is no sink of the scores",
     lambda s: (e := _low(s).exp()) / (e.sum(-1, keepdim=True) + 1e-3))  # fmt: skip
_add("decline", "clamp of 2", "a row of one large score sums to 1", quiet=True,
     weights=lambda s: (e := _low(s * 9).exp()) / e.sum(-1, keepdim=True).clamp(min=2.0))  # fmt: skip
_add("equal", "clamp of a millionth", "the sum is at least 1",
     lambda s: (e := _low(s).exp()) / e.sum(-1, keepdim=True).clamp(min=1e-6))  # fmt: skip
_add("decline", "triangle of the dividend alone", "the sum is over all keys",
     lambda s: (e := _low(s).exp()).tril() / e.sum(-1, keepdim=True))  # fmt: skip
_add("decline", "triangle below the diagonal", "the first row has no key, 0 / 0",
     lambda s: (e := _low(s).exp().tril(-1)) / e.sum(-1, keepdim=True))  # fmt: skip
_add("equal", "two triangles", "a band of exponentials",
     lambda s: (e := _low(s).exp().tril(1).triu(-2)) / e.sum(-1, keepdim=True))  # fmt: skip
_add("decline", "shift not taken back", "what is added to the sum is shifted by half as much",
     lambda s: (e := (s - (m := s.amax(-1, keepdim=True))).exp()) / (e.sum(-1, True) + (-m / 2).exp()))  # fmt: skip
_add("decline", "shift of each key", "taken back in the sum by what differs between keys", quiet=True,
     weights=lambda s: (e := (s - (m := s.amax(-2, keepdim=True))).exp()) / (e.sum(-1, True) + (-m).exp()))  # fmt: skip
_add("decline", "twos", "exponentials of some keys count twice",
     lambda s: (e := _low(s).exp() * (TRIANGLE + 1).to(s.dtype)) / e.sum(-1, keepdim=True))  # fmt: skip
_add("decline", "given factors", "exponentials are multiplied by an input, which holds 0 and 1 today",
     lambda s, m: (e := _low(s).exp() * m.to(s.dtype)) / e.sum(-1, keepdim=True),
     lambda r: [*r.qkv(), r.bools(6, 6).float()])  # fmt: skip
_add("decline", "given mask", "a row without a key is 0 / 0 by this spelling, with other gradients than minus infinity",
     lambda s, m: (e := _low(s).exp() * m) / e.sum(-1, keepdim=True),
     lambda r: [*r.qkv(), r.bools(6, 6, full="one")])  # fmt: skip
_add("decline", "masked above only", "the sum is of all keys",
     lambda s: ((e := _low(s).exp()) * TRIANGLE.to(s.dtype)) / e.sum(-1, keepdim=True))  # fmt: skip
_add("decline", "masked below only", "the sum is of some keys, the weights of all", quiet=True,
     weights=lambda s: (e := _low(s).exp()) / (e * TRIANGLE.to(s.dtype)).sum(-1, keepdim=True))  # fmt: skip
_add("decline", "masked and normalised over queries", "the second sum runs over queries",
     lambda s: (p := s.softmax(-1) * TRIANGLE.to(s.dtype)) / p.sum(-2, keepdim=True))  # fmt: skip
_add("decline", "softmax over queries normalised over keys", "masked and divided by sums over the other dim",
     lambda s: (p := s.softmax(-2) * TRIANGLE.to(s.dtype)) / p.sum(-1, keepdim=True))  # fmt: skip
_add("decline", "masked, with a number in the sum", "weights that were normalised once, and a millionth",
     lambda s: (p := s.softmax(-1) * TRIANGLE.to(s.dtype)) / (p.sum(-1, keepdim=True) + 1e-6))  # fmt: skip


def _apart(s):
    return (e := s.exp()) / e.sum(-1, keepdim=True)


def _some(r):
    return [*r.qkv(), r.bools(6, 6, full="one")]


for number in (-5.0, 0.0):
    _add("equal", f"filled, then {number:g}", "a row of -1e9 is 0 / 0 where no maximum is taken off it",
         lambda s, m, number=number: _apart(s.masked_fill(~m, -1e9) + number), _some)  # fmt: skip
for number in (-1e4, -1e9):
    _add("equal", f"{number:g} after the maximum", "a row that is filled after its maximum was taken off is 0 / 0",
         lambda s, m, number=number: _apart(_low(s).masked_fill(~m, number)), _some)  # fmt: skip
_add("decline", "-1e9 added after the maximum", "a row of it is 0 / 0, whatever was taken off before",
     lambda s, m: _apart(_low(s) + torch.where(m, 0.0, -1e9)), _some)  # fmt: skip
_add("decline", "maximum of all rows", "a row of -1e9 is 0 / 0 beside the maximum of another row",
     lambda s, m: _apart((t := s.masked_fill(~m, -1e9)) - t.max().detach()), _some)  # fmt: skip
_add("decline", "low exponentials", "all of them are 0", lambda s: _apart(s - 1e5))
_add("decline", "low exponentials of 2", "all of them are 0", lambda s: (e := (s - 1e5).exp2()) / e.sum(-1, True))
_add("decline", "high exponentials", "those that a bool raises are infinite",
     lambda s, m: _apart(s + 1e4 * m), _some)  # fmt: skip
_add("decline", "shifted scores times keys", "what was added to all scores differs from key to key afterwards",
     lambda s, m: ((s + 5.0) * m).softmax(-1), lambda r: [*r.qkv(), r.randn(6)])  # fmt: skip
_add("decline", "shifted, then cast", "scores are rounded off beside the number after the sum",
     lambda s: (s.float() - 7000).bfloat16().softmax(-1).to(s.dtype))  # fmt: skip


@suite.decline(quiet=True)
def divided_behind_by_sums_over_queries(q, k, v):
    """The product is divided by the sums over the other dim."""
    e = (q @ k.mT * 0.3).exp()
    return (e @ v) / e.sum(-2)[..., None]


@suite.decline(quiet=True)
def divided_behind_and_used_before(q, k, v):
    """The product is also used as it is."""
    e = (q @ k.mT * 0.3).exp()
    out = e @ v
    return out / e.sum(-1, keepdim=True), out.sum()


@suite.decline(quiet=True)
def sums_divided_by_the_product(q, k, v):
    """The product is the divisor."""
    e = (q @ k.mT * 0.3).exp()
    return e.sum(-1, keepdim=True) / (e @ v.abs() + 1)


def _times_mask(name: str, why: str, change) -> None:
    suite.decline(name=name, why=why)(lambda q, k, v: change(q @ k.mT * 0.3).softmax(-1) @ v)


_times_mask("complement of another", "s m - c (1 - n): some scores are 0, others are lost beside c",
            lambda s: s * TRIANGLE.to(s.dtype) - 1e9 * (1 - torch.ones(6, 6).tril(1).to(s.dtype)))  # fmt: skip
_times_mask("halves", "s m - c (1 - m) for m of 0 and 0.5",
            lambda s: s * (m := TRIANGLE.to(s.dtype) * 0.5) - 1e9 * (1 - m))  # fmt: skip
_times_mask("without a number", "s m: masked scores are 0", lambda s: s * TRIANGLE.to(s.dtype))
_times_mask("of one number less", "s m - c (2 - m): the seen ones are lost too",
            lambda s: s * (m := TRIANGLE.to(s.dtype)) - 1e9 * (2 - m))  # fmt: skip


def _behind(kind: str, name: str, why: str, divided, **more) -> None:
    def program(q, k, v):
        e = (q @ k.mT * 8**-0.5).exp()
        return divided(e, e @ v)

    getattr(suite, kind)(name=name, why=why, **more)(program)


_behind("decline", "twos behind", "divided by twice the sums", lambda e, o: o / (e @ torch.full((6, 1), 2.0).to(e)))
_behind("decline", "ones of some keys behind", "divided by the sums over some keys",
        lambda e, o: o / (e @ (torch.arange(6) < 4).to(e)[:, None]))  # fmt: skip
_behind("decline", "ones over queries", "divided by sums over the queries",
        lambda e, o: o / (e.mT @ torch.ones(6, 1).to(e)))  # fmt: skip
_behind("decline", "transposed sums behind", "summed over queries, in another layout",
        lambda e, o: o / torch.einsum("bhqk->bkh", e).transpose(1, 2)[..., None])  # fmt: skip
_behind("decline", "heads mixed behind", "divided by the sums of another head",
        lambda e, o: o / torch.einsum("bhqk->bhq", e).flip(1)[..., None])  # fmt: skip
_behind("decline", "one column behind", "divided by what ones make of two columns",
        lambda e, o: o / (e @ torch.ones(6, 8).to(e)).cumsum(-1))  # fmt: skip
_add("decline", "length of 2", "divided by the root of the sum of squares",
     lambda s: F.normalize(_low(s).exp(), p=2.0, dim=-1))  # fmt: skip
_add("decline", "length over queries", "sums of each key", quiet=True,
     weights=lambda s: F.normalize(_low(s).exp(), p=1.0, dim=-2))  # fmt: skip
_add("decline", "length without the maximum", "a row may sum to less than what the length is not let below",
     lambda s: F.normalize((s * 9 - 40).exp(), p=1.0, dim=-1))  # fmt: skip
_add("decline", "length of scores", "they may be negative", lambda s: F.normalize(s, p=1.0, dim=-1), quiet=True)
