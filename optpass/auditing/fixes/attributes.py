"""What a class's `__init__` makes its attributes from, where it stands in the same file."""

from __future__ import annotations

import ast

from optpass.auditing.fixes import tables
from optpass.auditing.fixes.scope import Module, Scope


def attributes_of(scope: Scope) -> dict[str, str | None]:
    """Attribute of `self` -> name of the class in `torch.nn` that it is made from, 'Parameter' or 'buffer'.

    None for an attribute that is made from something else, or more than once. A `Sequential` of pure modules counts as
    one of them.

    Args:
        scope: of a method; for any other function the result is empty.
    """
    source = scope.source
    cls = next(source.enclosing(scope.function, ast.ClassDef), None) if scope.function else None
    found: dict[str, str | None] = {}
    for node in ast.walk(cls) if cls is not None else ():
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _on_self(node):
            parent = source.parents[node]
            value = parent.value if isinstance(parent, ast.Assign) and parent.targets == [node] else None
            found[node.attr] = None if node.attr in found else _made(value, scope.module)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _on_self(node.func):
            name = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            if node.func.attr == "register_buffer" and isinstance(name, str):
                found[name] = "buffer"
    return found


def _made(value: ast.expr | None, module: Module) -> str | None:
    if not isinstance(value, ast.Call):
        return None
    dotted = Scope(module, None).dotted(value.func) or ""
    if not dotted.startswith("torch.nn."):
        return None
    name = dotted.rpartition(".")[2]
    if name == "Sequential":
        parts = [_made(part, module) for part in value.args]
        return "Identity" if parts and all(part in tables.PURE_MODULES for part in parts) else None
    return name


def _on_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"
