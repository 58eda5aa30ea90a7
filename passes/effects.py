"""What a node of a Dynamo graph writes to, told from its target and never by running it.

Errs towards "written": an op that nothing here knows (a function of the user's, a higher-order op, a module) may
write to everything it is given. Only tensors' contents count; what a pass does with the answer is its own business.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

_INPLACE_OPERATORS = frozenset(
    getattr(operator, n)
    for n in "setitem iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift".split()
)
_INPLACE_DUNDERS = frozenset(
    f"__{n}__"
    for n in "setitem iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift".split()
)
#: Parameters of torch's Python functions that are updated in place when given.
_STATISTICS = ("running_mean", "running_var")


def op_name(node: fx.Node) -> str:
    """Name of the tensor method, torch function or tensor attribute that `node` is; '' for everything else.

    A function of the user's that is called like one of torch's has no name here.
    """
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    if node.target is getattr:
        return str(node.args[1]) if len(node.args) > 1 else ""
    name = getattr(node.target, "__name__", "")
    genuine = any(getattr(home, name, None) is node.target for home in (torch, torch.Tensor, torch.nn.functional))
    return name if genuine else ""


def written(node: fx.Node) -> tuple[list[fx.Node], bool]:
    """Nodes whose tensors `node` writes to, and whether that is certain (False: it cannot be excluded)."""
    if node.op == "call_module":
        return node.all_input_nodes, False
    if node.op == "call_method":
        return _by_name(node, str(node.target)), True
    if node.op != "call_function":
        return [], True
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _by_schema(node, target), True
    if isinstance(target, torch._ops.OpOverloadPacket):
        names = target.overloads()  # type: ignore[no-untyped-call]
        mutable = any(getattr(target, name)._schema.is_mutable for name in names)
        return (node.all_input_nodes, False) if mutable else ([], True)
    if target in _INPLACE_OPERATORS:
        return _nodes(node.args[:1]), True
    if inspect.isfunction(target):
        return _by_signature(node, target)
    if not _is_builtin(target):
        return node.all_input_nodes, False
    name = getattr(target, "__name__", "")
    if name.endswith(("batch_norm", "instance_norm")):  # running statistics, at positions that differ
        return node.all_input_nodes, False
    if name.startswith("_") and name.endswith("_") and not name.endswith("__"):  # _fused_adam_ and its like
        return node.all_input_nodes, False
    return _by_name(node, name), True


def _by_name(node: fx.Node, name: str) -> list[fx.Node]:
    """The naming rule of torch's own operators: `add_` and `__iadd__` write to their first argument, `out=` to that."""
    inplace = (name.endswith("_") and not name.endswith("__")) or name in _INPLACE_DUNDERS
    first = node.args[:1] or tuple(v for k, v in node.kwargs.items() if k in ("input", "self"))
    return _nodes((first if inplace else (), node.kwargs.get("out")))


def _by_schema(node: fx.Node, target: torch._ops.OpOverload) -> list[fx.Node]:
    arguments = target._schema.arguments
    by_name = {a.name: a.alias_info is not None and a.alias_info.is_write for a in arguments}
    positional = [value for value, a in zip(node.args, arguments, strict=False) if by_name[a.name]]
    return _nodes((*positional, *(value for key, value in node.kwargs.items() if by_name.get(key))))


def _by_signature(node: fx.Node, target: Any) -> tuple[list[fx.Node], bool]:
    """Python functions: torch's own say by their parameters what they write; the user's may write to anything."""
    if str(getattr(target, "__module__", "")).partition(".")[0] != "torch":
        return node.all_input_nodes, False
    try:
        given = _signature(target).bind_partial(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):
        return node.all_input_nodes, False
    if given.get("max_norm") is not None:  # embedding renormalises its weight
        return node.all_input_nodes, False
    targets = [given[name] for name in _STATISTICS if name in given]
    if given.get("inplace") not in (None, False):
        targets.append(node.args[:1] or given.get("input"))
    return [*_by_name(node, target.__name__), *_nodes(targets)], True


@functools.cache
def _signature(target: Any) -> inspect.Signature:
    return inspect.signature(target)


def _is_builtin(target: Any) -> bool:
    """Functions compiled into Python or torch, which follow the naming rule."""
    home = str(getattr(target, "__module__", None) or "torch")
    return (inspect.isbuiltin(target) or inspect.ismethoddescriptor(target) or target is getattr) and (
        home.partition(".")[0] in ("torch", "_operator", "builtins", "math")
    )


def _nodes(values: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    _collect(values, found)
    return found


def _collect(value: Any, found: list[fx.Node]) -> None:
    if isinstance(value, fx.Node):
        found.append(value)
    elif isinstance(value, dict):
        _collect(value.values(), found)
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for item in value:
            _collect(item, found)
