"""The import rules of pyproject.toml: each covers what it should, and each bites."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

#: The one package that may import torch's private modules.
COMPAT = "backend/compat/"


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--config", "pyproject.toml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_contracts_hold(root: Path) -> None:
    done = lint_imports(root)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_part_of_the_package_is_in_a_contract(root: Path, project: dict[str, Any]) -> None:
    contracts = project["tool"]["importlinter"]["contracts"]
    covered = {
        name.strip()
        for contract in contracts
        for layer in contract.get("layers", ())
        for name in re.split(r"[|:]", layer)
    }
    covered |= {name for contract in contracts for name in contract.get("source_modules", ())}
    parts = {
        path.stem for path in (root / "optpass").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert {f"optpass.{part}" for part in parts if not part.startswith("__")} <= covered


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("passes/order.py", "import optpass.backend.entry", "imports run one way"),
        ("backend/device.py", "import optpass.cli.app", "imports run one way"),
        ("optpass/errors.py", "import optpass.options", "imports run one way"),
        ("models/mlp.py", "import optpass.passes.contract", "models are plain torch programs"),
        ("optpass/reporting/text.py", "import torch", "do not know torch"),
    ],
)
def test_contracts_bite(tmp_path: Path, copy_tree: Callable[[Path], Path], file: str, line: str, contract: str) -> None:
    tree = copy_tree(tmp_path / "tree")
    with (tree / file).open("a", encoding="utf-8") as module:
        module.write(f"\n{line}\n")
    done = lint_imports(tree)
    assert done.returncode == 1, done.stdout + done.stderr
    broken = [text for text in done.stdout.splitlines() if text.endswith("BROKEN")]
    assert any(contract in text for text in broken), done.stdout


@pytest.mark.parametrize("name", ["passes", "backend", "models", "bench"])
@pytest.mark.parametrize("statement", ["import {}", "from {} import anything", "import {}.anything"])
def test_root_folders_cannot_be_imported_by_their_own_names(root: Path, name: str, statement: str) -> None:
    file = str(root / "passes" / "sample.py")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", "--stdin-filename", file, "-"],
        input=statement.format(name) + "\n", cwd=root, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "TID251" in done.stdout and f"import optpass.{name}" in done.stdout, done.stdout


def test_private_torch_imports_are_in_one_place(root: Path) -> None:
    found = []
    for folder in ("optpass", "passes", "backend", "models", "bench"):
        for path in sorted((root / folder).rglob("*.py")):
            place = path.resolve().relative_to(root).as_posix()
            private = {name for name in _imports(path) if name.startswith("torch._")}
            if private and not place.startswith(COMPAT):
                found.append((place, sorted(private)))
    assert found == []


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names
