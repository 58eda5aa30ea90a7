"""The example of CONTRIBUTING.md: the pass is registered and its own tests are run, exactly as they are printed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from optpass.passes import registry


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example(
    root: Path, blocks: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    """The example's test module, with its pass in the registry."""
    printed = {block.note.removeprefix("file: "): block.text for block in blocks(root / "CONTRIBUTING.md", "python")}
    assert set(printed) == {"passes/stable_log.py", "tests/passes/test_stable_log.py"}
    modules = {"optpass.passes.stable_log": "passes/stable_log.py", "example_test": "tests/passes/test_stable_log.py"}
    for name, place in modules.items():
        file = tmp_path / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(printed[place], encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
        load(name, file)
    stable_log = sys.modules["optpass.passes.stable_log"]
    monkeypatch.setattr(registry, "PASSES", (*registry.PASSES, stable_log.StableLog))
    yield sys.modules["example_test"]
    for name in modules:
        sys.modules.pop(name, None)
    torch._dynamo.reset()


def test_the_printed_tests_pass(example: ModuleType) -> None:
    tests = [value for name, value in vars(example).items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


def test_the_printed_tests_can_fail(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the pass each of them fails, so that they test it and not torch."""
    monkeypatch.setattr(registry, "PASSES", registry.PASSES[:-1])
    for name in ("test_applies_and_stays_finite", "test_declines_where_the_softmax_is_needed"):
        with pytest.raises(AssertionError):
            getattr(example, name)()


def test_the_pass_is_as_short_as_promised(root: Path, blocks: Callable[..., list[Any]]) -> None:
    lines = [line for block in blocks(root / "CONTRIBUTING.md", "python") for line in block.text.splitlines() if line]
    assert len(lines) <= 60


@pytest.mark.slow
def test_the_pass_keeps_the_house_rules(root: Path, blocks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """ruff, and mypy --strict."""
    import subprocess

    (block,) = (b for b in blocks(root / "CONTRIBUTING.md", "python") if b.note == "file: passes/stable_log.py")
    file = tmp_path / "stable_log.py"
    file.write_text(block.text, encoding="utf-8")
    # torch is left out of mypy's sight: reading it takes longer than all other tests of the documents.
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nstrict = True\n[mypy-torch.*]\nfollow_imports = skip\n", encoding="utf-8")
    ruff = ["ruff", "check", "--no-cache", "--config", str(root / "pyproject.toml")]
    mypy = ["mypy", "--config-file", str(config), "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache")]
    for command in (ruff, mypy):
        done = subprocess.run(
            [sys.executable, "-m", *command, str(file)],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
