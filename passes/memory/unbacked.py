"""Sizes that only running tells (what `nonzero` finds, `item()`), and what is known of them ahead."""

from __future__ import annotations

from typing import Any

from optpass.errors import ConfigError

#: A bound beyond it is none: torch bounds what it knows nothing of by the largest integer.
_MOST = 1 << 40


class UnboundedSizeError(ConfigError):
    """A size depends on data, and nothing says how large it can be."""


def value_of(number: Any) -> Any:
    """A number as it is; of a symbolic one the value that it had when it was traced, or the most that it can be.

    Raises:
        UnboundedSizeError: only running tells, and nothing bounds it.
    """
    node = getattr(number, "node", None)
    if node is None or not hasattr(node, "hint"):
        return number
    return node.hint if has_value(node) else _most(node)


def has_value(node: Any) -> bool:
    """Whether a symbolic number, of which this is the node, had a value when it was traced."""
    return node.hint is not None


def _most(node: Any) -> int | float | bool:
    """Each symbol has one value everywhere, so that sizes made of it go together."""
    if node.pytype is not int:
        return True if node.pytype is bool else 1.0
    values = {symbol: _value(symbol, node.shape_env) for symbol in node.expr.free_symbols}
    unbounded = [str(symbol) for symbol, value in values.items() if value is None]
    if unbounded:
        raise UnboundedSizeError(
            f"the size {node.expr} of a tensor is known only when the graph runs, and nothing bounds {unbounded[0]}; "
            "torch._check(n <= most) does"
        )
    return int(node.expr.xreplace(values))


def _value(symbol: Any, env: Any) -> Any:
    known = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    if symbol in known:
        return known[symbol]
    upper = env.var_to_range[symbol].upper if symbol in env.var_to_range else None
    return upper if upper is not None and upper.is_Integer and upper <= _MOST else None
