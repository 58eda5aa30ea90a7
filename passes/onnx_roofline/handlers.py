"""Which ops of ai.onnx are walked rather than expanded, and how a handler reads its node. No handler lives here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from optpass.passes.onnx_roofline.value import Item, Value

if TYPE_CHECKING:
    import onnx

    from optpass.passes.onnx_roofline.walk import Frame, Walker

Handler = Callable[["Walker", "onnx.NodeProto", "Frame", list[Item]], list[Item]]
_HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Decorator: what walks these ops."""

    def wrap(handler: Handler) -> Handler:
        for name in names:
            _HANDLERS[name] = handler
        return handler

    return wrap


def control_of(domain: str, op: str) -> Handler | None:
    """What walks this op, if it is control flow or a sequence."""
    return _HANDLERS.get(op) if domain == "" else None


def handled() -> set[str]:
    """Every op of ai.onnx that is handled here."""
    return set(_HANDLERS)


def number_of(item: Item) -> Any:
    """The single number of a value, or None."""
    if isinstance(item, Value) and item.const is not None and item.const.size == 1:
        return item.const.reshape(-1)[0].item()
    return None


def graph_of(node: onnx.NodeProto, name: str) -> onnx.GraphProto:
    """The graph inside a node. Raises StopIteration if there is none of that name."""
    found: onnx.GraphProto = next(a.g for a in node.attribute if a.name == name)
    return found


def attr_of(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """An int attribute, or one of several ints as a list."""
    for attribute in node.attribute:
        if attribute.name == name:
            return list(attribute.ints) if attribute.ints else attribute.i
    return default


def label(node: onnx.NodeProto) -> str:
    """The node as a note names it."""
    return f"{node.op_type} {node.name!r}" if node.name else node.op_type
