"""A finding, and the places that one frame's guards look at: their text, their value now, where they live."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from optpass.backend.audit.guards import Scope
from optpass.backend.audit.sources_text import Words, condition_in_user_terms, prefixes, user_terms
from optpass.reporting.audit.model import Cause


@dataclass(frozen=True)
class Finding:
    """A failed guard in the user's terms.

    Attributes:
        place: the thing itself where `source` names a property of it: 'x' of 'x.size(1)'.
        dimension: of a size or stride.
        dynamic: the guard is a condition on a symbol, so `before` may be that condition.
        fixed: 'parameter' or 'buffer' of a module, whose sizes Dynamo never makes dynamic unless it is told to.
        replaced: an object, or one of another type, is in its place.
        choice: one of a closed set, as a member of an enum.
        library: an attribute, parameter or buffer of a module that torch itself defines.
        shared: a function that this one closes over is another: one piece of code makes several, as a decorator does.
        behind: line of the graph break that it was computed in front of, where the break's continuation depends on it.
    """

    cause: Cause
    source: str
    before: str
    after: str
    place: str = ""
    dimension: int | None = None
    dynamic: bool = False
    fixed: str = ""
    replaced: bool = False
    choice: bool = False
    library: bool = False
    shared: bool = False
    behind: int | None = None


#: Source of a recompile that no guard explains, since the entry that fits was made by another thread meanwhile.
THREADS = "calls in several threads at once"


class _Gone:
    """Stands for a value that cannot be looked up any more."""


GONE = _Gone()


class Places:
    """The places of one frame, seen through the closest cache entry.

    Args:
        scope: over the closest cache entry's names.
        free: names of the frame's closure variables.
        names: texts for expressions that are not the user's, see `sources_text.Words`.
        made_for: values that the entry was compiled for, by expression, where its guards are only conditions.
        identify: finds a living object by its id; None when it is gone.
    """

    def __init__(
        self,
        scope: Scope,
        free: tuple[str, ...],
        names: Mapping[str, str],
        made_for: Mapping[str, str],
        identify: Callable[[int], Any],
    ) -> None:
        self.scope, self.free, self.made_for, self.identify = scope, set(free), made_for, identify
        self.words = Words(scope.evaluate, names)

    def text(self, source: str) -> str:
        """A source in the user's terms."""
        return user_terms(source, self.words)

    def condition_text(self, code: str) -> str:
        """A guard's condition in the user's terms."""
        return condition_in_user_terms(code, self.words)

    def value(self, source: str) -> Any:
        """Its value now; `GONE` where there is none."""
        try:
            return self.scope.evaluate(source)
        except Exception:  # noqa: BLE001  # whatever looking up an attribute of the user's object raises
            return GONE

    def home(self, source: str) -> Cause | None:
        """Where the value lives, as far as that is a cause of its own."""
        path = prefixes(source)
        if not path:
            return None
        owners = [self.value(owner) for owner in path[:-1]]
        if any(isinstance(owner, torch.nn.Module) or _is_module_class(owner) for owner in owners):
            return "module attribute"
        if any(isinstance(owner, types.ModuleType) for owner in owners):
            return "global"
        if "cell_contents" in source or any(path[0] == f"L['{name}']" for name in self.free):
            return "closure"
        return "global" if path[0].startswith("G[") else None


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.nn.Module)
