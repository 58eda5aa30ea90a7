"""The wheel in a clean environment: found by torch, alone under its name, and light to import."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

_PROBE = """
import importlib, importlib.util, json, pkgutil, sys
import optpass
from optpass.errors import OptPassError
result = {"torch_after_import": "torch" in sys.modules, "file": optpass.__file__}
generic = ("passes", "backend", "models", "bench", "docs", "tests", "examples")
result["generic"] = [name for name in generic if importlib.util.find_spec(name)]
import torch
result["backends"] = torch._dynamo.list_backends(exclude_tags=())
result["modules"] = []
for info in pkgutil.walk_packages(optpass.__path__, "optpass."):
    if info.name != "optpass.__main__":
        importlib.import_module(info.name)
        result["modules"].append(info.name)
result["outside"] = sorted(
    name for name, module in sys.modules.items()
    if name.split(".")[0] == "optpass" and not (module.__file__ or "").startswith(sys.prefix)
)
x = torch.randn(3, 4)
compiled = torch.compile(lambda t: t.transpose(0, 1).transpose(0, 1) + 1, backend="optpass", options={"inner": "eager"})
result["right"] = bool(torch.equal(compiled(x), x + 1))
print(json.dumps(result))
"""

_HELP = """
import sys
from optpass.cli.app import run
for verb in ([], ["analyze"], ["train"], ["bench"], ["report"], ["env"]):
    try:
        run([*verb, "-h"])
    except SystemExit as end:
        assert not end.code, (verb, end.code)
    heavy = {"torch", "numpy", "jinja2", "onnx", "transformers"} & sys.modules.keys()
    assert not heavy, (verb, heavy)
"""


@pytest.fixture(scope="session")
def probe(clean: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(clean.run("python", "-c", _PROBE).stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_the_wheel_is_what_is_imported(probe: dict[str, Any], clean: Any) -> None:
    assert probe["file"] == str(clean.site / "optpass" / "__init__.py")
    assert probe["outside"] == []


def test_torch_finds_the_backend(probe: dict[str, Any]) -> None:
    assert "optpass" in probe["backends"]


def test_the_backend_compiles(probe: dict[str, Any]) -> None:
    assert probe["right"]


def test_no_generic_name_is_importable(probe: dict[str, Any]) -> None:
    assert probe["generic"] == []


def test_every_module_imports(probe: dict[str, Any]) -> None:
    assert len(probe["modules"]) > 50


def test_import_brings_no_torch(probe: dict[str, Any]) -> None:
    assert probe["torch_after_import"] is False


def test_command_line(clean: Any) -> None:
    from optpass import __version__

    assert clean.run("python", "-m", "optpass", "--version").stdout == f"optpass {__version__}\n"
    assert "analyze" in clean.run("optpass", "--help").stdout


def test_help_brings_no_torch(clean: Any) -> None:
    """Of the command itself and of every verb."""
    assert clean.run("python", "-c", _HELP).stdout.count("Usage:") == 6


def test_help_is_quick(clean: Any) -> None:
    """Under 0.3 s of processor time at best of five: wall time would measure the other tests.

    On a processor where importing what prints it takes most of that, at most as much again.
    """

    def seconds(*command: str) -> float:
        before = os.times()
        clean.run(*command)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    library = min(seconds("python", "-c", "import typer, typer.rich_utils") for _ in range(5))
    assert min(seconds("optpass", "--help") for _ in range(5)) < max(0.3, 2.0 * library)
