"""Results in memory of their own, for whoever is given one and may write to it, and what operators keep themselves.

Kernels keep their result for the backward.

`torch.ops.optpass.returned` is a clone that every compiler leaves where it is. Inductor takes one of `aten` between two
tensors of the same layout for a useless one before it knows which of them the backward keeps, and the caller then
writes to what gradients are computed from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from optpass.passes.attention.strides import has_gaps
from optpass.passes.attention.write.emit import Writer, tensor_of

_LIBRARY: Any = torch.library.Library("optpass", "FRAGMENT")  # type: ignore[no-untyped-call, unused-ignore]
#: The strides of the copy are those of what it is given.
_TAGS = tuple(
    tag for name in ("needs_exact_strides", "pt2_compliant_tag") if (tag := getattr(torch.Tag, name, None)) is not None
)
_LIBRARY.define("returned(Tensor result) -> Tensor", tags=_TAGS)


def _copy(result: Tensor) -> Tensor:
    return result.clone()


def _fake(result: Tensor) -> Tensor:
    return torch.empty_like(result)


def _passed_back(ctx: Any, grad: Tensor) -> Tensor:
    return grad


def _batched(info: Any, dims: tuple[int | None], result: Tensor) -> tuple[Tensor, int | None]:
    return OPERATOR(result), dims[0]


_LIBRARY.impl("returned", _copy, "CompositeExplicitAutograd")
torch.library.register_fake("optpass::returned", _fake, lib=_LIBRARY)
torch.library.register_autograd("optpass::returned", _passed_back, lib=_LIBRARY)
torch.library.register_vmap("optpass::returned", _batched, lib=_LIBRARY)

#: `(result)`: a copy of it, in its strides where no two of its elements share memory.
OPERATOR: Any = torch.ops.optpass.returned.default


def kept(writer: Writer, node: fx.Node) -> fx.Node:
    """`node` as an operator of ours may keep it for its backward, which leaves strides to Inductor.

    That gives a view with gaps strides of its own, and where they are not those that were traced, AOTAutograd takes
    them for numbers in a backward of symbolic sizes: the next length is an error.
    """
    have = tensor_of(node)
    symbolic = any(not isinstance(size, int) for size in have.shape)
    return writer.call(torch.Tensor.contiguous, node) if symbolic and has_gaps(have) else node
