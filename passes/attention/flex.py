"""FlexAttention as a node of a Dynamo graph: the score of one query and key as a small graph, and a mask of no blocks.

The higher-order operator is called as Dynamo itself calls it. Its form belongs to torch; `available` tries it once on
a few numbers, and where it does not answer as expected the target is not used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from optpass.passes.attention.emit import Writer
from optpass.passes.attention.site import Softcap

#: What Dynamo passes for a call without options.
_OPTIONS = {
    "BACKEND": "AUTO", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True, "OUTPUT_LOGSUMEXP": False, "OUTPUT_MAX": False,
}  # fmt: skip
_WHOLE = 1 << 30  #: a block as large as any sequence


@dataclass(frozen=True)
class ScoreMod:
    """What happens to one score: `outer · tanh(score)`, then a mask operand, then causality.

    Attributes:
        outer: None where there is no softcap.
        mask: 'bool' or 'float' operand, or None; `broadcast` says which of its four dims have one element.
        causal: keys after the query are not seen.
    """

    outer: float | None
    mask: str | None
    broadcast: tuple[bool, ...]
    causal: bool

    def graph(self) -> fx.GraphModule:
        """`(score, batch, head, query, key, *operands) -> score`."""
        graph = fx.Graph()
        score, *index = (graph.placeholder(n) for n in ("score", "batch", "head", "query", "key"))
        if self.outer is not None:
            score = graph.call_function(torch.mul, (graph.call_function(torch.tanh, (score,)), self.outer))
        if self.mask is not None:
            operand = graph.placeholder("operand")
            zero = graph.call_function(torch.zeros_like, (index[0],))
            at = [zero if one else i for one, i in zip(self.broadcast, index, strict=True)]
            element = graph.call_function(torch.ops.aten.index.Tensor, (operand, at))
            score = _masked(graph, score, element, self.mask)
        if self.causal:
            seen = graph.call_function(torch.ge, (index[2], index[3]))
            score = _masked(graph, score, seen, "bool")
        graph.output(score)
        return fx.GraphModule({}, graph)


def _masked(graph: fx.Graph, score: fx.Node, element: fx.Node, kind: str) -> fx.Node:
    if kind == "float":
        return graph.call_function(torch.add, (score, element))
    return graph.call_function(torch.where, (element, score, float("-inf")))


def _no_mask() -> fx.GraphModule:
    """Every key is seen: `mask_mod` of the block mask without blocks."""
    graph = fx.Graph()
    batch, *_ = (graph.placeholder(n) for n in ("batch", "head", "query", "key"))
    graph.output(graph.call_method("new_ones", (batch, ()), {"dtype": torch.bool}))
    return fx.GraphModule({}, graph)


def operator() -> Any:
    """The higher-order operator; None where this torch has none."""
    return getattr(torch.ops.higher_order, "flex_attention", None)


def _block_mask(ones: Any, zeros: Any, mask_mod: Any) -> tuple[Any, ...]:
    """Lengths and indices of one block that holds everything, in the order of `BlockMask.as_tuple`."""
    return (1, 1, ones, zeros, None, None, ones, zeros, None, None, None, None, None, None, _WHOLE, _WHOLE, mask_mod)


@functools.cache
def available() -> bool:
    """Whether the operator takes what is written here and answers rightly, tried on a few numbers."""
    flex = operator()
    if flex is None:
        return False
    q = torch.linspace(-1, 1, 32).reshape(1, 2, 4, 4)
    mod = ScoreMod(2.0, None, (), True).graph()
    ones, zeros = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    try:
        with torch.no_grad():
            out = flex(q, q, q, mod, _block_mask(ones, zeros, _no_mask()), 0.5, dict(_OPTIONS), (), ())[0]
    except Exception:  # noqa: BLE001  # another torch, another form: whatever it says, the target is not there
        return False
    scores = 2.0 * torch.tanh(q @ q.mT * 0.5)
    scores = scores.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), float("-inf"))
    return torch.allclose(out, scores.softmax(-1) @ q, atol=1e-5)


def call(
    writer: Writer, operands: tuple[fx.Node, fx.Node, fx.Node], scale: float, mod: ScoreMod, mask: fx.Node | None,
    attach: Callable[[str, fx.GraphModule], fx.Node],
) -> fx.Node:  # fmt: skip
    """The node that computes attention of (q, k, v); its dims are those of `F.scaled_dot_product_attention`.

    Args:
        writer: writes the nodes.
        operands: q (batch, heads, queries, depth), k and v (batch, kv_heads, keys, depth).
        scale: multiplies the product before `mod`.
        mod, mask: what happens to a score, and the operand that it reads.
        attach: puts a graph module on the owning module and returns a `get_attr` node for it.
    """
    device = writer.like.tensor.device
    ones = writer.call(torch.ones, (1, 1, 1), dtype=torch.int32, device=device)
    zeros = writer.call(torch.zeros, (1, 1, 1, 1), dtype=torch.int32, device=device)
    block = _block_mask(ones, zeros, attach("mask_mod", _no_mask()))
    score_mod = attach("score_mod", mod.graph())
    buffers = () if mask is None else (mask,)
    result = writer.call(operator(), *operands, score_mod, block, scale, dict(_OPTIONS), buffers, ())
    return writer.call(getitem, result, 0)


def softcap(scale: float | torch.SymFloat, caps: list[Softcap]) -> tuple[float | torch.SymFloat, float | None]:
    """(scale before the score modification, factor after its tanh)."""
    if not caps:
        return scale, None
    assert isinstance(scale, (int, float))
    return caps[0].inner, float(scale)
