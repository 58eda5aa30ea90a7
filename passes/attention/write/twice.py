"""Second derivatives of a kernel's result, for graphs that run as they are: torch's kernels have but first ones.

A node behind the call, of no effect until a backward is itself recorded (`create_graph=True`). Then the gradients come
of the same attention computed by operations that have derivatives of any order, scores and all, as in the program.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def differentiable(
    result: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool,
    scale: float, softcap: float,
) -> Tensor:  # fmt: skip
    """`result` of a call for these arguments; q [b, h, s, d], k and v [b, g, t, d], without dropout."""
    found: Tensor = _Twice.apply(result, query, key, value, mask, causal, scale, softcap)  # type: ignore[no-untyped-call, unused-ignore]
    return found


class _Twice(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(result: Tensor, *_given: Any) -> Tensor:
        # A view: nothing writes to a kernel's result, what may be written to is copied from it.
        return result.view_as(result)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[1:5])
        ctx.numbers = inputs[5:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():  # the call's own backward is next
            return (*grads, *(None,) * 7)
        # Aliases: an operand may be another one, or made of it, and its gradient is that of its own place alone.
        operands: list[Any] = [None if t is None else t.view_as(t) for t in ctx.saved_tensors]
        wanted = [t for t in operands if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(_composed(*operands, *ctx.numbers), wanted, grads, create_graph=True))
        return (None, *(next(found) if t is not None and t.requires_grad else None for t in operands), None, None, None)


def _composed(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float, softcap: float
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    if not softcap:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups > 1
            )
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scores = softcap * torch.tanh(query @ key.mT * scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ value
