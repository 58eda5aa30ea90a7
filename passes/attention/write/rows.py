"""Rows without a single key: made to come out of a kernel as they come out of the user's program.

`masking.MaskPlan.empty_rows` says which way; here the nodes are written.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from optpass.passes.attention.find.fills import NO_KEY
from optpass.passes.attention.find.terms import ABSORBS
from optpass.passes.attention.plans.empty import no_key
from optpass.passes.attention.plans.plan import Plan
from optpass.passes.attention.site import Blocked
from optpass.passes.attention.write.emit import Writer, tensor_of
from optpass.passes.attention.write.exact import Events, Exact, ExactRows

#: Beside a larger number than this the logarithm of a row's sum is lost in float32.
_LARGE = 1e3
#: Kernels of GPUs take powers of two, of scores times log2(e): of lower numbers than this they make minus infinity.
_LOWEST = -torch.finfo(torch.float32).max / math.log2(math.e)


def takes_powers_of_two(device: str) -> bool:
    """Whether kernels of a type of device do, in place of powers of e."""
    return device != "cpu"


@dataclass(frozen=True)
class Rows:
    """Operands with rows without a key taken care of, what is added to the result, and what rows of it become."""

    query: fx.Node
    value: fx.Node
    mask: fx.Node | None
    after: fx.Node | None = None
    exact: Exact | None = None


class EmptyRows:
    """Writes what is needed for the rows without a key of one site.

    Args:
        writer: writes the nodes.
        plan: of the site.
        keep: writes the boolean operand of the plan's fills.
        events: what is done to the scores.
        twice: gradients may be differentiated: nothing is written that is right in the first order alone.
    """

    def __init__(
        self, writer: Writer, plan: Plan, keep: Callable[[], fx.Node], events: Events, *, twice: bool = False
    ) -> None:
        self.writer, self.plan, self.keep, self.events, self.twice = writer, plan, keep, events, twice
        self.no_key = no_key(plan.site)

    def write(self, query: fx.Node, key: fx.Node, value: fx.Node, mask: fx.Node | None) -> Rows:
        """The operands as the kernel gets them."""
        how, training = self.plan.mask.empty_rows, self.plan.problem.training or bool(self.plan.problem.dropout)
        zeroed = training or (how == "uniform" and takes_powers_of_two(self.plan.problem.device))
        if how in ("never", "zero") or mask is None or (how == "uniform" and not zeroed):
            return Rows(query, value, mask)
        if how == "large":
            return Rows(query, value, self._shifted(mask)[0])
        if how == "exact":
            return self._exactly(query, key, value, mask)
        if how in ("added", "zero or NaN"):
            return (self._added if training else self._result)(query, key, value, mask)
        call = self.writer.call
        some = call(torch.any, self.keep(), -1, True)
        after = self._nan_where(call(torch.logical_not, some), query) if how == "nan" else None
        if zeroed:  # the fill cuts the gradient of a masked score; with q = 0 nothing flows through this row
            query = call(torch.where, some, query, self.writer.scalar(0.0, self.plan.dtype))
            mask = self._shifted(mask)[0]
            value = self._nan_gradient(value, self._harmless(some)) if how == "nan" else value
        return Rows(query, value, mask, after)

    def _result(self, query: fx.Node, key: fx.Node, value: fx.Node, mask: fx.Node) -> Rows:
        """Without gradients: a row of minus infinities is NaN, and kernels make it zeros.

        Scores that the user's program loses or replaces in a row without a key are zero where the kernel would not.
        """
        call, plan, given = self.writer.call, self.plan, mask
        if not self._lost_in_the_kernel() or any(fill.fill > ABSORBS for fill in plan.mask.fills):
            empty = call(torch.ge, call(torch.abs, call(torch.amax, mask, -1, True)), -self.no_key)
            query = call(torch.where, empty, self.writer.scalar(0.0, plan.dtype), query)
        query, mask = self._raised(query, mask)
        if plan.mask.finite:
            return Rows(query, value, mask)
        lost = call(torch.all, call(torch.eq, given, float("-inf")), -1, True)
        if plan.mask.empty_rows == "zero or NaN":  # where no key is left by the mask that sets weights to zero: zeros
            lost = call(torch.logical_and, lost, call(torch.any, self.keep(), -1, True))
        return Rows(query, value, mask, self._nan_where(lost, query))

    def _raised(self, query: fx.Node, mask: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Without gradients: rows whose every number is too low for a kernel, which would leave them at zero, or too
        high, once it is in the kernel's dtype.

        Scores are lost beside such numbers, and q = 0 makes them zero; what is left are the mask's own differences.
        """
        lost = self._lost_below()
        if lost is None:
            return query, mask
        call = self.writer.call
        top = call(torch.amax, mask, -1, True)
        low = call(torch.le, top, lost)
        if not self.plan.mask.finite:
            low = call(torch.logical_and, low, call(torch.gt, top, -math.inf))
        mask = call(torch.sub, mask, call(torch.where, low, top, self.writer.scalar(0.0, tensor_of(top).dtype)))
        return call(torch.where, low, self.writer.scalar(0.0, self.plan.dtype), query), mask

    def _lost_below(self) -> float | None:
        """What all numbers of a row may be as low as, beside which scores are lost, and not so in a kernel; or None."""
        plan, floor = self.plan.mask, self.plan.site.scores.floor
        if not takes_powers_of_two(self.plan.problem.device):
            return None
        added = [
            [v * b.coefficient for v in facts.values if not b.factors and math.isfinite(v)]
            for b, facts in zip(plan.biases, plan.facts[len(plan.fills) :], strict=True)
        ]
        put = [f.fill for f in plan.fills if math.isfinite(f.fill)] + ([] if floor is None else [floor.number])
        if self.plan.dtype == torch.float16:
            narrowed = torch.finfo(torch.float16).min
            below = [number for number in (*put, *itertools.chain(*added)) if number < narrowed]
            return narrowed if below and max(below) <= self.no_key else None
        known = all(facts.values for facts in plan.facts[len(plan.fills) :]) and not any(b.factors for b in plan.biases)
        lowest = min([0.0, *put]) + sum(min([0.0, *numbers]) for numbers in added)
        return None if known and lowest > _LOWEST else _LOWEST

    def _lost_in_the_kernel(self) -> bool:
        """Where the user's program loses the scores of a row, so does the kernel, whose sums may be in a wider dtype.

        That is so where all that hides a key is proved to be low enough for the wider one too.
        """
        kernels = NO_KEY[torch.float64 if self.plan.dtype == torch.float64 else torch.float32]
        values = [v for facts in self.plan.mask.facts for v in facts.values]
        known = all(facts.values for facts in self.plan.mask.facts)
        return self.no_key <= kernels or (known and all(v == 0 or v <= kernels for v in values))

    def _exactly(self, query: fx.Node, key: fx.Node, value: fx.Node, mask: fx.Node) -> Rows:
        """Rows in which the user's program rounds scores off beside what is added to them are computed as it does.

        A kernel, whose sums are wider, rounds otherwise; what it makes of these rows is not used.
        """
        exact = ExactRows(self.writer, self.plan, self.events).write(query, key, value, mask)
        if self.plan.problem.training or self.plan.site.dropout:  # of these numbers a backward makes nothing wrong
            zero = self.writer.scalar(0.0, tensor_of(mask).dtype)
            mask = self.writer.call(torch.where, exact.rows, zero, self._shifted(self._shifted_apart(mask))[0])
        return Rows(query, value, mask, exact=exact)

    def _shifted_apart(self, mask: fx.Node) -> fx.Node:
        """The mask; numbers that are known to be large are taken off a row before anything smaller is added to them.

        Beside -1e4 a bias would be rounded to steps of .001, on its way to a sum with the score that is rounded too.
        """
        call, plan, dtype = self.writer.call, self.plan.mask, tensor_of(mask).dtype
        if plan.fills or self.plan.site.scores.floor is not None:
            return mask
        large: list[fx.Node] = []
        rest: list[fx.Node] = []
        for bias, facts in zip(plan.biases, plan.facts, strict=True):
            node = self.events.node(bias)
            have = tensor_of(node).dtype
            if not have.is_floating_point or torch.finfo(have).max > torch.finfo(dtype).max:
                return mask
            known = not bias.factors and any(abs(v * bias.coefficient) >= _LARGE for v in facts.values)
            (large if known else rest).append(call(torch.mul, self.writer.to(node, dtype), bias.coefficient))
        if not large or not rest:
            return mask
        total = functools.partial(functools.reduce, functools.partial(call, torch.add))
        return call(torch.add, self._shifted(total(large))[0], total(rest))

    def _shifted(self, mask: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The mask with its maximum taken off rows where that is large, and the size of that.

        Kernels keep the logarithm of a row's sum for the backward; beside -3e38 it is lost, and every weight of such a
        row would count as 1. A row of minus infinities becomes NaN, as it is in the user's program.
        """
        call = self.writer.call
        top = call(torch.amax, call(torch.Tensor.detach, mask), -1, True)
        size = call(torch.abs, top)
        large = call(torch.ge, size, _LARGE)  # all rows without a key are among these
        shift = call(torch.where, large, top, self.writer.scalar(0.0, tensor_of(top).dtype))
        return call(torch.sub, mask, shift), size

    def _added(self, query: fx.Node, key: fx.Node, value: fx.Node, mask: fx.Node) -> Rows:
        """Large negative numbers were added: weights do not depend on the scores there, and yet gradients flow to them.

        With q = 0 the kernel makes the weights those of the mask (a factor, not a `where`: NaN passes on). What flows
        to q and k is what flows through the first order of the softmax around them. Where they are the same for all
        queries it is q·(kᵀ w (v - mean v)), which is added with its own value taken off.
        """
        call, plan = self.writer.call, self.plan
        shared = not self._evenly() and self._same_for_all_queries(mask)
        if self.twice or (not self._evenly() and not shared):
            return self._exactly(query, key, value, mask)
        mask, size = self._shifted(mask)
        empty = call(torch.ge, size, -self.no_key)
        keep = self.writer.to(call(torch.logical_not, empty), plan.dtype)
        flow = self._first_order(query, key, value, mask if shared else None)
        gone = self.writer.to(empty, plan.dtype)
        after = self._passed(call(torch.mul, call(torch.sub, flow, call(torch.Tensor.detach, flow)), gone))
        return Rows(call(torch.mul, query, keep), value, mask, after)

    def _passed(self, flow: fx.Node) -> fx.Node:
        """The share of it that passes a floor of the scores."""
        passes = self.plan.mask.passes
        return flow if passes == 1.0 else self.writer.call(torch.mul, flow, passes)

    def _evenly(self) -> bool:
        """Proved: in a row without a key all keys carry the same number."""
        capped = self.plan.site.scores.softcaps  # of which the gradient depends on the score
        scaled = any(bias.factors for bias in self.plan.mask.biases)  # by a tensor, of which nothing is known
        known = not scaled and all(facts.values for facts in self.plan.mask.facts)
        return not capped and not self.plan.mask.uneven and known

    def _same_for_all_queries(self, mask: fx.Node) -> bool:
        """The weights that the mask leaves a row without a key, where queries share keys and values."""
        _, heads, queries, keys = map(str, tensor_of(mask).shape)
        capped = self.plan.site.scores.softcaps
        return (
            not capped
            and queries == "1"
            and keys != "1"
            and not self.plan.mask.fills
            and (heads == "1" or not self.plan.frame.groups)
        )

    def _first_order(self, query: fx.Node, key: fx.Node, value: fx.Node, mask: fx.Node | None) -> fx.Node:
        """Around uniform weights, or those that `mask` leaves."""
        call = self.writer.call
        fixed = call(torch.Tensor.detach, value)
        if mask is None:
            centred = call(torch.sub, fixed, call(torch.mean, fixed, 2, True))
            count = call(torch.ops.aten.sym_size.int, key, 2)
            moment = call(torch.div, call(torch.matmul, call(torch.transpose, key, 2, 3), centred), count)
        else:
            weights = call(torch.softmax, call(torch.Tensor.detach, mask), -1)
            weights = self.writer.to(call(torch.transpose, weights, 2, 3), self.plan.dtype)
            mean = call(torch.sum, call(torch.mul, fixed, weights), 2, True)
            centred = call(torch.mul, call(torch.sub, fixed, mean), weights)
            moment = call(torch.matmul, call(torch.transpose, key, 2, 3), centred)
        if self.plan.frame.groups:
            groups = [a.size for a in self.plan.frame.groups]
            moment = call(torch.repeat_interleave, moment, self.writer.product(groups), 1)
        return call(torch.mul, call(torch.matmul, query, moment), self.writer.number(self.plan.scale))

    def _nan_where(self, condition: fx.Node, like: fx.Node) -> fx.Node:
        dtype, scalar = tensor_of(like).dtype, self.writer.scalar
        return self.writer.call(torch.where, condition, scalar(float("nan"), dtype), scalar(0.0, dtype))

    def _harmless(self, some: fx.Node) -> fx.Node:
        """Rows with a key, and those that are set to zero behind the softmax: no NaN of theirs meets v."""
        call, frame = self.writer.call, self.plan.frame
        for factor in self.plan.site.weights:
            if factor.zeroes:
                dims = (frame.batch, frame.heads, frame.rows, ())
                rows = self.writer.arrange(
                    self.writer.value(factor.operand.value), factor.operand.dims, dims, fill=False
                )
                some = call(torch.logical_or, some, rows if factor.inverse else call(torch.logical_not, rows))
        return some

    def _nan_gradient(self, value: fx.Node, some: fx.Node) -> fx.Node:
        """v, whose gradient is NaN where a row of NaN weights makes it so: 0 · NaN in the branch that is not taken."""
        call = self.writer.call
        if self.plan.frame.groups and tensor_of(some).shape[1] != 1:
            raise Blocked("rows without a key differ between query heads that share values", self.plan.site.output)
        every = call(torch.all, some, 2, True)
        factor = self._nan_where(call(torch.logical_not, every), value)
        taken = call(torch.ones_like, every)
        return call(torch.where, taken, value, call(torch.mul, value, factor))
