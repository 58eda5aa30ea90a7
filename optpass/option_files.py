"""The TOML files that options are read from: the nearest one of a folder, and its contents.

What the keys mean is `options`' business.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optpass.errors import ConfigError


def find_toml(start: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """The nearest `optpass.toml`, or `pyproject.toml` with `[tool.optpass]`, in `start` or a folder above it."""
    for folder in (start, *start.parents):
        own = folder / "optpass.toml"
        if _is_file(own):
            return own, read_toml(own)
        project = folder / "pyproject.toml"
        if _is_file(project):
            try:
                tools = tomllib.loads(project.read_text(encoding="utf-8")).get("tool")
            except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError):
                tools = None  # a broken pyproject.toml is its own tools' business, and says nothing to us
            table = tools.get("optpass") if isinstance(tools, dict) else None
            if table is not None:
                return project, table
    return None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False  # a folder above us that we may not look into


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dict; `ConfigError` with path, line and cause where it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
