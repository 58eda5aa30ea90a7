"""Names in a source file: what a dotted expression is called, and who reads and writes a function's locals."""

from __future__ import annotations

import ast
import builtins
from functools import cached_property

from optpass.auditing.fixes.source import Function, Source

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_BUILTINS = frozenset(dir(builtins))


class Module:
    """The names that a module binds at its top."""

    def __init__(self, source: Source) -> None:
        self.source = source

    @cached_property
    def imports(self) -> dict[str, str]:
        """Local name -> dotted path of what it imports, e.g. {'F': 'torch.nn.functional'}."""
        return imports_of(self.source.tree.body)

    @cached_property
    def assigned(self) -> dict[str, list[ast.expr | None]]:
        """Name -> the values assigned to it at the top of the module; None for what is not a plain assignment."""
        found: dict[str, list[ast.expr | None]] = {}
        for statement in self.source.tree.body:
            for node in _own(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
                    found.setdefault(node.id, []).append(_plain_value(self.source, node))
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.setdefault(statement.name, []).append(None)
        return found

    @cached_property
    def torch(self) -> str | None:
        """What torch is called here; None if it is not imported."""
        return next((name for name, path in self.imports.items() if path == "torch"), None)


class Scope:
    """A function's names."""

    def __init__(self, module: Module, function: Function | None) -> None:
        self.module = module
        self.function = function
        self.source = module.source

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """The function's own nodes, in order of the source; those of functions and classes inside it left out."""
        if self.function is None:
            return []
        body = self.function.body if isinstance(self.function.body, list) else [self.function.body]
        return [node for statement in body for node in _own(statement)]

    @cached_property
    def parameters(self) -> frozenset[str]:
        """Names of the parameters."""
        if self.function is None:
            return frozenset()
        a = self.function.args
        several = [a.vararg, a.kwarg]
        return frozenset(p.arg for p in [*a.posonlyargs, *a.args, *a.kwonlyargs, *(s for s in several if s)])

    @cached_property
    def _inner(self) -> list[ast.AST]:
        """Nodes of functions and classes inside this function."""
        scopes = [node for node in self.nodes if isinstance(node, _SCOPES)]
        return [inner for scope in scopes for inner in ast.walk(scope)]

    @cached_property
    def imports(self) -> dict[str, str]:
        """Local imports of the function."""
        return imports_of([node for node in self.nodes if isinstance(node, ast.stmt)])

    def stores(self, name: str) -> list[ast.AST]:
        """Where the name is bound or deleted: assignments, loops, imports, inner functions, handlers, patterns."""
        return [node for node in self.nodes if name in _bound(node)]

    def loads(self, name: str) -> list[ast.Name]:
        """Where the name is read, by the function itself."""
        return [n for n in self.nodes if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]

    def shared(self, name: str) -> bool:
        """Whether the name's value can be seen from outside of the function's own statements."""
        declared = any(isinstance(n, ast.Global | ast.Nonlocal) and name in n.names for n in self.nodes + self._inner)
        inner = any(isinstance(n, ast.Name) and n.id == name for n in self._inner)
        dynamic = any(
            isinstance(n, ast.Name) and n.id in ("locals", "vars", "eval", "exec") for n in self.nodes + self._inner
        )
        return declared or inner or dynamic

    def local(self, name: str) -> bool:
        """Whether the function binds the name itself."""
        return name in self.parameters or bool(self.stores(name))

    def value(self, name: str) -> ast.expr | None:
        """The value of a name that is assigned once, plainly; None otherwise."""
        stores = self.stores(name)
        if name in self.parameters or len(stores) != 1 or not isinstance(stores[0], ast.Name) or self.shared(name):
            return None
        return _plain_value(self.source, stores[0])

    def dotted(self, node: ast.AST) -> str | None:
        """The imported or built-in thing that an expression names, e.g. 'torch.nn.functional.relu'; None if unknown."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        root = self._root(node.id)
        return ".".join([root, *reversed(parts)]) if root else None

    def _root(self, name: str) -> str | None:
        if self.function is not None and self.local(name):
            return self.imports.get(name) if name not in self.parameters and len(self.stores(name)) == 1 else None
        for above in self.source.enclosing(self.function) if self.function is not None else ():
            if isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                outer = Scope(self.module, above)
                if outer.local(name):
                    return outer._root(name)
        if name in self.module.imports:
            return self.module.imports[name] if name not in self.module.assigned else None
        return f"builtins.{name}" if name in _BUILTINS and name not in self.module.assigned else None

    def fresh(self, name: str) -> str:
        """A name like this one that nothing in the file uses."""
        used = {n.id for n in ast.walk(self.source.tree) if isinstance(n, ast.Name)}
        used |= {n.arg for n in ast.walk(self.source.tree) if isinstance(n, ast.arg)}
        candidate, number = name, 2
        while candidate in used:
            candidate, number = f"{name}{number}", number + 1
        return candidate


def imports_of(statements: list[ast.stmt]) -> dict[str, str]:
    """Local name -> dotted path, from import statements, also those under `try` and `if`."""
    found: dict[str, str] = {}
    for node in (inner for statement in statements for inner in _own(statement)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                found[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    return found


def _own(statement: ast.AST) -> list[ast.AST]:
    """The nodes under a statement without those of functions and classes in it (their own node is there)."""
    found, waiting = [], [statement]
    while waiting:
        node = waiting.pop()
        found.append(node)
        if isinstance(node, _SCOPES):
            waiting += reversed(getattr(node, "decorator_list", []))
        else:
            waiting += reversed(list(ast.iter_child_nodes(node)))
    return found


def _bound(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.Name):
        return (node.id,) if isinstance(node.ctx, ast.Store | ast.Del) else ()
    if isinstance(node, ast.Import | ast.ImportFrom):
        return tuple(a.asname or a.name.split(".")[0] for a in node.names)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return (node.name,)
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        return (node.name,) if node.name else ()
    return ()


def _plain_value(source: Source, target: ast.Name) -> ast.expr | None:
    """The value of `name = value`, where that is what the target stands in."""
    parent = source.parents[target]
    if isinstance(parent, ast.Assign) and parent.targets == [target]:
        return parent.value
    return parent.value if isinstance(parent, ast.AnnAssign) and parent.target is target else None
