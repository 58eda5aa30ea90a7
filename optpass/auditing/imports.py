"""Functions that run as soon as a module that somebody else imports is loaded. Standard library only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AfterImport:
    """Calls functions as soon as some modules are loaded: a finder that lets others find."""

    def __init__(self, actions: dict[str, Callable[[], None]]) -> None:
        self._actions = dict(actions)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Python's finder protocol: the module's own spec, its loader watched; None for all other modules."""
        action = self._actions.pop(name, None)
        if action is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if finder is not self and find is not None else None
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _ThenLoader(spec.loader, action)
                return spec
        return None


class _ThenLoader(Loader):
    """A loader that calls a function once its module is loaded."""

    def __init__(self, original: Any, action: Callable[[], None]) -> None:
        self._original, self._action = original, action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._original.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._original
        module.__loader__ = self._original
        self._original.exec_module(module)
        self._action()
