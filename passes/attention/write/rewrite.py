"""The call that computes a planned site: q, k and v in the kernel's layout, its mask, and what becomes of the result.

Only builds nodes through `emit.Writer`; putting them in the place of the user's is `swap`'s.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from optpass.passes.attention.axes import Axis, Dims, resolve
from optpass.passes.attention.blocks import operator as blocks
from optpass.passes.attention.find.operands import positive
from optpass.passes.attention.plans.plan import Plan
from optpass.passes.attention.site import Blocked, Factor, Operand
from optpass.passes.attention.write import few_keys, flex, lost, returned, twice, uncast
from optpass.passes.attention.write.emit import Writer, tensor_of
from optpass.passes.attention.write.exact import Events
from optpass.passes.attention.write.mask_operand import MaskOperand, times
from optpass.passes.attention.write.preference import preferring
from optpass.passes.attention.write.rows import EmptyRows, Rows

Layout = tuple[tuple[Axis, ...], ...]


class Rewrite:
    """One site being written.

    Args:
        summed: others are added to it: the sum is rounded once, by the caller.
        twice: its backward may be differentiated, since the graph is run as it is.
    """

    def __init__(self, writer: Writer, plan: Plan, *, summed: bool = False, twice: bool = False) -> None:
        self.writer, self.plan, self.summed = writer, plan, summed
        self.twice = twice and plan.problem.training and not plan.site.dropout
        self.scale = plan.scale
        frame = plan.frame
        self.query_dims: Layout = (frame.batch, frame.heads, frame.rows, frame.depth)
        self.key_dims: Layout = (frame.batch, frame.kv_heads, frame.keys, frame.depth)
        self.value_dims: Layout = (frame.batch, frame.kv_heads, frame.keys, frame.width)
        self.out_dims: Layout = (frame.batch, frame.heads, frame.rows, frame.width)
        self.masks = MaskOperand(writer, plan, (frame.batch, frame.heads, frame.rows, frame.keys))

    def sdpa(self, prefer: str | None = None) -> fx.Node:
        """`F.scaled_dot_product_attention`, whose dims run over `out_dims`, in the dtype of the user's result.

        `prefer` names the kernel that SDPA is to take, where it would not take it by itself.
        """
        plan = self.plan
        query, key, value, mask, rows = self._prepared()
        scale = self.scale
        if not isinstance(scale, torch.SymFloat) and scale < 0:  # kernels scale their own minus infinities too
            query, scale = self.writer.call(torch.neg, query), -scale
        arguments: dict[str, Any] = {"scale": self.writer.number(scale)}
        if plan.mask.kind == "causal":
            arguments["is_causal"] = True
        elif mask is None and few_keys.loses_nan(plan.problem.device, key):
            arguments["attn_mask"] = mask = few_keys.all_seen(self.writer, key)
        elif mask is not None:
            arguments["attn_mask"] = mask if plan.problem.device == "cpu" else self._rows_of_keys(mask)
        if plan.site.dropout:
            arguments["dropout_p"] = plan.site.dropout
        if plan.frame.groups:
            arguments["enable_gqa"] = True

        def call() -> fx.Node:
            return self.writer.call(F.scaled_dot_product_attention, query, key, value, **arguments)

        dtypes = (plan.dtype, torch.bool if mask is None else tensor_of(mask).dtype)
        narrowed = uncast.narrows(self.writer, plan.problem.device, *dtypes)

        def sdpa() -> fx.Node:
            return uncast.without(self.writer, plan.problem.device, call) if narrowed else call()

        result = sdpa() if prefer is None else preferring(self.writer, plan.problem.device, prefer, sdpa)
        operands = (query, key, value, mask)
        return self._finish(self._differentiable(result, operands, self.writer.number(scale), 0.0), rows)

    def in_blocks(self) -> fx.Node:
        """Our own operator for CPUs, as `sdpa`; the scale is a number."""
        query, key, value, mask, rows = self._prepared()
        causal = self.plan.mask.kind == "causal"
        if self.plan.problem.training:
            query, key, value = (returned.kept(self.writer, operand) for operand in (query, key, value))
            mask = None if mask is None else returned.kept(self.writer, mask)
        scale, outer = flex.softcap(self.scale, self.plan.site.scores.softcaps)
        arguments: list[Any] = [query, key, value, mask, causal, float(scale), 0.0 if outer is None else float(outer)]
        if self.plan.site.dropout:
            device = self.plan.site.output.tensor.device
            seed = self.writer.call(torch.randint, 0, 2**63 - 1, (1,), dtype=torch.int64, device=device)
            arguments += [self.plan.site.dropout, seed]
        wide: dict[str, Any] = {"wide": True} if self.plan.problem.keeps_wide else {}
        result = self.writer.call(blocks.OPERATOR, *arguments, **wide)
        return self._finish(self._differentiable(result, (query, key, value, mask), *arguments[5:7]), rows)

    def flex(self, attach: Callable[[str, fx.GraphModule], fx.Node]) -> fx.Node:
        """FlexAttention, as `sdpa`; `attach` puts a graph on the owning module."""
        plan = self.plan
        query, key, value, mask, rows = self._prepared()
        dense = plan.problem.training  # nobody compiles that for a CPU
        scale, outer = flex.softcap(self.scale, plan.site.scores.softcaps)
        kind = None if mask is None else "bool" if tensor_of(mask).dtype == torch.bool else "float"
        broadcast: tuple[bool, ...] = ()
        if mask is not None:
            broadcast = tuple(str(size) == "1" for size in tensor_of(mask).shape)
        mod = flex.ScoreMod(outer, kind, broadcast, plan.mask.kind == "causal")
        if plan.site.dropout >= 1.0:
            raise Blocked("all weights are dropped", plan.site.dropout_value)
        if plan.problem.device == "cpu" and not dense:
            # Inductor's kernel reads a view without its offset, and its lowering fails on a mask that is one.
            query, key, value = (self.writer.call(returned.OPERATOR, t) for t in (query, key, value))
            mask = None if mask is None else self.writer.call(returned.OPERATOR, mask)
        call = flex.Call(self.writer, (query, key, value), self.writer.number(scale), mod, mask, attach)
        dropout = plan.site.dropout
        return self._finish(call.dropped(dropout) if dropout else call.node(), rows)

    def _differentiable(
        self, result: fx.Node, operands: tuple[fx.Node | None, ...], scale: float | fx.Node, softcap: float
    ) -> fx.Node:
        if not self.twice:
            return result
        causal = self.plan.mask.kind == "causal"
        return self.writer.call(twice.differentiable, result, *operands, causal, scale, softcap)

    def _prepared(self) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node | None, Rows]:
        """q, k, v, the mask operand, and what is done to the result for rows without a key."""
        plan, scores = self.plan, self.plan.site.scores
        query = self._vectors(scores.query, [p.query for p in scores.parts], self.query_dims, plan.query_factors)
        key = self._vectors(scores.key, [p.key for p in scores.parts], self.key_dims, plan.key_factors)
        value = self._operand(plan.site.value, self.value_dims, [])
        masks = self.masks
        keep = functools.partial(masks.keep, plan.mask.fills)
        events = Events(masks.events(), masks.event)
        empty = EmptyRows(self.writer, plan, keep, events, twice=self.twice)
        rows = empty.write(query, key, value, masks.write())
        query, value, mask = rows.query, rows.value, rows.mask
        if isinstance(self.scale, torch.SymFloat) and not positive(self.scale):
            # Kernels scale their own minus infinities too, and what is appended to scores is divided by the scale.
            query, self.scale = self.writer.call(torch.mul, query, self.writer.number(self.scale)), 1.0
        sink = plan.site.sink
        if sink is not None:
            query, key = self._sink_columns(query, key, sink)
        query, key, value = self._same_width(query, key, value)
        if sink is not None:
            query, key, value, mask = self._sink_key(query, key, value, mask)
        return query, key, value, mask, rows

    # ---- operands ---------------------------------------------------------------------------------------------

    def _operand(self, operand: Operand, dims: Layout, factors: Sequence[Factor]) -> fx.Node:
        writer = self.writer
        node = writer.value(operand.value)
        if self.summed and tensor_of(node).dtype != self.plan.dtype:
            node = writer.once(torch.Tensor.to, node, self.plan.dtype)  # one sum of gradients, rounded once
        node = writer.arrange(node, operand.dims, dims)
        node = times(self.writer, node, factors, dims)
        return self.writer.to(node, self.plan.dtype)

    def _vectors(self, first: Operand, more: Sequence[Operand], dims: Layout, factors: Sequence[Factor]) -> fx.Node:
        """Queries or keys; where the scores are a sum of products, those of all of them next to each other."""
        if not more:
            return self._operand(first, dims, factors)
        parts = [self._operand(first, dims, [])]
        for operand, part, depth in zip(more, self.plan.site.scores.parts, self.plan.frame.depths, strict=True):
            node = self._operand(operand, (*dims[:3], depth), [])
            queries = operand is part.query and part.ratio != 1.0
            parts.append(self.writer.call(torch.mul, node, part.ratio) if queries else node)
        joined = self.writer.call(torch.cat, tuple(parts), 3)
        return self.writer.to(times(self.writer, joined, factors, dims), self.plan.dtype)

    def _same_width(self, query: fx.Node, key: fx.Node, value: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Kernels want one head dim: zeros on the narrower side add nothing to scores, and are cut off again."""
        scores, values = self.plan.padding
        if scores:
            query, key = (self.writer.call(F.pad, t, (0, scores)) for t in (query, key))
        return query, key, self.writer.call(F.pad, value, (0, values)) if values else value

    def _finish(self, result: fx.Node, rows: Rows) -> fx.Node:
        """What comes after the product: the columns asked for, factors of the weights, empty rows, the dtype."""
        plan, call = self.plan, self.writer.call
        site = plan.site
        if site.sink is not None and plan.mask.kind == "causal":
            result = call(operator.getitem, result, (slice(None), slice(None), slice(1, None)))
        if plan.padding[1]:
            result = call(torch.narrow, result, 3, 0, plan.problem.value_dim - plan.padding[1])
        if rows.after is not None:
            result = call(torch.add, result, rows.after)
        if rows.exact is not None:
            result = call(lost.OPERATOR, result, *rows.exact.operands)
        if self.summed:
            result = self.writer.to(result, torch.promote_types(site.output.dtype, torch.float32))
        if isinstance(site.weight, torch.SymFloat) or site.weight != 1.0:
            result = call(torch.mul, result, self.writer.number(site.weight))
        result = times(self.writer, result, site.weights[::-1], self.out_dims)  # in the order of the program
        return result if self.summed else self.writer.to(result, site.output.dtype)

    # ---- a sink -----------------------------------------------------------------------------------------------

    def _sink_columns(self, query: fx.Node, key: fx.Node, sink: Operand) -> tuple[fx.Node, fx.Node]:
        """One more column: q's holds the sink's logit (before the scale), k's is 0 but for the key of `_sink_key`."""
        call, frame = self.writer.call, self.plan.frame
        node = self.writer.arrange(self.writer.value(sink.value), sink.dims, (frame.batch, frame.heads, frame.rows, ()))
        logit = self.writer.to(call(torch.div, node, self.writer.number(self.scale)), self.plan.dtype)
        return call(torch.cat, (query, logit), 3), call(F.pad, key, (0, 1))

    def _sink_key(
        self, query: fx.Node, key: fx.Node, value: fx.Node, mask: fx.Node | None
    ) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node | None]:
        """A key that answers to the sink's column alone, with a value of zeros.

        It comes last, and every row sees it. Where the mask is causal it comes first, with a query that nobody asked
        for before the others, so that what is causal stays so.
        """
        call, causal = self.writer.call, self.plan.mask.kind == "causal"
        where = (0, 0, 1, 0) if causal else (0, 0, 0, 1)
        column = self.plan.depth
        wide = tensor_of(key).shape[3]
        unit = call(torch.nn.functional.one_hot, self.writer.scalar(column, torch.int64), wide)
        row = call(torch.Tensor.expand_as, self.writer.to(unit, self.plan.dtype), call(torch.narrow, key, 2, 0, 1))
        key = call(torch.cat, (row, key) if causal else (key, row), 2)
        value = call(F.pad, value, where)
        query = call(F.pad, query, where) if causal else query
        if mask is not None:
            seen = tensor_of(mask).dtype == torch.bool
            mask = self._full_keys(mask)
            mask = call(F.pad, mask, (0, 1), "constant", True if seen else 0.0)
        return query, key, value, mask

    def _rows_of_keys(self, mask: fx.Node) -> fx.Node:
        """A mask whose rows lie in memory: expanding one column to all keys, as SDPA does, its kernels for GPUs refuse
        (`(*bias): last dimension must be contiguous`)."""
        full = self._full_keys(mask)
        return mask if full is mask else self.writer.call(torch.Tensor.contiguous, full)

    def _full_keys(self, mask: fx.Node) -> fx.Node:
        """A mask that is the same for all keys has one column for them all; a sink's own makes it two of them."""
        have = tensor_of(mask).shape
        if str(have[3]) != "1" or not self.plan.frame.keys:
            return mask
        keys = self.writer.product([a.size for a in self.plan.frame.keys])
        return self.writer.call(torch.Tensor.expand, mask, -1, -1, -1, keys)


def place(writer: Writer, node: fx.Node, dims: Layout, target: Dims) -> fx.Node:
    """`node` in the layout of the user's own result."""
    return writer.arrange(node, tuple(tuple(d) for d in dims), resolve(target))
