"""CPU workspaces of matrix products, attention, normalisation, embeddings, resampling and sorting."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from optpass.passes.memory.workspace.call import Call, copied, elements, nbytes, number, sizes, strides

_LONG = torch.long.itemsize
_HALF = (torch.bfloat16, torch.float16)


def _blas(matrix: torch.Tensor) -> bool:
    """Whether BLAS can read the matrix: one stride is 1, and the other spans the rows (`addmm_impl_cpu_`)."""
    rows, columns = sizes(matrix)[-2:]
    row, column = strides(matrix)[-2:]
    return (column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows))


def _product(call: Call) -> int:
    """Operands that BLAS cannot read are copied, one matrix of a batch at a time; an output likewise."""
    total = 0
    for name in ("self", "mat1", "mat2", "batch1", "batch2"):
        operand = call.get(name)
        if not isinstance(operand, torch.Tensor) or (name == "self" and call.name in ("addmm", "baddbmm")):
            continue
        if operand.dim() >= 2 and elements(operand) and not _blas(operand):
            total += nbytes(operand) // (sizes(operand)[0] if operand.dim() == 3 else 1)
    return total


def _attention_split(queries: int, keys: int) -> tuple[int, int]:
    """Rows and columns of the blocks of scores (`flash_attention_kernel_impl`, FlashAttentionKernel.cpp)."""
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), min(512, keys)


def _flash_attention(call: Call) -> int:
    """Per thread: a block of scores, its maxima and sums, and a block of the output; scores in half precision too."""
    query, key = call.tensor("query"), call.tensor("key")
    rows, columns = _attention_split(sizes(query)[-2], sizes(key)[-2])
    accumulate = 8 if query.dtype == torch.float64 else 4
    per_thread = accumulate * (rows * columns + 2 * rows + rows * sizes(query)[-1])
    if query.dtype in _HALF:
        per_thread += query.dtype.itemsize * rows * columns
    return torch.get_num_threads() * per_thread


def _flash_attention_backward(call: Call) -> int:
    """Per thread: blocks of scores and of their gradients, and sums of the rows; a copy of a gradient that is not
    laid out as [batch, sequence, head, width]."""
    query, key, gradient = call.tensor("query"), call.tensor("key"), call.tensor("grad_out")
    rows, columns = _attention_split(sizes(query)[-2], sizes(key)[-2])
    accumulate = 8 if query.dtype == torch.float64 else 4
    per_thread = accumulate * (2 * rows * columns + rows)
    if query.dtype in _HALF:
        per_thread += 2 * query.dtype.itemsize * rows * columns
    return torch.get_num_threads() * per_thread + copied(gradient.transpose(1, 2))


def _layer_norm(call: Call) -> int:
    return copied(call.get("input"))


def _layer_norm_backward(call: Call) -> int:
    """Sums of the weights' gradients, per thread (`LayerNormBackwardKernelImplInternal`)."""
    total = copied(call.get("grad_out")) + copied(call.get("input"))
    weight = call.get("weight")
    mask = call.get("output_mask") or (True, True, True)
    if isinstance(weight, torch.Tensor) and any(mask[1:]):
        total += 2 * torch.get_num_threads() * nbytes(weight)
    return total


def _group_norm(call: Call) -> int:
    """Channels last: scale and shift of each channel of each sample."""
    source = call.tensor("input")
    if source.is_contiguous() or source.dim() < 4:
        return 0
    return 2 * 4 * number(call.get("N")) * number(call.get("C"))


def _group_norm_backward(call: Call) -> int:
    """Sums over each channel of each sample: of the gradient, and of its product with the input."""
    return 2 * 4 * number(call.get("N")) * number(call.get("C"))


def _batch_norm(call: Call) -> int:
    """Scale and shift of each channel."""
    source = call.tensor("input")
    channels = sizes(source)[1] if source.dim() > 1 else 0
    return (2 if source.is_contiguous() and source.dim() > 2 else 3) * 4 * channels


def _batch_norm_backward(call: Call) -> int:
    """One tensor like the input, where its gradient is asked for (`batch_norm_backward_cpu_template`)."""
    gradient, source = call.get("grad_out"), call.tensor("input")
    mask = call.get("output_mask") or (True, True, True)
    alike = isinstance(gradient, torch.Tensor) and strides(gradient) == strides(source)
    return nbytes(source) if mask[0] and alike else 0


def _embedding_backward(call: Call) -> int:
    return copied(call.tensor("grad_output")) + copied(call.tensor("indices"))


def _embedding_bag_backward(call: Call) -> int:
    """Indices sorted, their order, and the bags in that order (`_embedding_bag_dense_backward_cpu`, EmbeddingBag.cpp).

    In mode max: of the bags that are not empty, their numbers, the largest entries and the gradient.
    """
    gradient, indices = call.tensor("grad"), call.tensor("indices")
    total, mode = copied(gradient), number(call.get("mode"))
    if mode == 2:
        bags = sizes(gradient)[0]
        return total + bags * _LONG + elements(gradient) * _LONG + nbytes(gradient)
    total += nbytes(indices) + 2 * elements(indices) * _LONG
    if call.name == "_embedding_bag_backward" and mode == 0:  # the forward of a sum does not say which bag is whose
        total += (elements(indices) + 1) * _LONG
    weights = call.get("per_sample_weights")
    return total + (nbytes(weights) if isinstance(weights, torch.Tensor) else 0)


def _embedding_bag_weights_backward(call: Call) -> int:
    """The bag of each index, where the forward does not say it (`_embedding_bag_per_sample_weights_backward_cpu`)."""
    indices = call.tensor("indices")
    known = elements(call.tensor("offset2bag")) > 0
    return 0 if known else 2 * indices.element_size() * (elements(indices) + 1)


def _ctc_loss_backward(call: Call) -> int:
    """The probabilities from the end, as many as those from the beginning (`ctc_loss_backward_cpu_template`)."""
    return nbytes(call.tensor("log_alpha"))


def _upsample(call: Call) -> int:
    """Small outputs go through the kernel for channels last: input and output are copied where they are not.

    (`_use_vectorized_kernel_cond_2d`, UpSampleKernel.cpp.) Others need, for each row and column of the output, the
    positions and the weights of what it is made of.
    """
    source, result = call.get("self"), call.result()
    if not isinstance(source, torch.Tensor) or result is None or source.dim() != 4:
        return 0
    last = torch.channels_last
    height, width = sizes(result)[-2:]
    if source.is_contiguous(memory_format=last) and not source.is_contiguous():
        return 0
    points = {"upsample_bilinear2d": 2, "upsample_bicubic2d": 4}.get(call.name, 1)
    alone = points == 2 and sizes(source)[1] == 3 and torch.get_num_threads() == 1  # images, whatever their size
    if points < 4 and (height + width <= 128 or alone):
        return copied(source, last) + copied(result, last)
    return points * (_LONG + source.element_size()) * (height + width)


def _sort(call: Call) -> int:
    """One row of values and of their order."""
    source = call.tensor("self")
    return sizes(source)[number(call.get("dim", -1))] * _LONG if source.dim() else 0


def _kthvalue(call: Call) -> int:
    source = call.tensor("self")
    return nbytes(source) + elements(source) * _LONG


RULES: Mapping[str, Callable[[Call], int]] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _product),
    "_scaled_dot_product_flash_attention_for_cpu": _flash_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_attention_backward,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
         "_batch_norm_with_update", "_batch_norm_with_update_functional"), _batch_norm,
    ),
    "native_batch_norm_backward": _batch_norm_backward,
    "batch_norm_backward": _batch_norm_backward,
    "embedding_dense_backward": _embedding_backward,
    "_embedding_bag_backward": _embedding_bag_backward,
    "_embedding_bag_dense_backward": _embedding_bag_backward,
    **dict.fromkeys(
        ("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d"), _upsample
    ),
    "sort": _sort,
    "kthvalue": _kthvalue,
    "_ctc_loss_backward": _ctc_loss_backward,
    "_embedding_bag_per_sample_weights_backward": _embedding_bag_weights_backward,
}  # fmt: skip
