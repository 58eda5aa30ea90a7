"""Which expressions are tensors, as far as that can be proved from the source alone.

Every answer is "yes, proved" or "not proved". Types come from torch's own names (tables.py), from what Dynamo said
about the place of a break, and from the class's `__init__` where it stands in the same file.
"""

from __future__ import annotations

import ast
from functools import cached_property

from optpass.auditing.fixes import tables
from optpass.auditing.fixes.attributes import attributes_of
from optpass.auditing.fixes.scope import Scope
from optpass.auditing.fixes.site import Site

#: Modules whose functions are those that tables.py knows by name.
TORCH = ("torch.", "torch.nn.functional.", "torch.linalg.", "torch.special.")
_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
_ANNOTATIONS = frozenset({"torch.Tensor", "torch.nn.Parameter", "torch.FloatTensor", "torch.LongTensor"})


class TensorFacts:
    """Proofs about types, for expressions of the function that a site is in."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.scope: Scope = site.scope
        self._asked: set[str] = set()

    def made_from(self, node: ast.Attribute) -> str | None:
        """What `self.name` is made from, see `attributes_of`; None if unknown."""
        return self._attributes.get(node.attr) if isinstance(node.value, ast.Name) and node.value.id == "self" else None

    @cached_property
    def _attributes(self) -> dict[str, str | None]:
        return attributes_of(self.scope)

    # -- names of calls ------------------------------------------------------------------------------------------

    def torch_call(self, node: ast.AST) -> tuple[str, list[ast.expr]] | None:
        """(name, arguments) of `torch.name(...)`, `F.name(...)` or a method call on what may be a tensor.

        The receiver of a method is the first argument.
        """
        if not isinstance(node, ast.Call) or any(isinstance(a, ast.Starred) for a in node.args):
            return None
        dotted = self.scope.dotted(node.func)
        if dotted is not None:
            prefix = next((p for p in TORCH if dotted.startswith(p) and "." not in dotted[len(p) :]), None)
            return (dotted[len(prefix) :], list(node.args)) if prefix else None
        return (node.func.attr, [node.func.value, *node.args]) if isinstance(node.func, ast.Attribute) else None

    def is_method(self, call: ast.Call) -> bool:
        """Whether the call is of a method of some value (and not of a module's function)."""
        return isinstance(call.func, ast.Attribute) and self.scope.dotted(call.func) is None

    def tensor(self, node: ast.expr) -> bool:
        """Proved to be one tensor."""
        if node in self._known:
            return True
        if isinstance(node, ast.Name):
            return node.id in self.site.assumed or self._seen_as_tensor(node) or self._name_is_tensor(node.id)
        if isinstance(node, ast.BinOp):
            return self.tensor(node.left) or self.tensor(node.right)
        if isinstance(node, ast.UnaryOp):
            return not isinstance(node.op, ast.Not) and self.tensor(node.operand)
        if isinstance(node, ast.Compare):
            plain = not any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops)
            return plain and len(node.ops) == 1 and (self.tensor(node.left) or self.tensor(node.comparators[0]))
        if isinstance(node, ast.Subscript):
            return self.tensor(node.value)
        if isinstance(node, ast.Attribute):
            own = node.attr in _ATTRIBUTES and self.tensor(node.value)
            return own or self.made_from(node) in ("Parameter", "buffer")
        return isinstance(node, ast.Call) and self._call_is_tensor(node)

    def _call_is_tensor(self, node: ast.Call) -> bool:
        if isinstance(node.func, ast.Attribute) and self.made_from(node.func) in tables.PURE_MODULES:
            return True
        found = self.torch_call(node)
        if found is None:
            return False
        name, args = found
        if self.is_method(node):
            if name in tables.MAYBE_SEVERAL:
                return self.tensor(args[0]) and len(args) == 1 and not node.keywords
            return name in tables.PURE and (name in tables.TENSOR_ONLY or self.tensor(args[0]))
        if name in tables.MAYBE_SEVERAL:
            return (len(args) == 1 and not node.keywords and name != "where") or (name == "where" and len(args) == 3)
        return name in tables.PURE or name in tables.CONSTRUCTORS

    def _seen_as_tensor(self, node: ast.Name) -> bool:
        """Whether Dynamo saw a tensor of that name, and the node means the same value: its only one, or right there."""
        if not any(isinstance(known, ast.Name) and known.id == node.id for known in self._known):
            return False
        return node.id in self.names_seen() or not hasattr(node, "lineno") or node in self._at_site

    def names_seen(self) -> frozenset[str]:
        """Names with one value in the function, of which Dynamo saw that it is a tensor."""
        names = {known.id for known in self._known if isinstance(known, ast.Name)}
        return frozenset(n for n in names if len(self.scope.stores(n)) + (n in self.scope.parameters) == 1)

    @cached_property
    def _at_site(self) -> frozenset[ast.AST]:
        return frozenset(ast.walk(self.site.statement))

    def _name_is_tensor(self, name: str) -> bool:
        if self.scope.function is None:
            return False
        if name in self._asked:
            return True  # `x = x * 2` is a tensor if `x` was one, which its other values decide
        self._asked.add(name)
        try:
            stores = self.scope.stores(name)
            if name in self.scope.parameters:
                return self._used_as_tensor(name) and all(self._stores_tensor(s) for s in stores)
            return bool(stores) and all(self._stores_tensor(s, own=name) for s in stores)
        finally:
            self._asked.discard(name)

    def _stores_tensor(self, store: ast.AST, own: str | None = None) -> bool:
        parent = self.site.source.parents[store]
        if isinstance(parent, ast.Assign) and parent.targets == [store]:
            return self.tensor(parent.value)
        return isinstance(parent, ast.AugAssign)  # keeps what it was

    def _used_as_tensor(self, name: str) -> bool:
        """Whether the parameter's uses show a tensor: its annotation, or methods that nothing else has."""
        function = self.scope.function
        assert function is not None
        for parameter in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]:
            if parameter.arg == name and parameter.annotation is not None:
                return self.scope.dotted(parameter.annotation) in _ANNOTATIONS
        for load in self.scope.loads(name):
            if load in self._known:
                return True
            parent = self.site.source.parents[load]
            call = self.site.source.parents.get(parent)
            method = isinstance(parent, ast.Attribute) and isinstance(call, ast.Call) and call.func is parent
            if method and isinstance(parent, ast.Attribute) and parent.attr in tables.TENSOR_ONLY:
                return True
            if isinstance(parent, ast.Call) and parent.args[:1] == [load]:
                found = self.torch_call(parent)
                several = {"cat", "stack", "concat", "hstack", "vstack", "tensor", "as_tensor", "einsum"}
                sizes = tables.CONSTRUCTORS
                if found and not self.is_method(parent) and found[0] in tables.PURE - several - sizes:
                    return True
                if isinstance(parent.func, ast.Attribute) and self.made_from(parent.func) in tables.PURE_MODULES:
                    return True
        return False

    def used_as_tensor(self, node: ast.expr) -> bool:
        """Whether what is done with a value shows that it is a tensor or a number, and no container of such.

        Looks at the expression around it, or at the uses of the one name that it is assigned to.
        """
        parent = self.site.source.parents[node]
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name):
            name = parent.targets[0].id
            once = self.scope.value(name) is node
            return once and any(self.used_as_tensor(load) for load in self.scope.loads(name))
        if isinstance(parent, ast.BinOp):
            other = parent.right if parent.left is node else parent.left
            plain = not isinstance(parent.op, ast.Mult | ast.Mod)  # a list times a number is a list
            return (plain and is_number(other)) or self.tensor(other)
        call = self.site.source.parents.get(parent)
        method = isinstance(parent, ast.Attribute) and isinstance(call, ast.Call) and call.func is parent
        return method and isinstance(parent, ast.Attribute) and parent.attr in tables.TENSOR_ONLY

    @cached_property
    def _known(self) -> set[ast.expr]:
        """Expressions that are tensors because Dynamo said so of the place of the break."""
        known: set[ast.expr] = set()
        gb = self.site.gb_type.lower()
        if not self.site.exact:
            return known
        node = self.site.expressions[0]
        if any(isinstance(n, ast.Name) and self._is_number(n.id) for n in ast.walk(node)):
            return known  # Dynamo may have stopped at a number that it knows by a symbol only
        if self.site.branching:
            while isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
                node = node.operand
            if not isinstance(node, ast.BoolOp):
                known |= self._downwards(node)
        elif "tensor.item" in gb and isinstance(node, ast.Call):
            inner = self.scalar_of(node)
            known |= self._downwards(inner) if inner is not None else set()
        elif "dynamic shape operator" in gb and isinstance(node, ast.Subscript):
            known |= self._downwards(node.value)
        elif "deepcopy a tensor" not in gb and isinstance(node, ast.Call):
            method = node.func.value if isinstance(node.func, ast.Attribute) and self.is_method(node) else None
            known |= self._downwards(method) if method is not None and "dynamic shape" in gb else set()
        return known

    def _is_number(self, name: str) -> bool:
        """Whether some value of a local is `t.item()` or its like."""
        parents = self.site.source.parents
        stores = [parents[store] for store in self.scope.stores(name)]
        return any(isinstance(s, ast.Assign) and self.scalar_of(s.value) is not None for s in stores)

    def _downwards(self, node: ast.expr) -> set[ast.expr]:
        """The expression, and those parts of it that must be tensors if it is one."""
        known = {node}
        if isinstance(node, ast.Compare) and isinstance(node.comparators[0], ast.Constant):
            known |= self._downwards(node.left)
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant):
            known |= self._downwards(node.comparators[0])
        elif isinstance(node, ast.BinOp):
            same = ast.dump(node.left) == ast.dump(node.right)
            known |= self._downwards(node.left) if same or is_number(node.right) else set()
            known |= self._downwards(node.right) if same or is_number(node.left) else set()
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
            known |= self._downwards(node.value)  # no list takes several indices
        elif isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
            known |= self._downwards(node.operand)
        elif isinstance(node, ast.Call):
            found = self.torch_call(node)
            keeps = tables.PURE if self.is_method(node) else tables.POINTWISE | tables.REDUCTIONS
            if found and found[0] in keeps and found[1]:
                known |= self._downwards(found[1][0])
        return known

    def scalar_of(self, node: ast.expr) -> ast.expr | None:
        """The tensor in `t.item()`, `float(t)`, `int(t)`, `bool(t)`; None for anything else."""
        if not isinstance(node, ast.Call) or node.keywords:
            return None
        if isinstance(node.func, ast.Attribute) and node.func.attr == "item" and not node.args:
            return node.func.value
        builtin = self.scope.dotted(node.func) in ("builtins.float", "builtins.int", "builtins.bool")
        return node.args[0] if builtin and len(node.args) == 1 and not isinstance(node.args[0], ast.Starred) else None


def is_number(node: ast.expr) -> bool:
    """Whether the expression is a number written out, a sign or `float("inf")` included."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub | ast.UAdd) and is_number(node.operand)
    if isinstance(node, ast.Call):
        inf = isinstance(node.func, ast.Name) and node.func.id == "float" and len(node.args) == 1
        return inf and isinstance(node.args[0], ast.Constant)
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)
