"""Where people put the scale: before, after, split, as a tensor, as a division, nowhere."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attention_forms.base import Sizes, flat, form, heads_first, one, root
from torch import Tensor, nn


@form(scale=root, dynamic=True)
def divided_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    return torch.matmul(F.softmax(scores, dim=-1), v)


@form(scale=root)
def multiplied_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(dim=-1) @ v


@form(scale=root)
def multiplied_from_the_left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attn = torch.softmax((1.0 / np.sqrt(16.0).item()) * (q @ k.transpose(2, 3)), -1)
    return attn @ v


@form()
def on_the_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q * q.shape[-1] ** -0.5
    attn = (q @ k.transpose(-2, -1)).softmax(dim=-1)
    return attn @ v


@form()
def on_the_query_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q * 1.0 + 0.0  # a projection's result, as fairseq scales it
    q *= q.shape[-1] ** -0.5
    attn = (q @ k.transpose(-2, -1)).softmax(dim=-1)
    return attn @ v


@form()
def on_the_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attn = (q @ (k / math.sqrt(k.shape[-1])).transpose(-2, -1)).softmax(dim=-1)
    return attn @ v


@form()
def on_the_transposed_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kt = k.permute(0, 1, 3, 2) * (1 / math.sqrt(k.shape[-1]))
    return torch.matmul(torch.softmax(torch.matmul(q, kt), dim=3), v)


@form()
def split_over_both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale = 1 / math.sqrt(math.sqrt(q.shape[-1]))
    weight = torch.einsum("bhtc,bhsc->bhts", q * scale, k * scale)
    return torch.einsum("bhts,bhsc->bhtc", torch.softmax(weight, dim=-1), v)


@form(dynamic=True)
def a_tensor_made_here(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / torch.sqrt(torch.tensor(q.size(-1), dtype=q.dtype))
    return torch.softmax(scores, dim=-1) @ v


@form()
def a_full_of_no_dimension(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attn_weights = torch.matmul(q, k.transpose(-1, -2))
    attn_weights = attn_weights / torch.full(
        [], v.size(-1) ** 0.5, dtype=attn_weights.dtype, device=attn_weights.device
    )
    return torch.matmul(nn.functional.softmax(attn_weights, dim=-1), v)


@form(scale=one)
def absent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(3, 2))
    return torch.matmul(nn.functional.softmax(scores, dim=-1), v)


@form(scale=lambda s: root(s) / 3.0)
def and_a_layer_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    layer = 2
    w = torch.matmul(q, k.transpose(-1, -2)) / (v.size(-1) ** 0.5)
    w = w / float(layer + 1)
    return torch.matmul(nn.functional.softmax(w, dim=-1), v)


@form()
def before_and_undone_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # The coefficient of Megatron and GPT-J-like code: divide early against overflow, multiply back in the softmax.
    coefficient = 5.0
    scores = torch.matmul(q / (coefficient * math.sqrt(q.size(-1))), k.transpose(-1, -2))
    return torch.softmax(scores.float() * coefficient, dim=-1).to(v.dtype) @ v


@form(scale=root)
def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores *= q.shape[-1] ** -0.5
    return torch.matmul(scores.softmax(-1), v)


@form()
class ABufferOfNoDimension(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(s.dim**-0.5))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax((q @ k.transpose(-2, -1)) * self.scale, dim=-1) @ v


@form()
class AFloatTensorOfOne(nn.Module):
    """The machine translation tutorial: a tensor that is no buffer."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.scale = torch.sqrt(torch.FloatTensor([s.dim]))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        energy = torch.matmul(q, k.permute(0, 1, 3, 2)) / self.scale.to(q.dtype)
        return torch.matmul(torch.softmax(energy, dim=-1), v)


@form()
class ALearnedTemperaturePerHead(nn.Module):
    """XCiT and cosine attention: (heads, 1, 1) parameter on the scores."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.rand(s.heads, 1, 1) + 0.5)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attn = (q @ k.transpose(-2, -1)) * self.temperature
        return attn.softmax(dim=-1) @ v


@form()
class CosineWithALogitScale(nn.Module):
    """Swin v2: normalised q and k, a clamped and exponentiated scale per head."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones((s.heads, 1, 1))))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        attn = attn * torch.clamp(self.logit_scale, max=math.log(1.0 / 0.01)).exp()
        return attn.softmax(dim=-1) @ v


@form()
class QKNorm(nn.Module):
    """Layer norm over each head of q and k, as in ViT-22B."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(s.dim), nn.LayerNorm(s.dim)
        self.scale = s.dim**-0.5

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attn = self.q_norm(q) * self.scale @ self.k_norm(k).transpose(-2, -1)
        return attn.softmax(dim=-1) @ v


@form(scale=root)
def added_with_alpha(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.add(torch.zeros_like(q[..., :1]), q @ k.transpose(-2, -1), alpha=q.shape[-1] ** -0.5)
    return torch.softmax(scores, dim=-1) @ v


def _biased(s: Sizes) -> list[Any]:
    return [*heads_first(s), torch.randn(s.batch, 1, 1, s.length)]


@form(_biased, mask="operand", scale=root)
def addcmul(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scale = torch.tensor(q.shape[-1] ** -0.5, dtype=q.dtype)
    return torch.softmax(torch.addcmul(bias, q @ k.transpose(-2, -1), scale), dim=-1) @ v


@form(_biased, mask="operand")
def after_the_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1) + bias) / math.sqrt(q.shape[-1])
    return torch.softmax(scores, dim=-1) @ v


@form(flat)
def guided_diffusion(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (batch x heads, channels, length)
    scale = 1 / math.sqrt(math.sqrt(q.shape[1]))
    weight = torch.einsum("bct,bcs->bts", q * scale, k * scale)
    weight = torch.softmax(weight.float(), dim=-1).type(weight.dtype)
    return torch.einsum("bts,bcs->bct", weight, v)
