"""Calls a function once torch's compiler is there, without importing torch: the user's program decides when it does.

Importing torch before the program would take away what it sets in the environment first. Standard library only.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: The module whose presence means that something may be compiled.
COMPILER = "torch._dynamo"


def load_compiler() -> None:
    """Load it now. Done first of all by who needs it, so that nothing of optpass's is half loaded when `ready` runs."""
    importlib.import_module(COMPILER)


class WhenCompilerLoads:
    """Calls `ready` once, as soon as `torch._dynamo` is loaded and no module of torch is half loaded.

    `torch.compile` imports `torch._dynamo` when it is first called, so `ready` runs before anything compiles.
    """

    def __init__(self, ready: Callable[[], None]) -> None:
        self._ready = ready
        self._depth = threading.local()
        self._lock = threading.Lock()
        self._called = False
        self._loaded = False

    def install(self) -> None:
        """Begin to watch imports; at once, where the compiler is loaded already."""
        if COMPILER in sys.modules:
            self._call()
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Watch imports no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Python's finder protocol: torch's own spec, its loader watched; None for all other modules."""
        if name != "torch" and not name.startswith("torch."):
            self._try()  # put off from a moment that did not suit
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _WatchedLoader(spec.loader, self)
                return spec
        return None

    def entered(self) -> None:
        """A module of torch begins to load in this thread."""
        self._depth.value = getattr(self._depth, "value", 0) + 1

    def left(self, name: str, *, loaded: bool) -> None:
        """It is loaded, or has failed."""
        self._depth.value -= 1
        self._loaded = self._loaded or (loaded and name == COMPILER)
        self._try()

    def _try(self) -> None:
        if self._loaded and not getattr(self._depth, "value", 0) and not _half_loaded():
            self._call()

    def _call(self) -> None:
        with self._lock:
            if self._called:
                return
            self._called = True
        self.remove()
        self._ready()


class _WatchedLoader(Loader):
    """A loader that tells when its module's code begins and ends; the module keeps the original."""

    def __init__(self, original: Any, owner: WhenCompilerLoads) -> None:
        self._original = original
        self._owner = owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._original.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._original
        module.__loader__ = self._original
        loaded = False
        self._owner.entered()
        try:
            self._original.exec_module(module)
            loaded = True
        finally:
            self._owner.left(module.__name__, loaded=loaded)


def _half_loaded() -> bool:
    """Whether a module of optpass's is being loaded: what `ready` imports could need it."""
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("optpass.")]
    return any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in ours)
