"""cuDNN's attention backward, protected from plans that torch keeps for another layout of the gradient.

torch builds a plan per problem and keeps it (`mhagraphbackwardcache` in aten/src/ATen/native/cudnn/MHA.cpp, torch 2.11
to 2.15). The plan holds the strides of the gradient that it was built for; the key it is kept by has those of queries,
keys and values alone. A second attention of the same sizes whose gradient lies otherwise in memory is computed by the
first one's plan, and all its gradients are wrong (seen on an H100 with torch 2.11 and cuDNN 9.19, in 2 of 108 programs
that ran one after another). So here each gradient is given in the strides of the result, which follow from those of the
queries, and so from the key.

That holds for attention that the user has written as a call of SDPA, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

_LIBRARY: Any = torch.library.Library("optpass", "FRAGMENT")  # type: ignore[no-untyped-call, unused-ignore]
#: Compilers hand over the strides that the graph says, so that a gradient laid out in the graph is not copied again.
_TAGS = tuple(
    tag for name in ("needs_exact_strides", "pt2_compliant_tag") if (tag := getattr(torch.Tag, name, None)) is not None
)
_LIBRARY.define(
    "cudnn_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
    "Tensor philox_seed, Tensor philox_offset, Tensor? attn_bias, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, "
    "SymInt max_k, float dropout_p, bool is_causal, *, float? scale=None) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
#: Torch's own operator, which this one calls.
THEIRS: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
#: Places of the gradient and of the forward's result among the arguments of both.
_GRADIENT, _RESULT = 0, 4


def order_of(strides: Sequence[int]) -> list[int]:
    """The dims from the outermost to the innermost."""
    return sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` in the strides of `like`, a dense tensor of its shape; itself where it has them already."""
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _backward(grad_out: Tensor, *args: Any, scale: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = THEIRS(laid_out(grad_out, args[_RESULT - 1]), *args, scale=scale)
    return found


def _fake(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


_LIBRARY.impl("cudnn_attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("optpass::cudnn_attention_backward", _fake, lib=_LIBRARY)

#: As `THEIRS`, with a gradient in any layout.
OPERATOR: Any = torch.ops.optpass.cudnn_attention_backward.default


def protect(gm: fx.GraphModule) -> int:
    """Replace torch's operator in a joint graph by ours, in place; how often it was there.

    A gradient whose strides the graph says, and that has others than the result, is copied in the graph, where a
    compiler can fuse that with what makes it.
    """
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is THEIRS]
    for node in nodes:
        _lay_out(gm.graph, node)
        node.target = OPERATOR
    if nodes:
        gm.recompile()
    return len(nodes)


def _lay_out(graph: fx.Graph, node: fx.Node) -> None:
    """Write the copy of the gradient that is needed. Symbolic strides are left to the run."""
    gradient, result = node.args[_GRADIENT], node.args[_RESULT]
    if not isinstance(gradient, fx.Node) or not isinstance(result, fx.Node):
        return
    value, like = gradient.meta["val"], result.meta["val"]
    if any(isinstance(s, torch.SymInt) for t in (value, like) for s in (*t.shape, *t.stride())):
        return
    order = order_of(like.stride())
    if value.permute(*order).is_contiguous():
        return
    back = sorted(range(len(order)), key=lambda dim: order[dim])
    with graph.inserting_before(node):
        for target, arguments in (
            (torch.ops.aten.permute.default, (order,)),
            (torch.ops.aten.clone.default, ()),
            (torch.ops.aten.permute.default, (back,)),
        ):
            keywords: dict[str, Any] = {} if arguments else {"memory_format": torch.contiguous_format}
            made = graph.call_function(target, (gradient, *arguments), keywords)
            made.meta = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
            made.meta["val"] = target(gradient.meta["val"], *arguments, **keywords)
            for key in ("partitioner_tag", "is_backward"):
                if key in node.meta:
                    made.meta[key] = node.meta[key]
            gradient = made
    node.update_arg(_GRADIENT, gradient)
