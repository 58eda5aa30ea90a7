"""Near misses among branches: where no `torch.where`, `torch.cond` or assertion may stand instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

#: id -> (rewrites that must not be proposed, '*' for any; the program)
PROGRAMS = {
    "branch-with-effect": (
        "*",
        """
seen = []
def f(x):
    if x.sum() > -1e9:
        seen.append(1)
        x = x + 1
    return x
""",
    ),
    "one-side-converts": (
        "*",
        """
def f(x):
    if x.sum() > -1e9:
        x = x.half()
    return x
""",
    ),
    "one-side-compares": (
        "*",
        """
def f(x):
    if x.sum() > -1e9:
        return x > 0
    return x * 2
""",
    ),
    "one-side-is-of-a-converted-value": (
        "*",
        """
def f(x):
    y = x.double()
    return y * 2 if x.sum() > -1e9 else x
""",
    ),
    "one-side-is-a-part": (
        "*",
        """
def f(x):
    if x.sum() > -1e9:
        x = x[:2]
    return x
""",
    ),
    "branch-in-place": (
        "*",
        """
def f(x):
    y = x.clone()
    if y.sum() > -1e9:
        y.add_(1)
    return y
""",
    ),
    "branch-augmented": (
        "*",
        """
def f(x):
    y = x.clone()
    if y.sum() > -1e9:
        y += 1
    return y
""",
    ),
    "branch-shapes-differ": (
        "where",
        """
def f(x):
    if x.sum() > 0:
        y = x.sum()
    else:
        y = x
    return y * 2
""",
    ),
    "branch-draws-random": (
        "*",
        """
def f(x):
    if x.sum() > 0:
        y = x + torch.rand(3)
    else:
        y = x + 1
    return y
""",
    ),
    "branch-of-dropout": (
        "*",
        """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Dropout()
    def forward(self, x):
        if x.sum() > -1e9:
            x = self.drop(x)
        return x
f = Net()
""",
    ),
    "branch-of-unknown-function": (
        "*",
        """
def g(x):
    return x + 1
def f(x):
    if x.sum() > -1e9:
        x = g(x)
    return x
""",
    ),
    "branch-divides": (
        "where",
        """
def f(x):
    if x.sum().abs() > 1:
        x = x / x.sum()
    return x
""",
    ),
    "branch-of-numbers": (
        "where cond",
        """
def f(x):
    if x.sum() > 0:
        n = 1
    else:
        n = 2
    return x.reshape(-1)[n:]
""",
    ),
    "branch-name-unbound": (
        "*",
        """
def f(x):
    if x.sum() > -1e9:
        y = x + 1
    return y
""",
    ),
    "branch-crossed": (
        "where",
        """
def f(x):
    a = x.sin()
    b = x.cos()
    if a.sum() > -1e9:
        a = b * 2
        b = a + 1
    return a - b
""",
    ),
    "branch-returns-on-one-side": (
        "*",
        """
seen = []
def f(x):
    if x.sum() > 1e9:
        return x
    seen.append(1)
    y = x.sin()
    return y + 1
""",
    ),
    "branch-breaks-loop": (
        "*",
        """
def f(x):
    for i in range(3):
        x = x + 1
        if x.sum() > 5:
            break
    return x
""",
    ),
    "chain-that-asks-of-a-part": (
        "where",
        """
def f(x):
    picked = x[x > 100]
    if x.numel() < picked.sum() + 100:
        y = x.sin()
    elif x[x > 100].max() > 1:
        y = x.cos()
    else:
        y = x
    return y + 1
""",
    ),
    "chain-that-calls": (
        "*",
        """
seen = []
def f(x):
    if x.sum() > 1e9:
        y = x.sin()
    elif seen.append(1) is None:
        y = x.cos()
    else:
        y = x
    return y + 1
""",
    ),
    "chain-with-a-name-of-one-side": (
        "where",
        """
def f(x, early=False):
    if early:
        z = x.sum()
    if x.sum() > -1e9:
        y = x.sin()
    elif z > 1:
        y = x.cos()
    else:
        y = x
    return y + 1
""",
    ),
    "chain-crossed": (
        "where",
        """
def f(x):
    a = x.sin()
    b = x.cos()
    if a.sum() > 1e9:
        a = a * 2
    elif b.sum() > -1e9:
        b = a + 1
        a = b * 2
    return a - b
""",
    ),
    "branch-membership": (
        "*",
        """
def f(x):
    if x.sum() in (1, 2):
        return x
    return x + 1
""",
    ),
    "branch-in-one-line": (
        "*",
        """
def f(x):
    y = x.sin(); z = y if y.sum() > 0 else None
    return y if z is None else z
""",
    ),
    "branch-on-number-of-graph": (
        "*",
        """
torch._dynamo.config.capture_scalar_outputs = True
def f(x):
    n = x.abs().sum().int().item()
    if n > 3:
        return x + 1
    return x - 1
""",
    ),
    "number-then-loop": (
        "*",
        """
def f(x):
    n = x.abs().sum().int().item()
    if n > 1e6:
        x = x + 1
    for _ in range(min(n, 2)):
        x = x * 2
    return x
""",
    ),
    "while": (
        "*",
        """
def f(x):
    while x.sum() < 10:
        x = x + 1
    return x
""",
    ),
    "conditional-of-calls": (
        "*",
        """
def g(x):
    return x + 1
def f(x):
    return g(x) if x.sum() > 0 else g(-x)
""",
    ),
    "raise-with-value": (
        "assert-async",
        """
def f(x):
    if torch.isnan(x).any():
        raise ValueError(f"nan in {x}")
    return x.cos()
""",
    ),
    "raise-that-is-caught": (
        "assert-async",
        """
def f(x):
    try:
        if (x > 1e9).any():
            raise ValueError("large")
        x = x + 1
    except ValueError:
        x = x - 1
    return x.cos()
""",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_is_declined(name: str, fix: Callable[..., Any]) -> None:
    """The program breaks, and the rewrite is not proposed for it; nothing proposed changes what it computes."""
    refused, text = PROGRAMS[name]
    fixed = fix(text)
    assert fixed.breaks, "the program does not break"
    proposed = fixed.rewrites()
    assert not (proposed if refused == "*" else proposed & set(refused.split())), fixed.diff
