"""FlexAttention as a node of a Dynamo graph: the score of one query and key as a small graph, and a mask of no blocks.

Dropout: FlexAttention changes scores, and dropout changes what the softmax makes of them. Scores of minus infinity
where a weight is dropped give what is kept, over the sum of what is kept; a second call gives the sum of all. Which are
dropped is computed from a seed and the place (`draws.Hashed`): the backward drops the same, and nothing is kept for it.

The higher-order operator is called as Dynamo itself calls it. Its form belongs to torch; `available` tries it once on
a few numbers, and where it does not answer as expected the target is not used.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.nn.attention.flex_attention import BlockMask

from optpass.passes.attention.blocks.draws import Hashed
from optpass.passes.attention.site import Softcap
from optpass.passes.attention.write.emit import Writer, tensor_of

#: What Dynamo passes for a call without options.
_OPTIONS = {
    "BACKEND": "AUTO", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True, "OUTPUT_LOGSUMEXP": False, "OUTPUT_MAX": False,
}  # fmt: skip
_WHOLE = 1 << 30  #: a block as large as any sequence
_FEW = 16  #: columns of v, the fewest that its kernels for GPUs take


@dataclass(frozen=True)
class ScoreMod:
    """What happens to one score: `outer · tanh(score)`, then a mask operand, then causality, then dropout.

    Attributes:
        outer: None where there is no softcap.
        mask: 'bool' or 'float' operand, or None; `broadcast` says which of its four dims have one element.
        causal: keys after the query are not seen.
        draw: which weights are dropped; None for all are kept. The seed is the last operand.
    """

    outer: float | None
    mask: str | None
    broadcast: tuple[bool, ...]
    causal: bool
    draw: Hashed | None = None

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
        if self.draw is not None:
            score = _masked(graph, score, self.draw.kept(graph, graph.placeholder("seed"), index), "bool")
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
    orders = (None,) * _orders()
    return (1, 1, ones, zeros, None, None, ones, zeros, None, None, *orders, _WHOLE, _WHOLE, mask_mod)


@functools.cache
def _orders() -> int:
    """How many orders of writing a block mask has between indices and sizes: none before torch 2.13."""
    ones, zeros = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    return len(BlockMask.from_kv_blocks(ones, zeros).as_tuple()) - 13


@functools.cache
def available() -> bool:
    """Whether the operator takes what is written here and answers rightly, tried on a few numbers."""
    with torch.autocast("cpu", enabled=False):
        tried = _try(ScoreMod(2.0, None, (), True), ())
        scores = (2.0 * torch.tanh(_scores())).masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), float("-inf"))
        return tried is not None and torch.allclose(tried[0], scores.softmax(-1) @ _numbers(), atol=1e-5)


@functools.cache
def drops() -> bool:
    """Whether its logarithm of the sums is to the base of 2, as dropout needs it."""
    with torch.autocast("cpu", enabled=False):
        tried = _try(ScoreMod(None, None, (), False, Hashed(0.0)), (torch.zeros(2, dtype=torch.int64),))
        return tried is not None and torch.allclose(tried[1], _scores().logsumexp(-1) / math.log(2), atol=1e-5)


def _numbers() -> torch.Tensor:
    return torch.linspace(-1, 1, 32, dtype=torch.float32).reshape(1, 2, 4, 4)


def _scores() -> torch.Tensor:
    return _numbers() @ _numbers().mT * 0.5


def _try(mod: ScoreMod, buffers: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
    """(result, logarithm of the sums, ...) of a few numbers; None where the operator has another form."""
    flex, q = operator(), _numbers()
    ones, zeros = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    if flex is None:
        return None
    try:
        with torch.no_grad():
            block = _block_mask(ones, zeros, _no_mask())
            found: tuple[torch.Tensor, ...] = flex(q, q, q, mod.graph(), block, 0.5, dict(_OPTIONS), buffers, ())
        return found
    except Exception:  # noqa: BLE001  # another torch, another form: whatever it says, the target is not there
        return None


@dataclass(frozen=True)
class Call:
    """FlexAttention of some operands, written into a graph.

    Attributes:
        writer: writes the nodes.
        operands: q (batch, heads, queries, depth), k and v (batch, kv_heads, keys, depth).
        scale: multiplies the product before `mod`.
        mod, mask: what happens to a score but dropout, and the operand that it reads.
        attach: puts a graph module on the owning module and returns a `get_attr` node for it.
    """

    writer: Writer
    operands: tuple[fx.Node, fx.Node, fx.Node]
    scale: float | fx.Node
    mod: ScoreMod
    mask: fx.Node | None
    attach: Callable[[str, fx.GraphModule], fx.Node]

    def node(self) -> fx.Node:
        """The result; its dims are those of `F.scaled_dot_product_attention`."""
        return self.writer.call(getitem, self._written(self.operands, self.mod), 0)

    def dropped(self, probability: float) -> fx.Node:
        """The result with weights dropped, the others divided by `1 - probability`; in float32 at least.

        kept / (sum of kept) · (sum of kept) / sum: both sums are known by their logarithms to the base of 2.
        """
        call, (query, key, value) = self.writer.call, self.operands
        device = self.writer.like.tensor.device
        seed = call(torch.randint, 0, 2**32, (2,), dtype=torch.int64, device=device)
        kept = self._written(self.operands, replace(self.mod, draw=Hashed(probability)), seed)
        few = call(torch.narrow, value, 3, 0, min(_FEW, tensor_of(value).shape[3]))  # of the second, sums alone
        whole = self._written((query, key, call(torch.Tensor.detach, few)), self.mod, lse=True)
        logs = [call(getitem, made, 1) for made in (kept, whole)]
        # Nothing is left of a row of which no key, or none that is seen, was kept.
        nothing = self.writer.scalar(float("-inf"), torch.float32)
        apart = call(torch.where, call(torch.isinf, logs[0]), nothing, call(torch.sub, *logs))
        share = call(torch.unsqueeze, call(torch.div, call(torch.exp2, apart), 1.0 - probability), 3)
        return call(torch.mul, call(getitem, kept, 0), share)

    def _written(
        self, operands: tuple[fx.Node, ...], mod: ScoreMod, seed: fx.Node | None = None, *, lse: bool = False
    ) -> fx.Node:
        device = self.writer.like.tensor.device
        ones = self.writer.call(torch.ones, (1, 1, 1), dtype=torch.int32, device=device)
        zeros = self.writer.call(torch.zeros, (1, 1, 1, 1), dtype=torch.int32, device=device)
        block = _block_mask(ones, zeros, self.attach("mask_mod", _no_mask()))
        score_mod = self.attach("score_mod", mod.graph())
        buffers = tuple(n for n in (self.mask, seed) if n is not None)
        options = {**_OPTIONS, "OUTPUT_LOGSUMEXP": True} if lse or seed is not None else dict(_OPTIONS)
        return self.writer.call(operator(), *operands, score_mod, block, self.scale, options, buffers, ())


def softcap(scale: float | torch.SymFloat, caps: list[Softcap]) -> tuple[float | torch.SymFloat, float | None]:
    """(scale before the score modification, factor after its tanh)."""
    if not caps:
        return scale, None
    assert isinstance(scale, (int, float))
    return caps[0].inner, float(scale)
