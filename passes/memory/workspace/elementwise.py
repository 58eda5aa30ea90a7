"""CPU workspaces of element-wise operators, reductions, softmax, dropout and losses.

Most are copies in another dtype: on CPU a TensorIterator casts an operand that has not the common dtype as a whole
(`TensorIteratorBase::compute_types`, aten/src/ATen/TensorIterator.cpp), which on CUDA happens in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from optpass.passes.memory.workspace.call import (
    Call,
    common_dtype,
    copied,
    elements,
    nbytes,
    number,
    sizes,
    strides,
    transposing,
)

_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"))
#: Element-wise by their tag, but not computed in a common dtype.
_NO_PROMOTION = frozenset(("clone", "_to_copy", "copy", "fill", "masked_fill", "logical_not", "isnan", "alias"))
#: Operands that say where, not what: never cast.
_MASKS = frozenset(("condition", "mask"))
_NONE, _MEAN, _SUM = 0, 1, 2
_HALF = (torch.bfloat16, torch.float16)


def promotion(call: Call) -> int:
    """Casts of a TensorIterator: each operand, and the output of an in-place form, that has not the common dtype."""
    name = call.name.removesuffix("_") if not call.name.startswith("_") else call.name
    result = call.result()
    if result is None or name in _NO_PROMOTION:
        return 0
    operands = [t for argument, t in call.tensors() if argument not in _MASKS and argument != "out"]
    in_place = call.name.endswith("_") or isinstance(call.get("out"), torch.Tensor)
    if name in _COMPARISONS or in_place:
        values = [v for k, v in call.args.items() if k not in _MASKS and k not in ("out", "alpha", "rounding_mode")]
        common = common_dtype([item for v in values for item in (v if isinstance(v, (list, tuple)) else (v,))])
    elif result.dtype == torch.bool:
        return 0
    else:
        common = result.dtype
    total = sum(nbytes(t, common) for t in operands if t.dim() > 0 and t.dtype != common)
    if in_place and result.dtype != common and name not in _COMPARISONS:
        total += nbytes(result, common)
    return total


def _accumulate(call: Call) -> int:
    """sum, prod, cumsum, ...: the input in the output's dtype (`make_reduction`, ReduceOpsUtils.h)."""
    source, result = call.tensor("self"), call.result()
    return nbytes(source, result.dtype) if result is not None and result.dtype != source.dtype else 0


def _mean(call: Call) -> int:
    """A half-precision mean is a float sum of a float copy, then divided (`mean`, ReduceOps.cpp)."""
    source, result = call.tensor("self"), call.result()
    if result is None:
        return 0
    if result.dtype in _HALF and source.dtype == result.dtype:
        return nbytes(source, torch.float32) + nbytes(result, torch.float32)
    return _accumulate(call)


def _truth(call: Call) -> int:
    source = call.tensor("self")
    return 0 if source.dtype in (torch.bool, torch.uint8) else nbytes(source, torch.bool)


def _norm(call: Call) -> int:
    source, dtype = call.tensor("self"), call.get("dtype")
    return nbytes(source, dtype) if dtype is not None and dtype != source.dtype else 0


def _logsumexp(call: Call) -> int:
    """exp(x - max), and the maxima."""
    source, result = call.tensor("self"), call.result()
    return nbytes(source) + (nbytes(result) if result is not None else 0)


def _isinf(call: Call) -> int:
    """`self.abs() == inf`."""
    source = call.tensor("self")
    return nbytes(source) if source.is_floating_point() else 0


def _clone(call: Call) -> int:
    source, result = call.tensor("self"), call.result()
    return transposing(source) if result is not None and result.is_contiguous() else 0


def _softmax(call: Call) -> int:
    return copied(call.tensor("self"))


def _safe_softmax(call: Call) -> int:
    """Which scores are minus infinity, which rows are that throughout, and a zero (`_safe_softmax`, SoftMax.cpp).

    The softmax before it needs its input in the dtype of the result.
    """
    source, result = call.tensor("self"), call.result()
    if result is None or not source.dim():
        return 0
    cast = nbytes(source, result.dtype) if result.dtype != source.dtype else copied(source)
    of_rows = elements(source) // max(1, sizes(source)[number(call.get("dim", -1))])
    return max(cast, elements(source) + of_rows + result.element_size())


def _of_complex(call: Call) -> int:
    """What is real of a complex number is computed in a complex tensor, of which the real part is taken."""
    source = call.tensor("self")
    return nbytes(source) if source.is_complex() else promotion(call)


def _multinomial(call: Call) -> int:
    """Several with replacement: the distribution of one row; else a race of exponentials, and its best
    (Distributions.cpp)."""
    source, count = call.tensor("self"), number(call.get("num_samples"))
    categories = sizes(source)[-1]
    if call.get("replacement", False) and count > 1:
        return categories * max(source.element_size(), 4)  # summed in float at least
    best = elements(source) // max(1, categories) * count * source.element_size()
    return nbytes(source) + (best if count > 1 else 0)


def _softmax_backward(call: Call) -> int:
    return copied(call.tensor("grad_output")) + copied(call.tensor("output"))


def _dropout(call: Call) -> int:
    """The mask in the input's dtype, for the product (`native_dropout_cpu`, Dropout.cpp)."""
    return nbytes(call.tensor("input")) if call.get("train", True) is not False else 0


def _dropout_backward(call: Call) -> int:
    """`grad * (mask.type_as(grad) * scale)`."""
    return nbytes(call.tensor("grad_output"))


def _gelu_backward(call: Call) -> int:
    """oneDNN's form copies a gradient that is not laid out as the input, and its result back into that layout.

    `gelu_backward_out_cpu` (Activation.cpp) takes it for contiguous float inputs and the exact form.
    """
    gradient, source = call.tensor("grad_output"), call.tensor("self")
    if call.get("approximate", "none") != "none" or source.dtype != torch.float32 or not source.is_contiguous():
        return promotion(call)
    return copied(gradient) * (2 if torch._prims_common.is_non_overlapping_and_dense_or_false(gradient) else 1)


def _fma(call: Call) -> int:
    """Outside of generated code it is a product and a sum."""
    return nbytes(result) if (result := call.result()) is not None else 0


def _pair_loss(call: Call) -> int:
    """Element-wise losses are computed whole before they are reduced."""
    return 0 if call.get("reduction", _MEAN) == _NONE else _whole(call) + _own_loss(call)


def _own_loss(call: Call) -> int:
    """Those whose elements stand in the result: half precision is averaged in a float copy, as by `_mean`."""
    result = call.result()
    if result is None or result.dtype not in _HALF or call.get("reduction", _MEAN) != _MEAN:
        return 0
    return _whole(call, torch.float32)


def _logits_loss(call: Call) -> int:
    whole = _whole(call)
    return whole if call.get("reduction", _MEAN) == _NONE else 2 * whole


def _whole(call: Call, dtype: torch.dtype | None = None) -> int:
    """Bytes of all elements of a loss, in `dtype` or their own."""
    source, target = call.tensor("self"), call.tensor("target")
    larger = source if source.numel() >= target.numel() else target
    return nbytes(larger, dtype or torch.promote_types(source.dtype, target.dtype))


def retained_copy(call: Call) -> int:
    """The functional forms of writing to a view copy the whole storage behind what they are given
    (`clone_preserve_strides`, aten/src/ATen/native/TensorFactories.cpp), of which the result is a view."""
    given, result = next(call.tensors())[1], call.result()
    if result is None or any(
        stride == 0 and size > 1 for size, stride in zip(sizes(given), strides(given), strict=True)
    ):
        return 0
    return max(0, number(given.untyped_storage().nbytes()) - number(result.untyped_storage().nbytes()))


def retained_fold(call: Call) -> int:
    """The result is made in the size of the columns first (`col2im_out_cpu_template`, Col2Im.cpp)."""
    result = call.result()
    return max(0, nbytes(call.tensor("self")) - nbytes(result)) if result is not None else 0


def retained_loss(call: Call) -> int:
    """A loss that is reduced into the tensor that held its elements keeps their storage.

    `mse_loss` and its like (structured kernels with a borrowed output, aten/src/ATen/native/Loss.cpp): the scalar that
    they return is a view of as many bytes as there are elements.
    """
    result = call.result()
    if result is None or call.get("reduction", _MEAN) == _NONE:
        return 0
    return max(0, _whole(call) - nbytes(result))


RULES: Mapping[str, Callable[[Call], int]] = {
    **dict.fromkeys(("sum", "prod", "cumsum", "cumprod", "nansum"), _accumulate),
    "mean": _mean,
    "any": _truth,
    "all": _truth,
    "linalg_vector_norm": _norm,
    "logsumexp": _logsumexp,
    "isinf": _isinf,
    "clone": _clone,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "_safe_softmax": _safe_softmax,
    "abs": _of_complex,
    "angle": _of_complex,
    "multinomial": _multinomial,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _softmax_backward,
    "native_dropout": _dropout,
    "native_dropout_backward": _dropout_backward,
    "gelu_backward": _gelu_backward,
    "prims.fma": _fma,
    "mse_loss": _pair_loss,
    "smooth_l1_loss": _pair_loss,
    "huber_loss": _pair_loss,
    "binary_cross_entropy": _own_loss,
    "soft_margin_loss": _own_loss,
    "binary_cross_entropy_with_logits": _logits_loss,
}

#: Operators whose result holds more bytes than its own elements.
RETAINED: Mapping[str, Callable[[Call], int]] = {
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"), retained_loss),
    "col2im": retained_fold,
    **dict.fromkeys(("copy", "slice_scatter", "select_scatter", "diagonal_scatter"), retained_copy),
}
