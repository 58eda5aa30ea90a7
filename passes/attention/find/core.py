"""Finding attention: a product of weights and values, the softmax behind the weights, the scores behind the softmax.

The search starts at every matrix product and looks backwards; what an operand is called or how it is laid out plays no
part. `walk` goes up to the softmax, `scores` reads the chain between it and the first product.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

import torch

from optpass.passes.attention.axes import Axis, Dims, above, atoms, broadcast, equal, flat, is_one, resolve
from optpass.passes.attention.find import pieces, sinks
from optpass.passes.attention.find.elements import contractions
from optpass.passes.attention.find.operands import (
    PRODUCTS,
    Constant,
    Now,
    exact_cast,
    not_zero,
    peel,
    product_operands,
    row_maximum_values,
    shifts_rows,
)
from optpass.passes.attention.find.picks import Pick, apply_picks, take_part
from optpass.passes.attention.find.scores import Reader
from optpass.passes.attention.find.sinks import appended
from optpass.passes.attention.find.unseen import ONE_VECTOR, Unseen, by_elements, is_parameter, of_single_numbers
from optpass.passes.attention.find.walk import Walk, Weights, stands_between
from optpass.passes.attention.program.ir import Program, Value, arg
from optpass.passes.attention.site import Blocked, Fill, JoinedError, NoSoftmaxError, Operand, Scores, Site, SumError

#: Below it exponentials are 0 in any dtype.
_NO_EXPONENTIAL = -1e3


@dataclass
class Found:
    """A product that looks like an attention's second: the site, or why it is none.

    Several sites where the weights are a sum of softmaxes: what each makes of v adds up to the product.
    """

    product: Value
    sites: list[Site] = field(default_factory=list)
    blocked: Blocked | None = None


def find(
    program: Program, constant: Constant, now: Now, roots: Collection[Value] = (), *, join: bool = True
) -> Iterator[Found]:
    """Every attention of `program` in order, and everything that resembles one with the reason why it is not.

    Args:
        program, constant, now: see `scores.Reader`.
        roots: values that leave the graph.
        join: products that are added up are read as one; else as a product and its biases.
    """
    unseen = Unseen(program, {value: (found.left, found.right) for value, found in contractions(program).items()})
    behind = unseen.weights
    summed = {found.total: found for found in pieces.sums(program, behind)}
    terms = {product for found in summed.values() for product in found.products}
    for softmax in unseen.leaving(roots):
        reason = "the weights leave the graph before they meet v: at a graph break, or they are what is asked for"
        yield Found(softmax, blocked=Blocked(reason, softmax))
    for value in program.values:
        if value.name in ONE_VECTOR and any(factor in behind for factor in value.inputs()):
            yield Found(value, blocked=Blocked(f"the product with v is {value.name}, of a single vector", value))
        if any(factor in behind for factor in of_single_numbers(value)):
            yield Found(value, blocked=Blocked("there is a single key, whose weight is 1", value))
        if by_elements(value, behind):
            reason = "the product with v is written as a sum of products of elements"
            yield Found(value, blocked=Blocked(reason, value))
        if value in summed:
            whole = _Weights.of_pieces(program, summed[value], constant, now, join=join).find(behind)
            if whole is not None:
                yield whole
        if value.name not in PRODUCTS or value in terms:
            continue
        if value.name in ("baddbmm", "addmm") and arg(value, "beta") != 0:
            if any(factor in behind and not is_parameter(other) for factor, other in _both_ways(value)):
                yield Found(value, blocked=Blocked(f"{value.name} adds the product with v to something else", value))
            continue
        sides = [_Weights(program, value, side, constant, now, join=join).find(behind) for side in (0, 1)]
        found = [side for side in sides if side is not None]
        if found:
            yield next((side for side in found if side.blocked is None), found[0])


def _both_ways(product: Value) -> tuple[tuple[Value, Value], tuple[Value, Value]]:
    left, right = product_operands(product)
    return (left, right), (right, left)


def _vanishes(fill: Fill, scores: Scores) -> bool:
    """Whether the exponential of a fill is 0, as minus infinity's: no maximum is taken off it, and nothing added."""
    return not fill.lifted and not fill.late and scores.floor is None and fill.fill + scores.offset < _NO_EXPONENTIAL


def _added_up(sites: list[Site]) -> list[Site]:
    """Sites whose results are added to each other; what is inside one is inside all."""
    inside = list(dict.fromkeys(v for site in sites for v in site.values))
    positive = all(isinstance(s.weight, (int, float)) and s.weight > 0 and not s.weights for s in sites)
    for site in sites:
        site.values, site.cancels = inside, not positive
    return sites


class _Weights(Weights):
    """One operand of one product, and the sites that it is the weights of."""

    def find(self, behind: Collection[Value]) -> Found | None:
        """The site, the reason why it is none, or None where there is no softmax behind this operand.

        `behind`: values that a softmax of scores is behind, however far.
        """
        far = self.walk.value in behind
        if not self.may_be_weights(self.walk.value) and not far:
            return None
        if not self.inner:
            return Found(self.product, blocked=Blocked("there is a single key, whose weight is 1", self.product))
        if any(isinstance(size, int) and size == 0 for size in self.product.shape):
            return Found(self.product, blocked=Blocked("its result has no elements", self.product))
        try:
            return Found(self.product, self._sites())
        except NoSoftmaxError:
            return Found(self.product, blocked=stands_between(self.walk.value)) if far else None
        except Blocked as blocked:
            return Found(self.product, blocked=blocked)
        except Exception as error:  # noqa: BLE001  # `work` says so, and raises it where the user wants that
            return Found(self.product, blocked=Blocked.of_error(error, self.product))

    def _sites(self) -> list[Site]:
        """One for each softmax that the weights are a sum of."""
        try:
            logits, dims, softmax = self.to_softmax()
        except SumError as found:
            return self._of_terms(found.value)
        except JoinedError as found:
            return self._of_parts(found.value)
        return [self._site(logits, dims, softmax)]

    def _of_terms(self, value: Value) -> list[Site]:
        """The sites of `a · left + b · right`; what is inside one is inside all."""
        if self.walk.dropout_value is not None:
            raise Blocked("a sum of weights is dropped as a whole", value)
        if self.walk.numbers:
            raise Blocked("NaN in a sum of weights is replaced as a whole", value)
        if self.walk.sliced is not None:
            raise Blocked("a column of a sum of weights is dropped", value)
        alpha = float(arg(value, "alpha") or 1.0)
        a, b = {"add": (1.0, alpha), "sub": (1.0, -alpha), "rsub": (-alpha, 1.0)}[value.name]
        sites: list[Site] = []
        for term, sign in ((value.args[0], a), (value.args[1], b)):
            walk = self.walk
            branch = copy.copy(self)
            branch.summed = True
            branch.walk = Walk(
                term, walk.dims, [*walk.passed, value], weight=walk.weight * sign, weights=[*walk.weights],
                zeroed=[*walk.zeroed], products=[*walk.products], numbers=walk.numbers, picks=[*walk.picks],
                shared=walk.shared,
            )  # fmt: skip
            sites += branch._sites()
        return _added_up(sites)

    def _of_parts(self, value: Value) -> list[Site]:
        """The sites of `cat([left, right])`: each weighs the values of its own keys, and they add up."""
        if self.walk.zeroed or self.walk.products:
            raise Blocked("weights of several softmaxes are set to zero as a whole", value)
        (whole,) = self.keys
        sites: list[Site] = []
        start, dim = 0, value.args[1] % value.dim
        for part in value.args[0]:
            branch, keys = copy.copy(self), Axis(part.shape[dim])
            branch.summed, branch.inner = True, (keys,)
            branch.other = take_part(self.other, Pick(whole, start, keys))
            dims = list(self.walk.dims)
            dims[dim] = (keys,)
            branch.walk = replace(
                self.walk, value=part, dims=tuple(dims), passed=[*self.walk.passed, value],
                weights=[*self.walk.weights], zeroed=[], products=[], picks=[*self.walk.picks],
            )  # fmt: skip
            sites += branch._sites()
            start += keys.size
        return _added_up(sites)

    def _site(self, logits: Value, dims: Dims, softmax: Value) -> Site:
        sink, read, walk = None, logits, self.walk
        if walk.sliced is not None:
            logits, dims, sink = self._sink(logits, dims)
        reader = Reader(self.inner, lambda: flat(dims), self.constant, self.now, join=self.join)
        scores = reader.read(logits, dims)
        if self.spelled.scale != 1.0:
            reader.scaled_by(scores, self.spelled.scale, logits)
        if sink is not None and scores.shifted:
            raise Blocked("scores are shifted against the column that is appended to them", logits)
        binary = [*scores.binary, *self._hide(scores, dims)]
        if sink is None and self.spelled.sink is not None:
            sink = sinks.of_sum(self.spelled, logits, dims, self.keys)
            if scores.shifted:
                raise Blocked("scores are shifted against what is added to the sum of their exponentials", logits)
        picks = walk.picks[::-1]  # the part of a part: what was met last is what the scores have
        apply_picks(scores, picks)
        for pick in picks:
            sink = None if sink is None else take_part(sink, pick)
            walk.weights = [replace(f, operand=take_part(f.operand, pick)) for f in walk.weights]
            binary = [take_part(o, pick) for o in binary]
        value, factor = peel(self.other, self.constant, grad=self.product.grad)
        weight = walk.weight * factor
        output, out_dims = self.product, self.out_dims
        if self.finished is not None:
            output, out_dims, softmax = self.finished.output, self.finished.dims, self.finished.output
        if softmax.name in ("div", "mul"):
            scores.fills = [replace(f, fill=-math.inf, near=False) if _vanishes(f, scores) else f for f in scores.fills]
        site = Site(
            output, resolve(out_dims), self.sides, value, scores, self.keys, softmax, sink,
            walk.dropout, walk.dropout_value, weight, walk.weights, walk.zeroed, [*walk.passed, *scores.values],
            numbers=walk.numbers, sink_behind=self.spelled.sink is not None, binary=binary,
            alone=bool(self.spelled.hidden) or self.spelled.sink is not None, joined=self.joined,
            products=walk.products,
        )  # fmt: skip
        if sink is not None or walk.picks or self.finished is not None:
            return site
        return sinks.behind(site, read, dims, self.program, weights_only=self.summed)

    def _hide(self, scores: Scores, dims: Dims) -> list[Operand]:
        """Masks of the exponentials as masks of the scores; returns what must be proved to hold nothing but 0 and 1."""
        binary = []
        for hidden in self.spelled.hidden:
            if scores.floor is not None or scores.bounded:
                raise Blocked("scores are clamped before their exponentials are masked", hidden.mask)
            if hidden.mask.dim > len(dims):
                raise Blocked("the mask has more dims than the scores", hidden.mask)
            mask, axes = hidden.mask, broadcast(dims, hidden.mask.shape)
            if hidden.keep_when is None:
                binary.append(Operand(mask, axes))
                mask = not_zero(mask)
            if mask.dtype != torch.bool:
                raise Blocked("the mask is not boolean", mask)
            scores.fills.append(Fill(Operand(mask, axes), hidden.keep_when is not False, -math.inf))
        return binary

    def _sink(self, logits: Value, dims: Dims) -> tuple[Value, Dims, Operand]:
        """Through `cat([scores, sink])`, with the casts and the shift by the maximum that come after it."""
        value = logits
        while value.name not in ("cat", "constant_pad_nd"):
            source = value.args[0] if value.args and isinstance(value.args[0], Value) else None
            cast = value.name == "_to_copy" and source is not None and exact_cast(source.dtype, value.dtype)
            shift = (
                value.name == "sub"
                and arg(value, "alpha") in (None, 1)
                and source is not None
                and isinstance(value.args[1], Value)
                and shifts_rows(value.args[1], source, dims, atoms(self.wide))
            )
            if source is None or not (cast or shift):
                raise Blocked("a column is dropped after the softmax that was not appended before it", value)
            self.walk.passed.append(value)
            if shift:
                self.walk.passed.extend(row_maximum_values(value.args[1], source))
            value = source
        parts, dim = appended(value, front=self.front)
        if len(parts) != 2 or atoms(dims[dim]) != atoms(self.wide) or not equal(parts[1].shape[dim], 1):
            raise Blocked("a column is dropped after the softmax that was not appended before it", value)
        self.walk.passed.append(value)
        inner = list(dims)
        inner[dim] = self.inner
        sink = parts[1]
        sink_dims = tuple(() if is_one(size) else axes for axes, size in zip(dims, sink.shape, strict=True))
        step = above(sink, sink_dims)
        while step is not None:
            sink, sink_dims = step
            step = above(sink, sink_dims)
        return parts[0], tuple(inner), Operand(sink, resolve(sink_dims))
