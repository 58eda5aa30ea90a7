"""Finds the measured table for a device: those that come with the package, and those in the user's cache folder.

What tells one kind of processor from another is its name and its vector instructions; a GPU, its name. Nothing is
measured here and no figure is read.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

import torch

from optpass.passes.attention.gate.table import Table, from_json
from optpass.passes.devices import DeviceSpec
from optpass.passes.processor import instructions
from optpass.passes.roofline.calibration import cache_folder
from optpass.reporting.environment import cpu_model

Fit = Literal["measured", "extrapolated"]


@dataclass(frozen=True)
class Found:
    """A table, and whether it was measured on this kind of device or on another that must stand for it."""

    table: Table
    fit: Fit

    @property
    def source(self) -> str:
        """Where the figures come from, in words."""
        made = f"with torch {self.table.torch} ({self.table.command})"
        threads = f", {self.table.threads} thread{'s' * (self.table.threads != 1)}" if self.table.kind == "cpu" else ""
        if self.fit == "measured":
            return f"measured on {self.table.device}{threads}, {made}"
        return (
            f"extrapolated from {self.table.device}{threads}, measured {made}: this kind of processor was not measured"
        )


def find(spec: DeviceSpec, kind: str) -> Found | None:
    """The table for a device of type `kind` ('cpu', 'cuda').

    Of a processor, the one at hand; where its kind was not measured, the table whose vector instructions are the most
    like its own. Of a GPU, the one that `spec` names, and None where that was not measured.
    """
    tables = [table for table in _tables(str(folder())) if table.kind == kind]
    if kind != "cpu":
        named = [table for table in tables if table.device in (spec.name, spec.key)]
        return Found(named[-1], "measured") if named else None
    if not tables:
        return None
    name, own, threads = cpu_model(), instructions(), torch.get_num_threads()
    same = [table for table in tables if (table.device, table.instructions) == (name, own)]
    if same:
        # The later of two equals: tables of the user's folder come last.
        return Found(min(reversed(same), key=lambda table: abs(table.threads - threads)), "measured")
    return Found(max(reversed(tables), key=lambda table: _likeness(table.instructions, own)), "extrapolated")


def folder() -> Path:
    """Where tables measured by the user are kept."""
    return cache_folder() / "attention"


def fingerprint() -> str:
    """SHA-256 of every table that can be found: part of what decides the attention pass's output."""
    digest = hashlib.sha256()
    for text, _ in _texts(str(folder())):
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


def _likeness(one: str, other: str) -> int:
    a, b = set(one.split()), set(other.split())
    return len(a & b) - len(a ^ b)


@functools.cache
def _tables(user: str) -> tuple[Table, ...]:
    return tuple(from_json(text, source) for text, source in _texts(user))


@functools.cache
def _texts(user: str) -> tuple[tuple[str, str], ...]:
    """Text and name of every file, the package's before the user's, each by name: the same order in every process."""
    own = sorted(
        (item for item in resources.files(__package__).joinpath("tables").iterdir() if item.name.endswith(".json")),
        key=lambda item: item.name,
    )
    theirs = sorted(Path(user).glob("*.json")) if Path(user).is_dir() else []
    files = [(item.read_text(encoding="utf-8"), item.name) for item in own]
    return tuple(files + [(path.read_text(encoding="utf-8"), str(path)) for path in theirs])
