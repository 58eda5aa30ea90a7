"""Losses of torch's that are one call and several nodes of autograd: what such a call is given is there until it is
over, which no node says (aten/src/ATen/native/Loss.cpp and LossNLL.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from optpass.backend.memory.eager.inside import named


def begun_by(node: Any) -> list[Any]:
    """Of the sum that `F.cross_entropy` of probabilities ends with, the node that it begins with. The same product of a
    logarithm of a softmax, summed by hand, may let go of what that is made of before."""
    summed, following = named(node, ("SumBackward0",)), node
    while summed and following is not None and not named(following, ("LogSoftmax",)):
        between = named(following, ("SumBackward0", "NegBackward", "MulBackward"))
        following = next((n for n, _ in following.next_functions if n is not None), None) if between else None
    return [following] if summed and following is not None else []


def is_divergence(node: Any, saves_numbers: Callable[[Any], bool], saves_its_own: Callable[[Any], bool]) -> bool:
    """Whether a node is what `F.kl_div` ends with, and does not save the target, which was made for it alone and has no
    gradient: the difference of what it takes of that and of a product with the input; of logarithms of probabilities,
    the product of their exponentials with a difference of the two.

    Args:
        saves_numbers: whether a node has saved numbers that no node made.
        saves_its_own: whether it has saved such as nobody else holds, so that they are no mask of the caller's.
    """
    (first, _), (second, _) = (*node.next_functions, (None, 0), (None, 0))[:2]
    if first is not None or second is None:
        return False
    if named(node, ("SubBackward0",)):
        return named(second, ("MulBackward0",)) and saves_numbers(second)
    difference = named(node, ("MulBackward0",)) and named(second, ("SubBackward0",))
    return difference and second.next_functions[0][0] is None and saves_its_own(node)
