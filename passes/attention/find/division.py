"""A softmax that is finished behind the product with v: (exp(s) v) / sum exp(s), as online softmaxes are taught.

Only finds the division; that the exponentials are those of scores is `core`'s to see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from optpass.passes.attention.axes import Dims, above, atoms, below, broadcast, flat, resolve
from optpass.passes.attention.program.ir import Program, Value, arg

#: How many operations after the product are looked at.
_LOOK = 8


@dataclass(frozen=True)
class Division:
    """Where the product is divided by the sums of its weights.

    Attributes:
        output: the quotient, and `dims`, its axes.
        dim: of the weights, that the sums run over.
        values: between the product and the output, and from the weights to the output, both excluded.
    """

    output: Value
    dims: Dims
    dim: int
    values: list[Value]


def division(product: Value, out_dims: Dims, weights: Value, dims: Dims, program: Program) -> Division | None:
    """The division of `product` by the sums of `weights`, whose dims run over `dims`; None without one."""
    value, passed = product, [product]
    for _ in range(_LOOK):
        users = program.users(value)
        if len(users) != 1:
            return None
        (user,) = users
        step = below(value, user, out_dims)
        if step is None:
            for divisor, between in _divisors(user, value):
                found = _sums(divisor, broadcast(out_dims, divisor.shape), weights, dims)
                if found is not None and user.dim == value.dim and user.dtype == value.dtype:
                    return Division(user, resolve(out_dims), found[0], [*passed, *between, *found[1]])
            return None
        value, out_dims = user, step
        passed.append(value)
    return None


def _divisors(user: Value, value: Value) -> Iterator[tuple[Value, list[Value]]]:
    """(divisor, values between) where `user` divides `value`."""
    if user.name not in ("div", "mul"):
        return
    other = user.args[1] if user.args[0] is value else user.args[0]
    if not isinstance(other, Value) or other.dim > value.dim:
        return
    if user.name == "mul" and other.name == "reciprocal":
        yield other.args[0], [other]
    if user.name == "div" and other is not user.args[0] and not arg(user, "rounding_mode"):
        yield other, []


def _sums(value: Value, axes: Dims, weights: Value, dims: Dims) -> tuple[int, list[Value]] | None:
    """(dim, values) where `value`, whose dims run over `axes`, holds the sums of `weights` over one dim."""
    passed = [value]
    step = above(value, axes)
    while step is not None:
        value, axes = step
        passed.append(value)
        step = above(value, axes)
    if value.name != "sum" or value.args[0] is not weights or value.dtype != weights.dtype:
        return None
    over = [d % weights.dim for d in arg(value, "dim") or ()]
    if len(over) != 1:
        return None
    kept = bool(arg(value, "keepdim"))
    wanted = [() if d in over else atoms(group) for d, group in enumerate(resolve(dims)) if kept or d not in over]
    have = [atoms(group) for group in resolve(axes)]
    return (over[0], passed) if have == wanted and flat(axes) else None
