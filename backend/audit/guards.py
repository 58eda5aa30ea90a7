"""Every guard of a cache entry that a frame fails, not only the first: the tree of guards is walked leaf by leaf.

What a failure means is judged in `causes`. Values that guards are evaluated on are not kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from optpass.backend.audit import tensor_guards
from optpass.backend.audit.sources_text import sources_in
from optpass.backend.compat import audit_guards as dynamo

#: Torch function modes of a call, the outermost first: type, and what to say of it.
Modes = list[tuple[type, str]]

#: Leaves that compare several places; they keep state between calls, so they are judged by their text instead.
_RELATIONAL = {"OBJECT_ALIASING", "NO_TENSOR_ALIASING", "STORAGE_OVERLAPPING", "SYMBOLIC_SHAPE_GUARD"}
_MODES = "TORCH_FUNCTION_MODE_STACK"
_HINT = re.compile(r" \(HINT: .*\)\s*$", re.DOTALL)
_STEP = re.compile(r"(?:\.(?P<attribute>[A-Za-z_]\w*)|\['(?P<key>[^'\\]*)'\]|\[(?P<index>\d+)\])$")
_OTHER_LENGTH = re.compile(r"len\((?P<source>.*)\) != (?P<length>\d+)")
_ENOUGH = 400  #: failures of one entry; an entry with more is not what the call resembles


@dataclass(frozen=True)
class Failure:
    """One guard, or one property of a tensor, that the frame fails.

    Attributes:
        kind: the guard's type in Dynamo ('EQUALS_MATCH'), or 'tensor' with `property`.
        code: the guard's text.
        source: Dynamo's expression of the place it looks at; '' for the process's state.
        property: of a tensor: 'size', 'stride', 'dtype', ...
        before: what the guard expects, where the kind alone does not tell.
        after: what it found.
        dimension: of a size or stride.
    """

    kind: str
    code: str
    source: str
    property: str = ""
    before: str | None = None
    after: str | None = None
    dimension: int | None = None


class Scope:
    """Evaluates guard expressions over one frame's values, each once."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        self._known: dict[str, Any] = {"L": names["L"], "G": names["G"]}

    def evaluate(self, expression: str) -> Any:
        """The expression's value; raises what looking it up raises."""
        if expression not in self._known:
            self._known[expression] = self._look_up(expression)
        return self._known[expression]

    def _look_up(self, expression: str) -> Any:
        step = _STEP.search(expression)
        base = expression[: step.start()] if step else ""
        if step is not None and base in self._known:
            owner = self._known[base]
            if (name := step["attribute"]) is not None:
                return getattr(owner, name)
            if type(owner) in (dict, list, tuple):
                return owner[step["key"] if step["index"] is None else int(step["index"])]
        return eval(expression, {"__builtins__": __builtins__}, _Names(self.names))  # Dynamo's own expressions

    def forget(self) -> None:
        """Let go of all values."""
        self._known.clear()
        self.names.clear()


class _Names(dict[str, Any]):
    """A copy, so that evaluating an expression cannot change Dynamo's scope."""


def plain(part: str) -> str:
    """A guard's text without the source line and the hint that Dynamo puts behind it."""
    return _HINT.sub("", part).partition("  # ")[0].strip()


def failures(entry: Any, scope: Scope, modes: Modes | None, enough: int = _ENOUGH) -> list[Failure]:
    """Guards of `entry` that fail, in the order of the tree; stops behind `enough`.

    Args:
        entry: Dynamo's cache entry.
        scope: over the entry's names (`compat.audit_guards.guard_scope`).
        modes: torch function modes that were active at the call; None: not known.
        enough: how many failures make the rest uninteresting.
    """
    walk = _Walk(entry, scope, modes, enough)
    walk.visit(dynamo.guard_root(entry), "", scope.names["L"])
    walk.epilogue()
    walk.relations()
    walk.lengths()
    return walk.found


class _Walk:
    def __init__(self, entry: Any, scope: Scope, modes: Modes | None, enough: int) -> None:
        self.entry, self.scope, self.modes, self.enough = entry, scope, modes, enough
        self.found: list[Failure] = []
        self.relational: list[tuple[str, str]] = []

    def visit(self, manager: Any, source: str, value: Any) -> None:
        """The manager's own guards, then what hangs on it: not where the thing itself is another."""
        if len(self.found) > self.enough:
            return
        before = len(self.found)
        for leaf in manager.get_leaf_guards():
            self.leaf(leaf, source, value)
        if source and len(self.found) > before:
            return
        pairs = getattr(manager, "get_key_value_managers", None)
        for child in (child for pair in (pairs().values() if pairs is not None else ()) for child in pair):
            if child is not None:
                self.descend(child)
        for child in manager.get_child_managers():
            self.descend(child)

    def descend(self, manager: Any) -> None:
        source = manager.get_source()
        if source == "G":
            self.visit(manager, "", self.scope.names["G"])
            return
        try:
            value = self.scope.evaluate(source)
        except (AttributeError, KeyError, IndexError) as error:
            self.missing(manager, source, error)
            return
        except Exception:  # noqa: BLE001  # a source that only Dynamo can follow; its guards are checked as a whole
            return
        self.visit(manager, source, value)

    def missing(self, manager: Any, source: str, error: Exception) -> None:
        if isinstance(error, AttributeError) and source.endswith(".__code__"):
            # Of functions Dynamo compares the code: something else that can be called is in the function's place.
            parts = [plain(part) for leaf in manager.get_leaf_guards() for part in leaf.verbose_code_parts()]
            code = next((part for part in parts if source in part), f"{source} is there")
            self.found.append(Failure("ID_MATCH", code, source.removesuffix(".__code__")))
            return
        kind = {AttributeError: "HASATTR", KeyError: "KEY", IndexError: "INDEX"}.get(type(error), "MISSING")
        self.found.append(Failure(kind, f"{source} is there", source, after="missing"))

    def leaf(self, leaf: Any, source: str, value: Any) -> None:
        kind = type(leaf).__name__
        if kind in _RELATIONAL:
            self.relational.extend((kind, plain(part)) for part in leaf.verbose_code_parts())
            return
        if kind == _MODES:
            self.function_modes()
            return
        if leaf(value):
            return
        parts = [plain(part) for part in leaf.verbose_code_parts()]
        if kind == "TENSOR_MATCH":
            changed = tensor_guards.differences(parts[0], source, value)
            self.found.extend(
                Failure("tensor", parts[0], source, c.property, c.before, c.after, c.dimension) for c in changed
            )
        elif kind == "GLOBAL_STATE":
            changed = tensor_guards.state_differences(parts[0])
            self.found.extend(Failure("state", c.text, "", c.property, c.before, c.after) for c in changed)
        else:
            self.found.extend(Failure(kind, part, source) for part in self.false_parts(parts))

    def false_parts(self, parts: list[str]) -> list[str]:
        """Of a guard with several conditions, those that do not hold; all when none can be evaluated."""
        if len(parts) == 1:
            return parts
        return [part for part in parts if self.holds(part) is False] or parts

    def holds(self, part: str) -> bool | None:
        try:
            return bool(self.scope.evaluate(part))
        except Exception:  # noqa: BLE001  # text that is no expression, or a place that is gone: the guard failed anyhow
            return None

    def function_modes(self) -> None:
        expected = dynamo.function_mode_types(self.entry)
        if expected is None or self.modes is None:
            return
        before, after = ([kind.__qualname__ for kind in kinds] for kinds in (expected, [t for t, _ in self.modes]))
        if before != after:
            texts = {kind.__qualname__: text for kind, text in self.modes}
            expects, finds = (", ".join(names) or "none" for names in (before, [texts[name] for name in after]))
            devices = {"DeviceContext"} == set(before) ^ set(after)
            self.found.append(Failure(_MODES, _MODES, "", "device" if devices else "modes", expects, finds))

    def epilogue(self) -> None:
        """Conditions over several places, e.g. on symbolic sizes: Dynamo checks them when all else holds."""
        for leaf in getattr(dynamo.guard_root(self.entry), "get_epilogue_lambda_guards", list)():
            for part in map(plain, leaf.verbose_code_parts()):
                if self.holds(part) is False and not self.explained(part):
                    self.found.append(Failure("LAMBDA_GUARD", part, next(iter(sources_in(part)), "")))

    def explained(self, part: str) -> bool:
        """Whether a failure found already says the same of the same place."""
        places = {failure.source for failure in self.found if failure.source}
        return any(place in places for place in sources_in(part))

    def lengths(self) -> None:
        """The length of a dict: what checks it is no leaf, so it is taken from Dynamo's word on the first failure."""
        for part in dynamo.first_failure(self.entry, self.scope.names["L"])[:1]:
            match = _OTHER_LENGTH.fullmatch(plain(part))
            if match is not None:
                source = match["source"]
                self.found = [failure for failure in self.found if source not in failure.source]
                self.found.append(Failure("DICT_LENGTH", f"len({source}) == {match['length']}", source))

    def relations(self) -> None:
        """Which tensors are the same object."""
        for kind, part in dict.fromkeys(self.relational):
            if kind in ("OBJECT_ALIASING", "SYMBOLIC_SHAPE_GUARD") and self.holds(part) is False:
                self.found.append(Failure(kind, part, next(iter(sources_in(part)), "")))
            elif kind == "NO_TENSOR_ALIASING":
                self.duplicates()

    def duplicates(self) -> None:
        seen: dict[int, str] = {}
        for source in dynamo.unaliased_sources(self.entry):
            try:
                value = self.scope.evaluate(source)
            except Exception:  # noqa: BLE001  # the place is gone: another guard says so
                continue
            first = seen.setdefault(id(value), source)
            if first != source and not any(f.kind == "NO_TENSOR_ALIASING" and f.source == source for f in self.found):
                self.found.append(Failure("NO_TENSOR_ALIASING", f"{source} is not {first}", source))
