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
        gathers: reads its first argument at positions that other data decides.
        row_dims: trailing dimensions of a gather's result that run through a row of the source.
        stores: the result is always stored.
        mutates: position of the argument written to, for scatters and `copy_`.
        copies_first: a scatter that starts from its first argument, not from zeros.
        reduced: dimensions that a reduction reduces.
    """

    name: str
    role: Role
    gathers: bool = False
    row_dims: int = 0
    stores: bool = False
    mutates: int | None = None
    copies_first: bool = True
    reduced: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Fusing:
    """How an op goes into kernels with others.

    Attributes:
        inlined: its result is computed inside whoever reads it, where that is possible.
        reads: what it reads may be computed inside it.
        overwrites: its result may take the place of an input of the same size that nobody reads afterwards.
        heavy: where its result is read more than once, it is stored.
    """

    inlined: bool = False
    reads: bool = False
    overwrites: bool = False
    heavy: bool = False


#: Ops that Inductor's CPU backend stores when their result is reused (`ir.StorageBox.should_realize_on_reuse`).
HEAVY = frozenset({"exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"})

_CONSTANT = frozenset(
    "full iota arange scalar_tensor zeros ones empty full_like zeros_like ones_like empty_like new_empty new_full "
    "new_zeros new_ones inductor_seeds inductor_lookup_seed sym_size sym_numel empty_strided eye rngprims".split()
)
_GATHER = frozenset(
    "embedding gather index index_select take take_along_dim _unsafe_index _unsafe_masked_index".split()
)
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
        return LoweredOp(name, Role.EXTERN, mutates=0, copies_first=name != "embedding_dense_backward")
    if name in ("copy_", "copy") and name.endswith("_"):
        return LoweredOp(name, Role.POINTWISE, mutates=0)
    if kind == "view":
        return LoweredOp(name, Role.VIEW)
    if name in _GATHER:
        return LoweredOp(name, Role.POINTWISE, gathers=True, row_dims=_row_dims(node, x, name))
    if name in _COPYING:
        return LoweredOp(name, Role.POINTWISE, stores=name in ("cat", "stack"))
    if name in _RNG or kind in _POINTWISE_KINDS:
        return LoweredOp(name, Role.POINTWISE, stores=name in _RNG)  # drawn once, however often it is used
    if name in _REDUCE:
        return _reduction(node, x, name)
    return LoweredOp(name, Role.EXTERN)


def fusing_of(target: object, kind: str) -> Fusing:
    """How an op goes into kernels with others, by its name and its `OpCost.kind` ('other' where that is not known)."""
    name = base_name(target)
    if _draws(target):  # what is left of them after Inductor's joint-graph passes is a kernel of its own
        return Fusing()
    if name in _SCATTER and name not in _POINTWISE_SCATTER:
        return Fusing(overwrites=name != "embedding_dense_backward")
    if name in _CONSTANT or name in _GATHER or name in _POINTWISE_SCATTER:
        return Fusing(inlined=True, reads=True)
    if name in _COPYING or name in _RNG or kind in _POINTWISE_KINDS:
        stored = name in _RNG or name in ("cat", "stack") or name.endswith("_")
        return Fusing(inlined=not stored, reads=True, overwrites=True, heavy=name in HEAVY)
    return Fusing(reads=name in _REDUCE)


def _draws(target: object) -> bool:
    """Whether an operator draws from a generator, rather than from a seed as `inductor_random` does."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace != "prims"
        and torch.Tag.nondeterministic_seeded in target.tags
    )


def _row_dims(node: fx.Node, x: Extractor, name: str) -> int:
    """Dimensions of the source that are not indexed, at its end."""
    from optpass.passes.roofline.extract import tensors

    source = next((t for a in node.all_input_nodes[:1] for t in tensors(x.values[a])), None)
    if source is None or name in ("gather", "take", "take_along_dim"):
        return 0
    if name == "embedding":
        return source.dim() - 1
    if name == "index_select":
        return max(0, source.dim() - 1 - int(node.args[1] % source.dim()))  # type: ignore[operator]
    indices = node.args[1] if len(node.args) > 1 else ()
    used = len(indices) if isinstance(indices, (list, tuple)) else 1
    return max(0, source.dim() - used)


def _reduction(node: fx.Node, x: Extractor, name: str) -> LoweredOp:
    """The dims of a reduction; all of them where none are given."""
    from optpass.passes.roofline.extract import tensors

    source = next((t for a in node.all_input_nodes[:1] for t in tensors(x.values[a])), None)
    if source is None:
        return LoweredOp(name, Role.EXTERN)
    position = 2 if name in ("norm", "linalg_vector_norm") else 1
    given = node.args[position] if len(node.args) > position else node.kwargs.get("dim")
    return LoweredOp(name, Role.REDUCTION, reduced=frozenset(_dims(given, source.dim())))


def _dims(given: Any, rank: int) -> tuple[int, ...]:
    if isinstance(given, int):
        return (given % rank if rank else 0,)
    if isinstance(given, (list, tuple)) and given and all(isinstance(d, int) for d in given):
        return tuple(d % rank if rank else 0 for d in given)
    return tuple(range(rank))
