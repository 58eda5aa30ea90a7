"""What is added to the scores of a site, with what is known of its size: enough to tell masks from biases.

What follows for the kernel is in `masking`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from optpass.passes.attention.find.fills import MINUS_INFINITY
from optpass.passes.attention.find.operands import PRODUCTS, Constant, multiple
from optpass.passes.attention.masks import MaskFacts
from optpass.passes.attention.program.ir import Value, arg
from optpass.passes.attention.site import Bias

#: Below it a float32 number does not change when a score or a bias is added.
ABSORBS = -1e37
#: What numbers next to each other may be apart in a sum of scores and something else; 1/64 in other dtypes.
_UNIT = {torch.bfloat16: 1 / 4, torch.float16: 1 / 16}
#: What scores are multiplied by at most; masks are multiplied by more.
_LARGEST_FACTOR = 1e3
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

    def overflows(self, largest: float) -> bool:
        """Whether a number that it adds may be infinite once the sum is scaled, if nothing beyond `largest` is held."""
        factor = most = abs(self.bias.written)
        for step in self.bias.after or ():
            if step.startswith("times"):
                factor *= abs(float(step.split()[1]))
                most = max(most, factor)
        most = max(most, abs(self.bias.coefficient))
        known = max(map(abs, self.facts.values), default=self.facts.bound)
        return most > 1.0 and (known is None or known * most > largest)

    def small(self, limit: float) -> bool:
        """Proved to be of the size of a score."""
        return self.size < limit

    def uneven(self, hidden: float) -> bool:
        """Known to leave different weights in a row whose scores are lost: there are several such numbers."""
        return sum(v <= hidden for v in self.extremes) > 1 or any(v >= -hidden for v in self.extremes)

    def drowns(self, hidden: float) -> bool:
        """Known to add a number beside which scores are lost."""
        return any(abs(v) >= -hidden for v in self.extremes)

    def coarse(self, dtypes: list[torch.dtype], hidden: float) -> bool:
        """Of a mask that is large where a key is seen, so that scores are rounded off beside it, but not lost."""
        number = (self.facts.fill or 0.0) * self.bias.coefficient
        return number > 0 and _rounds(number, dtypes) and number < -hidden and not self.bias.factors

    def rounds_off(self, dtypes: list[torch.dtype]) -> bool:
        """Zero where a key is seen, and elsewhere so low that scores are rounded off beside it."""
        number = (self.facts.fill or 0.0) * self.bias.coefficient
        return number < 0 and _rounds(number, dtypes) and not self.bias.factors

    def raises(self, dtypes: list[torch.dtype], constant: Constant) -> bool:
        """Known to raise scores so far that they are rounded off beside it, or made of numbers that do."""
        numbers = self.extremes or written(self.bias.operand.value, self.bias.coefficient, constant)
        return any(v > 0 and _rounds(v, dtypes) for v in numbers)

    def spares(self, dtypes: list[torch.dtype]) -> bool:
        """Proved not to round off the scores that it is added to."""
        return not _rounds(self.size, dtypes)

    def settled(self, dtypes: list[torch.dtype]) -> bool:
        """Known not to round off the scores that it is added to, or to lose them whatever they are."""
        return self.spares(dtypes) or self.absorbs

    @property
    def absorbs(self) -> bool:
        """Known to hold nothing but zeros and numbers beside which nothing is left."""
        return bool(self.extremes) and all(v == 0 or v < ABSORBS for v in self.extremes)

    @property
    def huge(self) -> bool:
        """Two such numbers may add up to minus infinity."""
        return self.size > -ABSORBS and (not self.extremes or min(self.extremes) < ABSORBS)


def coarse_from(dtype: torch.dtype) -> float:
    """From this size on what is added rounds scores off by more than rounding does anywhere else."""
    return _UNIT.get(dtype, 1 / 64) / torch.finfo(dtype).eps


def _rounds(size: float, dtypes: list[torch.dtype]) -> bool:
    return any(abs(size) >= coarse_from(dtype) for dtype in dtypes)


def of_products(value: Value, constant: Constant) -> bool:
    """Whether all elements are sums of what comes out of matrix products, and zeros: numbers that mask nothing.

    A product of zeros and ones masks if it is multiplied by a large number.
    """
    seen, todo = {value}, [(value, 1.0)]
    while todo:
        value, factor = todo.pop()
        if value.name in PRODUCTS:
            continue
        sources, times = _terms_of(value, constant)
        factor *= times
        if not sources or factor > _LARGEST_FACTOR:
            return False
        todo += [(v, factor) for v in sources if v not in seen]
        seen.update(sources)
    return True


def _terms_of(value: Value, constant: Constant) -> tuple[list[Value], float]:
    """What `value` is a sum, a multiple or a rearrangement of, and the factor; nothing where it is anything else."""
    inputs = [v for v in value.inputs() if v.tensor.is_floating_point()]
    if value.name in ("mul", "div"):
        number, source = multiple(value, constant)
        return ([source], abs(number)) if source is not None and isinstance(number, float) else ([], 1.0)
    if value.name in ("add", "sub", "rsub"):
        plain = arg(value, "alpha") in (None, 1) and not any(a for a in value.args[:2] if not isinstance(a, Value))
        return (inputs, 1.0) if plain else ([], 1.0)
    if value.name == "cat":
        return [v for v in inputs if not _is_zeros(v)], 1.0
    if value.name == "constant_pad_nd" and value.args[2] != 0:
        return [], 1.0
    return (inputs, 1.0) if len(inputs) == 1 and value.name in _REARRANGED else ([], 1.0)


def written(value: Value, times: float, constant: Constant) -> Iterator[float]:
    """Numbers that are written or added where `value` is made, each with `times` and what multiplies it after that."""
    seen, todo = set[Value](), [(value, times)]
    while todo:
        value, times = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        number = constant(value)
        if number is not None:
            yield times * number
            continue
        if value.leaf == "opaque" and value.version:  # written through an older view: any number
            yield math.inf
        for part, factor in _parts_of(value, constant):
            if isinstance(part, Value):
                todo.append((part, times * factor))
            elif isinstance(part, (int, float)):
                yield times * factor * part


def _parts_of(value: Value, constant: Constant) -> Iterator[tuple[object, float]]:
    """What each element of `value` is one of, or the sum of, and the number that multiplies it."""
    if value.name in ("mul", "div"):
        number, source = multiple(value, constant)
        if source is not None and isinstance(number, float):
            yield source, number
    elif value.name in ("add", "sub", "rsub"):
        alpha = arg(value, "alpha")
        alpha = alpha if isinstance(alpha, (int, float)) else 1.0
        own, other = {"add": (1.0, alpha), "sub": (1.0, -alpha), "rsub": (-alpha, 1.0)}[value.name]
        yield value.args[0], own
        yield value.args[1], other
    elif value.name == "where":
        yield from ((part, 1.0) for part in value.args[1:3])
    elif value.name == "masked_fill":
        yield value.args[0], 1.0
        yield value.args[2], 1.0
    elif value.name == "neg" or value.name in _REARRANGED:
        sign = -1.0 if value.name == "neg" else 1.0
        yield from ((part, sign) for part in value.inputs() if part.dtype.is_floating_point)


def _is_zeros(value: Value) -> bool:
    while value.name in ("detach", "alias", "_to_copy", "expand"):
        value = value.args[0]
    return value.name == "zeros" or (value.name == "full" and value.args[1] == 0)
