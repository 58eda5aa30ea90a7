"""Gradients of rows whose scores are lost beside the numbers that are added to them.

`torch.ops.optpass.flow_of_lost_rows`: where every key of a query carries a number like -1e9, the softmax reads those
numbers alone, and yet a gradient flows to queries and keys, through the weights that the numbers leave. A kernel that
is given zeros for such a query has the right result and no such gradient; this operator adds nothing to the result
and passes the gradient. Rows of that kind are rare: unless there are some, its backward reads one flag per row.

Which rows they are, and what their weights are, `rows` says; nothing is decided here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("optpass", "FRAGMENT")  # type: ignore[no-untyped-call, unused-ignore]
#: The backward asks whether there are such rows, which no captured CUDA graph could.
_TAGS = tuple(
    tag
    for name in ("flexible_layout", "pt2_compliant_tag", "cudagraph_unsafe")
    if (tag := getattr(torch.Tag, name, None)) is not None
)
_OPERANDS = (
    "Tensor query, Tensor key, Tensor value, Tensor mask, Tensor lost, Tensor? seen=None, float scale=1.0, "
    "float softcap=0.0"
)
_LIBRARY.define(f"flow_of_lost_rows({_OPERANDS}) -> Tensor", tags=_TAGS)
_LIBRARY.define(f"flow_of_lost_rows_backward(Tensor grad, {_OPERANDS}) -> (Tensor, Tensor)", tags=_TAGS)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, lost: Tensor, seen: Tensor | None = None,
    scale: float = 1.0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    return value.new_zeros((*query.shape[:3], value.shape[3]))


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, lost: Tensor, seen: Tensor | None = None,
    scale: float = 1.0, softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    to_query, to_key = torch.zeros_like(query), torch.zeros_like(key)
    if not bool(lost.any()):
        return to_query, to_key
    batch, heads, rows, _ = query.shape
    keys, groups = key.shape[2], heads // key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    every = lost.expand(batch, heads, rows, 1)[..., 0]
    mask = mask.expand(batch, heads, rows, keys)
    seen = None if seen is None else seen.expand(batch, heads, rows, keys)
    for b, h in every.any(-1).nonzero().tolist():
        at = every[b, h].nonzero()[:, 0]
        k, v = key[b, h // groups].to(wide), value[b, h // groups].to(wide)
        weights = mask[b, h, at].to(wide).softmax(-1)
        passed = grad[b, h, at].to(wide) @ v.mT
        passed = (passed - (weights * passed).sum(-1, keepdim=True)) * weights * scale
        if seen is not None:
            passed = passed.where(seen[b, h, at], 0.0)
        if softcap:
            passed = passed * (1.0 - torch.tanh(query[b, h, at].to(wide) @ k.mT * scale).square()) * softcap
        to_query[b, h, at] = (passed @ k).to(query.dtype)
        to_key[b, h // groups] += (passed.mT @ query[b, h, at].to(wide)).to(key.dtype)
    return to_query, to_key


def _fake_backward(grad: Tensor, query: Tensor, key: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, scale, softcap = inputs
    ctx.options = scale, softcap
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    to_query, to_key = torch.ops.optpass.flow_of_lost_rows_backward(grad, *ctx.saved_tensors, *ctx.options)
    return to_query, to_key, None, None, None, None, None, None


_LIBRARY.impl("flow_of_lost_rows", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("flow_of_lost_rows_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("optpass::flow_of_lost_rows", _forward, lib=_LIBRARY)
torch.library.register_fake("optpass::flow_of_lost_rows_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("optpass::flow_of_lost_rows", _gradients, setup_context=_keep, lib=_LIBRARY)

#: `(query, key, value, mask, lost, seen=None, scale=1.0, softcap=0.0) -> zeros of the result's shape`. query: [batch,
#: heads, queries, depth]; key and value: [batch, kv_heads, keys, ...]; mask: broadcasts to the scores, what the softmax
#: of a lost row reads; lost: [.., .., queries or 1, 1] bool; seen: broadcasts to the scores, False where a score was
#: replaced, which passes no gradient; softcap: unless 0, scores are softcap · tanh(q kᵀ · scale).
OPERATOR: Any = torch.ops.optpass.flow_of_lost_rows.default
