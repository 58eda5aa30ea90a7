"""An attention site in normal form: what recognition finds, and what is rewritten, gated and reported. Data only.

    out = weight · dropout(softmax(scale · (q kᵀ ∘ factors) + Σ bias, masked)) v

Axes (see `axes`) say which index each dim of each tensor runs over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from optpass.passes.attention.axes import Axis, Dims
from optpass.passes.attention.program.ir import Value

Number = Any  #: a float, or a SymFloat, made of sizes or not known to be of either sign


class Blocked(Exception):  # not an error: a reason to leave a site alone
    """Why a site is left alone, the value that blocks it, and the figures behind that.

    `defect`: the error of ours that it is left alone for.
    """

    def __init__(
        self,
        reason: str,
        value: Value | None = None,
        cost: dict[str, float] | None = None,
        defect: Exception | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason, self.value, self.cost, self.defect = reason, value, cost or {}, defect

    @classmethod
    def of_error(cls, error: Exception, value: Value) -> Blocked:
        """For an error, which costs its own site, not those beside it. But for a size that only data tells, it says
        nothing of the program."""
        if isinstance(error, GuardOnDataDependentSymNode):
            return cls("a size of it is known only when it runs, and a fused kernel asks for it", value)
        text = " ".join(str(error).split()) or "no message"
        return cls(f"an error in optpass: {type(error).__name__}: {text}", value, defect=error)


class SumError(Exception):
    """The weights are a sum of softmaxes."""

    def __init__(self, value: Value) -> None:
        super().__init__()
        self.value = value


class JoinedError(Exception):
    """The weights are softmaxes side by side, each over keys of its own."""

    def __init__(self, value: Value) -> None:
        super().__init__()
        self.value = value


class NoSoftmaxError(Exception):
    """The operand has no softmax behind it."""


@dataclass(frozen=True)
class Operand:
    """A tensor and the axes of its dims."""

    value: Value
    dims: Dims


@dataclass(frozen=True)
class Factor:
    """A tensor that multiplies (or divides) scores or weights, broadcast along the axes that it lacks.

    `zeroes`: a mask of weights, which are set to zero where it is False; where it is True if `inverse`.
    """

    operand: Operand
    inverse: bool = False
    zeroes: bool = False


@dataclass(frozen=True)
class Bias:
    """`coefficient · operand · factors`, added to the scores.

    `written`: the coefficient that it was added with, before the sum was scaled. `after`: what was done to the sum
    before anything else was added, as steps of `lost.OPERATOR`; None where that is more than rounding and scaling.
    """

    operand: Operand
    coefficient: float = 1.0
    factors: tuple[Factor, ...] = ()
    written: float = 1.0
    after: tuple[str, ...] | None = None

    @property
    def scaled(self) -> bool:
        """Whether the sum is multiplied by what may change how it was rounded: not by powers of two."""
        numbers = [float(s.split()[1]) for s in self.after or () if s.startswith("times")]
        return self.after is None or any(abs(math.frexp(number)[0]) != 0.5 for number in numbers)


@dataclass(frozen=True)
class Fill:
    """`where(mask == keep_when, scores, fill)`: a masked score is replaced, and its gradient is cut.

    `late`: bias terms that were added after the fill; they are part of masked scores too. `written`: what `fill` was
    when the first of them was added. `near`: a score could be as
    low as the number that was written; `fill` is what later factors have made of it. `lifted`: a maximum was taken off
    it, which may be itself. `product`: written as a product with 0, which NaN gets through on its way back.
    """

    mask: Operand
    keep_when: bool
    fill: float
    late: int = 0
    written: float = 0.0
    near: bool = False
    lifted: bool = False
    product: bool = False


@dataclass(frozen=True)
class Softcap:
    """`outer · tanh(inner · scores)`; `outer` becomes part of the scale."""

    inner: Number


@dataclass(frozen=True)
class Floor:
    """`maximum(scores, number)` for the lowest number of their dtype: minus infinity becomes that number.

    `tie`: the share of the gradient that passes where a score is that number.
    """

    number: float
    tie: float


@dataclass(frozen=True)
class Part:
    """Another product of queries and keys that the first is added to: `scale · (q kᵀ + ratio · query keyᵀ)`."""

    query: Operand
    key: Operand
    contraction: tuple[Axis, ...]
    ratio: float


@dataclass
class Scores:
    """What is made of the product before the softmax.

    Attributes:
        query, key: operands of the product, layout, scalar scales and exact casts peeled off.
        rows, contraction: atoms of the query side of the product, and of the axis that it sums over.
        scale: number that multiplies the product.
        steps: what made the scale: ('query', a) and ('key', a) before the product, ('times', a) and ('cap', 1), tanh,
            after it, until something was added.
        parts: more products, which are added to the first.
        factors: tensors that multiply it.
        biases, fills, softcaps: in the order in which they are applied.
        dtypes: dtypes that the scores pass through, product first.
        added_in: dtypes that the biases are added in, and that the sums are cast to.
        largest: beyond it a sum with a bias is infinite, for it is cast to a dtype that holds no more.
        floor: what they are not let below, after all that is named above.
        shifted: True where a constant was added to rows: nothing to a softmax, but not to a softcap that follows.
        topped: True where the maximum of rows was taken off that were masked or biased: a row without a key is near 0.
        centred: True where the maximum of each row was taken off, and nothing was masked or added to its keys since.
        bounded: True where they were clamped after that: a score that this changed has no weight beside the largest, 0.
        offset: sum of the numbers that were added to all scores, since the maximum was taken off.
        binary: numbers that scores are multiplied by, and that must be 0 or 1.
        unread: inputs of `baddbmm` that are multiplied by 0; one that learns gets zeros for its gradient.
        shifts: what makes the maxima that rows are shifted by.
        held: buffers that must go on holding the numbers of the fills.
        joined: True where the keys are those of several products, copied next to each other.
        values: every value of the chain from the product to the softmax: what a rewrite makes dead.
        product: the product itself.
    """

    query: Operand
    key: Operand
    product: Value
    rows: tuple[Axis, ...]
    contraction: tuple[Axis, ...]
    scale: Number = 1.0
    steps: list[tuple[str, Number]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    factors: list[Factor] = field(default_factory=list)
    biases: list[Bias] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    softcaps: list[Softcap] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    added_in: list[torch.dtype] = field(default_factory=list)
    largest: float = math.inf
    floor: Floor | None = None
    shifted: bool = False
    topped: bool = False
    centred: bool = False
    bounded: bool = False
    offset: float = 0.0
    binary: tuple[Operand, ...] = ()
    unread: list[Value] = field(default_factory=list)
    shifts: list[Value] = field(default_factory=list)
    held: tuple[Value, ...] = ()
    joined: bool = False
    values: list[Value] = field(default_factory=list)


@dataclass
class Site:
    """One attention.

    Attributes:
        output: what the rewrite replaces: the product of weights and values, or that times the gate of its sink.
        out_dims: its axes.
        sides: dims of the product of weights and values that are not batch: rows and columns, in either order.
        value: v, peeled.
        scores: see there.
        keys: atoms of the axis that the softmax normalises.
        softmax: the value that is the softmax.
        sink: logit of a column that is dropped after the softmax, or that the weights are scaled for afterwards, which
            `sink_behind` says: it does not save a row without a key from being NaN.
        dropout: probability; 0.0 where there is none. `dropout_value` is the operation.
        weight: number that multiplies the weights after the softmax.
        weights: tensors that do.
        zeroed: masks where weights are set to zero after the softmax, and the value that says so.
        products: boolean masks that weights are multiplied by.
        numbers: weights that are NaN are set to zero.
        values: every value inside the region, output excluded.
        cancels: its result is added to others, and little may be left of them.
        alone: its spelling of softmax makes of a row without a single key what no other makes of it.
        binary: masks that exponentials or scores are multiplied by, which must hold nothing but 0 and 1.
        joined: True where the values are those of several products, copied next to each other.
    """

    output: Value
    out_dims: Dims
    sides: Dims
    value: Operand
    scores: Scores
    keys: tuple[Axis, ...]
    softmax: Value
    sink: Operand | None = None
    dropout: float = 0.0
    dropout_value: Value | None = None
    weight: Number = 1.0
    weights: list[Factor] = field(default_factory=list)
    zeroed: list[tuple[Value, bool]] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    numbers: bool = False
    sink_behind: bool = False
    binary: list[Operand] = field(default_factory=list)
    cancels: bool = False
    alone: bool = False
    joined: bool = False
    products: list[Value] = field(default_factory=list)
