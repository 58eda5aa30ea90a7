"""A softmax that is finished behind the product with v: (exp(s) v) / sum exp(s), as online softmaxes are taught.

Only finds the division; that the exponentials are those of scores is `core`'s to see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from optpass.passes.attention.axes import Axis, Dims, above, atoms, below, broadcast, flat, is_one, resolve
from optpass.passes.attention.find.operands import PRODUCTS, Constant, product_operands
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


def division(
    product: Value, out_dims: Dims, weights: Value, dims: Dims, program: Program, constant: Constant
) -> Division | None:
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
                found = _sums(divisor, broadcast(out_dims, divisor.shape), weights, dims, constant)
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


def _sums(value: Value, axes: Dims, weights: Value, dims: Dims, constant: Constant) -> tuple[int, list[Value]] | None:
    """(dim, values) where `value`, whose dims run over `axes`, holds the sums of `weights` over one dim.

    They may be summed in another layout, and by a product with ones.
    """
    passed = [value]
    while (step := above(value, axes)) is not None:
        value, axes = step
        passed.append(value)
    whole = resolve(dims)
    gone = [d for d, group in enumerate(whole) if set(atoms(group)) - set(flat(axes))]
    if len(gone) != 1 or not flat(axes):
        return None
    found = _summed(value, axes, whole[gone[0]], constant)
    if found is None or value.dtype != weights.dtype:
        return None
    source, axes = found
    while source is not weights:
        step = above(source, axes)
        if step is None:
            return None
        passed.append(source)
        source, axes = step
    alike = [atoms(group) for group in resolve(axes)] == [atoms(group) for group in whole]
    return (gone[0], passed) if alike else None


def _summed(value: Value, axes: Dims, keys: tuple[Axis, ...], constant: Constant) -> tuple[Value, Dims] | None:
    """What `value`, whose dims run over `axes`, is the sums of over `keys`, and its axes."""
    if value.name in PRODUCTS and arg(value, "beta") is None:
        left, right = product_operands(value)
        ones = is_one(value.shape[-1]) and constant(right) == 1
        return (left, (*axes[:-1], keys)) if ones else None
    over = [d % value.args[0].dim for d in arg(value, "dim") or ()] if value.name == "sum" else []
    if len(over) != 1:
        return None
    (dim,) = over
    if arg(value, "keepdim"):
        return value.args[0], (*axes[:dim], keys, *axes[dim + 1 :])
    return value.args[0], (*axes[:dim], keys, *axes[dim:])
