"""Small training programs for the tests of memory plans, and the problems that the search sees of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from optpass.backend.ahead import capture_model
from optpass.backend.capture import Joint
from optpass.passes.memory.problem import Price, Problem, build


class Block(nn.Module):
    """Pre-norm attention, written out, and an MLP."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class Stack(nn.Module):
    """A stack of blocks; the loss is in the model unless `loss` is False."""

    def __init__(
        self, layers: int = 3, width: int = 16, heads: int = 2, *, loss: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.loss = loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean() if self.loss else x


class Chain(nn.Module):
    """Linear layers with tanh between: small enough for an exact solver."""

    def __init__(self, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Branches(nn.Module):
    """Branches of different costs that meet again, with a gate."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.a(x)) * self.b(x)
        return (x + self.c(y)).softmax(-1).square().sum()


class Scan(nn.Module):
    """A state space of so many steps, one after another."""

    def __init__(self, steps: int, width: int = 8, state: int = 4) -> None:
        super().__init__()
        self.steps, self.decay = steps, nn.Parameter(-torch.rand(width, state))
        self.mixed, self.step = nn.Linear(width, 2 * state), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step, (into, out) = F.softplus(self.step(x)), self.mixed(x).chunk(2, -1)
        state, found = x.new_zeros(x.shape[0], *self.decay.shape), []
        for t in range(self.steps):
            state = state * torch.exp(step[:, t, :, None] * self.decay) + (step * x)[:, t, :, None] * into[:, t, None]
            found.append((state * out[:, t, None]).sum(-1))
        return torch.stack(found, 1).square().mean()


def joint_of(model: nn.Module, *inputs: Any) -> Joint:
    """The joint graph of a training step."""
    found = capture_model(model, inputs, train=True, joint=True).items[0].joint
    assert found is not None
    return found


def price(node: fx.Node) -> Price:
    """Bytes over 20 GB/s and FLOPs over 100 GFLOP/s: figures that differ, and are the same on every machine."""
    values = [node.meta.get("val"), *(a.meta.get("val") for a in node.all_input_nodes)]
    flat = [v for value in values for v in (value if isinstance(value, (tuple, list)) else (value,))]
    moved = sum(int(v.numel()) * v.element_size() for v in flat if isinstance(v, torch.Tensor))
    flops = 0.0
    if any(word in str(node.target) for word in ("mm", "bmm")):
        left, right = (a.meta["val"] for a in node.all_input_nodes[-2:])
        flops = 2.0 * int(left.numel()) * int(right.shape[-1])
    return Price(moved / 20e9 + flops / 100e9, flops)


def problem_of(joint: Joint, **settings: Any) -> Problem:
    """What the search sees of a joint graph."""
    forward, backward = joint.outputs()
    return build(joint.graph, forward, backward, saved=joint.saved, price=price, hint=int, **settings)
