"""The user's program, made ready to run in a `__main__` of its own, as Python would. Standard library only."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any


class Program:
    """The user's program: a script or a module, made ready in a `__main__` of its own.

    Args:
        command: path of the script, or name of the module.
        module: whether it is a module.
        arguments: its own.
    """

    def __init__(self, command: str, module: bool, arguments: list[str]) -> None:
        self.command, self.module, self.arguments = command, module, arguments

    def prepare(self) -> types.CodeType:
        """Set `sys.argv`, `sys.path[0]` and `__main__` as Python does, and give the code to run.

        Raises:
            ImportError: there is no such module.
            SyntaxError, OSError: as Python gives for such a script.
        """
        main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        main.__dict__.setdefault("__annotations__", {})
        if self.module:
            code = self._module(main)
        else:
            code = self._script(main)
        # Pickle, multiprocessing and debuggers look there; and it lives as long as the process, as a real one does.
        sys.modules["__main__"] = main
        return code

    def _script(self, main: types.ModuleType) -> types.CodeType:
        path = os.path.abspath(self.command)  # noqa: PTH100  # as Python: no link is resolved, no '..' kept
        sys.argv[:] = [self.command, *self.arguments]
        _first_path(os.path.dirname(os.path.realpath(self.command)))  # noqa: PTH120
        loader: Any
        if path.endswith(".pyc"):
            loader = importlib.machinery.SourcelessFileLoader("__main__", path)
            code = loader.get_code("__main__")
        else:
            loader = importlib.machinery.SourceFileLoader("__main__", path)
            code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
        main.__dict__.update(__file__=path, __loader__=loader, __spec__=None, __package__=None, __cached__=None)
        assert isinstance(code, types.CodeType)
        return code

    def _module(self, main: types.ModuleType) -> types.CodeType:
        sys.argv[:] = ["-m", *self.arguments]
        _first_path(os.getcwd())  # noqa: PTH109
        name = self.command
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name, spec = f"{name}.__main__", importlib.util.find_spec(f"{name}.__main__")
        loader: Any = getattr(spec, "loader", None)
        code = loader.get_code(name) if hasattr(loader, "get_code") else None
        if spec is None or code is None:
            what = "is a package without __main__" if name != self.command else "no such module"
            raise ImportError(what, name=name)
        sys.argv[0] = spec.origin or name
        main.__dict__.update(
            __file__=spec.origin, __loader__=loader, __spec__=spec, __package__=spec.parent, __cached__=spec.cached
        )
        assert isinstance(code, types.CodeType)
        return code


def _first_path(folder: str) -> None:
    """Put the program's folder where Python would: first, unless Python was told not to (`-P`, `-I`)."""
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)
