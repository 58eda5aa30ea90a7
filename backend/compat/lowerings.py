"""How Inductor calls operators of ours.

`returned` and cuDNN's backward as the operators of torch that they stand for, without Python in between: an operator
that Python implements costs its caller some 20 microseconds a call, twice that where it has a gradient of its own, as
much as small kernels take. Copies to host memory from one buffer, which is kept until they are there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Lowering = Callable[..., Any]
#: Place of the forward's result among the arguments of cuDNN's backward; the gradient and the queries come first.
_RESULT = 4
#: The attribute of Inductor's graph that has the buffers that are copied to host memory, by their nodes.
_COPIED_OUT = "optpass_copied_out"


def install() -> None:
    """Tell Inductor of the operators that there are by now. Those that it is not told of are called as any other."""
    try:
        from torch._inductor.lowering import lowerings
    except ImportError:
        return
    for name, make in _LOWERINGS.items():
        packet = getattr(torch.ops.optpass, name, None)
        if packet is not None and packet.default not in lowerings:
            lowerings[packet.default] = make()


def _called(operator: Any) -> Lowering:
    from torch._inductor.lowering import fallback_handler

    return fallback_handler(operator, add_to_fallback_set=False)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]


def _returned() -> Lowering:
    return _called(torch.ops.aten.clone.default)


def _cudnn_attention_backward() -> Lowering:
    from torch._inductor.ir import ExternKernel, get_stride_order
    from torch._inductor.virtualized import V

    theirs = _called(torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default)
    protected = _called(torch.ops.optpass.cudnn_attention_backward.default)

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


def _offload() -> Lowering:
    from torch._inductor.virtualized import V

    begin = _called(torch.ops.optpass.offload.default)
    return lambda source: begin(_copied_out(V.graph, V.graph.current_node.args[0], source))


def _offloaded() -> Lowering:
    from torch._inductor.virtualized import V

    end = _called(torch.ops.optpass.offloaded.default)
    return lambda ticket, source: end(ticket, _copied_out(V.graph, V.graph.current_node.args[1], source))


def _copied_out(graph: Any, node: Any, value: Any) -> Any:
    """What is copied out, in one buffer for both halves of the copy, in the strides of the graph."""
    from torch._inductor.ir import ExternKernel

    known: dict[Any, Any] = graph.__dict__.setdefault(_COPIED_OUT, {})
    if node not in known:
        value.realize()
        known[node] = ExternKernel.require_exact_strides(value, node.meta["val"].stride())  # type: ignore[no-untyped-call, unused-ignore]
    return known[node]


_LOWERINGS: dict[str, Callable[[], Lowering]] = {
    "returned": _returned,
    "cudnn_attention_backward": _cudnn_attention_backward,
    "offload": _offload,
    "offloaded": _offloaded,
}
