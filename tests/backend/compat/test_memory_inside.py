"""What is seen inside of eager nodes, and that nothing changes by looking."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from optpass.backend.compat.memory_autograd import leaf_of, walk
from optpass.backend.compat.memory_inside import Inside

BYTES = 64 * 32 * 4


def watched(root):
    """Bytes inside of each node of a backward that is watched, by its name; filled when it runs."""
    found = {}
    for node in walk([root.grad_fn], lambda _: False):
        if leaf_of(node) is None and Inside.can_watch(node):
            inside, name = Inside(), node.name()

            def before(_, inside=inside):
                inside.begin()

            def after(_, __, inside=inside, name=name):
                found[name] = inside.end()

            node.register_prehook(before)
            node.register_hook(after)
    return found


def test_counts_what_operators_make():
    x = torch.randn(64, 32, requires_grad=True)
    result = torch.atan2(x * 1.0, torch.randn(64, 32)).sum()
    found = watched(result)
    result.backward()
    assert found["SumBackward0"] == 0  # a view
    assert found["MulBackward0"] == BYTES
    assert found["Atan2Backward0"] > 3 * BYTES


LOSSES = {
    "product": lambda x: (x.sigmoid() + 0.5).prod(1).sum(),
    "product of all": lambda x: (x.sigmoid() + 0.5).prod(),
    "cumulated product": lambda x: (x.sigmoid() + 0.5).cumprod(1).sum(),
    "filled with a number that learns": lambda x: x.masked_fill(x > 0, x.mean()).square().sum(),
    "positives that weigh": lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).float(), pos_weight=x[0].detach()),
    "largest": lambda x: x.max() + x.max(1)[0].sum() + x.topk(3)[0].sum() + x.sort()[0][:, 3].sum(),
    "indexed": lambda x: x[x[:, 0] > 0].sum() + x.gather(1, torch.zeros(64, 1).long()).square().sum(),
    "normalized": lambda x: F.normalize(x).sum() + F.cosine_similarity(x, x.flip(1)).sum() + x.norm(),
    "classes": lambda x: F.cross_entropy(x, torch.arange(64) % 32) + x.logsumexp(1).square().mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_the_same(name):
    x = torch.randn(64, 32)
    gradients = []
    for look in (False, True):
        leaf = x.clone().requires_grad_()
        result = LOSSES[name](leaf)
        found = watched(result) if look else {}
        result.backward()
        assert None not in found.values()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def test_a_node_that_raises_leaves_nothing_behind():
    x = torch.randn(64, 32, requires_grad=True)
    middle = x.exp()
    result = middle.sin().sum()
    watched(result)

    def fail(gradients):
        raise ValueError("of the user's")

    middle.grad_fn.register_prehook(fail)
    with pytest.raises(ValueError, match="of the user's"):
        result.backward()
    assert torch._C._len_torch_dispatch_stack() == 0


def test_nodes_in_python_are_not_watched():
    class Mine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    x = torch.randn(3, requires_grad=True)
    assert not Inside.can_watch(Mine.apply(x).grad_fn)
    assert Inside.can_watch(x.exp().grad_fn)
