"""C++ kernels of one generated module compiled several to a file, where Inductor compiles each by itself.

Nearly all of the time that a C++ kernel takes to compile goes to starting the compiler, reading headers and linking; a
memory plan that holds little has many small kernels (`memory_fusion` ends one where there is something to release).
Inside `joined()` those of one module are shared out among as many files as there are compile threads, or more
where these would be large; each is the same text under the same flags, and has the Python binding that Inductor gives
it. Which kernels there are is not decided here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

log = logging.getLogger(__name__)

#: Kernels in one file, at most: what is left of starting the compiler is then less than their own part.
MOST = 16
#: How a generated kernel begins: one header, one function by this name.
_KERNEL = re.compile(
    r"(\s*#include <torch/csrc/inductor/cpp_prefix\.h>\s*)(extern \"C\"\s[^\n({;]*\bvoid\b[^\n({;]*)\bkernel(?=\()"
)
#: What else it may not have to stand in a file with others.
_MORE = re.compile(r"^\s*#\s*(?:include|define)\b|\bextern\b", re.MULTILINE)
_DIRECTIVE = re.compile(r"^\s*#\s*(?:include|define)\b.*$", re.MULTILINE)


@dataclass(frozen=True)
class Part:
    """One kernel, as the generated module has it until it is compiled.

    Attributes:
        types: of its arguments, in C++.
        source: its text.
    """

    types: tuple[str, ...]
    source: str


class _Installed:
    """The two methods of Inductor's that are replaced while any thread is inside `joined()`."""

    def __init__(self) -> None:
        self.lock, self.users, self.patches = threading.Lock(), 0, contextlib.ExitStack()
        self.inside = threading.local()

    def enter(self) -> None:
        with self.lock:
            if not self.users:
                for name, method in self._methods().items():
                    self.patches.enter_context(mock.patch.object(async_compile(), name, method))
            self.users += 1
        self.inside.depth = getattr(self.inside, "depth", 0) + 1

    def leave(self) -> None:
        self.inside.depth -= 1
        with self.lock:
            self.users -= 1
            if not self.users:
                self.patches.close()

    def _methods(self) -> dict[str, Callable[..., Any]]:
        one, wait = async_compile().cpp_pybinding, async_compile().wait

        def cpp_pybinding(compiler: Any, argtypes: Sequence[str], source_code: str) -> Any:
            match = _KERNEL.match(source_code)
            if not getattr(self.inside, "depth", 0) or match is None or _MORE.search(source_code, match.end()):
                return one(compiler, argtypes, source_code)
            return Part(tuple(argtypes), source_code)

        def waited(compiler: Any, scope: dict[str, Any]) -> None:
            parts = {name: value for name, value in scope.items() if isinstance(value, Part)}
            files = shared_out(list(dict.fromkeys(parts.values())), _threads())
            started = [_start(compiler, file, one) for file in files]
            made = {part: kernel for found in started for part, kernel in found().items()}
            scope.update({name: made[part] for name, part in parts.items()})
            wait(compiler, scope)  # what is compiled by itself

        return {"cpp_pybinding": cpp_pybinding, "wait": waited}


_INSTALLED = _Installed()


def async_compile() -> Any:
    """Inductor's class of that name."""
    from torch._inductor.async_compile import AsyncCompile

    return AsyncCompile


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Inside, C++ kernels of one generated module are compiled together, in this thread; no effect on what is no plain
    kernel, nor with a torch that binds kernels otherwise."""
    if not _binds_as_known():
        yield
        return
    _INSTALLED.enter()
    try:
        yield
    finally:
        _INSTALLED.leave()


def shared_out(parts: Sequence[Part], threads: int) -> list[list[Part]]:
    """The kernels of each file: files of about one length, as many as there are threads, or more of `MOST` kernels."""
    number = min(len(parts), max(threads, -(-len(parts) // MOST)))
    files: list[list[Part]] = [[] for _ in range(number)]
    for part in sorted(parts, key=lambda part: (-len(part.source), part.source)):
        min((file for file in files if len(file) < MOST), key=_length).append(part)
    return files


def _length(file: Sequence[Part]) -> int:
    return sum(len(part.source) for part in file)


def file_of(parts: Sequence[Part], template: str) -> str:
    """The text of a file up to the binding of its first kernel, which Inductor adds.

    Args:
        template: Inductor's binding of one kernel.
    """
    kernels, bindings, directives = [], [], dict[str, None]()
    header = ""
    for number, part in enumerate(parts):
        match = _KERNEL.match(part.source)
        assert match is not None  # else it is no part
        header = match[1]
        kernels.append(f"{match[2]}{_name(number)}{part.source[match.end() :]}\n")
        if not number:
            continue
        arguments = ", ".join(f"parse_arg<{t.replace('const ', '')}>(args, {n})" for n, t in enumerate(part.types))
        binding = template.format(
            arg_len=len(part.types), call_entry_func=f"{_name(number)}({arguments}); Py_RETURN_NONE;",
            entry_func=_name(number), extra_parse_arg="",
        )  # fmt: skip
        directives |= dict.fromkeys(line.strip() for line in _DIRECTIVE.findall(binding))
        bindings.append(f"namespace part_{number} {{\n{_DIRECTIVE.sub('', binding)}\n}}\n")
    return "".join([header, *kernels, *(f"{line}\n" for line in directives), *bindings])


def _name(number: int) -> str:
    """Of a kernel in its file; the first one keeps its own, by which Inductor loads the file."""
    return f"kernel_{number}" if number else "kernel"


def _start(compiler: Any, file: Sequence[Part], one: Callable[..., Any]) -> Callable[[], dict[Part, Any]]:
    """Have a file compiled; its kernels, when they are asked for."""
    from torch._inductor.async_compile import kernel_code_log
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache
    from torch._inductor.exc import CppCompileError

    def alone() -> Callable[[], dict[Part, Any]]:
        begun = {part: one(compiler, list(part.types), part.source) for part in file}
        return lambda: {part: made.result() if hasattr(made, "result") else made for part, made in begun.items()}

    if len(file) == 1:
        return alone()
    first = file[0]
    for part in file:
        kernel_code_log.info("CPP+Bindings Kernel:\n%s", part.source)
    submit = compiler.submit if _threads() > 1 else None
    future = Cache.load_pybinding_async(
        list(first.types), file_of(file, Cache.suffix_template), submit_fn=submit
    )  # fmt: skip

    def found() -> dict[Part, Any]:
        try:
            kernel = future()
        except CppCompileError as error:  # too large for this machine, or names that clash
            log.debug("%d kernels are compiled one by one: %s", len(file), error)
            return alone()()
        library = kernel.__self__  # its module
        return {first: kernel} | {part: _loaded(library, n) for n, part in enumerate(file) if n}

    return found


def _loaded(library: Any, number: int) -> Any:
    """A kernel of a file whose first kernel is loaded; each has a module of its own in it."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache

    name = f"{library.__name__}_{number}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, library.__file__)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
        loaded: Any = getattr(Cache, "_loaded_module_names", None)  # forgotten with the others
        if loaded is not None:
            loaded.add(name)
    return getattr(sys.modules[name], _name(number))


def _threads() -> int:
    from torch._inductor.async_compile import get_compile_threads

    return int(get_compile_threads())


def _binds_as_known() -> bool:
    """Whether Inductor's binding of a kernel is made of the parts that are filled in here."""
    try:
        from torch._inductor.async_compile import AsyncCompile, get_compile_threads, kernel_code_log  # noqa: F401
        from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache
        from torch._inductor.exc import CppCompileError  # noqa: F401

        template: str = Cache.suffix_template
        text = template.format(arg_len=0, call_entry_func="", entry_func="one", extra_parse_arg="")
        called = Cache.entry_function, Cache.call_entry_function
        _ = AsyncCompile.cpp_pybinding, AsyncCompile.wait
    except (ImportError, AttributeError, KeyError, IndexError):
        return False
    return "PyInit_one(" in text and called == ("kernel", "kernel({}); Py_RETURN_NONE;")
