"""What costs the device nothing or belongs to no family: sizes, asserts, Python scalars, collectives, wrapper
ops.

Not here: control-flow ops that carry whole graphs (cond, scan, invoke_subgraph): their cost is that of the
graphs, which the caller walks; they are unknown to this registry on purpose.
"""

from __future__ import annotations

from optpass.passes.roofline.flops.cost import OpCost
from optpass.passes.roofline.flops.registry import Call, op_cost, register, words
from optpass.passes.roofline.flops.shapes import numel

_HOST = words("""
sym_size sym_stride sym_numel sym_storage_offset sym_is_contiguous sym_constrain_range
sym_constrain_range_for_size size stride numel dim storage_offset is_contiguous is_floating_point is_complex
is_same_size is_nonzero item _local_scalar_dense _assert_async _assert_scalar _assert_tensor_metadata
_functional_assert_async _functional_assert_scalar _functional_sym_constrain_range
_functional_sym_constrain_range_for_size _make_dep_token _print result_type can_cast promote_types
_linalg_check_errors _fused_sdp_choice record_stream _nested_tensor_size _nested_tensor_strides
_nested_tensor_storage_offsets _nested_compute_contiguous_strides_offsets _shape_as_tensor _version
_has_same_storage_numel _use_cudnn_ctc_loss _use_miopen_ctc_loss is_pinned is_conj is_neg is_set_to
_is_zerotensor _validate_compressed_sparse_indices prims::item mkldnn::_get_mkldnn_serialized_md
mkldnn::_nbytes mkldnn::data_ptr mkldnn::_is_mkldnn_acl_supported mkldnn::_is_mkldnn_bf16_supported
mkldnn::_is_mkldnn_fp16_supported profiler::_record_function_enter profiler::_record_function_enter_new
profiler::_record_function_exit rngprims::philox_rand_offset higher_order::print higher_order::_export_tracepoint
""")

#: Arithmetic on sizes: done by the host, once per call.
_PYTHON = words("""
getitem add sub mul floordiv truediv mod pow neg pos abs eq ne lt le gt ge and_ or_ xor not_ invert lshift
rshift is_ is_not contains index min max floor ceil trunc sqrt log sum_ sym_max sym_min sym_float sym_int
sym_ite sym_not sym_sum sym_fresh_size iadd isub imul ifloordiv itruediv setitem concat truth
""")


@register(*_HOST, *(f"python::{name}" for name in _PYTHON))
def _host(c: Call) -> OpCost:
    return OpCost(0, "view" if c.name == "python::getitem" else "other")


_C10D = "_c10d_functional::"


@register(
    *(
        _C10D + name
        for name in words("""
        all_gather_into_tensor all_gather_into_tensor_coalesced all_gather_into_tensor_out all_to_all_single
        broadcast wait_tensor _wrap_tensor_autograd irecv isend batch_p2p_ops
        """)
    )
)
def _transfer(c: Call) -> OpCost:
    return OpCost(0, "copy")


@register(
    *(
        _C10D + name
        for name in words("""
        all_reduce all_reduce_coalesced reduce_scatter_tensor reduce_scatter_tensor_coalesced
        reduce_scatter_tensor_out
        """)
    )
)
def _reduce_over_ranks(c: Call) -> OpCost:
    """Each rank adds (g - 1) / g of its input in a ring; the group size is not in every schema, so the whole
    input.
    """
    return OpCost(numel(c.at(0)), "other")


@register("higher_order::run_and_save_rng_state", "higher_order::run_with_rng_state")
def _with_rng_state(c: Call) -> OpCost | None:
    """(op, *args) returning (state, out), and (state, op, *args) returning out: the op inside is what costs."""
    if c.name.endswith("run_and_save_rng_state"):
        out = c.out[1] if isinstance(c.out, list | tuple) and len(c.out) == 2 else c.out
        return op_cost(c.args[0], c.args[1:], c.kwargs, out)
    return op_cost(c.args[1], c.args[2:], c.kwargs, c.out)


@register("higher_order::graphsafe_run_with_rng_state")
def _graphsafe(c: Call) -> OpCost | None:
    kwargs = {key: value for key, value in c.kwargs.items() if key != "rng_state"}
    return op_cost(c.args[0], c.args[1:], kwargs, c.out)


@register("higher_order::with_effects")
def _with_effects(c: Call) -> OpCost | None:
    """(token, op, *args) returning (token, *outputs)."""
    out = tuple(c.out[1:]) if isinstance(c.out, list | tuple) else c.out
    return op_cost(c.args[1], c.args[2:], c.kwargs, out[0] if isinstance(out, tuple) and len(out) == 1 else out)
