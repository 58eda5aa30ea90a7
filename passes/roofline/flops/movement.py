"""Ops that move or name data and do no arithmetic: views, copies, casts, fills, concatenation, packing.

Here: names only; every op here costs 0 by its nature. Not here: anything that computes a value.
"""

from __future__ import annotations

from optpass.passes.roofline.flops.cost import OpCost
from optpass.passes.roofline.flops.registry import Call, register, words
from optpass.passes.roofline.flops.shapes import numel, shape

_VIEWS = words("""
view view_as reshape reshape_as _unsafe_view _reshape_alias t transpose permute expand expand_as squeeze
unsqueeze slice select narrow unfold diagonal linalg_diagonal as_strided alias detach split split_with_sizes
chunk unsafe_split unsafe_split_with_sizes unsafe_chunk tensor_split hsplit vsplit dsplit unbind flatten
unflatten ravel movedim moveaxis swapaxes swapdims numpy_T mT mH matrix_H adjoint broadcast_to
broadcast_tensors view_as_real view_as_complex real imag conj _conj resolve_conj resolve_neg _neg_view lift
lift_fresh atleast_1d atleast_2d atleast_3d _values _indices values indices slice_inverse set resize resize_as
_nested_view_from_buffer _nested_view_from_jagged _nested_get_values _nested_get_offsets _nested_get_lengths
_nested_get_jagged_dummy _nested_get_ragged_idx _nested_get_min_seqlen _nested_get_max_seqlen data _fw_primal
_make_dual _unpack_dual prims::as_strided prims::broadcast_in_dim prims::collapse_view prims::conj
prims::split_dim prims::squeeze prims::transpose prims::view_of prims::view_of_dtype prims::real prims::imag
prims::resize prims::inductor_force_stride_order inductor::_reinterpret_tensor inductor::_alloc_from_pool
inductor::resize_storage_bytes_ prims::_make_token prims::_sink_tokens retain_grad
""")

_COPIES = words("""
clone copy _to_copy to type_as contiguous lift_fresh_copy _lazy_clone _copy_from _copy_from_and_resize
_reshape_copy _to_cpu to_mkldnn to_dense to_dense_backward to_mkldnn_backward _mkldnn_reshape
_mkldnn_transpose pin_memory _pin_memory chalf _cast_Byte _cast_Char _cast_Double _cast_Float _cast_Half
_cast_Int _cast_Long _cast_Short _autocast_to_reduced_precision _autocast_to_full_precision cat concat
concatenate stack hstack vstack dstack row_stack column_stack block_diag _chunk_cat pad_sequence _stack repeat
tile flip fliplr flipud roll rot90 channel_shuffle native_channel_shuffle constant_pad_nd pad _pad_circular
_pad_enum reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
replication_pad3d im2col slice_scatter select_scatter diagonal_scatter as_strided_scatter slice_backward
select_backward diagonal_backward diag diag_embed diagflat empty empty_like empty_strided empty_permuted
empty_quantized new_empty new_empty_strided _efficientzerotensor zeros zeros_like new_zeros ones ones_like
new_ones full full_like new_full fill zero scalar_tensor _new_zeros_with_same_feature_meta fill_diagonal
complex meshgrid cartesian_prod combinations tril_indices triu_indices _jagged_to_padded_dense_forward
_padded_dense_to_jagged_forward _nested_from_padded nested_to_padded_tensor _nested_from_padded_tensor
to_padded_tensor _nested_tensor_from_mask _foreach_copy _foreach_clone _foreach_zero flatten_dense_tensors
unflatten_dense_tensors _dyn_quant_pack_4bit_weight _convert_weight_to_int4pack
_convert_weight_to_int4pack_for_cpu mkldnn_reorder_conv2d_weight mkldnn_reorder_conv3d_weight
prims::as_strided_scatter prims::cat prims::clone prims::collapse prims::convert_element_type
prims::copy_strided prims::copy_to prims::device_put prims::empty prims::empty_permuted prims::empty_strided
prims::fill prims::full prims::full_like prims::reshape prims::rev prims::scalar_tensor prims::maximum_value
prims::minimum_value mkldnn::_reorder_linear_weight mkldnn::_reorder_convolution_weight
mkldnn::_reorder_convolution_transpose_weight mkldnn::_reorder_mkldnn_rnn_layer_weight
mkl::_mkl_reorder_linear_weight onednn::qlinear_prepack onednn::qconv_prepack onednn::linear_prepack_fp16
quantized_decomposed::convert_element_type optpass::lost_rows optpass::lost_rows_backward
optpass::returned
""")

_VIEW_COPIES = [
    f"{name}_copy"
    for name in words("""
    view _reshape_alias t transpose permute expand squeeze unsqueeze slice select unfold diagonal as_strided
    alias detach split split_with_sizes unbind view_as_real view_as_complex _conj _neg_view _values _indices
    values indices narrow _nested_view_from_buffer _nested_view_from_jagged _nested_get_values _fw_primal
    """)
]


@register(*_VIEWS)
def _view(c: Call) -> OpCost:
    return OpCost(0, "view")


@register(*_COPIES, *_VIEW_COPIES)
def _copy(c: Call) -> OpCost:
    return OpCost(0, "copy")


@register("arange", "range", "linspace", "prims::iota")
def _ramp(c: Call) -> OpCost:
    return OpCost(2 * numel(c.out), "pointwise")  # start + i * step


@register("logspace")
def _logspace(c: Call) -> OpCost:
    n = numel(c.out)
    return OpCost(3 * n, "pointwise", transcendental=n)


@register("eye")
def _eye(c: Call) -> OpCost:
    return OpCost(numel(c.out), "pointwise")  # row == column


@register("hann_window", "hamming_window", "bartlett_window", "blackman_window", "kaiser_window")
def _window(c: Call) -> OpCost:
    """Cosine terms: angle 1, cos 1, multiply, add; Blackman has two, Kaiser sqrt(1 - x x) and a Bessel
    function 7.
    """
    per, library = {"blackman_window": (8, 2), "kaiser_window": (7, 2), "bartlett_window": (4, 0)}.get(c.base, (4, 1))
    n = numel(c.out)
    return OpCost(per * n, "pointwise", transcendental=library * n)


@register("vander", "linalg_vander")
def _vander(c: Call) -> OpCost:
    return OpCost(numel(c.out), "scan" if shape(c.out) else "pointwise")  # a running product per row
