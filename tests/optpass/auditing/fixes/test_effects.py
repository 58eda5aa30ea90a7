"""Rewrites of what has an effect besides tensors: telling, checking, stopping, reading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

#: id -> (the rewrite that is proposed first, the program)
PROGRAMS = {
    "print": (
        "guard",
        """
def f(x):
    y = x.sin()
    print("shape", y.shape)  # told
    return y.cos()
""",
    ),
    "print-of-tensor": (
        "guard",
        """
def f(x):
    y = x.sin()
    print(f"mean {y.mean():.3f}", y)
    return y.cos()
""",
    ),
    "print-of-item": (
        "guard",
        """
def f(x):
    y = x.sin()
    print(f"mean {y.mean().item():.3f}")
    return y.cos()
""",
    ),
    "print-before-another-on-its-line": (
        "guard",
        """
def f(x):
    y = x.sin()
    print("a"); z = y * 2  # both
    return z.cos()
""",
    ),
    "prints-among-others-on-their-line": (
        "guard",
        """
def f(x):
    if x.shape[0] == 3:
        y = x.sin(); print("a"); m = y.mean().item(); print("b", m); z = y * 2; print(
            "c"
        );
    return z.cos()
""",
    ),
    "print-behind-another-on-its-line": (
        "guard",
        """
def f(x):
    y = x.sin(); print("a")
    print("b")
    return y.cos()
""",
    ),
    "break-before-another-on-its-line": (
        "remove",
        """
def f(x):
    torch._dynamo.graph_break(); y = x.sin(); torch._dynamo.graph_break()
    if y.shape[0] == 3: torch._dynamo.graph_break(); y = y + 1
    return y.cos()
""",
    ),
    "prints-joined": (
        "guard",
        """
def f(x):
    print("a")
    print("b", x.shape)
    norm = x.norm()
    print("c", norm)
    return x.cos()
""",
    ),
    "print-in-loop": (
        "guard",
        """
def f(x):
    for i in range(3):
        x = x.sin()
        print(i)
    return x
""",
    ),
    "print-over-lines": (
        "guard",
        '''
def f(x):
    y = x.sin()
    print(
        "mean",
        y.mean(),
        """two
lines""",
    )
    return y.cos()
''',
    ),
    "print-only-in-block": (
        "guard",
        """
verbose = True
def f(x):
    if verbose:
        print("deep")
    return x.sin()
""",
    ),
    "logger": (
        "guard",
        """
import logging
log = logging.getLogger("some")
def f(x):
    y = x.sin()
    log.info("shape %s", y.shape)
    return y.cos()
""",
    ),
    "logger-of-self": (
        "guard",
        """
import logging
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.logger = logging.getLogger("some")
        self.fc = torch.nn.Linear(3, 3)
    def forward(self, x):
        x = self.fc(x)
        self.logger.warning("seen %s", x.shape)
        return x.relu()
torch.manual_seed(0)
f = Net()
""",
    ),
    "warn": (
        "guard",
        """
import warnings
def f(x):
    warnings.warn("careful")
    return x.cos()
""",
    ),
    "stdout-write": (
        "guard",
        """
import sys
def f(x):
    y = x.sin()
    sys.stdout.write("here\\n")
    return y.cos()
""",
    ),
    "timing": (
        "guard",
        """
import time
def f(x):
    start = time.perf_counter()
    y = x.sin()
    took = time.perf_counter() - start
    print("took", took)
    return y.cos()
""",
    ),
    "collect": (
        "guard",
        """
import gc
def f(x):
    y = x.sin()
    gc.collect()
    return y.cos()
""",
    ),
    "stack": (
        "guard",
        """
import traceback
def f(x):
    y = x.sin()
    traceback.print_stack()
    return y.cos()
""",
    ),
    "torch-not-imported": (
        "guard",
        """# torch-free
from torch import nn as layers
from torch.nn import functional as F
def f(x):
    print("x")
    return F.relu(x)
""",
    ),
    "torch-by-other-name": (
        "guard",
        """
import torch as th
def f(x):
    print("x")
    return th.relu(x)
""",
    ),
    "branch-that-prints": (
        "guard-branch",
        """
def f(x):
    if torch.isnan(x).any():
        print("nan")
    return x.cos()
""",
    ),
    "branch-that-warns-on-either": (
        "guard-branch",
        """
import warnings
def f(x):
    if x.max() > 100 or x.min() < -100:
        warnings.warn("large")
    return x.cos()
""",
    ),
    "graph-break": (
        "remove",
        """
def f(x):
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()
""",
    ),
    "graph-break-in-try": (
        "remove",
        """
def f(x):
    try:
        y = x.sin()
        torch._dynamo.graph_break()
        y = y + 1
    finally:
        z = 1
    return y
""",
    ),
    "graph-break-alone-in-block": (
        "remove",
        """
def f(x):
    if x.shape[0] == 3:
        torch._dynamo.graph_break()
    return x.cos()
""",
    ),
    "assert-item": (
        "assert-tensor",
        """
def f(x):
    assert x.sum().item() > -1e9, "bad"
    return x.cos()
""",
    ),
    "assert-with-value": (
        "guard-assert",
        """
def f(x):
    assert x.sum().item() > -1e9, f"bad {x}"
    return x.cos()
""",
    ),
    "raise": (
        "assert-async",
        """
def f(x):
    if torch.isnan(x).any():
        raise ValueError("nan in x")
    return x.cos()
""",
    ),
    "hostname": (
        "hoist",
        """
import socket
def f(x):
    name = socket.gethostname()
    return x * len(name)
""",
    ),
    "constant-call-inline": (
        "hoist",
        """
from socket import gethostname
def f(x):
    return x * len(gethostname())
""",
    ),
    "file": (
        "hoist-file",
        """
def f(x):
    with open("words.txt") as handle:
        text = handle.read()
    return x * len(text)
""",
    ),
}

NO_GRADIENT = frozenset[str]()


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
