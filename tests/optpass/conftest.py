"""Models and target files that the tests of `analyze` share."""

from __future__ import annotations

from pathlib import Path

import pytest

FACTORIES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=8, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x

class Branch(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a = nn.Linear(width, width)
    def forward(self, x):
        y = self.a(x)
        if y.sum().item() > 1e30:
            return y
        return y @ y.T

class Noisy(Net):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            print("noise")
        return x

class Mismatch(Net):
    def forward(self, x):
        return x @ x

def plain(width=8, depth=2, dtype_name="float32"): return Net(width, depth), torch.randn(3, width)
def as_dict(): return Net(), {"x": torch.randn(3, 8)}
def as_three(): return Net(), (torch.randn(3, 8),), {}
def open_ended(**settings): return Net(**settings), torch.randn(3, settings["width"])
def huge(): return Net(100_000, 2), torch.randn(1, 100_000)
def branch(width=8): return Branch(width), torch.randn(3, width)
def noisy(): return Noisy(), torch.randn(3, 8)
def mismatch(): return Mismatch(), torch.randn(3, 8)
def integers(): return lambda x: x + 1, torch.arange(3)
def value_needed(): return Net(int(torch.full((), 8).item())), torch.randn(3, 8)
def raises(): raise ValueError("no luck\\nsecond line")
class Mute(Exception):
    def __str__(self): raise RuntimeError("no text")

def mute(): raise Mute
def lazy(): return nn.Sequential(nn.LazyLinear(4)), torch.randn(2, 3)
def number(): return 3
def single(): return (Net(),)
def no_module(): return 3, torch.randn(2)
def text_inputs(): return Net(), "abc"
def needs(width): return Net(width), torch.randn(3, width)
def leaves(): raise SystemExit(7)
constant = 3
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`factories.py` in the working directory, which is empty otherwise."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "factories.py"
    path.write_text(FACTORIES)
    return path
