"""The mask operand of a site's call: boolean, or numbers that are added, in the dims of the scores.

What is to be in it `masking.MaskPlan` says; for rows without a single key it is changed in `rows`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from optpass.passes.attention.axes import Axis, above
from optpass.passes.attention.find.fills import NO_WEIGHT
from optpass.passes.attention.plans.plan import Plan
from optpass.passes.attention.site import Bias, Blocked, Factor, Fill, Operand
from optpass.passes.attention.write.emit import Writer, tensor_of


class MaskOperand:
    """Writes the mask of one planned site; `dims`: batch, heads, queries and keys of its scores."""

    def __init__(self, writer: Writer, plan: Plan, dims: Sequence[Sequence[Axis]]) -> None:
        self.writer, self.plan, self.dims = writer, plan, dims

    def write(self) -> fx.Node | None:
        """The operand; None where the kernel needs none."""
        kind = self.plan.mask.kind
        if kind == "bool":
            return self.keep(self.plan.mask.fills)
        return self._float_mask() if kind == "float" else None

    def keep(self, fills: Sequence[Fill]) -> fx.Node:
        """Boolean operand: True where a key is seen."""
        total: fx.Node | None = None
        for fill in fills:
            node = self._keeps(fill)
            total = node if total is None else self.writer.call(torch.logical_and, total, node)
        assert total is not None
        return total

    def events(self) -> list[Bias | Fill]:
        """Biases and fills in the order in which the user's program applies them."""
        mask = self.plan.mask
        events: list[tuple[int, int, Bias | Fill]] = [(i, 1, b) for i, b in enumerate(mask.biases)]
        events += [(len(mask.biases) - f.late, 0, f) for f in mask.fills]
        return [event for _, _, event in sorted(events, key=lambda e: e[:2])]

    def event(self, event: Bias | Fill) -> fx.Node:
        """The operand of one, in the dims of the scores; of a bias without its coefficient."""
        if isinstance(event, Fill):
            return self._keeps(event)
        return times(self.writer, self._placed(event.operand), event.factors, self.dims)

    def _float_mask(self) -> fx.Node:
        """Additive operand: biases and fills in the order in which the user's program applies them."""
        call, dtype = self.writer.call, self.dtype
        total: fx.Node | None = None
        for event in self.events():
            if isinstance(event, Bias):
                node = self._bias(event)
                total = node if total is None else call(torch.add, total, node)
            else:
                keeps, base = self._keeps(event), 0.0 if total is None else self._narrowed(total, dtype)
                total = call(
                    torch.where, keeps, self.writer.scalar(base, dtype), self.writer.scalar(self._masked(event), dtype)
                )
        assert total is not None
        floor = self.plan.site.scores.floor
        if floor is not None:
            if torch.finfo(tensor_of(total).dtype).min > floor.number:  # its own minus infinity lies below that
                total = self.writer.to(total, dtype)
            if torch.finfo(dtype).min > floor.number:
                raise Blocked(
                    "scores are clamped at a number that the kernel's mask cannot hold", self.plan.site.output
                )
            total = call(torch.clamp, total, min=max(floor.number, torch.finfo(tensor_of(total).dtype).min))
        return self._narrowed(total, dtype)

    def _keeps(self, fill: Fill) -> fx.Node:
        node = self._placed(fill.mask)
        return node if fill.keep_when else self.writer.call(torch.logical_not, node)

    def _placed(self, operand: Operand) -> fx.Node:
        """In the dims of the scores, and no larger than it need be: expansions are taken back."""
        value, dims = operand.value, operand.dims
        step = above(value, dims)
        while step is not None:
            value, dims = step
            step = above(value, dims)
        node = self.writer.arrange(self.writer.value(value), dims, self.dims, fill=False)
        if operand in self.plan.mask.row_free and str(tensor_of(node).shape[2]) != "1":
            node = self.writer.call(torch.narrow, node, 2, 0, 1)
        return node

    def _masked(self, fill: Fill) -> float:
        """What a masked score becomes: a number that absorbs any score, so that rows of it alone are uniform.

        The user's own number where other masks may have the same, and such rows are seen to.
        """
        how, lowest = self.plan.mask.empty_rows, torch.finfo(self.dtype).min
        if how == "zero" or (fill.fill == float("-inf") and how not in ("nan", "uniform")):
            return float("-inf")
        if how == "exact" and self.plan.mask.near is not None:  # what replaces a score is not low enough for a kernel
            return float("-inf")
        return fill.fill if how in ("added", "exact") and fill.fill >= lowest else lowest

    def _bias(self, bias: Bias) -> fx.Node:
        node = self._placed(bias.operand)
        self._check_width(bias, tensor_of(node).dtype)
        if not tensor_of(node).dtype.is_floating_point:
            node = self.writer.to(node, self.dtype)
        node = times(self.writer, node, bias.factors, self.dims)
        return node if bias.coefficient == 1.0 else self.writer.call(torch.mul, node, bias.coefficient)

    def _check_width(self, bias: Bias, have: torch.dtype) -> None:
        """Raises Blocked where the program adds in a wide dtype what the kernel's mask would round."""
        epsilon = torch.finfo(self.dtype).eps
        if not any(torch.finfo(dtype).eps < epsilon for dtype in self.plan.site.scores.added_in):
            return
        if not have.is_floating_point or torch.finfo(have).eps >= epsilon:
            return
        mask = self.plan.mask
        values = [v * bias.coefficient for v in mask.facts[len(mask.fills) + mask.biases.index(bias)].values]
        rounded = any(v > NO_WEIGHT and v != torch.tensor(v, dtype=self.dtype).item() for v in values)
        merged = len({v for v in values if -math.inf < v < torch.finfo(self.dtype).min}) > 1
        if not values or bias.factors or rounded or merged:
            what = f"{str(have)[6:]} is added to the scores, and the kernel's mask would round it to"
            raise Blocked(f"{what} {str(self.dtype)[6:]}", self.plan.site.output)

    def _narrowed(self, mask: fx.Node, dtype: torch.dtype) -> fx.Node:
        """To the kernel's dtype, without turning the lowest float32 into minus infinity."""
        have = tensor_of(mask).dtype
        if have == dtype:
            return mask
        if torch.finfo(have).max > torch.finfo(dtype).max:
            low = torch.finfo(dtype).min
            clamped = self.writer.call(torch.clamp, mask, min=low, max=-low)
            mask = self.writer.call(torch.where, self.writer.call(torch.isinf, mask), mask, clamped)
        return self.writer.to(mask, dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Kernels on CPU take a float32 mask beside half-precision operands; elsewhere it must be of their dtype."""
        half = self.plan.dtype in (torch.float16, torch.bfloat16)
        return torch.float32 if half and self.plan.problem.device == "cpu" else self.plan.dtype


def times(writer: Writer, node: fx.Node, factors: Sequence[Factor], dims: Sequence[Sequence[Axis]]) -> fx.Node:
    """`node`, whose dims run over `dims`, times tensors that are arranged so."""
    for factor in factors:
        other = writer.arrange(writer.value(factor.operand.value), factor.operand.dims, dims, fill=False)
        if factor.zeroes:
            zero = writer.scalar(0.0, tensor_of(node).dtype)
            node = writer.call(torch.where, other, *((zero, node) if factor.inverse else (node, zero)))
        else:
            node = writer.call(torch.div if factor.inverse else torch.mul, node, other)
    return node
