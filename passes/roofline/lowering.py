"""What each ATen op becomes when it is lowered: a view, part of a loop nest, a reduction, or a kernel of its own."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from optpass.passes.roofline.program import OpInfo

if TYPE_CHECKING:
    from optpass.passes.roofline.extract import Extractor


class Role(enum.Enum):
    """How an op is lowered."""

    NOTHING = "nothing"  #: constants and scalars: folded into whoever uses them
    GETITEM = "getitem"
    VIEW = "view"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    EXTERN = "extern"  #: a library kernel, or one that cannot fuse


@dataclass(frozen=True, slots=True)
class LoweredOp:
    """An op with its role.

    Attributes:
        name: base name, e.g. 'exp'.
        narrows: a view that touches fewer elements than its source (slice, select, split).
        order: a layout change that fusion must respect (the permutation), or None.
        gathers: reads only as many elements of its first argument as it has results.
        stores: the result is always stored.
        mutates: position of the argument written to, for scatters and `copy_`.
        elements: elements read by a reduction; `reduced` of them make one result.
        innermost: the reduction runs over the trailing dimensions.
    """

    name: str
    role: Role
    narrows: bool = False
    order: object = None
    gathers: bool = False
    stores: bool = False
    mutates: int | None = None
    elements: int = 0
    reduced: int = 1
    innermost: bool = True


_CONSTANT = frozenset(
    "full iota arange scalar_tensor zeros ones empty full_like zeros_like ones_like empty_like new_empty new_full "
    "new_zeros new_ones inductor_seeds inductor_lookup_seed sym_size sym_numel empty_strided eye rngprims".split()
)
_NARROW = frozenset("slice select split split_with_sizes unbind narrow chunk diagonal as_strided unfold".split())
_ORDER = frozenset("permute transpose t mT movedim".split())
_GATHER = frozenset("embedding gather index index_select take take_along_dim _unsafe_index _unsafe_masked_index".split())
_SCATTER = frozenset(
    "index_put index_put_ scatter scatter_add scatter_reduce index_add index_copy _unsafe_index_put slice_scatter "
    "select_scatter as_strided_scatter _unsafe_masked_index_put_accumulate embedding_dense_backward".split()
)
_POINTWISE_SCATTER = frozenset("slice_scatter select_scatter diagonal_scatter".split())
_REDUCE = frozenset(
    "sum mean amax amin max min var var_mean std std_mean prod any all argmax argmin norm linalg_vector_norm "
    "logsumexp xor_sum aminmax".split()
)
_COPYING = frozenset("cat stack constant_pad_nd pad repeat flip roll".split())
_RNG = frozenset("inductor_random inductor_randint rand randn bernoulli native_dropout rand_like randn_like".split())
_POINTWISE_KINDS = frozenset({"pointwise", "copy"})


def base_name(target: object) -> str:
    """`exp` for `aten.exp.default`; the function's name for anything else."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return getattr(target, "__name__", str(target))


def role_of(node: fx.Node, x: Extractor, info: OpInfo) -> LoweredOp:
    """How `node` is lowered."""
    from optpass.passes.roofline.extract import tensors

    name = base_name(node.target)
    out = tensors(x.values[node])
    if name == "getitem":
        return LoweredOp(name, Role.GETITEM)
    if not out or name in _CONSTANT:
        return LoweredOp(name, Role.NOTHING)
    kind = info.cost.kind if info.cost is not None else "other"
    if name in _POINTWISE_SCATTER:
        return LoweredOp(name, Role.POINTWISE)
    if name in _SCATTER:
        return LoweredOp(name, Role.EXTERN, mutates=0)
    if name in ("copy_", "copy") and name.endswith("_"):
        return LoweredOp(name, Role.POINTWISE, mutates=0)
    if kind == "view":
        order = tuple(node.args[1]) if name == "permute" and len(node.args) > 1 else (name if name in _ORDER else None)
        return LoweredOp(name, Role.VIEW, narrows=name in _NARROW, order=order)
    if name in _GATHER:
        return LoweredOp(name, Role.POINTWISE, gathers=True)
    if name in _COPYING:
        return LoweredOp(name, Role.POINTWISE, stores=name in ("cat", "stack"))
    if name in _RNG:
        return LoweredOp(name, Role.POINTWISE)
    if kind in _POINTWISE_KINDS:
        copies = name == "clone" or name == "_to_copy"
        return LoweredOp(name, Role.POINTWISE, stores=False) if not copies else LoweredOp(name, Role.POINTWISE)
    if name in _REDUCE:
        return _reduction(node, x, name)
    return LoweredOp(name, Role.EXTERN)


def _reduction(node: fx.Node, x: Extractor, name: str) -> LoweredOp:
    """Sizes of a reduction: from its input, its dims, or its result where dims are not given."""
    from optpass.passes.roofline.extract import tensors

    source = next((t for a in node.all_input_nodes for t in tensors(x.values[a])), None)
    out = tensors(x.values[node])[0]
    if source is None:
        return LoweredOp(name, Role.EXTERN)
    dims = _dims(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim"), source.dim())
    elements = source.numel()
    reduced = max(1, elements // max(1, out.numel()))
    innermost = set(dims) == set(range(source.dim() - len(dims), source.dim()))
    return LoweredOp(name, Role.REDUCTION, elements=elements, reduced=reduced, innermost=innermost)


def _dims(given: Any, rank: int) -> tuple[int, ...]:
    if isinstance(given, int):
        return (given % rank if rank else 0,)
    if isinstance(given, (list, tuple)) and given and all(isinstance(d, int) for d in given):
        return tuple(d % rank if rank else 0 for d in given)
    return tuple(range(rank))
