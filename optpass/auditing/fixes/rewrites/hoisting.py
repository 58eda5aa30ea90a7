"""Values that do not change from call to call: taken once, when the module is imported."""

from __future__ import annotations

import ast

from optpass.auditing.fixes import tables
from optpass.auditing.fixes.facts import Facts
from optpass.auditing.fixes.site import Site
from optpass.auditing.fixes.source import Edit, apply_edits

_READERS = frozenset(
    "json.load tomllib.load pickle.load yaml.safe_load builtins.list builtins.tuple builtins.len".split()
)
_FILE_METHODS = frozenset("read readline readlines".split())
_CONVERSIONS = frozenset("builtins.int builtins.float builtins.str builtins.bool builtins.len".split())


class HoistCall:
    """`os.getenv("MODE")`, `socket.gethostname()`: a constant of the module."""

    name = "hoist"
    note = "The value is taken once, on import."

    def edits(self, site: Site, facts: Facts) -> list[Edit] | None:
        """Put the call in front of the function or class, and its name in its place."""
        for call in site.expressions:
            if isinstance(call, ast.Call) and facts.scope.dotted(call.func) in tables.CONSTANT_CALLS:
                return self._hoist(call, site, facts)
        return None

    def _hoist(self, call: ast.Call, site: Site, facts: Facts) -> list[Edit] | None:
        place = _before_function(site, facts)
        text = site.source.segment(call)
        arguments = [*call.args, *(k.value for k in call.keywords)]
        if place is None or "\n" in text or not all(isinstance(a, ast.Constant) for a in arguments):
            return None
        if any(isinstance(a, ast.Constant) and not isinstance(a.value, str | int | float | None) for a in arguments):
            return None
        root = call.func
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name) or root.id not in facts.scope.module.imports:
            return None  # imported inside of the function: unknown where the constant would stand
        parent = site.source.parents[call]
        target = parent.targets[0] if isinstance(parent, ast.Assign) else None
        wanted = target.id if isinstance(target, ast.Name) else _words(call)
        name = site.scope.fresh(f"_{wanted.strip('_').upper()}")
        line = f"{name} = {text}{site.source.newline * 3}"
        return [Edit(place, place, line), site.replace(call, name)]


class HoistFile:
    """`with open("words.txt") as f: words = f.read()`: read once, on import."""

    name = "hoist-file"
    note = "The file is read once, on import."

    def edits(self, site: Site, facts: Facts) -> list[Edit] | None:
        """Move a `with open(...)` of a constant path that only reads into names to the module."""
        statement = site.statement
        if not isinstance(statement, ast.With) or len(statement.items) != 1 or not site.source.alone(statement):
            return None
        item = statement.items[0]
        place = _before_function(site, facts)
        handle = item.optional_vars
        if place is None or not isinstance(handle, ast.Name) or not self._reads(item.context_expr, facts):
            return None
        names = self._names(statement, handle.id, facts)
        if names is None or len(site.source.block(statement)) == 1:
            return None
        text, indent = self._dedented(statement, site), site.source.newline * 2
        return [Edit(place, place, text + indent), Edit(*site.source.whole_lines(statement, statement), "")]

    def _reads(self, call: ast.expr, facts: Facts) -> bool:
        if not isinstance(call, ast.Call) or facts.scope.dotted(call.func) != "builtins.open" or call.keywords:
            return False
        mode = call.args[1] if len(call.args) > 1 else None
        reading = mode is None or (isinstance(mode, ast.Constant) and mode.value in ("r", "rb", "rt"))
        return reading and 1 <= len(call.args) <= 2 and self._constant(call.args[0], facts)

    def _constant(self, path: ast.expr, facts: Facts) -> bool:
        """A literal, `__file__`, or a name that the module binds once, to a literal."""
        if not isinstance(path, ast.Name) or facts.scope.local(path.id):
            return isinstance(path, ast.Constant)
        values = facts.scope.module.assigned.get(path.id, [])
        return path.id == "__file__" or (len(values) == 1 and isinstance(values[0], ast.Constant))

    def _names(self, statement: ast.With, handle: str, facts: Facts) -> list[str] | None:
        """The names that the block reads the file into; None where it does anything else."""
        scope, names = facts.scope, []
        for inner in statement.body:
            target = inner.targets[0] if isinstance(inner, ast.Assign) and len(inner.targets) == 1 else None
            if (
                not isinstance(inner, ast.Assign)
                or not isinstance(target, ast.Name)
                or not self._of_file(inner.value, handle, facts)
            ):
                return None
            module = facts.scope.module
            taken = target.id in module.assigned or target.id in module.imports
            if scope.value(target.id) is None or taken:
                return None
            names.append(target.id)
        inside = set(ast.walk(statement))
        return names if all(load in inside for load in scope.loads(handle)) else None

    def _of_file(self, node: ast.expr, handle: str, facts: Facts) -> bool:
        if isinstance(node, ast.Name):
            return node.id == handle
        if not isinstance(node, ast.Call) or node.keywords:
            return False
        if isinstance(node.func, ast.Attribute) and facts.scope.dotted(node.func) is None:
            plain = node.func.attr in _FILE_METHODS | {"strip", "split", "splitlines", "lower"}
            return (
                plain
                and all(isinstance(a, ast.Constant) for a in node.args)
                and self._of_file(node.func.value, handle, facts)
            )
        known = facts.scope.dotted(node.func) in _READERS | _CONVERSIONS
        return known and len(node.args) == 1 and self._of_file(node.args[0], handle, facts)

    def _dedented(self, statement: ast.With, site: Site) -> str:
        start, end = site.source.whole_lines(statement, statement)
        text, indent = site.source.text[start:end], len(site.source.indent(statement))
        cuts, at = [], 0
        for line in text.splitlines(keepends=True):
            cuts.append(Edit(at, at + min(indent, len(line) - len(line.lstrip(" \t"))), ""))
            at += len(line)
        return apply_edits(text, cuts)


def _before_function(site: Site, facts: Facts) -> int | None:
    """Offset in front of the top-level function or class around the site, its decorators and comments included."""
    if site.function is None or isinstance(site.function, ast.Lambda):
        return None
    chain = [site.function, *site.source.enclosing(site.function)]
    top = next((node for node in chain if node in site.source.tree.body), None)
    if not isinstance(top, ast.FunctionDef | ast.ClassDef) or not site.source.alone(top):
        return None
    start, _ = site.source.whole_lines(top, top)
    line = min([top.lineno, *(d.lineno for d in top.decorator_list)])
    while line > 1 and site.source.line(line - 1).startswith("#"):
        line -= 1
        start = site.source.line_start(line)
    return start


def _words(call: ast.Call) -> str:
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value.isidentifier():
        return first.value
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
