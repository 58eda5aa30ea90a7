"""How Inductor calls operators of ours: as the operators of torch that they stand for, without Python in between.

An operator that Python implements costs its caller some 20 microseconds a call, twice that where it has a gradient of
its own: as much as small kernels take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Lowering = Callable[..., Any]
#: Place of the forward's result among the arguments of cuDNN's backward; the gradient and the queries come first.
_RESULT = 4


def install() -> None:
    """Tell Inductor of the operators that there are by now. Those that it is not told of are called as any other."""
    try:
        from torch._inductor.ir import ExternKernel, get_stride_order
        from torch._inductor.lowering import fallback_handler, lowerings
        from torch._inductor.virtualized import V
    except ImportError:
        return

    def called(operator: Any) -> Lowering:
        return fallback_handler(operator, add_to_fallback_set=False)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]

    def copy() -> Lowering:
        return called(torch.ops.aten.clone.default)

    def backward() -> Lowering:
        theirs = called(torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default)
        protected = called(torch.ops.optpass.cudnn_attention_backward.default)

        def lower(*args: Any, **kwargs: Any) -> Any:
            wanted = args[_RESULT].maybe_get_stride()
            if wanted is None:
                return protected(*args, **kwargs)
            gradient, query, *others = args
            gradient = ExternKernel.require_exact_strides(gradient, wanted)
            # Computed again in the backward, queries may lie otherwise than those that the result was laid out after.
            query = ExternKernel.require_stride_order(query, get_stride_order(wanted, V.graph.sizevars.shape_env))
            alike = V.graph.sizevars.statically_known_list_equals(gradient.get_stride(), wanted)
            return (theirs if alike else protected)(gradient, query, *others, **kwargs)

        return lower

    for name, make in {"returned": copy, "cudnn_attention_backward": backward}.items():
        packet = getattr(torch.ops.optpass, name, None)
        if packet is not None and packet.default not in lowerings:
            lowerings[packet.default] = make()
