"""pyproject.toml against the files on disk and the imports in them: nothing forgotten, nothing left over."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

#: Folder at the root -> package that it is.
PACKAGES = {
    "optpass": "optpass",
    "passes": "optpass.passes",
    "backend": "optpass.backend",
    "models": "optpass.models",
    "bench": "optpass.bench",
}
#: Distribution -> the names it is imported by, where they differ.
IMPORTED_AS = {"protobuf": ("google",)}
#: Programs that load these files of ours as their plugins, and so are there when they are imported.
HOSTS = {"pytest": {"optpass/auditing/plugin.py", "optpass/auditing/pytest_session.py"}}
#: Names that exist for type checkers only.
STUB_ONLY = {"_typeshed"}


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def files(root: Path) -> Iterator[tuple[str, Path]]:
    """(package, file) of every file of the five folders; the links inside `optpass` are not followed."""
    for folder, package in PACKAGES.items():
        for path in sorted((root / folder).rglob("*")):
            inside = path.relative_to(root / folder).parts
            if path.is_file() and "__pycache__" not in inside and not _behind_a_link(root / folder, inside):
                yield ".".join([package, *inside[:-1]]), path


def _behind_a_link(folder: Path, inside: tuple[str, ...]) -> bool:
    return any(folder.joinpath(*inside[: i + 1]).is_symlink() for i in range(len(inside)))


def test_packages_are_those_on_disk(root: Path, project: dict[str, Any]) -> None:
    on_disk = {package for package, path in files(root) if path.suffix == ".py"}
    listed = project["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(on_disk)
    assert len(listed) == len(set(listed))


def test_every_folder_with_modules_is_a_package(root: Path) -> None:
    with_modules = {path.parent for _, path in files(root) if path.suffix == ".py"}
    assert [folder for folder in sorted(with_modules) if not (folder / "__init__.py").is_file()] == []


def test_root_folders_are_linked_into_the_package(root: Path, project: dict[str, Any]) -> None:
    assert project["tool"]["setuptools"]["package-dir"] == {package: folder for folder, package in PACKAGES.items()}
    for folder in PACKAGES.keys() - {"optpass"}:
        link = root / "optpass" / folder
        assert link.is_symlink() and link.readlink() == Path("..") / folder, link


def test_data_files_are_declared(root: Path, project: dict[str, Any]) -> None:
    declared = project["tool"]["setuptools"]["package-data"]
    packages = set(project["tool"]["setuptools"]["packages"])
    used: set[tuple[str, str]] = set()
    for package, path in files(root):
        if path.suffix == ".py" or path.is_relative_to(root / "bench" / "results"):
            continue
        owner, parts = package, [path.name]
        while owner not in packages:  # data lie in plain folders inside a package
            owner, _, folder = owner.rpartition(".")
            parts.insert(0, folder)
        patterns = [p for p in declared.get(owner, []) if fnmatch("/".join(parts), p)]
        assert patterns, f"{path.relative_to(root)} is in no package-data pattern of {owner}"
        used.update((owner, pattern) for pattern in patterns)
    assert used == {(owner, pattern) for owner, patterns in declared.items() for pattern in patterns}


def test_version_is_written_once_more_and_equal(project: dict[str, Any]) -> None:
    import optpass

    assert project["project"]["version"] == optpass.__version__


def test_third_party_imports_are_declared(root: Path, project: dict[str, Any]) -> None:
    required = [_name(text) for text in project["project"]["dependencies"]]
    extras = project["project"]["optional-dependencies"]
    optional = [_name(text) for extra in ("onnx", "hf") for text in extras[extra]]
    declared = {module for name in required + optional for module in IMPORTED_AS.get(name, (name,))}
    known = declared | STUB_ONLY | {"optpass"} | set(sys.stdlib_module_names)
    found = {
        (module, path.relative_to(root).as_posix())
        for _, path in files(root)
        if path.suffix == ".py"
        for module in _imported(path)
    }
    missing = {(module, where) for module, where in found if module not in known}
    assert {(module, where) for module, where in missing if where not in HOSTS.get(module, ())} == set()
    unused = {_name(text) for text in project["project"]["dependencies"]} - {module for module, _ in found}
    assert unused == set()


def test_pinned_set_fits_the_requirements(root: Path, project: dict[str, Any]) -> None:
    from packaging.requirements import Requirement

    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {_name(line): line.partition("==")[2] for line in lines if line and not line.startswith("#")}
    groups = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    for requirement in (Requirement(text) for group in groups for text in group):
        if requirement.name != "optpass":
            assert requirement.specifier.contains(pins[_name(requirement.name)]), requirement


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return match.group().lower().replace("_", "-")


def _imported(path: Path) -> set[str]:
    """First names of all absolute imports of a file, wherever they stand."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.partition(".")[0])
    return names
