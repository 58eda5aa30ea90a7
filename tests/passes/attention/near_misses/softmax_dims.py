"""The softmax runs over something else than the keys, or its result is used with the wrong axes."""

from __future__ import annotations

import torch
from attention_near_misses.program import Inputs, Suite, cross, flat
from torch.nn import functional as F

suite = Suite("softmax_dims")


def cube(r: Inputs) -> list[torch.Tensor]:
    """Every axis but the last of size 4, so that every wrong axis still has a valid shape."""
    return r.qkv(4, 4, 4, 8)


def matrices(r: Inputs) -> list[torch.Tensor]:
    """Two dimensions."""
    return r.qkv(6, 8)


def _over(dim: int):
    def program(q, k, v):
        return (q @ k.transpose(-2, -1) / 8**0.5).softmax(dim) @ v

    return program


for _dim in (-2, -3, -4, 0, 1, 2):
    suite.decline(cube, name=f"4-D over {_dim}", why=f"softmax over dim {_dim} of four")(_over(_dim))
for _dim in (-2, -3, 0, 1):
    suite.decline(flat, name=f"3-D over {_dim}", why=f"softmax over dim {_dim} of three")(_over(_dim))
for _dim in (-2, 0):
    suite.decline(matrices, name=f"2-D over {_dim}", why="softmax over the queries of a matrix")(_over(_dim))
for _dim in (3, -1):
    suite.equal(cube, name=f"4-D over {_dim}", why="the last axis, by either name")(_over(_dim))
suite.equal(matrices, name="2-D over 1", why="the last axis of a matrix")(_over(1))
suite.decline(cross, name="cross over -2", why="over the queries, five on seven keys")(_over(-2))


@suite.decline(flat)
def implicit_dim_3d(q, k, v):
    """F.softmax without dim takes dim 0 of a 3-D tensor."""
    return F.softmax(q @ k.mT) @ v


@suite.decline()
def over_queries_functional_fp32(q, k, v):
    """Over dim -2, in float32 and cast back, as people write the right one."""
    return F.softmax((q @ k.mT) * 8**-0.5, dim=-2, dtype=torch.float32).to(q.dtype) @ v


@suite.decline()
def transposed_scores_over_last(q, k, v):
    """Scores are (keys, queries); softmax over the last axis is over the queries."""
    return (k @ q.mT * 8**-0.5).softmax(-1).mT @ v


@suite.equal()
def transposed_scores_over_keys(q, k, v):
    """Scores are (keys, queries) and softmax over -2 is over the keys: this is attention."""
    return (k @ q.mT * 8**-0.5).softmax(-2).mT @ v


@suite.decline()
def transposed_scores_not_transposed_back(q, k, v):
    """Softmax over the keys of transposed scores, then used as if they were not transposed."""
    return (k @ q.mT * 8**-0.5).softmax(-2) @ v


@suite.decline()
def probabilities_transposed(q, k, v):
    """pᵀ v: a value is given out by its query."""
    return (q @ k.mT * 8**-0.5).softmax(-1).mT @ v


@suite.equal(flat)
def probabilities_transposed_with_batch(q, k, v):
    """p is transposed over batch and queries before it meets v: attention of single queries, in another batch."""
    return (q @ k.mT).softmax(-1).transpose(0, 1) @ v


@suite.equal(cube)
def probabilities_transposed_with_heads(q, k, v):
    """p changes heads and queries before it meets v: attention of single queries, in other heads."""
    return (q @ k.mT).softmax(-1).transpose(1, 2) @ v


@suite.decline(cross)
def over_queries_and_keys(q, k, v):
    """One softmax over all pairs of query and key."""
    s = q @ k.mT
    return s.flatten(-2).softmax(-1).view(s.shape) @ v


@suite.decline(cross)
def over_heads_and_keys(q, k, v):
    """One softmax over heads and keys together."""
    b, h, n, m = (s := q @ k.mT).shape
    return s.transpose(1, 2).reshape(b, n, h * m).softmax(-1).view(b, n, h, m).transpose(1, 2) @ v


@suite.decline(cross)
def over_heads_by_transposition(q, k, v):
    """Softmax over the last axis, which a transposition has made the heads."""
    return (q @ k.mT).transpose(1, 3).softmax(-1).transpose(1, 3) @ v


@suite.equal(cross)
def over_keys_by_transposition(q, k, v):
    """Softmax over axis 1, which a transposition has made the keys: this is attention."""
    return (q @ k.mT).transpose(1, 3).softmax(1).transpose(1, 3) @ v


@suite.equal(cross)
def flat_heads_then_last(q, k, v):
    """Batch and heads folded around the softmax, which stays over the keys."""
    s = q @ k.mT
    return s.flatten(0, 1).softmax(-1).view(s.shape) @ v


@suite.decline(flat)
def regrouped_before_softmax(q, k, v):
    """Scores (6, 6, 6) seen as (6, 18, 2): a softmax over pairs of keys."""
    return (q @ k.mT).reshape(6, 18, 2).softmax(-1).reshape(6, 6, 6) @ v


@suite.decline()
def log_softmax_over_queries(q, k, v):
    """exp(log_softmax) over dim -2."""
    return (q @ k.mT).log_softmax(-2).exp() @ v


@suite.equal()
def log_softmax_over_keys(q, k, v):
    """exp(log_softmax) over the keys is softmax."""
    return (q @ k.mT).log_softmax(-1).exp() @ v


@suite.decline()
def log_softmax_without_exp(q, k, v):
    """log_softmax times v."""
    return (q @ k.mT).log_softmax(-1) @ v


@suite.equal()
def softmin(q, k, v):
    """softmin of transposed scores: keys ask queries, and the sign must not be lost."""
    return F.softmin((q @ k.mT).mT, dim=-1) @ v


@suite.equal()
def softmin_over_keys(q, k, v):
    """softmin over the keys: softmax with scale -1."""
    return F.softmin(q @ k.mT, dim=-1) @ v


@suite.decline(cube)
def einsum_over_heads(q, k, v):
    """The einsum's third letter is the heads; softmax over it."""
    p = torch.einsum("bhqd,bhkd->bqkh", q, k).softmax(-1)
    return torch.einsum("bqkh,bhkd->bhqd", p, v)


@suite.equal(cube)
def einsum_keys_in_the_middle(q, k, v):
    """Scores as (b, q, k, h) with softmax over axis 2: attention, oddly laid out."""
    p = torch.einsum("bhqd,bhkd->bqkh", q, k).softmax(2)
    return torch.einsum("bqkh,bhkd->bhqd", p, v)


@suite.decline(cube)
def einsum_contracts_queries(q, k, v):
    """The second einsum sums over the queries."""
    p = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bhqd->bhkd", p, v)


@suite.decline(cube)
def einsum_contracts_heads_too(q, k, v):
    """The first einsum sums over the heads as well: scores shared by all heads of the second."""
    p = torch.einsum("bhqd,bhkd->bqk", q, k).softmax(-2)
    return torch.einsum("bqk,bhkd->bhqd", p, v)


@suite.equal(cube)
def einsum_sums_heads(q, k, v):
    """Scores summed over the heads: attention with one wide head, used for every head of v."""
    p = torch.einsum("bhqd,bhkd->bqk", q, k).softmax(-1)
    return torch.einsum("bqk,bhkd->bhqd", p, v)


@suite.decline(cube)
def einsum_diagonal_heads(q, k, v):
    """Every head's queries meet every head's keys; the softmax is over keys, the second einsum takes head pairs."""
    p = torch.einsum("bhqd,bgkd->bhgqk", q, k).softmax(-1)
    return torch.einsum("bhgqk,bgkd->bhqd", p, v)


@suite.decline()
def maximum_of_rows_softmax_over_columns(q, k, v):
    """The row maximum is taken off, and the softmax runs over the other axis of the transposed scores."""
    s = q @ k.mT
    return (s - s.amax(-1, keepdim=True)).mT.softmax(-1) @ v
