"""Rows that no kernel computes as the user's program does: which they are, and what that program does with them.

Beside a large number scores are rounded off, and where all are as low as what replaces masked ones these count too.
Such rows are told by data, not when compiling; `lost` computes them. What else there is of rows without a key is in
`rows`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from optpass.passes.attention.find.terms import coarse_from
from optpass.passes.attention.plans.empty import by_logarithm, rounded_in
from optpass.passes.attention.plans.plan import Plan
from optpass.passes.attention.site import Bias, Blocked, Fill
from optpass.passes.attention.write.emit import Writer
from optpass.passes.attention.write.returned import kept

_BEFORE = ("query", "key")
#: Scores of any dtype are no larger than so many times what their factors say.
_ROUNDING = 1.02


@dataclass(frozen=True)
class Exact:
    """Rows that are computed as the user's program does, and the operands of `lost.OPERATOR` behind a result."""

    rows: fx.Node
    operands: tuple[Any, ...]


@dataclass(frozen=True)
class Events:
    """What is done to the scores between product and softmax, in order, and nodes of their operands.

    Attributes:
        order: of biases and fills.
        node: writes the operand of one, in the dims of the scores; that of a fill is True where a score stays.
    """

    order: list[Bias | Fill]
    node: Callable[[Bias | Fill], fx.Node]


class ExactRows:
    """Writes the rows of one site that are computed exactly.

    Args:
        writer, plan: as in `rows.EmptyRows`.
        events: what is done to the scores.
    """

    def __init__(self, writer: Writer, plan: Plan, events: Events) -> None:
        self.writer, self.plan, self.events = writer, plan, events

    def write(self, query: fx.Node, key: fx.Node, value: fx.Node, mask: fx.Node) -> Exact:
        """Which rows they are, by the mask operand, and what computes them."""
        call, plan = self.writer.call, self.plan
        rows = self._chosen(query, key, mask)
        terms, steps = self._steps()
        grad = kept(self.writer, mask) if plan.problem.mask_grad else None
        seed, dropout = None, plan.site.dropout
        if dropout:
            device = plan.site.output.tensor.device
            seed = call(torch.randint, 0, 2**63 - 1, (1,), dtype=torch.int64, device=device)
        caps = plan.site.scores.softcaps
        scale = 1.0 if self._followed() else self.writer.number(caps[0].inner if caps else plan.scale)
        some = call(torch.any, rows)
        if plan.problem.device != "cpu":  # waits for the device; once for all sites that `shared` finds to ask the same
            some = call(torch.Tensor.to, some, "cpu")
        return Exact(rows, (query, key, value, rows, some, terms, steps, grad, seed, scale, float(dropout)))

    def _chosen(self, query: fx.Node, key: fx.Node, mask: fx.Node) -> fx.Node:
        call, plan = self.writer.call, self.plan
        top = call(torch.amax, call(torch.Tensor.detach, mask), -1, True)
        large = call(torch.ge, top, coarse_from(rounded_in(plan.site)))
        rows = call(torch.logical_or, call(torch.le, top, self._lowest()), large)
        if plan.mask.near is not None:
            rows = call(torch.logical_or, rows, self._reaches(query, key, top, plan.mask.near))
        if plan.mask.cancels:
            rows = call(torch.logical_or, rows, self._made_up_for())
        return rows

    def _lowest(self) -> float:
        """A row of masks below it is rounded off, or holds nothing but scores that were replaced."""
        fills = [fill.fill / 2 for fill in self.plan.mask.fills if math.isfinite(fill.fill) and not fill.near]
        return max([-coarse_from(rounded_in(self.plan.site)), *fills])

    def _made_up_for(self) -> fx.Node:
        """Rows with a key whose score was lost beside one number, or replaced by it, and another has brought back."""
        call, wide = self.writer.call, torch.promote_types(self.plan.dtype, torch.float32)
        zero = self.writer.scalar(0.0, wide)
        total, lost = zero, []
        for event in self.events.order:
            node = self.events.node(event)
            if isinstance(event, Fill):
                total = call(torch.where, node, total, self.writer.scalar(event.fill, wide))
            else:
                total = call(torch.add, total, call(torch.mul, self.writer.to(node, wide), event.coefficient))
            lost.append(call(torch.ge, call(torch.abs, total), coarse_from(rounded_in(self.plan.site))))
        there = call(torch.gt, total, self._lowest())
        found = [call(torch.any, call(torch.logical_and, some, there), -1, True) for some in lost[:-1]]
        return functools.reduce(functools.partial(call, torch.logical_or), found)

    def _raised(self, fill: float) -> fx.Node | float:
        """What masked scores become at most, with what is added to them afterwards."""
        call, order = self.writer.call, self.events.order
        late = order[next(i for i, e in enumerate(order) if isinstance(e, Fill)) :]
        found: fx.Node | float = fill
        for event in late:
            if isinstance(event, Bias):
                size = call(torch.mul, self.writer.to(self.events.node(event), torch.float32), event.coefficient)
                found = call(torch.add, call(torch.amax, call(torch.Tensor.detach, size), -1, True), found)
        return found

    def _reaches(self, query: fx.Node, key: fx.Node, top: fx.Node, fill: float) -> fx.Node:
        """Rows of which the scores may all be so low that what replaces masked ones counts beside them."""
        call, caps = self.writer.call, self.plan.site.scores.softcaps
        wide = torch.promote_types(self.plan.site.softmax.dtype, torch.float32)
        underflow = math.log(torch.finfo(wide).tiny) * 1.25  # of exp, below the last subnormal
        apart = call(torch.sub, top, self._raised(fill))
        if caps:
            return call(torch.logical_not, call(torch.gt, apart, abs(float(self.plan.scale)) - underflow))
        norms = [
            call(
                torch.norm,
                call(torch.Tensor.detach, t),
                2,
                -1,
                True,
                dtype=torch.promote_types(self.plan.dtype, torch.float32),
            )
            for t in (query, key)
        ]
        longest = call(torch.amax, norms[1], 2, True)
        if self.plan.frame.groups:
            groups = [a.size for a in self.plan.frame.groups]
            longest = call(torch.repeat_interleave, longest, self.writer.product(groups), 1)
        largest = call(torch.mul, call(torch.mul, norms[0], longest), self.writer.number(self.plan.scale))
        largest = call(torch.mul, call(torch.abs, largest), _ROUNDING)
        safe = call(torch.gt, call(torch.sub, apart, largest), -underflow)
        return call(torch.logical_not, safe)  # NaN is not safe

    def _scaled(self) -> list[str]:
        """What is done to the product before anything is added to it, rounded as the user's program rounds it."""
        scores = self.plan.site.scores
        rounding = f"round {_name(scores.product.dtype)}"
        if not self._followed():
            if not scores.softcaps:
                return [rounding]
            if isinstance(self.plan.scale, torch.SymFloat):
                raise Blocked("rows without a single key are capped by a number made of sizes", self.plan.site.output)
            return [rounding, "cap 1.0", rounding, f"times {self.plan.scale!r}", rounding]
        before = [f"{name} {float(a)!r} {_name(scores.product.dtype)}" for name, a in scores.steps if name in _BEFORE]
        steps = [] if scores.biases and scores.product.name in ("baddbmm", "addmm") else [rounding]
        for name, number in scores.steps:
            if name not in _BEFORE and (name, number) != ("times", 1.0):
                steps += [f"{name} {float(number)!r}", rounding] if steps else [f"{name} {float(number)!r}"]
        return before + steps

    def _followed(self) -> bool:
        """The scale is made in steps of known numbers, not of sizes, or of several products."""
        scores = self.plan.site.scores
        return not scores.parts and all(isinstance(number, (int, float)) for _, number in scores.steps)

    def _steps(self) -> tuple[list[fx.Node], str]:
        """What happens to a score up to the softmax, for `lost.OPERATOR`."""
        scores, terms = self.plan.site.scores, []
        followed = self._followed()
        steps = self._scaled() + self._kept(self.plan.mask.before, followed)
        for event in self.events.order:
            node = self.events.node(event)
            terms.append(kept(self.writer, node) if self.plan.problem.training else node)
            if isinstance(event, Fill):
                steps.append(f"fill {event.written if event.late and followed else event.fill!r}")
            else:
                steps += self._added(event, followed)
        if scores.floor is not None:
            if self.plan.problem.mask_grad:
                raise Blocked("scores that a bias was added to are clamped, and it learns", self.plan.site.output)
            steps.append(f"floor {scores.floor.number!r} {scores.floor.tie!r}")
        site = self.plan.site
        steps += [f"logarithm {_name(site.softmax.dtype)}"] if by_logarithm(site) else []
        if self.plan.mask.zeroed:
            steps.append(f"hide {next(i for i, e in enumerate(self.events.order) if isinstance(e, Fill))}")
        return terms, ";".join(steps)

    def _added(self, bias: Bias, followed: bool) -> list[str]:
        """A bias and what is done to the sum; where the scale is not followed, it is scaled before, which is the same
        for powers of two alone."""
        after = self._kept(None if bias.scaled and not followed else bias.after, followed)
        return [f"add {(bias.written if followed else bias.coefficient)!r}", *after]

    def _kept(self, steps: tuple[str, ...] | None, followed: bool) -> list[str]:
        """Of what is done to a sum, what is still to be done: where the scale is not followed, it is scaled before."""
        if steps is None:
            reason = "rows without a single key are rounded once more than can be followed"
            raise Blocked(reason, self.plan.site.output)
        return [step for step in steps if followed or not step.startswith("times")]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
