"""A copy of the source tree, the archives built from it, and a clean environment with the wheel installed.

Built from a copy, so that neither a stale `build/` nor the running checkout can lend a file. Nothing is downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("optpass", "passes", "backend", "models", "bench", "docs", "examples")
FILES = (
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "constraints.txt",
)


@dataclass(frozen=True)
class Archives:
    """What `python -m build` makes: the sdist, a wheel from the sdist, and a wheel straight from the tree."""

    sdist: Path
    wheel: Path
    direct: Path


@dataclass(frozen=True)
class Clean:
    """An environment that holds the wheel and its dependencies, and nothing of the checkout."""

    python: Path
    site: Path
    home: Path

    def run(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment ('python', 'optpass') far from the checkout; it must exit with 0."""
        own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OPTPASS", "PYTEST", "COV"))}
        done = subprocess.run(
            [str(self.python.with_name(arguments[0])), *arguments[1:]],
            cwd=cwd or self.home,
            env={**own, "PYTHONNOUSERSITE": "1", "NO_COLOR": "1", "COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{arguments} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the source tree."""
    return ROOT


@pytest.fixture(scope="session")
def copy_tree() -> Callable[[Path], Path]:
    """Copies the sources into an empty folder, links as links; returns the folder."""

    def copy(target: Path) -> Path:
        target.mkdir(parents=True)
        for folder in FOLDERS:
            shutil.copytree(
                ROOT / folder, target / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
            )
        for file in FILES:
            if (ROOT / file).is_file():
                shutil.copy2(ROOT / file, target / file)
        return target

    return copy


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory, copy_tree: Callable[[Path], Path]) -> Archives:
    base = tmp_path_factory.mktemp("build")
    source = copy_tree(base / "source")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir"]
    _checked([*build, str(base / "dist"), str(source)])
    _checked([*build, str(base / "direct"), "--wheel", str(source)])
    return Archives(
        sdist=_only(base / "dist", "*.tar.gz"),
        wheel=_only(base / "dist", "*.whl"),
        direct=_only(base / "direct", "*.whl"),
    )


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory, archives: Archives) -> Clean:
    base = tmp_path_factory.mktemp("clean")
    venv.create(base / "venv", with_pip=False)
    python = base / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"]
    _checked([*pip, "--no-deps", "--no-index", str(archives.wheel)])
    site = next((base / "venv" / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(f"{_dependencies(base / 'dependencies')}\n", encoding="utf-8")
    home = base / "home"
    home.mkdir()
    return Clean(python, site, home)


def _dependencies(folder: Path) -> Path:
    """A folder of links to everything that this environment has installed, except optpass in any form."""
    folder.mkdir()
    for site in {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}:
        for entry in site.iterdir():
            ours = entry.name.lower().startswith(("optpass", "__editable__"))
            if not ours and entry.suffix != ".pth" and entry.name != "__pycache__":
                (folder / entry.name).symlink_to(entry)
    return folder


def _checked(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    assert len(found) == 1, found
    return found[0]
