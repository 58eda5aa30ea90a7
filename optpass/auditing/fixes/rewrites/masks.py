"""Indexing with a boolean mask, whose result's size depends on data: the same by `torch.where`, at full size."""

from __future__ import annotations

import ast

from optpass.auditing.fixes.facts import Facts, same_moment
from optpass.auditing.fixes.site import Site
from optpass.auditing.fixes.source import Edit

#: Reductions that can leave elements out by a neutral one: name -> that element.
_NEUTRAL = {"sum": "0", "prod": "1", "count_nonzero": "0", "any": "False"}


class MaskedReduction:
    """`x[mask].sum()` -> `torch.where(mask, x, 0).sum()`; also mean, prod, any, and of `y = x[mask]`."""

    name = "masked-reduction"
    note = "The sum runs over the whole tensor, in which the elements left out are zero."

    def edits(self, site: Site, facts: Facts) -> list[Edit] | None:
        """Rewrite the selection together with each reduction of it."""
        for place in site.expressions:
            pair = _selected(place, facts)
            if pair is not None and site.torch is not None:
                found = self._rewrite(place, *pair, site, facts)
                return None if found is None else [*site.torch_import(), *found]
        return None

    def _rewrite(self, place: ast.expr, base: ast.expr, mask: ast.expr, site: Site, facts: Facts) -> list[Edit] | None:
        if not _fits(base, mask, site, facts):
            return None
        parent = site.source.parents[place]
        texts = site.source.segment(base), site.source.segment(mask)
        if isinstance(parent, ast.Attribute):
            edit = self._reduction(place, texts, site)
            return None if edit is None else [edit]
        if (
            not isinstance(parent, ast.Assign)
            or len(parent.targets) != 1
            or not isinstance(parent.targets[0], ast.Name)
        ):
            return None
        return self._of_name(parent, parent.targets[0].id, texts, base, mask, site)

    def _of_name(
        self, made: ast.Assign, name: str, texts: tuple[str, str], base: ast.expr, mask: ast.expr, site: Site
    ) -> list[Edit] | None:
        """`y = x[mask]` of which every use is a reduction: each becomes one of the whole, and the line goes."""
        scope, source = site.scope, site.source
        if scope.value(name) is None or not source.alone(made) or not isinstance(base, ast.Name):
            return None
        names = {n.id for part in (base, mask) for n in ast.walk(part) if isinstance(n, ast.Name)}
        edits = [Edit(*source.whole_lines(made, made), "")]
        for load in scope.loads(name):
            user = source.statement(load)
            edit = self._reduction(load, texts, site)
            if user is None or edit is None or not same_moment(site, made, user, names):
                return None
            edits.append(edit)
        return edits if len(edits) > 1 else None

    def _reduction(self, node: ast.expr, texts: tuple[str, str], site: Site) -> Edit | None:
        parents = site.source.parents
        attribute = parents[node]
        call = parents.get(attribute)
        if not isinstance(attribute, ast.Attribute) or not isinstance(call, ast.Call) or call.func is not attribute:
            return None
        if call.args or call.keywords:
            return None
        base, mask = texts
        loose = mask if mask.isidentifier() else f"({mask})"
        if attribute.attr == "mean":
            division = f"{site.torch}.where({mask}, {base}, 0).sum() / {loose}.sum()"
            above = parents[call]
            bare = isinstance(above, ast.Return | ast.Assign) or (isinstance(above, ast.Call) and call in above.args)
            return site.replace(call, division if bare else f"({division})")
        neutral = _NEUTRAL.get(attribute.attr)
        if neutral is None:
            return None
        return site.replace(call, f"{site.torch}.where({mask}, {base}, {neutral}).{attribute.attr}()")


class MaskedUpdate:
    """`x[mask] = y[mask] * 2`, `x[mask] += y` -> `x.copy_(torch.where(mask, y * 2, x))`."""

    name = "masked-update"
    note = "The whole tensor is written."

    def edits(self, site: Site, facts: Facts) -> list[Edit] | None:
        """Rewrite an assignment to the masked elements, itself in place as before."""
        statement = site.statement
        if (
            not isinstance(statement, ast.Assign | ast.AugAssign)
            or site.torch is None
            or not site.source.alone(statement)
        ):
            return None
        if isinstance(statement, ast.Assign) and len(statement.targets) != 1:
            return None
        target = statement.target if isinstance(statement, ast.AugAssign) else statement.targets[0]
        pair = _selected(target, facts)
        if pair is None or not isinstance(pair[0], ast.Name) or not _fits(*pair, site, facts):
            return None
        base, mask = pair
        value = self._whole(statement.value, mask, base, site, facts)
        if value is None:
            return None
        x, m = site.source.segment(base), site.source.segment(mask)
        if isinstance(statement, ast.AugAssign):
            operator = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}.get(type(statement.op))
            if operator is None:
                return None
            value = f"{x} {operator} {value if isinstance(statement.value, ast.Name | ast.Constant) else f'({value})'}"
        new = f"{x}.copy_({site.torch}.where({m}, {value}, {x}))"
        return [*site.torch_import(), site.replace(statement, new)]

    def _whole(self, value: ast.expr, mask: ast.expr, base: ast.expr, site: Site, facts: Facts) -> str | None:
        """The value with `y[mask]` as `y`, where the rest is elementwise and of numbers."""
        replaced: dict[ast.expr, str] = {}
        for node in ast.walk(value):
            pair = _selected(node, facts) if isinstance(node, ast.expr) else None
            if pair is not None and isinstance(node, ast.expr):
                same = ast.dump(pair[1]) == ast.dump(mask) and _fits(*pair, site, facts)
                if not same or not isinstance(pair[0], ast.Name | ast.Attribute):
                    return None
                if facts.shape(pair[0]) is None or not _alike(pair[0], base, mask, facts):
                    return None
                replaced[node] = site.source.segment(pair[0])
        if not self._elementwise(value, replaced, facts):
            return None
        return site.source.rewritten(value, replaced)

    def _elementwise(self, node: ast.expr, replaced: dict[ast.expr, str], facts: Facts) -> bool:
        if node in replaced or (isinstance(node, ast.Constant) and isinstance(node.value, int | float)):
            return True
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.op, ast.USub) and self._elementwise(node.operand, replaced, facts)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
            return all(self._elementwise(side, replaced, facts) for side in (node.left, node.right))
        found = facts.torch_call(node)
        smooth = (
            found is not None and isinstance(node, ast.Call) and not node.keywords and facts.pure(node, smooth=True)
        )
        return smooth and found is not None and len(found[1]) == 1 and self._elementwise(found[1][0], replaced, facts)


def _selected(node: ast.expr, facts: Facts) -> tuple[ast.expr, ast.expr] | None:
    """(x, mask) of `x[mask]` or `torch.masked_select(x, mask)`."""
    if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice | ast.Tuple | ast.Constant):
        return node.value, node.slice
    found = facts.torch_call(node)
    if found is not None and found[0] == "masked_select" and len(found[1]) == 2:
        return found[1][0], found[1][1]
    return None


def _fits(base: ast.expr, mask: ast.expr, site: Site, facts: Facts) -> bool:
    """Whether the mask is boolean and of the base's own shape, so that it picks elements and not rows."""
    if not facts.tensor(base) or not facts.boolean(mask) or not facts.pure(base) or not facts.pure(mask):
        return False
    return _alike(base, base, mask, facts) and _unchanged(base, mask, site)


def _alike(node: ast.expr, base: ast.expr, mask: ast.expr, facts: Facts) -> bool:
    if isinstance(mask, ast.Name):
        value = facts.scope.value(mask.id)
        if value is None:
            return False
        mask = value
    shape = facts.shape(mask)
    return shape is not None and shape != "()" and shape in (facts.shape(node), facts.shape(base))


def _unchanged(base: ast.expr, mask: ast.expr, site: Site) -> bool:
    """Whether the names in a mask that was made before still mean what they did then."""
    if not isinstance(mask, ast.Name):
        return True
    store = site.scope.stores(mask.id)
    made = site.source.statement(store[0]) if len(store) == 1 else None
    if made is None or site.scope.value(mask.id) is None:
        return False
    value = site.scope.value(mask.id)
    assert value is not None
    names = {n.id for part in (base, value) for n in ast.walk(part) if isinstance(n, ast.Name)}
    return same_moment(site, made, site.statement, names)
