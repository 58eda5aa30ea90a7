"""Rewrites of values that leave the graph: numbers, sizes, selections, copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

#: id -> (the rewrite that is proposed first, the program)
PROGRAMS = {
    "item-divides": (
        "keep-tensor",
        """
def f(x):
    s = x.abs().sum().item()
    return x / s
""",
    ),
    "item-inline": (
        "keep-tensor",
        """
def f(x):
    return x * x.max().item() + 1
""",
    ),
    "item-of-parameter": (
        "keep-tensor",
        """
def f(x):
    scale = (x * x).mean().item()
    bias = 2 * scale - 1
    return x * scale + bias
""",
    ),
    "item-through-math": (
        "keep-tensor",
        """
import math
def f(x):
    norm = math.sqrt((x * x).sum().item())
    return x / norm
""",
    ),
    "float-of-tensor": (
        "keep-tensor",
        """
def f(x):
    top = float(x.abs().max())
    return x / top
""",
    ),
    "int-of-tensor": (
        "keep-tensor",
        """
def f(x):
    n = int(x.abs().sum())
    return x * n
""",
    ),
    "float-of-count": (
        "keep-tensor",
        """
def f(x):
    n = float((x > 0).sum())
    return x * n
""",
    ),
    "item-of-one-element": (
        "keep-tensor",
        """
def f(x):
    first = x[0, :1].item()
    return x - first
""",
    ),
    "item-compared-with-tensor": (
        "keep-tensor",
        """
def f(x):
    t = x.mean().item()
    return (x > t) * x
""",
    ),
    "item-is-a-size": (
        "capture-scalar",
        """
def f(x):
    n = x.abs().sum().int().item()
    return torch.zeros(n).sum() + x.sum()
""",
    ),
    "item-is-a-slice": (
        "capture-scalar",
        """
def f(x):
    n = x.argmax().item()
    return x.flatten()[:n].sum()
""",
    ),
    "tensor-is-a-slice": (
        "capture-scalar",
        """
def f(x):
    n = x.argmax()
    return x.flatten()[:n].sum()
""",
    ),
    "item-returned": (
        "capture-scalar",
        """
def f(x):
    return x.sin(), x.sum().item()
""",
    ),
    "item-kept": (
        "capture-scalar",
        """
class Net(torch.nn.Module):
    def forward(self, x):
        self.last = x.mean().item()
        return x.cos()
f = Net()
""",
    ),
    "masked-sum": (
        "masked-reduction",
        """
def f(x):
    return x[x > 0].sum()
""",
    ),
    "masked-mean-of-name": (
        "masked-reduction",
        """
def f(x):
    mask = x.abs() > 0.1
    picked = x[mask]
    return picked.mean() + picked.sum() * 2
""",
    ),
    "masked-select": (
        "masked-reduction",
        """
def f(x):
    y = x.sin()
    return 2 * torch.masked_select(y, y > 0).mean()
""",
    ),
    "masked-update": (
        "masked-update",
        """
def f(x):
    y = x.clone()
    mask = y > 0
    y[mask] = y[mask] * 2
    return y.sin()
""",
    ),
    "masked-add": (
        "masked-update",
        """
def f(x):
    y = x * 1
    y[y < 0] += 1
    return y.sin()
""",
    ),
    "masked-loss": (
        "capture-dynamic-shape",
        """
def f(x):
    y = x[x > 0]
    return torch.nn.functional.mse_loss(y, torch.zeros_like(y))
""",
    ),
    "nonzero": (
        "capture-dynamic-shape",
        """
def f(x):
    return x.nonzero().sum() + x
""",
    ),
    "unique": (
        "capture-dynamic-shape",
        """
def f(x):
    return torch.unique(x).sum() + x
""",
    ),
    "tolist": (
        "capture-dynamic-shape",
        """
def f(x):
    sizes = x.abs().int().flatten().tolist()
    return torch.split(torch.ones(sum(sizes)), sizes)[0].sum() + x
""",
    ),
    "deepcopy": (
        "clone",
        """
import copy
def f(x):
    y = copy.deepcopy(x.detach())
    return y + 1
""",
    ),
    "deepcopy-of-parameter": (
        "clone",
        """
from copy import deepcopy
def f(x):
    y = x.sin().detach()
    z = deepcopy(y)
    return z * 2
""",
    ),
    "tensor-of-tensors": (
        "stack",
        """
def f(x):
    return torch.tensor([x.sum().item(), x.mean().item()]) * 2
""",
    ),
    "numpy": (
        "numpy-to-torch",
        """
import numpy as np
torch._dynamo.config.trace_numpy = False
def f(x):
    y = torch.from_numpy(np.sqrt(np.abs(x.detach().cpu().numpy())))
    return y + 1
""",
    ),
}

NO_GRADIENT = frozenset({"numpy", "unique"})


@pytest.mark.parametrize("name", PROGRAMS)
def test_break_is_gone_and_values_are_equal(name: str, fix: Callable[..., Any]) -> None:
    """With the diff there is no break left, and values and gradients are those of the program run eager."""
    wanted, text = PROGRAMS[name]
    fixed = fix(text, grad=name not in NO_GRADIENT)
    assert fixed.breaks, "the program does not break"
    assert fixed.first_rewrites() == {wanted}
    assert not fixed.after.breaks, fixed.diff
    assert len(fixed.after.values) == len(fixed.reference)
    for value, reference in zip(fixed.after.values, fixed.reference, strict=True):
        if isinstance(reference, torch.Tensor):
            torch.testing.assert_close(value, reference, equal_nan=True)
        else:
            assert value == reference
