"""What lies in the wheel and in the sdist."""

from __future__ import annotations

import stat
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

SOURCES = {
    "optpass": "optpass",
    "passes": "optpass/passes",
    "backend": "optpass/backend",
    "models": "optpass/models",
    "bench": "optpass/bench",
}


def expected(root: Path) -> set[str]:
    """Paths in a wheel of every module, template, schema and table of the tree."""
    paths = set()
    for folder, target in SOURCES.items():
        for path in (root / folder).rglob("*"):
            inside = path.relative_to(root / folder)
            linked = folder == "optpass" and inside.parts[0] in SOURCES
            left_out = linked or "__pycache__" in inside.parts or inside.parts[0] == "results"
            if path.is_file() and not left_out:
                paths.add(f"{target}/{inside.as_posix()}")
    return paths


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename for info in archive.infolist() if not info.is_dir()}


def code(wheel: Path) -> set[str]:
    return {name for name in names(wheel) if ".dist-info/" not in name}


def test_wheel_holds_exactly_the_sources(root: Path, archives: Any) -> None:
    assert code(archives.wheel) == expected(root)


@pytest.mark.parametrize(
    "path",
    [
        "optpass/py.typed",
        "optpass/reporting/schemas/optpass.report-1.json",
        "optpass/reporting/schemas/optpass.analysis-1.json",
        "optpass/reporting/templates/base.html.j2",
        "optpass/passes/devices/documents.toml",
        "optpass/auditing/fixes/knowledge/values.toml",
    ],
)
def test_wheel_holds_its_data(archives: Any, path: str) -> None:
    assert path in names(archives.wheel)


def test_wheel_brings_one_import_name(archives: Any) -> None:
    assert {name.partition("/")[0] for name in code(archives.wheel)} == {"optpass"}
    with zipfile.ZipFile(archives.wheel) as archive:
        top = next(name for name in archive.namelist() if name.endswith(".dist-info/top_level.txt"))
        assert archive.read(top).decode().split() == ["optpass"]


def test_wheel_from_the_sdist_is_the_wheel_from_the_tree(archives: Any) -> None:
    assert names(archives.wheel) == names(archives.direct)


def test_archives_hold_no_link(archives: Any) -> None:
    with zipfile.ZipFile(archives.wheel) as archive:
        assert [i.filename for i in archive.infolist() if stat.S_ISLNK(i.external_attr >> 16)] == []
    with tarfile.open(archives.sdist) as archive:
        assert [m.name for m in archive if m.issym() or m.islnk()] == []


def test_sdist_holds_what_a_reader_needs(archives: Any) -> None:
    with tarfile.open(archives.sdist) as archive:
        inside = {m.name.partition("/")[2] for m in archive}
    wanted = {"README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "constraints.txt", "pyproject.toml"}
    assert wanted | {"examples/gpt-demo.toml", "docs/architecture.md", "passes/registry.py"} <= inside


def test_metadata(root: Path, archives: Any) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    with zipfile.ZipFile(archives.wheel) as archive:
        found = {name.rpartition("/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
        metadata = archive.read(found["METADATA"]).decode()
        points = archive.read(found["entry_points.txt"]).decode()
        assert archive.read(found["LICENSE"]).decode() == (root / "LICENSE").read_text(encoding="utf-8")
    assert f"Version: {project['version']}\n" in metadata
    assert "License-Expression: BSD-3-Clause\n" in metadata
    assert "Requires-Python: >=3.11\n" in metadata
    assert "[torch_dynamo_backends]\noptpass = optpass.backend.entry:optpass" in points
    assert "[console_scripts]\noptpass = optpass.cli:main" in points
