"""Rewrites of branches on tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

#: id -> (the rewrite that is proposed first, the program)
PROGRAMS = {
    "branch": (
        "where",
        """
def f(x):
    if x.sum() > 0:
        y = x.sin()
    else:
        y = x.cos()
    return y + 1
""",
    ),
    "branch-on-item": (
        "where",
        """
def f(x):
    if x.sum().item() > 0:
        y = x.sin()
    else:
        y = x.cos()
    return y + 1
""",
    ),
    "branch-without-else": (
        "where",
        """
def f(x):
    y = x * 2
    # when small
    if y.abs().max() < 100:
        y = y + 1  # moved up
    return y.cos()
""",
    ),
    "branch-returns": (
        "where",
        """
def f(x):
    if x.sum() > 0:
        return x * 2
    else:
        return -x
""",
    ),
    "branch-returns-early": (
        "where",
        """
def f(x):
    if not (x > 0).all():
        return x.relu()
    return x + 1
""",
    ),
    "branch-on-two": (
        "where",
        """
def f(x):
    if x.sum() > 0 and x.mean() < 1:
        x = x * 2
    return x.sin()
""",
    ),
    "branch-on-chain": (
        "where",
        """
def f(x):
    if 0 < x.mean() < 1:
        x = x * 2
    return x.sin()
""",
    ),
    "branch-of-two-values": (
        "where",
        """
def f(x):
    a = x.sin()
    b = x.cos()
    if (a * b).sum() > 0:
        a = a * 2
    else:
        b = b - 1
    return a + b
""",
    ),
    "branch-on-number-tensor": (
        "where",
        """
def f(x):
    if x[0, :1].round():
        x = x + 1
    return x.sin()
""",
    ),
    "branch-any-nan": (
        "where",
        """
def f(x):
    if torch.isnan(x).any():
        x = torch.nan_to_num(x)
    return x.sin()
""",
    ),
    "conditional-expression": (
        "where-expression",
        """
def f(x):
    y = x.sin() if x.sum() > 0 else x.cos()
    return y + 1
""",
    ),
    "number-then-branch": (
        "branch-on-number",
        """
def f(x):
    s = x.sum().item()
    y = x * s
    if s > 0:
        y = y + 1
    return y
""",
    ),
    "truth-then-expression": (
        "branch-on-number",
        """
def f(x):
    positive = bool((x > 0).any())
    return x + 1 if positive else x - 1
""",
    ),
    "number-then-two-branches": (
        "branch-on-number",
        """
def f(x):
    s = float(x.mean())
    if s > 1:
        y = x.abs().log1p()
    else:
        y = x * 2
    if 0 < s < 1:
        y = y.sin()
    return y
""",
    ),
    "branch-of-layers": (
        "cond",
        """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3)
        self.b = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.GELU())
    def forward(self, x):
        if x.mean() > 0:
            y = self.a(x)
        else:
            y = self.b(x)
        return y.relu()
torch.manual_seed(0)
f = Net()
""",
    ),
    "branch-not-smooth": (
        "cond",
        """
def f(x):
    y = x.abs() + 1
    if y.min() > 0:
        y = y.log()
    return y * 2
""",
    ),
    "branch-in-steps": (
        "cond",
        """
def f(x):
    if x.sum() > 0:
        # twice
        a = x.sin()
        y = a * 2
    else:
        a = x.cos()
        y = a * 3
    return y + 1
""",
    ),
    "branch-returns-before-the-rest": (
        "cond",
        """
def f(x):
    mask = x > 0
    if mask.sum() == 0:
        return x * 0
    y = x.sin()  # all the rest
    y = y * mask
    return y / mask.sum()
""",
    ),
    "branch-of-views": (
        "cond",
        """
def f(x):
    if x.sum() > 0:
        y = x.t()
    else:
        y = x
    return y.reshape(-1) + 1
""",
    ),
    "branch-of-shapes-unknown": (
        "cond",
        """
def f(x):
    if x.sum() > 0:
        return x @ x
    return torch.matmul(x, x.t())
""",
    ),
}

NO_GRADIENT = frozenset({"branch-on-number-tensor"})


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
