"""A tensor's value as a Python number: kept a tensor where only tensor math uses it, captured where a size needs it."""

from __future__ import annotations

import ast

from optpass.auditing.fixes import tables
from optpass.auditing.fixes.facts import Facts
from optpass.auditing.fixes.site import Site
from optpass.auditing.fixes.source import Edit

_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)
#: Arguments of methods and functions that take a number or a tensor without dimensions alike, to the same effect.
_TAKES_EITHER = frozenset(
    "add sub subtract mul multiply div divide true_divide pow clamp clip clamp_min clamp_max".split()
)
_COMPARISONS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)


class KeepTensor:
    """`t.item()` -> `t.detach()` where every use of the number is tensor arithmetic."""

    name = "keep-tensor"
    note = "The value stays a tensor without dimensions; like the number it carries no gradient."

    def edits(self, site: Site, facts: Facts) -> list[Edit] | None:
        """Rewrite the call, and calls of `math` that its value goes into."""
        call = scalar_call(site, facts)
        if call is None:
            return None
        tensor = facts.scalar_of(call)
        assert tensor is not None
        kind = site.scope.dotted(call.func)
        text = as_tensor(site, facts, tensor)
        if text is None or kind == "builtins.bool":
            return None
        flow = Flow(site, facts)
        if not flow.tensor_math(call):
            return None
        if kind == "builtins.int":
            text += ".long()"
        elif kind == "builtins.float" and _integral(tensor, facts):
            text += ".double()"
        return [site.replace(call, text), *flow.edits, *(site.torch_import() if flow.edits else [])]


class CaptureScalar:
    """The number is a size, or is kept: `torch._dynamo.config.capture_scalar_outputs = True`."""

    name = "capture-scalar"
    note = "Scalars then become part of the graph in the whole program."

    def edits(self, site: Site, facts: Facts) -> list[Edit] | None:
        """One line behind the imports of the module."""
        call = scalar_call(site, facts)
        gb = site.gb_type.lower()
        index = "tensor.item" in gb and call is None and site.exact and _index_position(site.expressions[0], facts)
        if not index and (call is None or not Flow(site, facts).kept_or_size(call)):
            return None
        return config_line(site, "capture_scalar_outputs")


class CaptureDynamicShape:
    """The output's size depends on data: `torch._dynamo.config.capture_dynamic_output_shape_ops = True`."""

    name = "capture-dynamic-shape"
    note = "Operators whose output's size depends on data then become part of the graph in the whole program."

    def edits(self, site: Site, facts: Facts) -> list[Edit] | None:
        """One line behind the imports of the module."""
        gb = site.gb_type.lower()
        if "dynamic shape operator" in gb and any(self._supported(e, facts) for e in site.expressions[:1]):
            return config_line(site, "capture_dynamic_output_shape_ops")
        if "data dependent operator" in gb:
            tolist = any(isinstance(e, ast.Call) and _method(e) == "tolist" for e in site.expressions)
            return config_line(site, "capture_scalar_outputs") if tolist else None
        return None

    def _supported(self, node: ast.expr, facts: Facts) -> bool:
        """Whether torch can tell the output's size by a symbol; for other operators the flag does not help."""
        found = facts.torch_call(node)
        return isinstance(node, ast.Subscript) or (found is not None and found[0] in tables.SYMBOLIC_SIZE)


def config_line(site: Site, flag: str) -> list[Edit] | None:
    """Set a flag of Dynamo behind the imports; None where the file already does."""
    if site.torch is None or f"_dynamo.config.{flag}" in site.source.text or site.function is None:
        return None
    line = f"{site.torch}._dynamo.config.{flag} = True"
    if not site.torch_import():
        return [site.after_imports(line)]
    both = site.after_imports(f"import {site.torch}{site.source.newline}{site.source.newline}{line}")
    return [both]


def scalar_call(site: Site, facts: Facts) -> ast.Call | None:
    """The `.item()`, `float()`, `int()` or `bool()` that Dynamo stopped at."""
    if "tensor.item" not in site.gb_type.lower():
        return None
    calls = [e for e in site.expressions if isinstance(e, ast.Call) and facts.scalar_of(e) is not None]
    return calls[0] if len(calls) == 1 or (calls and site.exact) else None


def as_tensor(site: Site, facts: Facts, tensor: ast.expr) -> str | None:
    """Text for the tensor without gradient and without dimensions; None where the text cannot stand alone."""
    text = site.source.segment(tensor)
    if "\n" in text and not isinstance(tensor, ast.Call | ast.Subscript | ast.Attribute):
        return None
    if not isinstance(tensor, ast.Name | ast.Call | ast.Attribute | ast.Subscript):
        text = f"({text})"
    if isinstance(tensor, ast.Call) and _method(tensor) == "detach":
        return text if facts.zero_dim(tensor) else f"{text}.reshape(())"
    return f"{text}.detach()" if facts.zero_dim(tensor) else f"{text}.detach().reshape(())"


class Flow:
    """Where a number goes from one expression on."""

    def __init__(self, site: Site, facts: Facts) -> None:
        self.site, self.facts, self.scope = site, facts, site.scope
        self.parents = site.source.parents
        self.edits: list[Edit] = []
        self._names: set[str] = set()

    def tensor_math(self, node: ast.expr) -> bool:
        """Whether every use of the value works the same on a tensor without dimensions."""
        parent = self.parents[node]
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, _ARITHMETIC):
            other = parent.right if parent.left is node else parent.left
            return self.facts.tensor(other) or self.tensor_math(parent)
        if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.USub):
            return self.tensor_math(parent)
        if isinstance(parent, ast.Compare) and len(parent.ops) == 1 and isinstance(parent.ops[0], _COMPARISONS):
            other = parent.comparators[0] if parent.left is node else parent.left
            return self.facts.tensor(other)
        if isinstance(parent, ast.Call):
            return self._argument(node, parent)
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name):
            return self._name(parent.targets[0].id)
        if isinstance(parent, ast.AugAssign) and parent.value is node and isinstance(parent.op, _ARITHMETIC):
            return isinstance(parent.target, ast.Name) and self.facts.tensor(ast.Name(parent.target.id, ast.Load()))
        return False

    def _name(self, name: str) -> bool:
        scope = self.scope
        if name in self._names or name in scope.parameters or scope.shared(name) or len(scope.stores(name)) != 1:
            return False
        self._names.add(name)
        loads = scope.loads(name)
        return bool(loads) and all(self.tensor_math(load) for load in loads)

    def _argument(self, node: ast.expr, call: ast.Call) -> bool:
        found = self.facts.torch_call(call)
        keyword = next((k.arg for k in call.keywords if k.value is node), None)
        if found is not None:
            name, args = found
            takes = name in _TAKES_EITHER and node is not args[0] and self.facts.tensor(args[0])
            return takes and keyword in (None, "other", "min", "max")
        dotted = self.scope.dotted(call.func) or ""
        torch_name = tables.MATH.get(dotted.removeprefix("math.")) if dotted.startswith("math.") else None
        if torch_name is None or len(call.args) != 1 or self.site.torch is None or not self.tensor_math(call):
            return False
        self.edits.append(self.site.replace(call.func, f"{self.site.torch}.{torch_name}"))
        return True

    def kept_or_size(self, node: ast.expr) -> bool:
        """Whether every use of the number is arithmetic, a size, or to be returned or stored; none steers Python."""
        parent = self.parents[node]
        if _index_position(node, self.facts):
            return True
        if isinstance(parent, ast.BinOp | ast.UnaryOp) and not isinstance(getattr(parent, "op", None), ast.Not):
            other = [e for e in ast.iter_child_nodes(parent) if isinstance(e, ast.expr) and e is not node]
            return any(map(self.facts.tensor, other)) or self.kept_or_size(parent)
        if isinstance(parent, ast.Compare):
            return any(map(self.facts.tensor, [parent.left, *parent.comparators]))
        if isinstance(parent, ast.Return):
            return True
        if isinstance(parent, ast.Tuple | ast.List | ast.Dict | ast.Starred):
            return self.kept_or_size(parent)
        if isinstance(parent, ast.keyword):
            return self._takes(self.parents[parent])
        if isinstance(parent, ast.Call):
            if isinstance(parent.func, ast.Attribute) and parent.func.attr == "append" and parent.args == [node]:
                return True
            return self._takes(parent) or (self._sizes(parent) and self.kept_or_size(parent))
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
            target = parent.targets[0]
            if isinstance(target, ast.Attribute | ast.Subscript):
                return True
            return isinstance(target, ast.Name) and self._kept_name(target.id)
        return isinstance(parent, ast.AugAssign) and parent.value is node

    def _kept_name(self, name: str) -> bool:
        scope = self.scope
        if name in self._names:
            return True
        self._names.add(name)
        if name in scope.parameters or scope.shared(name):
            return False
        return all(self.kept_or_size(load) for load in scope.loads(name))

    def _takes(self, call: ast.AST) -> bool:
        found = self.facts.torch_call(call)
        return found is not None and found[0] in tables.PURE | tables.SHAPE_TAKERS | tables.CONSTRUCTORS

    def _sizes(self, call: ast.Call) -> bool:
        return self.scope.dotted(call.func) in (
            "builtins.int",
            "builtins.float",
            "builtins.sum",
            "builtins.max",
            "builtins.min",
        )


def _index_position(node: ast.expr, facts: Facts) -> bool:
    """Whether the expression is a bound of a slice, or an index of a tensor, that is read."""
    parents = facts.site.source.parents
    sliced = False
    parent = parents[node]
    while isinstance(parent, ast.Slice | ast.Tuple | ast.BinOp):
        sliced |= isinstance(parent, ast.Slice)
        node, parent = parent, parents[parent]
    if not isinstance(parent, ast.Subscript) or parent.slice is not node or not isinstance(parent.ctx, ast.Load):
        return False
    return sliced or facts.tensor(parent.value)


def _integral(node: ast.expr, facts: Facts) -> bool:
    """Whether the source shows a tensor of integers or booleans; torch then has no number to round to in between."""
    found = facts.torch_call(node)
    if found is None:
        return facts.boolean(node)
    name, args = found
    if name in ("argmax", "argmin", "count_nonzero", "long", "int", "bool", "any", "all", "bincount"):
        return True
    keeps = tables.POINTWISE | frozenset(("sum", "max", "min", "amax", "amin", "prod"))
    return name in keeps and bool(args) and _integral(args[0], facts)


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""
