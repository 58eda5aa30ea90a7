"""Matrix products that are written by elements: `(a.unsqueeze(-2) * b.unsqueeze(-3)).sum(-1)` is a bᵀ.

Those that make scores, or sum values with weights, become products of the program: factors laid out as matrices, `bmm`,
and its result laid out as the sum, none of which a node of the graph computes. Sums that are no such products stay what
they are: of weights alone, masked or not, and of anything that no attention is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optpass.passes.attention.axes import is_one
from optpass.passes.attention.find.operands import FLOATS
from optpass.passes.attention.find.unseen import Unseen, sources_of
from optpass.passes.attention.program.ir import Program, Value, arg


@dataclass(frozen=True)
class Contraction:
    """`value = (left * right).sum(inner)`, or their mean, by the dims of `left * right`.

    Attributes:
        times: what `left * right` is scaled by before it is summed: products and quotients with numbers, last first.
        left, right: the factors before they were expanded.
        batch, rows, columns: dims that both factors have, `left` alone, `right` alone; those of size 1 are in none.
        inner: dims that are summed over; both have them.
    """

    value: Value
    times: tuple[Value, ...]
    left: Value
    right: Value
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    inner: tuple[int, ...]


def multiply_matrices(program: Program) -> None:
    """Makes products of those sums of `program` that are an attention's first or second product; changes `program`."""
    sums = contractions(program)
    if not sums:
        return
    unseen = Unseen(program, {value: (found.left, found.right) for value, found in sums.items()})
    scores = _leads_to(program, set(unseen.weights.values()), unseen.scores)
    for value, found in sums.items():
        if value.node is None or _narrows(program.autocast[value.node], value):
            continue
        left, right = found.left in unseen.weights, found.right in unseen.weights
        values = bool(found.columns) if left else bool(found.rows) and right  # else weights are summed, with a mask
        if value in scores or (values and not (left and right)):
            program.replace(value, _written(found))


def contractions(program: Program) -> dict[Value, Contraction]:
    """Matrix products of `program` that are written by elements."""
    return {value: found for value in program.values if (found := contraction(value)) is not None}


def contraction(value: Value) -> Contraction | None:
    """The matrix product that a sum is; None if it is none: where neither factor has an axis that the other lacks."""
    product = value.args[0] if value.name in ("sum", "mean") and arg(value, "dim") else None
    times = []
    while product is not None and _by_number(product):
        times.append(product)
        product = product.args[0]
    if product is None or product.name != "mul" or not all(isinstance(f, Value) for f in product.args[:2]):
        return None
    left, right = (_unexpanded(factor) for factor in product.args[:2])
    if {left.dtype, right.dtype, product.dtype} != {value.dtype} or value.dtype not in FLOATS:
        return None
    summed = {d % product.dim for d in arg(value, "dim")}
    groups: dict[tuple[bool, bool], list[int]] = {(True, True): [], (True, False): [], (False, True): []}
    inner = []
    for d in range(product.dim):
        has = _has(left, product, d), _has(right, product, d)
        if is_one(product.shape[d]):
            continue
        if d not in summed and any(has):
            groups[has].append(d)
        elif d in summed and all(has):
            inner.append(d)
        else:
            return None
    batch, rows, columns = groups.values()
    known = value.name == "sum" or all(isinstance(product.shape[d], int) for d in inner)
    if not inner or not (rows or columns) or not known:
        return None
    return Contraction(value, tuple(times), left, right, tuple(batch), tuple(rows), tuple(columns), tuple(inner))


def _narrows(autocast: Any, value: Value) -> bool:
    """Whether autocast would make a product narrower than `value`; it leaves products of elements as they are."""
    enabled, dtype = dict(zip(("cpu", "cuda"), autocast, strict=True)).get(value.tensor.device.type, (False, None))
    return bool(enabled) and dtype != value.dtype


def _by_number(value: Value) -> bool:
    """Whether a value is another times or over a number, without rounding."""
    exact = value.name == "mul" or (value.name == "div" and not arg(value, "rounding_mode"))
    return exact and isinstance(value.args[0], Value) and isinstance(value.args[1], (int, float))


def _unexpanded(factor: Value) -> Value:
    while factor.name == "expand":
        factor = factor.args[0]
    return factor


def _has(factor: Value, product: Value, dim: int) -> bool:
    """Whether a factor runs over a dim of the product, rather than being broadcast along it."""
    at = dim - (product.dim - factor.dim)
    return at >= 0 and not is_one(factor.shape[at])


def _leads_to(program: Program, softmaxes: set[Value], scores: set[Value]) -> set[Value]:
    """Of `scores`, what the softmaxes are computed from."""
    found: set[Value] = set()
    todo = list(softmaxes)
    while todo:
        for source in sources_of(program, todo.pop()):
            if source in scores and source not in found:
                found.add(source)
                todo.append(source)
    return found


# ---- the same as a product ----------------------------------------------------------------------------------------


def _written(found: Contraction) -> list[Value]:
    """Values that compute `found.value` as a product of matrices; the last is laid out as it is."""
    product = found.value.args[0] if not found.times else found.times[-1].args[0]
    made: list[Value] = []

    def make(op: Any, shape: Sequence[Any], *args: Any) -> Value:
        like = found.value
        tensor = like.tensor.new_empty(tuple(shape))
        made.append(
            Value(
                tensor,
                op=op,
                args=args,
                node=like.node,
                grad=like.grad,
                autocast=like.autocast,
                storage=int(tensor.untyped_storage()._cdata),
            )
        )
        return made[-1]

    sizes = {d: product.shape[d] for d in range(product.dim)}
    b, m, n, k = (_product(sizes[d] for d in group) for group in (found.batch, found.rows, found.columns, found.inner))
    left = _matrix(make, product, found.left, (found.batch, found.rows, found.inner), (b, m, k))
    right = _matrix(make, product, found.right, (found.batch, found.inner, found.columns), (b, k, n))
    result = make(torch.ops.aten.bmm.default, (b, m, n), left, right)
    for scaled in reversed(found.times):
        result = make(scaled.op, (b, m, n), result, *scaled.args[1:])
    if found.value.name == "mean":
        result = make(torch.ops.aten.div.Scalar, (b, m, n), result, k)
    dims = (*found.batch, *found.rows, *found.columns)
    result = make(torch.ops.aten.reshape.default, whole := [sizes[d] for d in dims], result, whole)
    order = [dims.index(d) for d in sorted(dims)]
    result = make(torch.ops.aten.permute.default, [whole[d] for d in order], result, order)
    make(torch.ops.aten.reshape.default, found.value.shape, result, list(found.value.shape))
    return made


def _matrix(
    make: Callable[..., Value], product: Value, factor: Value, groups: Sequence[tuple[int, ...]], shape: Sequence[Any]
) -> Value:
    """`factor` as matrices: one dim for each group of dims of the product."""
    dims = sorted(d for group in groups for d in group)
    sizes = [product.shape[d] for d in dims]
    factor = make(torch.ops.aten.reshape.default, sizes, factor, sizes)
    order = [dims.index(d) for group in groups for d in group]
    factor = make(torch.ops.aten.permute.default, [sizes[d] for d in order], factor, order)
    return make(torch.ops.aten.reshape.default, shape, factor, list(shape))


def _product(sizes: Iterator[Any]) -> Any:
    total: Any = 1
    for size in sizes:
        total = total * size
    return total
