"""Which private names of torch `backend/compat/` uses, and whether a given torch has them: read, not imported.

    python tests/backend/compat/torch_names.py torch-2.15.0-...whl /path/to/pytorch ...

says for each wheel, source tree or `site-packages` what is not there. `test_torch_names.py` asks it about the torch
that is installed. A name that is used behind `getattr` with a default, `hasattr`, or in a `try` that catches
ImportError has a fallback and counts as optional.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

COMPAT = Path(__file__).parents[3] / "backend" / "compat"


@dataclass(frozen=True, order=True)
class Use:
    """One name of torch's that a file of ours uses.

    Attributes:
        module: where it lives.
        path: 'name' or 'Class.name'; '' for the module itself.
        parameters: names that its signature must have, in this order.
        call: how many positional arguments it is called with, and the keywords; None where it is not called.
        where: our file and line.
        optional: there is something to do without it.
    """

    module: str
    path: str
    parameters: tuple[str, ...]
    where: str
    optional: bool
    call: tuple[int, tuple[str, ...]] | None = None

    @property
    def name(self) -> str:
        return f"{self.module}.{self.path}" if self.path else self.module


def is_private(dotted: str) -> bool:
    """Whether a dotted name is torch's and has a part that begins with an underscore."""
    parts = dotted.split(".")
    return parts[0] == "torch" and any(p.startswith("_") and not p.startswith("__") for p in parts[1:])


class _Reader(ast.NodeVisitor):
    """Uses in one file. Names bound by an import are followed as far as attributes of them are read."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[Use] = []
        self.bound: list[dict[str, str]] = [{}]
        self.guarded = 0

    def use(self, dotted: str, node: ast.AST, optional: bool = False, parameters: tuple[str, ...] = ()) -> None:
        module, _, path = dotted.partition(":")
        if is_private(f"{module}.{path}"):
            where = f"{self.file}:{getattr(node, 'lineno', 0)}"
            self.found.append(Use(module, path, parameters, where, optional or bool(self.guarded)))

    def call(self, dotted: str, node: ast.Call) -> None:
        self.use(dotted, node)
        starred = any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords)
        if self.found and not starred and is_private(dotted.replace(":", ".")):
            keywords = tuple(k.arg for k in node.keywords if k.arg is not None)
            self.found.append(replace(self.found.pop(), call=(len(node.args), keywords)))

    def dotted(self, node: ast.AST) -> str | None:
        """'module:path' of an expression that an import leads to."""
        if isinstance(node, ast.Name):
            return next((names[node.id] for names in reversed(self.bound) if node.id in names), None)
        if isinstance(node, ast.Attribute) and (base := self.dotted(node.value)) is not None:
            module, _, path = base.partition(":")
            return f"{module}:{path}.{node.attr}" if path else f"{module}:{node.attr}"
        return None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.bound.append({})
        self.generic_visit(node)
        self.bound.pop()

    def visit_Try(self, node: ast.Try) -> None:
        caught = {part for handler in node.handlers for part in ast.unparse(handler.type or node).split()}
        guards = bool(caught & {"ImportError", "ImportError,", "(ImportError,", "AttributeError"})
        self.guarded += guards
        for child in node.body:
            self.visit(child)
        self.guarded -= guards
        for child in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(child)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        for alias in node.names:
            self.bound[-1][alias.asname or alias.name] = f"{module}:{alias.name}"
            self.use(f"{module}:{alias.name}", node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.asname:
                self.bound[-1][alias.asname] = f"{alias.name}:"
                self.use(f"{alias.name}:", node)
            else:
                self.bound[-1][alias.name.partition(".")[0]] = f"{alias.name.partition('.')[0]}:"

    def visit_Attribute(self, node: ast.Attribute) -> None:
        found = self.dotted(node)
        if found is not None:
            self.use(found, node)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        texts = [a.value if isinstance(a, ast.Constant) and isinstance(a.value, str) else None for a in node.args]
        called = ast.unparse(node.func)
        base = self.dotted(node.args[0]) if node.args else None
        if called in ("getattr", "hasattr") and base is not None and len(texts) > 1 and texts[1]:
            default = called == "hasattr" or len(node.args) > 2
            self.use(f"{base}{'' if base.endswith(':') else '.'}{texts[1]}", node, optional=default)
            return
        if called.endswith("patch.object") and base is not None and len(texts) > 1 and texts[1]:
            self.use(f"{base}{'' if base.endswith(':') else '.'}{texts[1]}", node)
        if called in ("HookPoint", "FramePoint") and len(node.args) > 2 and texts[0] and texts[1]:
            parameters = tuple(ast.literal_eval(node.args[2]))
            self.use(f"{texts[0]}:{texts[1]}", node, parameters=parameters)
        if (function := self.dotted(node.func)) is not None and not function.endswith(":"):
            self.call(function, node)
        self.generic_visit(node)


@functools.cache
def uses(folder: Path = COMPAT) -> tuple[Use, ...]:
    """Every use of a private name in the files of `folder`."""
    found: list[Use] = []
    for file in sorted(folder.glob("*.py")):
        reader = _Reader(file.name)
        reader.visit(ast.parse(file.read_text(encoding="utf-8")))
        found += reader.found
    return tuple(found)


class Torch:
    """The sources of one torch: a wheel, or a folder that holds `torch/`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._wheel = zipfile.ZipFile(path) if path.suffix == ".whl" else None
        self._files = set(self._wheel.namelist()) if self._wheel else set()
        self._names: dict[str, dict[str, ast.AST] | None] = {}

    def read(self, name: str) -> str | None:
        """The text of a file, None where there is none."""
        if self._wheel is not None:
            return self._wheel.read(name).decode("utf-8") if name in self._files else None
        file = self.path / name
        return file.read_text(encoding="utf-8") if file.is_file() else None

    @property
    def version(self) -> str:
        found = re.search(r"__version__ = '([^']+)'", self.read("torch/version.py") or "")
        return found[1] if found else (self.read("version.txt") or "unknown").strip()

    def names(self, module: str) -> dict[str, ast.AST] | None:
        """What a module defines or imports, by name; None where there is no such module."""
        if module not in self._names:
            base = module.replace(".", "/")
            texts = (self.read(base + end) for end in (".py", "/__init__.py", ".pyi", "/__init__.pyi", ".pyi.in",
                                                      "/__init__.pyi.in"))  # fmt: skip
            text = next((t for t in texts if t is not None), None)
            self._names[module] = None
            if text is not None:
                text = re.sub(
                    r"^.*\$\{.*$", "", text, flags=re.M
                )  # a template of a source tree: what fills it is unknown
                self._names[module] = dict(_defined(ast.parse(text).body))
        return self._names[module]

    def find(self, module: str, path: str) -> ast.AST | None:
        """Where a name is defined or imported; None where it is not."""
        names = self.names(module)
        first, _, rest = path.partition(".")
        if names is None:
            return self._imported(module, path)
        node = names.get(first)
        if node is None:
            inside = f"{module}.{first}"
            if self.names(inside) is not None:
                return self.find(inside, rest) if rest else ast.Pass()
            return self._starred(names, path)
        if not rest:
            return node
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            original = _original(node, first)
            if self.names(f"{node.module}.{original}") is not None:
                return self.find(f"{node.module}.{original}", rest)
            return self.find(node.module, f"{original}.{rest}") if node.module != module else ast.Pass()
        if isinstance(node, ast.ClassDef):
            return self._member(module, node, rest)
        return ast.Pass()  # an object of some class: what it has is not known from here

    def _imported(self, module: str, path: str) -> ast.AST | None:
        """A name of something that is no module, such as a class: 'torch.autograd.Function' + 'x'."""
        parent, _, name = module.rpartition(".")
        return self.find(parent, f"{name}.{path}" if path else name) if parent else None

    def _member(self, module: str, node: ast.ClassDef, name: str) -> ast.AST | None:
        own = dict(_defined(node.body))
        if name in own:
            return own[name]
        for base in node.bases:
            found = self.find(module, f"{ast.unparse(base)}.{name}") if isinstance(base, ast.Name) else None
            if found is not None:
                return found
        return None

    def _starred(self, names: dict[str, ast.AST], path: str) -> ast.AST | None:
        for key, node in names.items():
            if key.startswith("*") and isinstance(node, ast.ImportFrom) and node.module:
                found = self.find(node.module, path)
                if found is not None:
                    return found
        return None

    def problem(self, use: Use) -> str | None:
        """What is wrong with a use in this torch; None if all is well."""
        if not use.path:
            return None if self.names(use.module) is not None else "no such module"
        found = self.find(use.module, use.path)
        if found is None:
            return "gone" if self.names(use.module) is not None else "no such module"
        function = self._function(use)
        if function is None:
            return None
        has = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
        rest = iter(has)
        fits = all(name in rest for name in use.parameters) and (use.call is None or _accepts(function.args, *use.call))
        return None if fits else f"takes ({', '.join(has)})"

    def _function(self, use: Use) -> ast.FunctionDef | None:
        """The definition of a function that is used, where it is a plain one."""
        module, path = use.module, use.path
        for _ in range(10):
            found = self.find(module, path)
            if not isinstance(found, ast.ImportFrom) or found.level or found.module is None or "." in path:
                break
            module, path = found.module, _original(found, path)
        plain = isinstance(found, ast.FunctionDef) and not found.decorator_list
        return found if plain and isinstance(found, ast.FunctionDef) else None

    def problems(self, found: tuple[Use, ...]) -> dict[Use, str]:
        """What is wrong, by use."""
        return {use: text for use in found if (text := self.problem(use)) is not None}


def _accepts(has: ast.arguments, positional: int, keywords: tuple[str, ...]) -> bool:
    """Whether a function can be called with so many positional arguments and these keywords."""
    names = [a.arg for a in (*has.posonlyargs, *has.args)]
    if has.vararg is None and positional > len(names):
        return False
    only = [a.arg for a in has.kwonlyargs]
    if has.kwarg is None and not set(keywords) <= {*names[positional:], *only}:
        return False
    needed = names[positional : len(names) - len(has.defaults)]
    needed += [name for name, default in zip(only, has.kw_defaults, strict=True) if default is None]
    return set(needed) <= set(keywords)


def _original(node: ast.ImportFrom, name: str) -> str:
    return next(alias.name for alias in node.names if (alias.asname or alias.name) == name)


def _defined(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from ((n.id, node) for n in ast.walk(target) if isinstance(n, ast.Name))
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"*{node.module}" if a.name == "*" else a.asname or a.name, node) for a in node.names)
        elif isinstance(node, ast.Import):
            yield from ((a.asname or a.name.partition(".")[0], node) for a in node.names)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.For):
            for part in ("body", "orelse", "finalbody"):
                yield from _defined(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _defined(handler.body)


def main(paths: list[str]) -> int:
    """Print what each torch lacks; 1 where that is more than optional names."""
    failed = False
    for path in paths:
        torch = Torch(Path(path))
        found = torch.problems(uses())
        print(
            f"torch {torch.version}: {len({u.name for u in uses()})} names, {len({u.name for u in found})} not as used"
        )
        for use, text in sorted(found.items(), key=str):
            failed = failed or not use.optional
            print(f"  {use.name} {text}; {'has a fallback' if use.optional else 'NEEDED'}: {use.where}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
