"""Programs that must stay as they are: what a fused kernel does not compute is needed, or it is no attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attention_forms.base import Sizes, form, heads_first, rand
from torch import Tensor, nn

_USED = r"(?i)used|return|output|else|need|read"


@form(target="decline", reason=_USED)
def weights_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = torch.softmax(q @ k.mT * 0.25, dim=-1)
    return p @ v, p


@form(target="decline", reason=_USED)
def weights_averaged_over_heads_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = torch.softmax(q @ k.mT * 0.25, dim=-1)
    return p @ v, p.mean(dim=1)


@form(target="decline", reason=_USED)
def entropy_of_the_weights_as_a_loss(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = torch.softmax(q @ k.mT * 0.25, dim=-1)
    return p @ v, -(p * (p + 1e-6).log()).sum()


@form(target="decline", reason=_USED)
def scores_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT * 0.25
    return torch.softmax(scores, dim=-1) @ v, scores


@form(target="decline", reason=_USED)
class WeightsKept(nn.Module):
    """Stored on the module, for a plot."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.weights: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = torch.softmax(q @ k.mT * 0.25, dim=-1)
        self.weights = p
        return p @ v


@form(target="decline", reason=_USED)
class WeightsHooked(nn.Module):
    """A forward hook on the softmax keeps what it sees."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.softmax = nn.Softmax(dim=-1)
        self.seen: list[Tensor] = []
        self.softmax.register_forward_hook(lambda module, args, out: self.seen.append(out))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.softmax(q @ k.mT * 0.25) @ v


@form(target="decline")
class TalkingHeads(nn.Module):
    """Heads are mixed between the products."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(s.heads, s.heads), nn.Linear(s.heads, s.heads)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.before((q @ k.mT * 0.25).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        p = scores.softmax(dim=-1)
        return self.after(p.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) @ v


@form(target="decline")
def sigmoid_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(q @ k.mT * 0.25 - 3.0) @ v


@form(target="decline")
def squared_relu_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.relu(q @ k.mT * 0.25).square() @ v


@form(target="decline")
def softmax_of_a_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(torch.softmax(q @ k.mT * 0.25, dim=-1), dim=-1) @ v


@form(target="decline")
def renormalised_by_the_column(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Slot attention: a softmax over the queries, then a mean over the keys."""
    p = torch.softmax(q @ k.mT * 0.25, dim=-2) + 1e-6
    return (p / p.sum(dim=-1, keepdim=True)) @ v


@form(lambda s: [*heads_first(s), rand(s.heads, s.length, s.length)], target="decline")
def weights_biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (torch.softmax(q @ k.mT * 0.25, dim=-1) + bias) @ v


@form(target="decline")
def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.softmax(dim=-1) @ (k.softmax(dim=-2).mT @ v)


@form(target="either", mask="free")
def one_softmax_for_two_values(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Two products share the weights: two kernels would compute them twice."""
    p = torch.softmax(q @ k.mT * 0.25, dim=-1)
    return p @ v, p @ v.flip(-1).tanh()


@form(target="either", mask="free")
def best_keys_only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mask is computed from the scores."""
    scores = q @ k.mT * 0.25
    kth = scores.topk(5, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < kth, float("-inf")).softmax(dim=-1) @ v
