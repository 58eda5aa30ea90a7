"""What is added to the scores of a site, with what is known of its size: enough to tell masks from biases.

What follows for the kernel is in `masking`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from optpass.passes.attention.ir import Value
from optpass.passes.attention.masks import MaskFacts
from optpass.passes.attention.operands import PRODUCTS
from optpass.passes.attention.scores import MINUS_INFINITY
from optpass.passes.attention.site import Bias

#: Below it a float32 number does not change when a score or a bias is added.
ABSORBS = -1e37
#: Operations whose result has elements of their input, and zeros.
_REARRANGED = frozenset(
    "_to_copy cat slice select index gather constant_pad_nd as_strided index_select flip roll view _unsafe_view "
    "reshape expand permute transpose t unsqueeze squeeze clone alias contiguous repeat".split()
)


@dataclass(frozen=True)
class Term:
    """A bias and what is proved of it."""

    bias: Bias
    facts: MaskFacts

    @property
    def hides(self) -> bool:
        """Zero where a key is seen, as good as minus infinity elsewhere."""
        fill = self.facts.fill
        return fill is not None and fill * self.bias.coefficient <= MINUS_INFINITY and not self.bias.factors

    @property
    def masked(self) -> bool:
        """Known to add numbers beside which scores are lost, whatever multiplies them."""
        return any(abs(v) * abs(self.bias.coefficient) >= -MINUS_INFINITY for v in self.facts.values)

    @property
    def extremes(self) -> tuple[float, ...]:
        """All that it can add; () where that is not known."""
        return () if self.bias.factors else tuple(v * self.bias.coefficient for v in self.facts.values)

    @property
    def size(self) -> float:
        """What nothing that it adds exceeds, whatever its sign; infinity where that is not known."""
        if self.extremes:
            return max(map(abs, self.extremes))
        known = self.facts.bound is not None and not self.bias.factors
        return self.facts.bound * abs(self.bias.coefficient) if known and self.facts.bound is not None else math.inf

    def small(self, limit: float) -> bool:
        """Proved to be of the size of a score."""
        return self.size < limit

    def uneven(self, hidden: float) -> bool:
        """Known to leave different weights in a row whose scores are lost: there are several such numbers."""
        return sum(v <= hidden for v in self.extremes) > 1 or any(v >= -hidden for v in self.extremes)

    def drowns(self, hidden: float) -> bool:
        """Known to add a number beside which scores are lost."""
        return any(abs(v) >= -hidden for v in self.extremes)

    def vague(self, dtypes: list[torch.dtype], hidden: float) -> bool:
        """Of a mask whose number rounds off the scores that it is added to, but does not lose them, where that matters.

        It does for all keys of a row, or for those that get the most.
        """
        number = (self.facts.fill or 0.0) * self.bias.coefficient
        rounds = any(abs(number) * torch.finfo(dtype).eps >= 1.0 for dtype in dtypes)
        matters = number > 0 or not self.facts.row_never_empty
        return rounds and abs(number) < -hidden and not self.bias.factors and matters

    def bounded(self, hidden: float) -> bool:
        """Proved not to drown the scores that it is added to."""
        return self.size < -hidden

    @property
    def huge(self) -> bool:
        """Two such numbers may add up to minus infinity."""
        return self.size > -ABSORBS and (not self.extremes or min(self.extremes) < ABSORBS)


def of_product(value: Value) -> bool:
    """Whether all elements come out of one matrix product or are zeros put beside it: numbers that mask nothing."""
    while value.name not in PRODUCTS:
        inputs = [v for v in value.inputs() if v.tensor.is_floating_point()]
        if value.name == "cat":
            inputs = [v for v in inputs if not _is_zeros(v)]
        if value.name == "constant_pad_nd" and value.args[2] != 0:
            return False
        number = value.name in ("mul", "div") and any(not isinstance(a, Value) for a in value.args[:2])
        if len(inputs) != 1 or not (number or value.name in _REARRANGED):
            return False
        (value,) = inputs
    return True


def _is_zeros(value: Value) -> bool:
    while value.name in ("detach", "alias", "_to_copy", "expand"):
        value = value.args[0]
    return value.name == "zeros" or (value.name == "full" and value.args[1] == 0)
