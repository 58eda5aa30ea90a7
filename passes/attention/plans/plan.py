"""From a site to the call that computes it: which axes are batch and heads, what the mask is, which numbers go where.

Decides nothing about cost and writes no nodes; raises `Blocked` where the call could differ from what the user wrote.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from optpass.passes.attention.axes import Axis, equal, expression, flat
from optpass.passes.attention.find.operands import exact_cast
from optpass.passes.attention.masks import Prover
from optpass.passes.attention.plans.frame import Frame, frame_of, size_of
from optpass.passes.attention.plans.masking import MaskPlan, plan_mask
from optpass.passes.attention.problem import Problem
from optpass.passes.attention.program.ir import Value, ancestors
from optpass.passes.attention.site import Bias, Blocked, Factor, Number, Operand, Site


@dataclasses.dataclass
class Plan:
    """Everything that the rewrite of one site needs."""

    site: Site
    frame: Frame
    mask: MaskPlan
    dtype: torch.dtype
    scale: Number
    query_factors: list[Factor]
    key_factors: list[Factor]
    problem: Problem

    def computed_in(self, dtype: torch.dtype | None) -> Plan:
        """The same with operands given in another dtype; in their own for None."""
        if dtype is None:
            return self
        return dataclasses.replace(self, dtype=dtype)

    @property
    def depth(self) -> int:
        """Head dim of q and k as the user has it."""
        return int(self.frame.vector)

    @property
    def padding(self) -> tuple[int, int]:
        """Zeros to append to the last dim of (q and k, v), for kernels want both the same.

        A sink takes one more column of q and k, and what comes then is brought to a multiple of 8.
        """
        depth, width = self.frame.vector, size_of(self.frame.width)
        if self.site.sink is None and equal(depth, width):
            return 0, 0
        depth += 1 if self.site.sink is not None else 0
        whole = max(depth, width)
        whole += -whole % 8 if self.site.sink is not None else 0
        return whole - depth, whole - width


def plan(site: Site, *, prover: Prover, exact_rows: bool, training: bool, sizes: Callable[[Any], int]) -> Plan:
    """How to compute `site` by one call.

    Args:
        site: what recognition found.
        prover: proves what masks are.
        exact_rows: rows without a single key must come out as in the user's program.
        training: a backward will be compiled.
        sizes: a number for a size that may be symbolic.
    """
    frame = frame_of(site)
    query_factors = [f for f in site.scores.factors if not set(flat(f.operand.dims)) & set(frame.keys)]
    key_factors = [f for f in site.scores.factors if f not in query_factors]
    _check_factors(site, frame, query_factors, key_factors)
    if site.sink is not None and site.scores.softcaps:
        raise Blocked("a column is appended to capped scores, which a kernel would cap too", site.output)
    # Dropout by FlexAttention divides by the sums of rows, as a backward does: they must not be lost.
    sums = training or bool(site.dropout)
    mask = plan_mask(site, frame, prover, exact_rows=exact_rows, training=sums)
    if training and any(_asks(value) for value in site.scores.unread):
        raise Blocked(
            "its product is added to 0 times a tensor that learns, whose gradient is zeros", site.scores.product
        )
    if training and _learns(site.output) and not any(_learns(operand.value) for operand in _read(site, mask)):
        raise Blocked("gradients flow to what its result does not depend on, and to nothing else", site.output)
    if training and site.scores.bounded:
        reason = "scores are clamped: they may be so large that a backward which computes them again has other weights"
        raise Blocked(reason, site.output)
    dtype = _dtype(site)
    if site.cancels:  # results and gradients do, and a kernel's are rounded one by one
        dtype = torch.promote_types(dtype, torch.float32)
    depth, width = frame.vector, size_of(frame.width)
    if (site.sink is not None or not equal(depth, width)) and not (isinstance(depth, int) and isinstance(width, int)):
        raise Blocked("the head dim is dynamic", site.output)
    problem = _problem(site, frame, mask, dtype, training, sizes)
    return Plan(site, frame, mask, dtype, site.scores.scale, query_factors, key_factors, problem)


def _check_factors(site: Site, frame: Frame, query: list[Factor], key: list[Factor]) -> None:
    shared = {*frame.batch, *frame.kv_heads}
    for factors, own in ((query, {*frame.batch, *frame.heads, *frame.rows}), (key, {*shared, *frame.keys})):
        for factor in factors:
            if not set(flat(factor.operand.dims)) <= own:
                reason = "scores are multiplied by a tensor that neither queries nor keys can take"
                raise Blocked(reason, factor.operand.value)
    if (query or key) and site.scores.softcaps:
        raise Blocked("scores are multiplied by a tensor before they are capped", site.output)


def _read(site: Site, mask: MaskPlan) -> list[Operand]:
    """All that a kernel gets of a site but what hides keys."""
    scores = site.scores
    factors = [*scores.factors, *site.weights, *(f for b in mask.biases for f in b.factors)]
    products = [scores.query, scores.key, *(o for part in scores.parts for o in (part.query, part.key))]
    return [*products, site.value, *(f.operand for f in factors), *(b.operand for b in mask.biases),
            *([] if site.sink is None else [site.sink])]  # fmt: skip


def _learns(value: Value) -> bool:
    """Whether autograd records what `value` comes from."""
    if not value.leaf and not any(value.inputs()):  # a number that is padded with, beside what it is padded to
        return False
    made = None if value.node is None else value.node.meta.get("example_value")
    return not isinstance(made, torch.Tensor) or made.requires_grad


def _dtype(site: Site) -> torch.dtype:
    """Dtype of the call: the widest that either product was written in, so that it is no less exact than they were."""
    found = site.scores.product.dtype
    for dtype in (site.output.dtype,):
        if exact_cast(found, dtype):
            found = dtype
        elif not exact_cast(dtype, found):
            raise Blocked(f"queries, keys and values are of {found} and {dtype}", site.output)
    if not found.is_floating_point:
        raise Blocked(f"queries, keys and values are of {found}", site.output)
    return found


# ---- the question for chooser and gate ----------------------------------------------------------------------------


def _problem(
    site: Site, frame: Frame, mask: MaskPlan, dtype: torch.dtype, training: bool, sizes: Callable[[Any], int]
) -> Problem:
    def size(axes: tuple[Axis, ...]) -> int:
        return math.prod(sizes(a.size) for a in axes)

    operands = [*(f.mask for f in mask.fills), *(b.operand for b in mask.biases)]
    axes = {a for o in operands for a in flat(o.dims)}
    window = next((w for f in mask.facts if (w := getattr(f, "window", None)) is not None), None)
    ops = {name for name, there in (("softcap", site.scores.softcaps),) if there}
    sink = site.sink is not None
    width = max(sum(map(size, (frame.depth, *frame.depths))) + sink, size(frame.width))  # the narrower is padded
    width += -width % 8 if sink else 0
    return Problem(
        device=site.output.tensor.device.type, dtype=dtype,
        batch=size(frame.batch), heads=size(frame.heads), kv_heads=size(frame.kv_heads),
        queries=size(frame.rows) + sink, keys=size(frame.keys) + sink, head_dim=width, value_dim=width,
        mask=mask.kind, mask_numel=math.prod(sizes(a.size) for a in axes) if operands else 0,
        keys_symbolic=any(not isinstance(expression(a.size), int) for a in frame.keys),
        mask_symbolic=any(not isinstance(expression(a.size), int) for a in axes),
        mask_grad=training and any(_needs_grad(b) for b in mask.biases),
        window=window if isinstance(window, int) else None,
        score_ops=frozenset(ops), dropout=site.dropout, training=training,
        score_dtype=site.softmax.dtype,
    )  # fmt: skip


def _needs_grad(bias: Bias) -> bool:
    """Whether a gradient flows to the bias: any of the user's tensors that it is made of asks for one."""
    return any(_asks(o.value) for o in (bias.operand, *(f.operand for f in bias.factors)))


def _asks(value: Value) -> bool:
    return any(item.leaf and item.learns for item in ancestors(value, through=_passes_gradients))


def _passes_gradients(value: Value) -> bool:
    return value.tensor.is_floating_point() and value.grad and value.name != "detach"
