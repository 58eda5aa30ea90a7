"""Rows without a single key: what becomes of them in the user's program, and whether a kernel can be made to do so.

Kernels differ from what people write there: a row of minus infinities is zeros instead of NaN; beside -3e38 the
logarithm of a row's sum is lost, and with it the weights in the backward; a replaced score passes no gradient where an
added number does. Each case is told apart here, and written in `rows`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from optpass.passes.attention.find.fills import NO_KEY
from optpass.passes.attention.find.operands import Constant
from optpass.passes.attention.find.terms import ABSORBS, Term, of_products
from optpass.passes.attention.masks import MaskFacts
from optpass.passes.attention.site import Blocked, Fill, Site

#: What is added up to this changes the logarithm of a row's sum by less than it is rounded to.
_SMALL = 1e4
#: The option that a reason ends with where it would help.
ALLOWED = " (options={'attention': {'masked_rows': 'any'}} allows that)"


@dataclass(frozen=True)
class Masked:
    """What is masked at a site, as proved, and what follows for rows without a single key.

    Attributes:
        fills: what replaces scores, without masks that show every key.
        terms: what is added to scores, without zeros.
        hiding: the terms that hide keys.
        seen: all that hides keys leaves one to every row.
        near: see `masking.MaskPlan.near`.
        exact_rows: such rows are to come out as in the user's program.
    """

    site: Site
    fills: list[tuple[Fill, MaskFacts]]
    terms: list[Term]
    hiding: list[Term]
    seen: bool
    near: float | None
    constant: Constant
    exact_rows: bool
    training: bool

    @cached_property
    def never(self) -> bool:
        """Every row has a key, and nothing may be added that is as low as a mask."""
        return self.seen and all(t in self.hiding or t.spares(self.site.scores.added_in) for t in self.terms)

    @cached_property
    def several(self) -> bool:
        """More than one mask of numbers that are finite alone, and not in sum."""
        return sum(t.huge for t in self.terms) + any(math.isfinite(f.fill) for f, _ in self.fills) > 1

    @cached_property
    def uneven(self) -> bool:
        """See `masking.MaskPlan.uneven`."""
        return self._tells_keys_apart() or any(t.uneven(no_key(self.site)) for t in self.terms)

    @cached_property
    def _limit(self) -> float:
        return min(_SMALL, -no_key(self.site))

    @cached_property
    def _large(self) -> list[Term]:
        return [t for t in self.terms if not t.small(self._limit)]

    @cached_property
    def _may_be_nan(self) -> bool:
        """Rows without a key may come out of the softmax as NaN."""
        infinite = any(f.fill == -math.inf for f, _ in self.fills)
        return infinite or self.several or not all(t.facts.finite and not t.bias.factors for t in self.terms)

    def _passes_nan(self) -> bool:
        """v would be passed NaN, in the backward, by rows of the result that are set to zero."""
        return self.training and self.exact_rows and not self.never and self._may_be_nan

    def rows(self) -> tuple[str, float]:
        """`masking.MaskPlan.empty_rows` and `passes`; raises `Blocked` where neither a kernel nor `rows` can do it."""
        empty = self._told_apart()
        zeroed = any(factor.zeroes for factor in self.site.weights)
        if zeroed and self._passes_nan() and not (empty == "nan" and self._stops_nan()):
            raise Blocked(f"rows without a single key may be NaN before they are set to zero{ALLOWED}")
        floor = self.training and empty == "added" and self.site.scores.floor
        passes = self._at_the_floor() if floor else 1.0
        if empty in ("uniform", "added", "exact"):
            if is_quotient(self.site) and not self.site.scores.centred:  # without the maximum taken off: 0 / 0
                raise Blocked(
                    f"rows without a single key are not normalised by this spelling of softmax{ALLOWED}",
                    self.site.softmax,
                )
            empty = "exact" if self._by_logarithm() else empty
        return empty, passes

    def _by_logarithm(self) -> bool:
        if by_logarithm(self.site) and self.site.scores.topped:
            reason = "the maximum of all rows is taken off masked scores before the logarithm of the sum of each"
            raise Blocked(f"{reason}{ALLOWED}", self.site.softmax)
        return by_logarithm(self.site)

    def _told_apart(self) -> str:
        site = self.site
        if self.near is not None:
            return "exact"
        if site.zeroed and self.fills:
            return self._zeroed()
        if site.numbers and self.exact_rows and not self.never and self._nan_is_zero():
            return "zero"
        if self.never:
            return self._never()
        if self.exact_rows and site.sink is None:  # a sink is a key of every row
            return self._without_a_key()
        if self.exact_rows and site.sink_behind:
            self._check_behind()
        return "never"

    def _never(self) -> str:
        """No such row; but all keys of one may carry a number beside which kernels lose precision in the backward."""
        if not self.training or all(t in self.hiding or t.small(self._limit) for t in self.terms):
            return "never"
        if self.site.sink is None:
            return "large"
        # The column takes part in every row: masks far below it do no harm, and rows cannot be shifted against it.
        if any(max(t.extremes, default=t.size) >= self._limit for t in self.terms):
            raise Blocked("large numbers are added to scores beside an appended column", self.site.output)
        return "never"

    def _zeroed(self) -> str:
        """Rows without a key are zeros in the user's program too, if one mask alone says which they are.

        Where something as low as the fill may be added to the other keys, these share the weights with those that are
        set to zero, and the rest does not add up to 1; or, beside minus infinity, is NaN, which can be said without
        gradients.
        """
        site, large = self.site, self._large
        alone = len(self.fills) == 1 and not any(t.hides for t in large) and not (large and site.scores.floor)
        if not alone or site.sink is not None:
            raise Blocked("weights are set to zero after the softmax, and more than one mask is at work", site.output)
        ((fill, _),) = self.fills
        absorbs = fill.fill < ABSORBS
        if all(
            (absorbs and of_products(t.bias.operand.value, self.constant)) or t.size < -fill.fill / 2 for t in large
        ):
            return "exact" if self.training and large else "zero"
        if fill.fill == -math.inf and not self.training and not site.dropout:
            return "zero or NaN"
        raise Blocked("weights are set to zero after the softmax, and what is added may be a mask", site.output)

    def _nan_is_zero(self) -> bool:
        """Whether such rows are zeros because their weights are NaN before; False where they never are NaN."""
        site = self.site
        if not self._may_be_nan:
            return False
        if site.sink is not None and not site.sink_behind:
            return False
        if not self._large and self._stops_nan():
            return True
        raise Blocked(f"rows without a single key become zeros, but not their gradients{ALLOWED}", site.output)

    def _stops_nan(self) -> bool:
        """Replaced scores stop the NaN that flows back to them; numbers that were added after that do not."""
        replaced = all(f.fill == -math.inf and not (self.training and f.late) for f, _ in self.fills)
        plain = self.site.softmax.name == "_softmax" and not self.site.sink_behind
        return replaced and plain and self.site.scores.floor is None

    def _without_a_key(self) -> str:
        scores = self.site.scores
        if self.training and any(t.masked and t.bias.factors for t in self.terms):
            # A mask that a tensor scales: what flows to the tensor is rounded off as the user's sums are.
            raise Blocked(f"rows without a single key would pass other gradients{ALLOWED}", self.site.output)
        settled = all(t.settled(scores.added_in) for t in self.terms)
        if not settled and (self.training or not self._rounds_as_kernels()):
            return "exact"
        narrow = any(dtype not in (torch.float32, torch.float64) for dtype in scores.added_in)
        if self.training and self.uneven and (narrow or scores.floor):  # sums are rounded off as the user's are
            return "exact"
        if not self.fills:
            return "added"
        numbers = {f.fill for f, _ in self.fills}
        # The lowest finite number absorbs what is added to it; -1e9 does not: a row of it alone shows what was added.
        shows = any(f.late and math.isfinite(f.fill) and f.fill > ABSORBS for f, _ in self.fills)
        # float64 loses no score beside -1e9: one that is replaced by it differs from one that it is added to.
        kept = bool(self.terms) and any(math.isfinite(n) and n > no_key(self.site) for n in numbers)
        if len(numbers) > 1 or shows or kept:
            return "exact"
        if self.training and self._large:
            return "exact" if scores.floor else "added"
        if self.terms and not self.training:
            return "added"
        return "uniform" if math.isfinite(min(numbers)) else "nan"

    def _check_behind(self) -> None:
        """A row of minus infinities alone is NaN before its sink is there; beside finite numbers it takes it all."""
        infinite = any(not math.isfinite(f.fill) for f, _ in self.fills) or not all(t.facts.finite for t in self.terms)
        if infinite or sum(t.huge for t in self.terms) + bool(self.fills) > 1:
            raise Blocked(f"rows without a single key would be zeros, not NaN{ALLOWED}")

    def _at_the_floor(self) -> float:
        """The share of the gradient that such rows pass on where their sums meet the floor of the scores."""
        floor, lowest = self.site.scores.floor, no_key(self.site)
        assert floor is not None
        hiding = {v for t in self.terms for v in t.extremes if t.drowns(lowest) and v <= lowest}
        if len(hiding) == 1 and all(t.extremes for t in self.terms) and torch.float16 not in self.site.scores.dtypes:
            (number,) = hiding  # beside the lowest number of a dtype with a wide range every score is lost
            return floor.tie if number == floor.number else 0.0 if number < floor.number else 1.0
        raise Blocked(f"rows without a single key would pass other gradients{ALLOWED}", self.site.output)

    def _rounds_as_kernels(self) -> bool:
        """All that is added is one mask, beside zeros and numbers that no sum changes, in the dtype kernels add in.

        What is added beside it, however small, is rounded with it in the operand of a kernel, and with the score
        before. A mask of unknown size may make up for such a number.
        """
        scores = self.site.scores
        wide = torch.promote_types(scores.product.dtype, torch.float32)
        rounding = [t for t in self.terms if not t.absorbs]
        scaled = any(t.bias.scaled for t in self.terms)
        alone = len(self.terms) == 1 or all(t.size < -ABSORBS for t in rounding)
        one = not self.fills and len(rounding) <= 1 and alone and not scaled
        return one and all(dtype == wide for dtype in scores.added_in)

    def _tells_keys_apart(self) -> bool:
        """Whether keys of a row without a single one are known to carry different numbers.

        Of two numbers that drown scores, the keys with the lesser keep the weights; beside one, so do those with the
        least of anything that is not lost in the sum with it.
        """
        lowest = no_key(self.site)
        drowning = [t for t in self.terms if t.drowns(lowest)]
        if not drowning:
            return False
        rest = [abs(v) for t in self.terms if t not in drowning for v in t.extremes]
        least = min(abs(v) for t in drowning for v in t.extremes if abs(v) >= -lowest)
        unit = least * min(torch.finfo(dtype).eps for dtype in self.site.scores.added_in)
        return len(drowning) > 1 or max(rest, default=0.0) >= unit / 2


def no_key(site: Site) -> float:
    """What counts as a row without a key at this site."""
    return NO_KEY.get(rounded_in(site), NO_KEY[torch.float32])


def rounded_in(site: Site) -> torch.dtype:
    """The dtype that its biases are added in where scores are lost beside the least numbers."""
    return max(site.scores.added_in or [torch.float32], key=lambda dtype: NO_KEY.get(dtype, NO_KEY[torch.float32]))


def is_quotient(site: Site) -> bool:
    """`exp(x) / sum`, written out."""
    return site.softmax.name in ("div", "mul")


def by_logarithm(site: Site) -> bool:
    """`exp(x - logsumexp(x))` of scores that may be large: beside them the logarithm of their sum is rounded off.

    Not where the maximum of each row was taken off before: no row is large then.
    """
    written = site.softmax.name == "exp" and site.softmax.args[0].name == "sub"
    return written and not site.scores.centred
