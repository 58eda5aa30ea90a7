"""How an operator lays out its result on a CPU, where its fake form says otherwise.

Fake tensors follow decompositions, most of which were written after the kernels for CUDA. A gradient that comes out
permuted, or does not, decides whether the operator behind it copies it first. What is here was found by running the
operators of PyTorch's own tests, forward and backward, on permuted inputs, fake and real.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from optpass.passes.memory.workspace.call import Call

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _contiguous(call: Call, out: torch.Tensor) -> tuple[int, ...]:
    return torch.empty_like(out, memory_format=torch.contiguous_format).stride()


def _as_product(call: Call, out: torch.Tensor) -> tuple[int, ...]:
    """As an element-wise operator lays out what it makes of its operands (`TensorIterator`)."""
    first, *others = (tensor for _, tensor in call.tensors())
    return torch.mul(first, others[0]).stride() if others else torch.empty_like(first).stride()


def _like(name: str) -> Callable[[Call, torch.Tensor], tuple[int, ...]]:
    return lambda call, out: torch.empty_like(call.tensor(name)).stride()


def _format_of(name: str) -> Callable[[Call, torch.Tensor], tuple[int, ...]]:
    """Channels last where the operand is, else contiguous (`suggest_memory_format`)."""

    def rule(call: Call, out: torch.Tensor) -> tuple[int, ...]:
        given = call.tensor(name)
        last = _FORMATS.get(given.dim())
        if last is None or given.is_contiguous() or not given.is_contiguous(memory_format=last):
            last = torch.contiguous_format
        return torch.empty_like(out, memory_format=last).stride()

    return rule


#: By the operator: the strides of its first result.
RULES: Mapping[str, Callable[[Call, torch.Tensor], tuple[int, ...]]] = {
    **dict.fromkeys(
        ("native_dropout_backward", "hardtanh_backward", "hardswish_backward", "logit_backward", "xlogy", "copysign",
         "floor_divide", "div"), _as_product,
    ),
    **dict.fromkeys(
        ("huber_loss_backward", "mse_loss_backward", "smooth_l1_loss_backward", "_log_softmax_backward_data",
         "native_layer_norm_backward", "log_sigmoid_forward"), _contiguous,
    ),
    **dict.fromkeys(("binary_cross_entropy", "binary_cross_entropy_backward"), _like("self")),
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
         "_batch_norm_with_update", "_batch_norm_with_update_functional", "native_batch_norm_backward",
         "batch_norm_backward"), _format_of("input"),
    ),
    **dict.fromkeys(
        ("reflection_pad2d_backward", "replication_pad2d_backward", "reflection_pad3d_backward",
         "replication_pad3d_backward", "reflection_pad3d", "replication_pad3d"), _format_of("self"),
    ),
}  # fmt: skip


def as_run(target: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """`out`, which is what the call returns with fake tensors, its first tensor laid out as the operator does it.

    Runs in the fake mode that made `out`.
    """
    if not isinstance(target, torch._ops.OpOverload) or target.overloadpacket.__name__ not in RULES:
        return out
    first = out[0] if isinstance(out, (list, tuple)) and out else out
    if not isinstance(first, torch.Tensor) or first.device.type != "cpu" or first.dim() < 2:
        return out
    call = Call.of(target, args, kwargs, out)
    if call is None or call.name not in RULES:
        return out
    strides = RULES[call.name](call, first)
    if strides == first.stride():
        return out
    laid = torch.empty_strided(first.shape, strides, dtype=first.dtype, device=first.device)
    return laid if first is out else type(out)((laid, *out[1:]))
