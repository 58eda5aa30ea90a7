"""Keys in pieces: scores side by side that are not one product's, and parts of weights that are not all of them."""

from __future__ import annotations

import torch
from attention_near_misses.program import Inputs, Suite, plus

suite = Suite("pieces")


def _weights(q, k):
    return (q @ k.mT * 0.3).softmax(-1)


def two(r: Inputs) -> list[torch.Tensor]:
    """q, k, v, and four more keys with their values."""
    return [*r.qkv(), r.randn(2, 3, 4, 8), r.randn(2, 3, 4, 8)]


def _sum(kind: str, name: str, why: str, total) -> None:
    getattr(suite, kind)(name=name, why=why)(lambda q, k, v: total(_weights(q, k), v))


_sum(
    "decline", "overlap", "the third key counts twice", lambda p, v: p[..., :3] @ v[:, :, :3] + p[..., 2:] @ v[:, :, 2:]
)
_sum("decline", "gap", "the third key is left out", lambda p, v: p[..., :2] @ v[:, :, :2] + p[..., 3:] @ v[:, :, 3:])
_sum("decline", "every other", "even keys and odd ones",
     lambda p, v: p[..., ::2] @ v[:, :, ::2] + p[..., 1::2] @ v[:, :, 1::2])  # fmt: skip
_sum("decline", "difference", "one is taken off", lambda p, v: p[..., :2] @ v[:, :, :2] - p[..., 2:] @ v[:, :, 2:])
_sum("decline", "alpha", "one counts half",
     lambda p, v: torch.add(p[..., :2] @ v[:, :, :2], p[..., 2:] @ v[:, :, 2:], alpha=0.5))  # fmt: skip
_sum("decline", "twice", "one is added twice",
     lambda p, v: (a := p[..., :2] @ v[:, :, :2]) + (p[..., 2:] @ v[:, :, 2:] + a))  # fmt: skip
_sum("decline", "rows", "parts of queries", lambda p, v: p[..., :3, :] @ v + p[..., 3:, :] @ v)
_sum("decline", "broadcast", "one head's result is added to all",
     lambda p, v: p[:, :1, :, :2] @ v[:, :1, :2] + p[..., 2:] @ v[:, :, 2:])  # fmt: skip
_sum("equal", "exchanged values", "the first keys' shares with the last values",
     lambda p, v: p[..., :3] @ v[:, :, 3:] + p[..., 3:] @ v[:, :, :3])  # fmt: skip
_sum("equal", "and a residual", "v is added too", lambda p, v: p[..., :2] @ v[:, :, :2] + p[..., 2:] @ v[:, :, 2:] + v)


@suite.decline()
def a_product_that_is_returned(q, k, v):
    """The first keys' part of the result is needed."""
    p = _weights(q, k)
    first = p[..., :2] @ v[:, :, :2]
    return first + p[..., 2:] @ v[:, :, 2:], first


@suite.decline(plus((2, 3, 6, 8)))
def parts_of_two_softmaxes(q, k, v, other):
    """Each is a part, of different weights."""
    return _weights(q, k)[..., :2] @ v[:, :, :2] + _weights(other, k)[..., 2:] @ v[:, :, 2:]


@suite.decline(random=True, modes=("training",))
def dropped_piece_by_piece(q, k, v):
    """One part's weights are dropped."""
    p = _weights(q, k)
    return torch.dropout(p[..., :2], 0.5, True) @ v[:, :, :2] + p[..., 2:] @ v[:, :, 2:]


@suite.decline(two)
def queries_that_differ(q, k, v, k2, v2):
    """The second product's queries are turned around."""
    scores = torch.cat([q @ k.mT, q.flip(-2) @ k2.mT], -1)
    return scores.softmax(-1) @ torch.cat([v, v2], -2)


@suite.decline(two)
def scales_that_differ(q, k, v, k2, v2):
    """One product is halved."""
    return torch.cat([q @ k.mT * 0.25, q @ k2.mT * 0.5], -1).softmax(-1) @ torch.cat([v, v2], -2)


@suite.decline(two)
def one_masked(q, k, v, k2, v2):
    """One product is masked before it is put beside the other."""
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    scores = torch.cat([(q @ k.mT).masked_fill(hidden, float("-inf")), q @ k2.mT], -1)
    return scores.softmax(-1) @ torch.cat([v, v2], -2)


@suite.equal(two)
def transposed_beside(q, k, v, k2, v2):
    """As many keys as numbers of a query: the second product is of queries with queries' numbers."""
    scores = torch.cat([q @ k.mT, (k2.mT @ k2 @ q.mT).mT], -1)
    return scores.softmax(-1) @ torch.cat([v, v2, v], -2)[:, :, : scores.shape[-1]]


@suite.equal(two, dtype=torch.bfloat16)
def masked_as_a_whole_in_bfloat16(q, k, v, k2, v2):
    """A row without a key, whose scores are rounded off, over keys of both kinds."""
    low = torch.zeros(6, 10, dtype=q.dtype).masked_fill(torch.ones(6, 10, dtype=torch.bool).triu(), -1e9)
    p = (torch.cat([q @ k.mT, q @ k2.mT], -1) + low).softmax(-1)
    return p[..., 6:] @ v2 + p[..., :6] @ v


@suite.decline(two, modes=("inference",))
def values_written_in_between(q, k, v, k2, v2):
    """v is doubled once its product was made."""
    p, v = torch.cat([q @ k.mT, q @ k2.mT], -1).softmax(-1), v * 1.0
    first = p[..., :6] @ v
    v.mul_(2)
    return first + p[..., 6:] @ v2
