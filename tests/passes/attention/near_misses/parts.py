"""Sums of maps and parts of them: what is shared, used twice or cut elsewhere; and masks that a tensor scales."""

from __future__ import annotations

import torch
from attention_near_misses.program import Suite, plus

suite = Suite("parts")


def _map(q, k, scale=0.3):
    return (q @ k.mT * scale).softmax(-1)


@suite.equal(plus((1,)))
def a_map_less_another(q, k, v, weight):
    """Two attentions, one times a tensor."""
    return (_map(q, k) - weight * _map(k, q)) @ v


@suite.equal()
def a_map_twice(q, k, v):
    """p + p."""
    p = _map(q, k)
    return (p + p) @ v


@suite.decline()
def a_map_and_itself_transposed(q, k, v):
    """p + pᵀ: the second sums over queries."""
    p = _map(q, k)
    return (p + p.mT) @ v


@suite.decline()
def a_map_less_its_first_head(q, k, v):
    """One head's map is taken off every head's, by broadcasting."""
    p = _map(q, k)
    return (p - p[:, :1]) @ v


@suite.decline()
def a_difference_that_is_returned(q, k, v):
    """The sum of the maps leaves the graph."""
    d = _map(q, k) - 0.5 * _map(k, q)
    return d @ v, d


@suite.decline(random=True)
def a_difference_that_is_dropped(q, k, v):
    """One dropout mask for both maps."""
    d = torch.nn.functional.dropout(_map(q, k) - 0.5 * _map(k, q), 0.5)
    return d @ v


@suite.equal()
def a_head_from_the_end(q, k, v):
    """The last head's last two rows, causal: rows that begin in the middle."""
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    p = (q @ k.mT * 0.3).masked_fill(hidden, float("-inf")).softmax(-1)
    return p[:, -1, -2:] @ v[:, -1]


@suite.equal()
def a_part_of_a_part(q, k, v):
    """The second of the last two heads, by two slices."""
    return _map(q, k)[:, 1:][:, 1:] @ v[:, :1]


@suite.equal()
def heads_in_another_order(q, k, v):
    """Heads picked by index."""
    return _map(q, k)[:, torch.tensor([2, 0])] @ v[:, :2]


@suite.equal()
def two_halves_on_two_values(q, k, v):
    """Heads of one map go to two products."""
    first, rest = _map(q, k).split([1, 2], 1)
    return first @ v[:, :1], rest @ v[:, 1:].flip(-1)


@suite.equal()
def heads_of_a_flat_map(q, k, v):
    """Heads and batch were one dim: the first head of each."""
    p = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).mul(0.3).softmax(-1)
    return p.view(2, 3, 6, 6)[:, 1] @ v[:, 0]


@suite.equal(plus((1, 3, 1, 1)))
def a_causal_mask_that_a_tensor_scales(q, k, v, scale):
    """Where the tensor is negative, hidden keys get all the weight, and their scores are lost beside the number."""
    mask = torch.full((6, 6), -1e9).triu(1).to(q.dtype)
    return ((q @ k.mT * 0.3 + mask) * scale).softmax(-1) @ v


@suite.decline(lambda r: [*r.qkv(), r.bools(2, 1, 6, 6, full="one")], dtype=torch.float16)
def minus_infinity_beside_a_product_with_zero(q, k, v, keep):
    """-1e9 is minus infinity in float16: rows without a key are NaN, and so is the gradient that the 0 multiplies."""
    m = keep.to(q.dtype)
    return (q @ k.mT * 0.3 * m + (1 - m) * -1e9).softmax(-1) @ v


@suite.decline(lambda r: [*r.qkv(), r.bools(2, 1, 6, 6, full="one")])
def nan_of_one_map_takes_the_other_along(q, k, v, keep):
    """Where one map is NaN the sum is, and becomes 0: the other map's row goes too."""
    masked = (q @ k.mT * 0.3).masked_fill(~keep, float("-inf")).softmax(-1)
    return (masked - 0.5 * _map(k, q)).nan_to_num() @ v


@suite.decline(plus((2, 3, 6, 1)))
def nan_to_num_of_weights_over_zero(q, k, v, divisor):
    """Infinite weights become the largest number."""
    return (_map(q, k) / torch.zeros_like(divisor)).nan_to_num(posinf=1.0) @ v


@suite.decline()
def shifted_by_the_detached_maximum_of_others(q, k, v):
    """A detached maximum over queries is not one number for each row."""
    scores = q @ k.mT * 0.3
    return (scores - scores.detach().amax(-2, keepdim=True)).softmax(-1) @ v


@suite.decline()
def beside_weights_that_are_no_softmax(q, k, v):
    """Half of the keys are weighed by a sigmoid."""
    left, right = (q @ k.mT * 0.3).chunk(2, -1)
    return torch.cat([left.softmax(-1), right.sigmoid()], -1) @ v


@suite.equal()
def softmaxes_in_another_order_than_their_values(q, k, v):
    """The weights of the last keys meet the first values."""
    left, right = (q @ k.mT * 0.3).split([2, 4], -1)
    return torch.cat([right.softmax(-1), left.softmax(-1)], -1) @ v


@suite.equal(lambda r: [*r.qkv(), r.bools(2, 1, 6, 6, full="one")])
def a_row_that_is_masked_in_one_part(q, k, v, keep):
    """A causal map in two parts: the first rows have no key in the second, which is NaN, and then 0."""
    scores = (q @ k.mT * 0.3).masked_fill(~keep, float("-inf")).masked_fill(torch.ones(6, 6).triu(1) > 0, float("-inf"))
    return torch.cat([part.softmax(-1) for part in scores.split([2, 4], -1)], -1).nan_to_num(0.0) @ v


@suite.decline()
def parts_of_queries(q, k, v):
    """Softmaxes side by side along the queries, one over them."""
    left, right = (q @ k.mT * 0.3).chunk(2, -2)
    return torch.cat([left.softmax(-2), right.softmax(-1)], -2) @ v


@suite.decline()
def a_part_that_is_used_twice(q, k, v):
    """The scores of the first keys are returned."""
    left, right = (q @ k.mT * 0.3).chunk(2, -1)
    return torch.cat([left.softmax(-1), right.softmax(-1)], -1) @ v, left


@suite.decline()
def every_second_key(q, k, v):
    """A slice with a stride."""
    return (q @ k.mT * 0.3)[..., ::2].softmax(-1) @ v[:, :, ::2]


@suite.equal()
def a_part_less_the_maximum_of_all_keys(q, k, v):
    """What is taken off the scores of a part is the maximum of all."""
    scores = q @ k.mT * 0.3
    return (scores - scores.amax(-1, keepdim=True))[..., 2:].softmax(-1) @ v[:, :, 2:]


@suite.decline(lambda r: [*r.qkv(), r.bools(2, 1, 6, 6, full="one")], dtype=torch.float16)
def a_part_less_the_maximum_of_all_masked_keys(q, k, v, keep):
    """Beside -1e4 the difference is rounded once more, by another number than the maximum of the part."""
    scores = q @ k.mT * 0.3 + (1 - keep.to(q.dtype)) * -1e4
    return (scores - scores.amax(-1, keepdim=True))[..., 2:].softmax(-1) @ v[:, :, 2:]
