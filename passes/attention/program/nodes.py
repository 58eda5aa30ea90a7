"""Nodes of a Dynamo graph by name: which are not looked into, which set state, which change a shape in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

#: Functions whose inside is never part of an attention, but for some linear layers (`reach.is_product`): their result
#: is a leaf, which keeps lowering cheap.
CLOSED = frozenset(
    "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d layer_norm rms_norm group_norm "
    "batch_norm instance_norm embedding embedding_bag cross_entropy gelu silu relu mish elu leaky_relu "
    "scaled_dot_product_attention interpolate max_pool2d avg_pool2d adaptive_avg_pool2d".split()
)
#: Of these, after which weights are still weights, though of another kind.
ACTIVATIONS = frozenset("gelu silu relu mish elu leaky_relu".split())
#: Nodes that set state instead of computing: they are run, so that what follows sees the state.
STATE = frozenset(
    "_enter_autocast _exit_autocast _set_grad_enabled _vmap_increment_nesting _vmap_decrement_nesting "
    "_add_batch_dim _remove_batch_dim _functorch_wrap lazy_load_decompositions".split()
)
#: Methods that change a tensor's shape in place: running them would change the fake tensor that Dynamo keeps.
RESHAPING = frozenset(
    "t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ resize_ resize_as_ as_strided_ set_ detach_ data "
    "requires_grad_ retain_grad".split()
)
#: Of these, what makes the view that its name says, and what gives a shape that only Dynamo knows.
VIEWS = frozenset("t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_".split())
RESIZES = frozenset("resize_ resize_as_ as_strided_ set_".split())
_PRODUCT_WORDS = ("matmul", "bmm", "mm", "einsum", "linear", "attention", "mv", "dot")


class NoTensor(Exception):
    """An argument of a node is nothing that can be run on fake tensors."""


def function_name(node: fx.Node) -> str:
    """Name of the function that a node calls; '' where it calls none."""
    return str(getattr(node.target, "__name__", node.target)) if node.op == "call_function" else ""


def method_name(node: fx.Node) -> str:
    """Name of the method that a node calls, as a method, a function or an operator (`torch.ops.aten.t_`)."""
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(node.target).split(".")[1]
    return function_name(node) or str(node.target)


def reshaped(method: str, args: Any, kwargs: Any, example: torch.Tensor) -> torch.Tensor:
    """What a method of `VIEWS` or `RESIZES` makes of its first argument, which keeps its shape.

    Args:
        example: what Dynamo says that the method returns.
    """
    if method in VIEWS:
        made: torch.Tensor = getattr(args[0], method[:-1])(*args[1:], **kwargs)
        return made
    try:
        view: torch.Tensor = args[0].as_strided(example.shape, example.stride(), example.storage_offset())
    except RuntimeError:  # it has more memory now
        return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)
    return view


def fake_mode(node: fx.Node) -> Any:
    """The mode of what Dynamo says that a node returns; None where that is no fake tensor."""
    return getattr(node.meta.get("example_value"), "fake_mode", None)


def is_symbolic(node: fx.Node) -> bool:
    """Whether a size in what Dynamo says that the node returns is not known."""
    values = tree_leaves(node.meta.get("example_value"))
    return any(
        v._has_symbolic_sizes_strides if isinstance(v, torch.Tensor) else isinstance(v, torch.SymInt) for v in values
    )


def is_wrapped(node: fx.Node) -> bool:
    """Whether a node is given or returns a tensor that stands for others, as a DTensor does for its shards."""
    values = (n.meta.get("example_value") for n in (node, *node.all_input_nodes))
    return any(isinstance(v, torch.Tensor) and hasattr(v, "__tensor_flatten__") for v in tree_leaves(list(values)))


def run(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """What a call of a function or method gives for these arguments."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def multiplies(node: fx.Node) -> bool:
    """Whether a node is a product of matrices or an attention, by its name."""
    name = method_name(node)
    return any(word in name for word in _PRODUCT_WORDS)


def calls_dropout(node: fx.Node) -> bool:
    """Whether a node calls a Python function that may call a dropout, as `F.multi_head_attention_forward` does."""
    return "dropout" in getattr(getattr(node.target, "__code__", None), "co_names", ())


def softmax_inside(body: object) -> bool:
    """Whether a graph makes a softmax and multiplies nothing with it: then its caller may."""
    if not isinstance(body, fx.GraphModule):
        return False
    names = [str(n.target) for m in body.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes]
    last = max((i for i, name in enumerate(names) if "softmax" in name), default=-1)
    return last > max((i for i, name in enumerate(names) if any(word in name for word in _PRODUCT_WORDS)), default=-1)
