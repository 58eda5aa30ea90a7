"""Which operators' workspaces are asked of the library: only running them on this processor tells, or no formula does.

All of them allocate the same whatever is in their tensors, so that zeros will do, but for those of `WITH_ONES`.
"""

from __future__ import annotations

import torch

from optpass.passes.memory.workspace import elementwise, library
from optpass.passes.memory.workspace.call import Call

#: Every formula, by the operator's name.
FORMULAS = {**elementwise.RULES, **library.RULES}
#: Products that oneDNN computes, in layouts and with scratchpads of its own choice for this processor.
_CONVOLUTIONS = frozenset(
    ("convolution", "convolution_backward", "_convolution", "mkldnn_convolution", "mkldnn_rnn_layer",
     "mkldnn_rnn_layer_backward", "thnn_conv2d", "_slow_conv2d_forward", "_slow_conv2d_backward", "slow_conv3d_forward",
     "slow_conv_transpose2d")
)  # fmt: skip
#: What is composed of other operators inside of ATen, or copies its operands in ways of its own.
_COMPOSED = frozenset(
    ("_euclidean_dist", "_trilinear", "dist", "ldexp", "renorm", "roll", "im2col", "col2im", "index_reduce", "histc",
     "mvlgamma", "_chunk_cat", "soft_margin_loss_backward", "_fft_c2c", "_fft_r2c", "_fft_c2r", "_unsafe_masked_index",
     "_unsafe_masked_index_put_accumulate", "cholesky_solve", "_fake_quantize_learnable_per_tensor_affine",
     "_fake_quantize_learnable_per_tensor_affine_backward", "_fake_quantize_learnable_per_channel_affine",
     "_fake_quantize_learnable_per_channel_affine_backward")
)  # fmt: skip
#: Beginnings of the names of whole families that are asked where there is no formula.
_FAMILIES = ("linalg_", "_linalg_", "upsample_", "_upsample_")
#: What allocates more the larger its numbers are, up to what it does of ones: a matrix is squared until it is small.
WITH_ONES = frozenset(("linalg_matrix_exp",))
#: What computes half precision by oneDNN, or in buffers of float32.
_HALF_PRECISION = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "gather", "scatter", "scatter_add", "scatter_reduce", "index_add",
     "_embedding_bag", "sum", "binary_cross_entropy_with_logits", "native_batch_norm_backward", "batch_norm_backward",
     *(name for name in FORMULAS if "attention" in name))
)  # fmt: skip
#: What copies operands that are not laid out as it reads them, and parts of names that say so of a family.
_READS_ROWS = frozenset(
    ("gelu_backward", "tril", "triu", "max", "min", "aminmax", "index_select", "log_sigmoid_forward", "narrow_copy",
     "searchsorted", "bucketize", "channel_shuffle", "multi_margin_loss", "multi_margin_loss_backward",
     "upsample_bicubic2d", "multilabel_margin_loss_forward", "multilabel_margin_loss_backward",
     "binary_cross_entropy_with_logits", "_cdist_forward", "_cdist_backward", "segment_reduce",
     "_segment_reduce_backward")
)  # fmt: skip
_READ_ROWS = ("pool", "_pad")
_HALF = (torch.bfloat16, torch.float16)


def is_library(call: Call) -> bool:
    """Whether the library is asked for the workspace of a call."""
    name = call.name if call.name.startswith("_") else call.name.removesuffix("_")  # in place, too
    if name in _CONVOLUTIONS or name in _COMPOSED:
        return True
    if name.startswith(("mkldnn.", "onednn.", "mkl.", "optpass.")):
        return True
    if name.startswith(_FAMILIES) and name not in FORMULAS:
        return True
    if name in _HALF_PRECISION and any(t.dtype in _HALF for _, t in call.tensors()):
        return True
    reads_rows = name in _READS_ROWS or any(part in name for part in _READ_ROWS)
    return reads_rows and not all(t.is_contiguous() for _, t in call.tensors())


#: On a GPU: products keep one workspace for the process (`around_gpu`), the others move numbers in one kernel.
_PLAIN_ON_GPU = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "clone", "_to_copy", "cat", "stack", "embedding", "gather",
     "index_select", "constant_pad_nd", "slice_scatter", "select_scatter", "slice_backward", "select_backward",
     "repeat", "bernoulli", "native_dropout")
)  # fmt: skip


#: What may be given integers of zero there: no kernel of theirs stops the device at one.
_INDICES_ON_GPU = ("attention", "embedding", "index_", "scatter", "nll_loss", "upsample", "pool", "sort", "topk")


def is_kernel_of_gpu(call: Call) -> bool:
    """Whether a GPU is asked for the workspace of a call: of what is no view, no function of elements and no draw.

    A kernel that is given an index which it does not expect stops the device for the rest of the process.
    """
    result = call.result()
    if result is None or result.device.type != "cuda" or call.target.namespace not in ("aten", "optpass"):
        return False
    tags, schema = call.target.tags, call.target._schema
    drawn = (torch.Tag.pointwise, torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape)
    if any(tag in tags for tag in drawn) or call.name in _PLAIN_ON_GPU:
        return False
    if schema.is_mutable or any(returned.alias_info is not None for returned in schema.returns):
        return False
    given = [tensor for _, tensor in call.tensors()]
    plain = all(t.is_floating_point() or t.is_complex() or t.dtype == torch.bool for t in given)
    return bool(given) and (plain or any(part in call.name for part in _INDICES_ON_GPU))
