"""Copies and conversions that leave the graph: the tensor operation that does the same."""

from __future__ import annotations

import ast

from optpass.auditing.fixes import tables
from optpass.auditing.fixes.facts import Facts
from optpass.auditing.fixes.site import Site
from optpass.auditing.fixes.source import Edit

_MAKERS = ("torch.from_numpy", "torch.tensor", "torch.as_tensor", "torch.asarray")
_SIMPLE = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)


class CloneCopy:
    """`copy.deepcopy(t)` -> `t.detach().clone()`."""

    name = "clone"
    note = "Like the copy it carries no gradient to the original."

    def edits(self, site: Site, facts: Facts) -> list[Edit] | None:
        """Replace the call where its argument is proved to be a tensor."""
        for call in site.expressions:
            if not isinstance(call, ast.Call) or facts.scope.dotted(call.func) != "copy.deepcopy":
                continue
            if len(call.args) != 1 or call.keywords:
                return None
            if not facts.tensor(call.args[0]) and not facts.used_as_tensor(call):
                return None
            text = site.source.segment(call.args[0])
            text = text if isinstance(call.args[0], _SIMPLE) else f"({text})"
            return [site.replace(call, f"{text}.detach().clone()")]
        return None


class StackTensors:
    """`torch.tensor([a.sum().item(), b.mean().item()])` -> `torch.stack([a.sum(), b.mean()]).detach()`."""

    name = "stack"
    note = ""

    def edits(self, site: Site, facts: Facts) -> list[Edit] | None:
        """Replace the call around the place where every element is the value of a tensor without dimensions."""
        if "tensor.item" not in site.gb_type.lower() or site.torch is None:
            return None
        parents = site.source.parents
        for place in site.expressions:
            row = parents.get(place)
            call = parents.get(row) if isinstance(row, ast.List | ast.Tuple) else None
            if isinstance(row, ast.List | ast.Tuple) and isinstance(call, ast.Call) and call.args == [row]:
                if call.keywords or facts.scope.dotted(call.func) != "torch.tensor":
                    return None
                texts = [self._element(element, site, facts) for element in row.elts]
                known = [text for text in texts if text is not None]
                if len(known) != len(texts):
                    return None
                return [site.replace(call, f"{site.torch}.stack([{', '.join(known)}]).detach()")]
        return None

    def _element(self, element: ast.expr, site: Site, facts: Facts) -> str | None:
        tensor = facts.scalar_of(element)
        tensor = element if tensor is None else tensor
        text = site.source.segment(tensor)
        return text if facts.tensor(tensor) and facts.zero_dim(tensor) and "\n" not in text else None


class TorchForNumpy:
    """`torch.from_numpy(np.sqrt(t.numpy()))` -> `torch.sqrt(t)`."""

    name = "numpy-to-torch"
    note = "The same function of torch."

    def edits(self, site: Site, facts: Facts) -> list[Edit] | None:
        """Replace a conversion to a tensor of calls of numpy on tensors."""
        for place in site.expressions:
            node: ast.AST | None = place
            while node is not None and not isinstance(node, ast.stmt):
                if isinstance(node, ast.Call) and facts.scope.dotted(node.func) in _MAKERS and len(node.args) == 1:
                    text = None if node.keywords else self._text(node.args[0], site, facts)
                    return None if text is None or site.torch is None else [site.replace(node, text)]
                node = site.source.parents.get(node)
        return None

    def _text(self, node: ast.expr, site: Site, facts: Facts) -> str | None:
        if isinstance(node, ast.Constant):
            return site.source.segment(node)
        if isinstance(node, ast.UnaryOp):
            inner = self._text(node.operand, site, facts)
            return None if inner is None else site.source.rewritten(node, {node.operand: inner})
        if isinstance(node, ast.BinOp):
            sides = {side: self._text(side, site, facts) for side in (node.left, node.right)}
            known = {side: text for side, text in sides.items() if text is not None}
            return site.source.rewritten(node, known) if len(known) == 2 else None
        if not isinstance(node, ast.Call):
            return None
        if isinstance(node.func, ast.Attribute) and node.func.attr == "numpy" and not node.args and not node.keywords:
            return self._tensor(node.func.value, site, facts)
        dotted = facts.scope.dotted(node.func) or ""
        name = tables.NUMPY.get(dotted.removeprefix("numpy.")) if dotted.startswith("numpy.") else None
        if name is None or node.keywords or (name == "t" and len(node.args) != 1):
            return None
        texts = {arg: self._text(arg, site, facts) for arg in node.args}
        known = {arg: text for arg, text in texts.items() if text is not None}
        if len(known) != len(texts):
            return None
        return site.source.rewritten(node, {**known, node.func: f"{site.torch}.{name}"})

    def _tensor(self, node: ast.expr, site: Site, facts: Facts) -> str | None:
        """The tensor of `t.detach().cpu().numpy()`, without gradient."""
        inner = node
        while (
            isinstance(inner, ast.Call)
            and isinstance(inner.func, ast.Attribute)
            and inner.func.attr in ("cpu", "detach")
        ):
            inner = inner.func.value
        text = site.source.segment(inner)
        text = text if isinstance(inner, _SIMPLE) else f"({text})"
        return f"{text}.detach()"
