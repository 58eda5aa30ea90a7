"""A branch on a tensor whose sides must not both be computed: two functions and `torch.cond`."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from optpass.auditing.fixes import tables
from optpass.auditing.fixes.facts import Facts
from optpass.auditing.fixes.rewrites.branches import in_test
from optpass.auditing.fixes.rewrites.conditions import predicate
from optpass.auditing.fixes.rewrites.decisions import bound_before, is_elif
from optpass.auditing.fixes.site import Site
from optpass.auditing.fixes.source import Edit

#: Statements behind a branch that returns, that may become its other side.
_LONGEST = 8


@dataclass(frozen=True)
class _Sides:
    """Both sides' statements, what they decide (None: what is returned), and the last statement of the whole."""

    yes: list[ast.stmt]
    no: list[ast.stmt]
    names: list[str] | None
    last: ast.stmt


class CondBranch:
    """`if tensor:` ... `else:` ... -> `torch.cond(tensor, if_true, if_false, operands)`."""

    name = "cond"
    note = "Both sides must give tensors of the same shapes, dtypes and strides."

    def edits(self, site: Site, facts: Facts) -> list[Edit] | None:
        """Replace the `if` by two functions and the call that chooses between them."""
        branch = site.statement
        if not isinstance(branch, ast.If) or site.torch is None or not in_test(site, branch) or is_elif(branch, site):
            return None
        if not site.source.alone(branch) or isinstance(site.function, ast.AsyncFunctionDef):
            return None
        sides = _returning(branch, site) or _deciding(branch, site)
        test = predicate(branch.test, site, facts)
        if sides is None or test is None or not all(_plain(side, facts) for side in (sides.yes, sides.no)):
            return None
        if not all(facts.tensor(value) for side in (sides.yes, sides.no) for value in _results(side, sides, site)):
            return None
        pairs = zip(_results(sides.yes, sides, site), _results(sides.no, sides, site), strict=False)
        if any(_differ(_origin(yes, sides.yes), _origin(no, sides.no), facts) for yes, no in pairs):
            return None
        return self._replace(sides, test, site)

    def _replace(self, sides: _Sides, test: str, site: Site) -> list[Edit]:
        source, new_line = site.source, site.source.newline
        indent = source.indent(site.statement)
        inner = indent + source.unit
        operands = [name for name in _assigned(sides) if any(_read_first(name, s) for s in (sides.yes, sides.no))]
        yes, no = site.scope.fresh("if_true"), site.scope.fresh("if_false")
        text = ""
        for function, side in ((yes, sides.yes), (no, sides.no)):
            body = "".join(f"{inner}{line}{new_line}" for line in self._steps(side, site))
            text += f"{indent}def {function}({', '.join(operands)}):{new_line}{body}"
            text += f"{inner}return {', '.join(self._given(side, sides, site))}{new_line}{new_line}"
        given = f"({', '.join(operands)}{',' if len(operands) == 1 else ''})"
        head = "return " if sides.names is None else f"{', '.join(sides.names)} = "
        comments = source.comments(*source.whole_lines(site.statement, sides.last))
        lead = "".join(f"{indent}{comment}{new_line}" for comment in comments)
        call = f"{indent}{head}{site.torch}.cond({test}, {yes}, {no}, {given}){new_line}"
        return [*site.torch_import(), Edit(*source.whole_lines(site.statement, sides.last), lead + text + call)]

    def _steps(self, side: list[ast.stmt], site: Site) -> list[str]:
        """The assignments of a side, each as one piece of text."""
        return [site.source.segment(s) for s in side if isinstance(s, ast.Assign)]

    def _given(self, side: list[ast.stmt], sides: _Sides, site: Site) -> list[str]:
        """What a side returns. `torch.cond` refuses results that alias operands: those go as copies."""
        texts = []
        for value in _results(side, sides, site):
            text = site.source.segment(value) if hasattr(value, "lineno") else ast.unparse(value)
            origin = _origin(value, side)
            if isinstance(origin, ast.Call) and _may_alias(origin):  # a view: both sides must have the same strides
                text += f".clone(memory_format={site.torch}.contiguous_format)"
            elif _may_alias(origin):
                text += ".clone()"
            texts.append(text)
        return texts


def _origin(value: ast.expr, side: list[ast.stmt]) -> ast.expr:
    """What a side computes a value by: names that it assigns are followed."""
    for statement in reversed(side):
        if isinstance(value, ast.Name) and isinstance(statement, ast.Assign) and value.id in _targets(statement):
            value = statement.value
    return value


def _may_alias(value: ast.expr) -> bool:
    """Whether the value may be a tensor from outside, or a view of one."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Attribute) and value.func.attr in tables.VIEWS
    return not isinstance(value, ast.BinOp | ast.UnaryOp | ast.Compare)


def _differ(yes: ast.expr, no: ast.expr, facts: Facts) -> bool:
    """Whether the sides convert to unlike dtypes, cut unlike, or one has no dimensions and the other some tensor's."""
    shapes = [facts.shape(yes), facts.shape(no)]
    scalar = None not in shapes and shapes[0] != shapes[1] and "()" in shapes
    return scalar or facts.casts(yes) != facts.casts(no) or _cut(yes) != _cut(no)


def _cut(value: ast.expr) -> str:
    """The index of what is a part of something; '' for anything else."""
    return ast.unparse(value.slice) if isinstance(value, ast.Subscript) else ""


def _returning(branch: ast.If, site: Site) -> _Sides | None:
    """Both sides end in `return`, or the `if` does and what stands behind it is the other side."""
    block = site.source.block(branch)
    after = block[block.index(branch) + 1 :]
    other, last = (branch.orelse, branch) if branch.orelse else (after, after[-1] if after else branch)
    ends = [side[-1] if side else None for side in (branch.body, other)]
    if not all(isinstance(end, ast.Return) and end.value is not None for end in ends) or not site.source.alone(last):
        return None
    if len(other) > _LONGEST:
        return None
    return _Sides(branch.body, other, None, last)


def _deciding(branch: ast.If, site: Site) -> _Sides | None:
    """The names that the sides assign and that anything else reads, each with a value on both sides."""
    sides = _Sides(branch.body, branch.orelse, [], branch)
    inside = set(ast.walk(branch))
    wanted = [name for name in _assigned(sides) if any(load not in inside for load in site.scope.loads(name))]
    for name in wanted:
        both = all(any(name in _targets(s) for s in side) for side in (sides.yes, sides.no))
        if site.scope.shared(name) or not (both or bound_before(name, branch, site)):
            return None
    return _Sides(branch.body, branch.orelse, wanted, branch) if wanted else None


def _results(side: list[ast.stmt], sides: _Sides, site: Site) -> list[ast.expr]:
    if sides.names is not None:
        return [ast.Name(name, ast.Load()) for name in sides.names]
    value = side[-1].value if side and isinstance(side[-1], ast.Return) else None
    assert value is not None
    return list(value.elts) if isinstance(value, ast.Tuple) else [value]


def _plain(side: list[ast.stmt], facts: Facts) -> bool:
    """Whether a side is nothing but assignments of pure values to names, a final `return` and `pass`."""
    for index, statement in enumerate(side):
        returned = isinstance(statement, ast.Return) and index == len(side) - 1
        if not returned and not isinstance(statement, ast.Pass) and not _targets(statement):
            return False
        value = statement.value if isinstance(statement, ast.Assign | ast.Return) else None
        if value is not None and (not facts.pure(value) or "\n" in facts.site.source.segment(value)):
            return False
    return True


def _targets(statement: ast.stmt) -> list[str]:
    if not isinstance(statement, ast.Assign) or not all(isinstance(t, ast.Name) for t in statement.targets):
        return []
    return [t.id for t in statement.targets if isinstance(t, ast.Name)]


def _assigned(sides: _Sides) -> list[str]:
    return list(dict.fromkeys(name for s in [*sides.yes, *sides.no] for name in _targets(s)))


def _read_first(name: str, side: list[ast.stmt]) -> bool:
    """Whether a side reads a name that it assigns later or at once: inside of a function it would be unbound."""
    if not any(name in _targets(statement) for statement in side):
        return False
    for statement in side:
        if any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) for n in ast.walk(statement)):
            return True
        if name in _targets(statement):
            return False
    return False
