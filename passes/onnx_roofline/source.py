"""Where an ONNX node comes from: module path and the user's line, from its name or from what torch.onnx wrote on it."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx

_SCOPES = "pkg.torch.onnx.name_scopes"
_STACK = "pkg.torch.onnx.stack_trace"


def module_of(node: onnx.NodeProto) -> str | None:
    """`blocks.0.attn`, from torch.onnx's name scopes or else from a name such as `/blocks.0/attn/MatMul`."""
    for entry in node.metadata_props:
        if entry.key == _SCOPES:
            return _innermost(entry.value)
    if not node.name.startswith("/"):
        return None
    return ".".join(part for part in node.name.strip("/").split("/")[:-1] if part) or None


def _innermost(text: str) -> str | None:
    """The last scope but one: the last is the op's own."""
    try:
        scopes = ast.literal_eval(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(scopes, list) or len(scopes) < 2:
        return None
    return str(scopes[-2]) or None


def metadata(node: onnx.NodeProto) -> dict[str, Any]:
    """FX metadata that `optpass.passes.source.locate` reads: stack trace and module stack."""
    found: dict[str, Any] = {}
    for entry in node.metadata_props:
        if entry.key == _STACK and entry.value:
            found["stack_trace"] = entry.value
    module = module_of(node)
    if module:
        found["nn_module_stack"] = {"": (module, "")}
    return found
