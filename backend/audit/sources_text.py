"""Dynamo's source expressions in the user's terms: `L['self']._modules['blocks']._modules['0'].scale` is
`self.blocks[0].scale`, `L['x'].size()[1]` is `x.size(1)`, `G['__import_a_dot_b'].C` is `a.b.C`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

#: Evaluates an expression in the scope of its guards; raises what evaluation raises.
Evaluate = Callable[[str], Any]

_HELD = ("_modules", "_parameters", "_buffers")
_TRANSPARENT = {
    "___from_numpy", "___as_tensor", "___normalize_range_iter", "___normalize_count_iter", "___tuple_iterator_len",
}  # fmt: skip
_SIZES = ("size", "stride")
_IMPORTED = re.compile(r"^__import_(.*)$")
_BUILTINS = re.compile(r"^__builtins_dict__")
_STACK = re.compile(r"^___stack(\d+)$")


class Words:
    """How one frame's places are put in the user's terms.

    Args:
        evaluate: looks an expression up, to name closure variables and defaults; None: they are numbered.
        names: texts for some expressions, e.g. where Dynamo put a frame of its own around what the user compiled.
    """

    def __init__(self, evaluate: Evaluate | None = None, names: Mapping[str, str] | None = None) -> None:
        self.evaluate, self.names = evaluate, dict(names or {})


def user_terms(expression: str, words: Words | None = None) -> str:
    """`expression` as the user would write it; unchanged where it cannot be read."""
    try:
        tree = ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        return expression
    try:
        return _Writer(words or Words()).write(tree)
    except RecursionError:
        return expression


def condition_in_user_terms(expression: str, words: Words | None = None) -> str:
    """A guard's condition, its sources in the user's terms."""
    try:
        tree = ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError, RecursionError):
        return expression
    writer = _Writer(words or Words())

    class Rewrite(ast.NodeTransformer):
        def generic_visit(self, node: ast.AST) -> ast.AST:
            if is_source(node):
                return ast.Name(writer.write(node), ast.Load())
            return super().generic_visit(node)

    return ast.unparse(ast.fix_missing_locations(Rewrite().visit(tree)))


def sources_in(expression: str) -> list[str]:
    """Source expressions in a condition, outermost ones only, in order."""
    try:
        tree = ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError, RecursionError):
        return []
    found: list[str] = []

    def visit(node: ast.AST) -> None:
        if is_source(node):
            found.append(ast.unparse(node))
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return list(dict.fromkeys(found))


def is_source(node: ast.AST) -> bool:
    """Whether the expression is a path that begins at `L[...]` or `G[...]`."""
    while True:
        match node:
            case ast.Subscript(value=ast.Name(id="L" | "G")):
                return True
            case ast.Subscript(value=inner) | ast.Attribute(value=inner):
                node = inner
            case ast.Call(func=ast.Attribute(value=inner, attr="size" | "stride" | "storage_offset"), args=[]):
                node = inner
            case ast.Call(func=ast.Name(id=name), args=[inner]) if name in _TRANSPARENT:
                node = inner
            case ast.Call(func=inner, args=[], keywords=[]) if not isinstance(inner, ast.Attribute | ast.Name):
                node = inner  # a weak reference's object
            case _:
                return False


def prefixes(expression: str) -> list[str]:
    """The expression's path, from its root ('L['self']') to itself; what is called on the way stays inside."""
    try:
        node: ast.AST = ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        return []
    found: list[str] = []
    while True:
        match node:
            case ast.Subscript(value=ast.Name(id="L" | "G")):
                found.append(ast.unparse(node))
                return found[::-1]
            case ast.Subscript(value=inner) | ast.Attribute(value=inner):
                found.append(ast.unparse(node))
                node = inner
            case ast.Call(func=ast.Attribute(value=inner), args=[]):
                found.append(ast.unparse(node))
                node = inner
            case ast.Call(args=[inner, *_]):
                found.append(ast.unparse(node))
                node = inner
            case _:
                return found[::-1]


class _Writer:
    def __init__(self, words: Words) -> None:
        self.evaluate, self.names = words.evaluate, words.names

    def write(self, node: ast.AST) -> str:
        if self.names and (name := self.names.get(ast.unparse(node))) is not None:
            return name
        match node:
            case ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value=str(name))):
                return _local(name)
            case ast.Subscript(value=ast.Name(id="G"), slice=ast.Constant(value=str(name))):
                return _global(name)
            case ast.Subscript(value=inner, slice=index):
                return self.subscript(inner, index)
            case ast.Attribute(value=inner, attr=attribute):
                return self.attribute(inner, attribute)
            case ast.Call(func=called, args=arguments):
                return self.call(node, called, arguments)
            case _:
                return ast.unparse(node)

    def subscript(self, inner: ast.AST, index: ast.AST) -> str:
        match inner, index:
            case ast.Subscript(value=ast.Name(id="G"), slice=ast.Constant(value=str(name))), ast.Constant(
                value=str(key)
            ) if _BUILTINS.match(name):
                return key
            case ast.Attribute(value=owner, attr=attribute), ast.Constant(value=str(key)) if attribute in _HELD:
                return self.write(owner) + (f"[{key!r}]" if self.keyed(owner) else _member(key))
            case ast.Attribute(value=owner, attr="_data"), ast.Constant(value=bytes(key)):  # os.environ
                return f"{self.write(owner)}[{key.decode(errors='replace')!r}]"
            case ast.Attribute(value=owner, attr="__dict__"), ast.Constant(value=str(key)):
                return f"{self.write(owner)}.{key}"
            case ast.Call(func=ast.Name(id="dict"), args=[ast.Attribute(value=owner, attr="__dict__")]), ast.Constant(
                value=str(key)
            ):
                return f"{self.write(owner)}.{key}"
            case ast.Attribute(value=owner, attr="__kwdefaults__"), ast.Constant(value=str(key)):
                return f"{self.write(owner)}'s default of {key}"
            case ast.Attribute(value=owner, attr="__defaults__"), ast.Constant(value=int(position)):
                return self.default(owner, position)
            case ast.Attribute(value=owner, attr="__closure__"), ast.Constant(value=int(position)):
                return self.cell(owner, position)
            case ast.Call(func=ast.Attribute(value=owner, attr=attribute), args=[]), ast.Constant(
                value=int(position)
            ) if attribute in _SIZES:
                return f"{self.write(owner)}.{attribute}({position})"
            case ast.Call(func=ast.Name(id="list"), args=[ast.Call(args=[mapping])]), _:
                return f"list({self.write(mapping)})[{ast.unparse(index)}]"
        return f"{self.write(inner)}[{ast.unparse(index)}]"

    def keyed(self, owner: ast.AST) -> bool:
        """Whether the members of a module are its items: of a `ModuleDict` or a `ParameterDict`."""
        return isinstance(self._evaluated(owner), torch.nn.ModuleDict | torch.nn.ParameterDict)

    def attribute(self, inner: ast.AST, attribute: str) -> str:
        if attribute in ("cell_contents", "__dict__", "__code__", "__func__"):
            return self.write(inner)
        if attribute == "_orig_mod" or attribute in _HELD:
            return self.write(inner)
        if attribute == "__class__":
            return f"type({self.write(inner)})"
        return f"{self.write(inner)}.{attribute}"

    def call(self, node: ast.AST, called: ast.AST, arguments: list[ast.expr]) -> str:
        match called, arguments:
            case ast.Attribute(value=owner, attr=attribute), []:
                return f"{self.write(owner)}.{attribute}()"
            case ast.Subscript(), []:
                return f"{self.write(called)}()"
            case ast.Name(id=name), [argument, *_] if name in _TRANSPARENT:
                return self.write(argument)
            case ast.Name(id="___odict_getitem" | "___tuple_iterator_getitem"), [mapping, key]:
                return f"{self.write(mapping)}[{ast.unparse(key)}]"
            case ast.Attribute(value=ast.Name(id="dict" | "list" | "tuple"), attr="__getitem__"), [mapping, key]:
                return f"{self.write(mapping)}[{ast.unparse(key)}]"
            case ast.Name(id=name), [argument]:
                return f"{name.lstrip('_')}({self.write(argument)})"
        return ast.unparse(node)

    def cell(self, owner: ast.AST, position: int) -> str:
        names = self._of(owner, "co_freevars")
        return names[position] if position < len(names) else f"{self.write(owner)}'s closure variable {position}"

    def default(self, owner: ast.AST, position: int) -> str:
        names = self._of(owner, "co_varnames")
        defaults = self._evaluated(owner)
        given = getattr(defaults, "__defaults__", None) or ()
        count = getattr(getattr(defaults, "__code__", None), "co_argcount", 0)
        index = count - len(given) + position
        name = names[index] if 0 <= index < len(names) else f"argument {position}"
        return f"{self.write(owner)}'s default of {name}"

    def _of(self, owner: ast.AST, attribute: str) -> tuple[str, ...]:
        code = getattr(self._evaluated(owner), "__code__", None)
        return tuple(getattr(code, attribute, ()))

    def _evaluated(self, owner: ast.AST) -> Any:
        if self.evaluate is None:
            return None
        try:
            return self.evaluate(ast.unparse(owner))
        except Exception:  # noqa: BLE001  # the object may be of any kind and be gone by now: it is then not named
            return None


def _local(name: str) -> str:
    if stack := _STACK.match(name):
        return f"<intermediate value {stack[1]}>"
    return name


def _global(name: str) -> str:
    if imported := _IMPORTED.match(name):
        return imported[1].replace("_dot_", ".")
    return name


def _member(key: str) -> str:
    return f"[{key}]" if key.isdigit() else f".{key}" if key.isidentifier() else f"[{key!r}]"
