"""The table of rules: which function says what one ATen operation's element is. Operations not listed are unknown.

A rule takes the engine, the Value and the indices, and gives the element, or None (or raises `UnknownError`) where it
cannot say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from optpass.passes.attention.masks import numbers, rules_index, rules_make, rules_point, rules_view
from optpass.passes.attention.masks.elements import Elements, Index, UnknownError
from optpass.passes.attention.masks.integers import Lin
from optpass.passes.attention.masks.pieces import Expr, Where, lift
from optpass.passes.attention.program.ir import Value

Rule: TypeAlias = Callable[[Elements, Value, Index], Expr | None]

#: Operations whose result is the same of 0.0 and -0.0, but for the sign of a zero: expressions do not keep that sign.
_SAME_OF_BOTH_ZEROS = frozenset(
    "abs exp exp2 expm1 log log2 log1p sqrt square neg relu sigmoid tanh sin cos erf floor ceil round trunc isinf "
    "isnan isfinite isneginf isposinf eq ne lt le gt ge logical_not logical_and logical_or logical_xor add sub rsub "
    "mul maximum minimum clamp softplus silu gelu".split()
)

RULES: dict[str, Rule] = {
    **rules_make.RULES,
    **rules_view.RULES,
    **rules_index.RULES,
    **rules_point.RULES,
}


def generic(engine: Elements, value: Value, index: Index) -> Expr | None:
    """Any other operation that works element by element: unknown, but of known operands; computed where they are
    constants."""
    tags = value.op.tags
    if torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags:
        return None
    tensors = [a for a in value.args if isinstance(a, Value)]
    if not tensors or any(isinstance(a, (list, tuple)) for a in value.args):
        return None
    operands = [engine.operand(value, tensor, index) for tensor in tensors]
    template = (value.op, value.index, *(_described(a) for a in value.args))

    def leaf(*leaves: Expr) -> Expr:
        if value.name not in _SAME_OF_BOTH_ZEROS and any(isinstance(x, float) and x == 0 for x in leaves):
            raise UnknownError
        folded = engine.folded(value, leaves, value.args)
        return engine.apply(template, value.dtype, *leaves) if folded is None else folded

    if value.dtype in numbers.DIGITS and any(isinstance(x, (Where, Lin)) for x in operands):
        # Of constants all the same, as the slopes of a bias are: computed, its size is known.
        found = engine.evaluated(value, index)
        if found is not None or engine.read(value) is not None:
            return found if found is not None else engine.unknown(value, index)
    return lift(leaf, operands)


def _described(argument: Any) -> Any:
    """An argument as part of an operation's identity; tensors by dtype, since the operands stand beside them."""
    if isinstance(argument, Value):
        return ("tensor", argument.dtype, argument.dim > 0)
    if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (type(argument).__name__, argument.node.expr)
    return (type(argument).__name__, repr(argument) if isinstance(argument, float) else argument)
