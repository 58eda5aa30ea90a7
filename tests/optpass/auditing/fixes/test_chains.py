"""Rewrites of `if ... elif ... else` on tensors: each of the sides is taken once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

CALLS = """
def f(x):
    x = x.detach() * 0.01
    return tuple(chosen(x + shift) for shift in (-2.0, -0.4, 0.0, 0.4, 2.0))
"""
PROGRAMS = {
    "assigned": """
def chosen(x):
    if x.mean() > 1:
        y = x.sin()
    elif x.mean() > 0.2:  # not much
        y = x.cos()
    elif x.mean().item() > -1:
        y = x * 2
    else:
        y = -x
    return y + 1
""",
    "without else": """
def chosen(x):
    x = x * 3
    if x.mean() > 1:
        x = x.sin()
    elif x.mean() < -1:
        x = x.cos()
    return x + 1
""",
    "returned": """
def chosen(x):
    if x.mean() > 1:
        return x.sin()
    elif x.mean() > 0.2:
        return x.cos()
    else:
        return -x
""",
    "returned early": """
def chosen(x):
    if x.mean() > 1:
        return x.sin()
    if x.mean() > 0.2:
        return x.cos()
    return -x
""",
    "returned by both": """
def chosen(x):
    if x.mean() > 0:
        if x.mean() > 1:
            return x.sin()
        return x.cos()
    elif x.mean() > -1:
        return x * 3
    return -x
""",
    "several names": """
def chosen(x):
    if x.mean() > 1:
        a = x.sin()
        b = x + 2
    elif x.mean() > 0.2:
        b = x * 3
        a = x * 2
    else:
        a = x + 1
        b = x.cos()
    return a - b
""",
    "behind one on a number": """
def chosen(x, mode=0):
    if mode == 1:
        x = x - 1
    elif x.mean() > 1:
        x = x + 1
    elif x.mean() > -1:
        x = x * 2  # both
    return x.sin()
""",
    "returned behind one on a number": """
def chosen(x, mode=0):
    y = x + 1
    if mode == 1:
        return y
    elif x.mean() > 1:
        return y.sin()
    else:
        return y.cos()
""",
    "before one on a number": """
class Settings:
    warm = True

settings = Settings()

def chosen(x, mode=0):
    if x.mean() > 1:
        y = x.sin()
    elif mode == 1 or not settings.warm:
        y = x.cos()
    elif x.mean() > 0:
        y = x * 2
    else:
        y = x * 3
    return y
""",
    "nested": """
def chosen(x):
    if x.mean() > 0:
        if x.mean() > 1:
            y = x.sin()
        else:
            y = x.cos()
    else:
        if x.mean() > -1:
            y = x * 2
        else:
            y = x * 3
    return y
""",
    "expression": """
def chosen(x):
    return (x.sin() if x.mean() > 1 else x.cos() if x.mean() > -1 else x * 2) + 1
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_break_is_gone_and_values_are_equal(name: str, fix: Callable[..., Any]) -> None:
    fixed = fix(PROGRAMS[name] + CALLS)
    assert fixed.breaks, "the program does not break"
    assert fixed.first_rewrites() <= {"where", "where-expression"} and fixed.diff
    assert not fixed.after.breaks, fixed.diff
    assert len(fixed.after.values) == len(fixed.reference) == 5
    for value, reference in zip(fixed.after.values, fixed.reference, strict=True):
        torch.testing.assert_close(value, reference)
