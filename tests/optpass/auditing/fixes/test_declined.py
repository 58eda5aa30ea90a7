"""Near misses: programs in which a rewrite must not be proposed, because it would not be right there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

#: id -> (rewrites that must not be proposed, '*' for any; the program)
PROGRAMS = {
    "print-value-kept": (
        "guard",
        """
def f(x):
    r = print("a")
    return x.sin() if r is None else x
""",
    ),
    "print-of-call-with-effect": (
        "*",
        """
seen = []
def note(x):
    seen.append(1)
    return 1
def f(x):
    print(note(x))
    return x.sin() * len(seen)
""",
    ),
    "print-of-walrus": (
        "*",
        """
def f(x):
    print(n := x.shape[0])
    return x * n
""",
    ),
    "print-of-next": (
        "*",
        """
def f(x):
    it = iter([1, 2])
    print(next(it))
    return x * next(it)
""",
    ),
    "print-of-random": (
        "*",
        """
def f(x):
    print(torch.rand(1))
    return x + torch.rand(3)
""",
    ),
    "print-into-file": (
        "*",
        """
import io
out = io.StringIO()
def f(x):
    print("a", file=out)
    return x.sin()
""",
    ),
    "print-and-more-in-one-line-if": (
        "*",
        """
def f(x):
    y = x.sin()
    if x.shape[0] == 3: print("a"); y = y + 1
    return y
""",
    ),
    "print-in-one-line-if": (
        "*",
        """
def f(x):
    if x.shape[0] == 3: print("a")
    else: x = x + 1
    return x.sin()
""",
    ),
    "print-in-lambda": (
        "*",
        """
f = lambda x: (print("a"), x.sin())[1]
""",
    ),
    "print-shadowed": (
        "guard",
        """
def print(*args):
    torch._dynamo.graph_break()
    seen.append(args)
seen = []
def f(x):
    print("a")
    return x * len(seen)
""",
    ),
    "print-in-except": (
        "*",
        """
def f(x):
    try:
        x = x.sin()
        raise ValueError
    except ValueError:
        print("failed")
    return x
""",
    ),
    "logger-of-result-of-module": (
        "*",
        """
import logging
log = logging.getLogger("some")
drop = torch.nn.Dropout()
def f(x):
    log.info("%s", drop(x))
    return x.sin()
""",
    ),
    "torch-shadowed": (
        "*",
        """
def f(x, torch=None):
    print("a")
    return x.sin()
""",
    ),
    "time-in-result": (
        "guard",
        """
import time
def f(x):
    t = time.time()
    return x * 0 + (t > 0)
""",
    ),
    "time-captured-by-inner-function": (
        "guard",
        """
import time
def f(x):
    t = time.time()
    def g():
        return t
    return x * g()
""",
    ),
    "random-number": (
        "*",
        """
import random
def f(x):
    return x.sin() * random.random()
""",
    ),
    "today": (
        "*",
        """
import datetime
def f(x):
    return x.sin() * datetime.datetime.now().year
""",
    ),
    "hostname-of-argument": (
        "*",
        """
import os, socket
def f(x, name="localhost"):
    n = socket.getfqdn(name)
    return x.sin() * len(n)
""",
    ),
    "file-of-argument": (
        "*",
        """
def f(x, path="words.txt"):
    with open(path) as handle:
        text = handle.read()
    return x * len(text)
""",
    ),
    "file-written": (
        "*",
        """
def f(x):
    with open("out.txt", "w") as handle:
        handle.write("a")
    return x.sin()
""",
    ),
    "item-steers-python": (
        "keep-tensor capture-scalar",
        """
def f(x):
    s = x.abs().sum().int().item()
    for i in range(min(s, 2)):
        x = x + 1
    return x / s
""",
    ),
    "item-in-if-later": (
        "keep-tensor capture-scalar",
        """
def f(x):
    s = x.sum().item()
    y = x * s
    if s > 0:
        y = y + 1
    return y
""",
    ),
    "tolist-of-floats": (
        "*",
        """
def f(x):
    return x, x.tolist()
""",
    ),
    "no-meta-kernel": (
        "*",
        """
def f(x):
    return torch.linalg.lstsq(x.double(), x.double()).solution
""",
    ),
    "assert-of-shape": (
        "*",
        """
def f(x):
    try:
        assert x.shape[0] == 4, [x]
    except AssertionError:
        x = x + 1
    return x
""",
    ),
    "threads": (
        "*",
        """
def f(x):
    torch.set_num_threads(torch.get_num_threads())
    return x.sin()
""",
    ),
    "item-in-f-string": (
        "keep-tensor capture-scalar",
        """
def f(x):
    s = x.sum().item()
    name = f"{s:.3f}"
    return x * s, name
""",
    ),
    "item-returned-too": (
        "keep-tensor",
        """
def f(x):
    s = x.sum().item()
    return x * s, s
""",
    ),
    "item-in-inner-function": (
        "keep-tensor",
        """
def f(x):
    s = x.sum().item()
    def g(y):
        return y * s
    return g(x)
""",
    ),
    "item-rebound": (
        "keep-tensor",
        """
def f(x):
    s = 1.0
    if x.shape[0] == 3:
        s = x.sum().item()
    return x * s
""",
    ),
    "item-of-two-numbers": (
        "keep-tensor",
        """
def f(x):
    s = x.sum().item() + 1
    return [s] * 2, x
""",
    ),
    "item-as-key": (
        "keep-tensor capture-scalar",
        """
def f(x):
    table = {0: x, 1: x + 1}
    return table[(x.sum() > 1e9).int().item()] * 2
""",
    ),
    "item-global": (
        "keep-tensor",
        """
last = 0.0
def f(x):
    global last
    last = x.sum().item()
    return x * last
""",
    ),
    "item-walrus": (
        "keep-tensor",
        """
def f(x):
    y = x * (s := x.sum().item())
    return y + s
""",
    ),
    "bool-kept": (
        "keep-tensor",
        """
def f(x):
    b = bool(x.sum() > 0)
    return x + b
""",
    ),
    "mask-of-rows": (
        "masked-reduction",
        """
def f(x):
    rows = x.sum(1) > 0
    return x[rows].sum()
""",
    ),
    "mask-made-of-another": (
        "masked-reduction",
        """
def f(x):
    mask = x > 0
    x = torch.cat([x, x])[:3]
    return x[mask].sum()
""",
    ),
    "mask-changed": (
        "masked-reduction",
        """
def f(x):
    mask = x > 0
    mask[0] = False
    return x[mask].sum()
""",
    ),
    "mask-selection-used-otherwise": (
        "masked-reduction",
        """
def f(x):
    y = x[x > 0]
    return y.sum() / y.numel()
""",
    ),
    "mask-reduction-along": (
        "masked-reduction",
        """
def f(x):
    return x[x > 0].sum(0)
""",
    ),
    "mask-max": (
        "masked-reduction",
        """
def f(x):
    return x[x > 0].max()
""",
    ),
    "masked-update-of-value": (
        "masked-update",
        """
def f(x):
    y = x.clone()
    m = y > 0
    y[m] = torch.arange(y[m].numel(), dtype=y.dtype)
    return y
""",
    ),
    "deepcopy-of-list": (
        "*",
        """
import copy
def f(x):
    parts = copy.deepcopy([x, x])
    return parts[0] + parts[1]
""",
    ),
    "deepcopy-unknown": (
        "*",
        """
import copy
def f(x):
    y = copy.deepcopy(x)
    return [y, x]
""",
    ),
    "seed": (
        "*",
        """
def f(x):
    torch.manual_seed(0)
    return x + torch.rand(3)
""",
    ),
    "saved": (
        "*",
        """
import io
def f(x):
    torch.save(x, io.BytesIO())
    return x + 1
""",
    ),
    "backward": (
        "*",
        """
def f(x):
    y = x.detach().requires_grad_().sin().sum()
    y.backward()
    return x + 1
""",
    ),
    "disabled": (
        "*",
        """
@torch._dynamo.disable
def g(x):
    return x + 1
def f(x):
    return g(x.sin()).cos()
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
