"""C++ kernels of one generated module are compiled several to a file, and compute what they compute by themselves."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache
from torch._inductor.exc import CppCompileError

from optpass.backend.compat import kernel_files
from optpass.backend.compat.kernel_files import MOST, Part, file_of, joined, shared_out

TYPES = ["const float*", "float*", "int64_t"]
HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>\n"


def kernel(expression: str) -> str:
    """A kernel as Inductor writes one, that applies `expression` of `x` to so many numbers."""
    return HEADER + (
        'extern "C"  void  kernel(const float* in_ptr0,\n                       float* out_ptr0,\n'
        "                       const int64_t ks0)\n{\n"
        "    for(int64_t i=0; i<ks0; i+=1) { auto x = in_ptr0[i]; out_ptr0[i] = " + expression + "; }\n}\n"
    )


SOURCES = {"twice": kernel("2.0f * x"), "less": kernel("x - 1.0f"), "same": kernel("x"), "again": kernel("2.0f * x")}


def compiled(sources: dict[str, str]) -> dict[str, Any]:
    """The kernels, as a generated module gets them."""
    with joined():
        compiler = AsyncCompile()
        scope: dict[str, Any] = {name: compiler.cpp_pybinding(TYPES, text) for name, text in sources.items()}
        compiler.wait(scope)
    return scope


def check(kernels: dict[str, Any]) -> None:
    x = torch.randn(11)
    for name, expected in (("twice", 2 * x), ("less", x - 1), ("same", x), ("again", 2 * x)):
        out = torch.empty(11)
        kernels[name](x, out, 11)
        assert torch.equal(out, expected)


@pytest.mark.slow
def test_kernels_of_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[str] = []
    load = Cache.load_async.__func__  # type: ignore[attr-defined]

    def counted(cls: Any, text: str, *args: Any, **kwargs: Any) -> Any:
        files.append(text)
        return load(cls, text, *args, **kwargs)

    monkeypatch.setattr(Cache, "load_async", classmethod(counted))
    monkeypatch.setattr(kernel_files, "_threads", lambda: 1)
    check(compiled(SOURCES))
    assert len(files) == 1  # and the text that stands twice is there once
    assert files[0].count('extern "C"') == 3


def test_threads_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that compiles as Inductor does, beside one that is inside, which ends last."""
    made: list[Any] = []
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda self, types, source: source)
    before = AsyncCompile.cpp_pybinding, AsyncCompile.wait
    outer, inner = joined(), joined()
    outer.__enter__()
    beside = threading.Thread(target=lambda: made.append(AsyncCompile().cpp_pybinding(TYPES, SOURCES["twice"])))
    beside.start()
    beside.join()
    with inner:
        parts = [AsyncCompile().cpp_pybinding(TYPES, SOURCES["twice"])]
    parts.append(AsyncCompile().cpp_pybinding(TYPES, SOURCES["twice"]))
    outer.__exit__(None, None, None)
    assert made == [SOURCES["twice"]] and all(isinstance(part, Part) for part in parts)
    assert (AsyncCompile.cpp_pybinding, AsyncCompile.wait) == before


def test_what_cannot_be_compiled_together_is_compiled_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    alone: list[str] = []

    def one(self: Any, types: Sequence[str], source: str) -> Any:
        alone.append(source)
        return source

    def fails(*args: Any, **kwargs: Any) -> Any:
        def future() -> Any:
            raise CppCompileError(["g++"], "killed")

        return future

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", one)
    monkeypatch.setattr(Cache, "load_pybinding_async", fails)
    monkeypatch.setattr(kernel_files, "_threads", lambda: 1)
    assert compiled(SOURCES) == SOURCES
    assert sorted(alone) == sorted(set(SOURCES.values()))
    alone.clear()
    others = {
        "header": HEADER + "#include <vector>\n" + SOURCES["twice"].removeprefix(HEADER),
        "definition": SOURCES["twice"] + "#define FOUR 4\n",
        "helper": HEADER + "static int four() { return 4; }\n" + SOURCES["twice"].removeprefix(HEADER),
        "second": SOURCES["twice"] + 'extern "C" void other() {}\n',
    }
    assert compiled(others) == others
    assert alone == list(others.values())


def test_files_are_of_one_length() -> None:
    parts = [Part(("float*",), "x" * length) for length in range(100, 100 + 40)]
    for threads, number in ((1, 3), (2, 3), (8, 8), (64, 40)):
        files = shared_out(parts, threads)
        assert len(files) == number
        assert sorted(part.source for file in files for part in file) == sorted(part.source for part in parts)
        lengths = [sum(len(part.source) for part in file) for file in files]
        assert max(map(len, files)) <= MOST and max(lengths) - min(lengths) < 140
    assert shared_out(parts, 8) == shared_out(parts[::-1], 8)
    assert shared_out([], 8) == []


def test_names_do_not_clash() -> None:
    parts = [Part(tuple(TYPES), SOURCES[name]) for name in ("twice", "less", "same")]
    text = file_of(parts, Cache.suffix_template)
    assert [text.count(f" {name}(const float*") for name in ("kernel", "kernel_1", "kernel_2")] == [1, 1, 1]
    assert text.count("#include <Python.h>") == text.count("PyInit_kernel_1(") == 1 and "PyInit_kernel(" not in text
