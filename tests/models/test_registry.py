"""The registry: names, sizes and descriptions as data, errors that name the nearest valid choice, and no torch."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import optpass.models
from optpass import models
from optpass.errors import ConfigError

NOT_MODELS = {"__init__", "common", "presets", "registry"}


def test_every_module_is_listed() -> None:
    folder = Path(optpass.models.__file__).parent
    assert {path.stem for path in folder.glob("*.py")} - NOT_MODELS == set(models.names())


@pytest.mark.parametrize("name", models.names())
def test_listed_sizes_are_the_modules_own(name: str) -> None:
    assert models.sizes(name) == tuple(import_module(f"optpass.models.{name}").SIZES)
    assert models.sizes(name)[:2] == ("tiny", "small")


@pytest.mark.parametrize("name", models.names())
def test_description_is_one_line(name: str) -> None:
    text = models.describe(name)
    assert 20 < len(text) < 100 and "\n" not in text


def test_small_is_the_default() -> None:
    with torch.device("meta"):
        default, small = (models.build("gpt", *size)[0] for size in ((), ("small",)))
    assert [p.shape for p in default.parameters()] == [p.shape for p in small.parameters()]


@pytest.mark.parametrize("ask", [models.sizes, models.describe, models.build])
def test_unknown_name(ask: object) -> None:
    assert callable(ask)
    with pytest.raises(ConfigError, match=r"'lama'.*'llama'"):
        ask("lama")


def test_unknown_size() -> None:
    with pytest.raises(ConfigError, match=r"llama.*'8bb'.*'8b'"):
        models.build("llama", "8bb")


def test_a_name_near_nothing_lists_them_all() -> None:
    with pytest.raises(ConfigError) as error:
        models.build("qqqq")
    assert all(name in str(error.value) for name in models.names())


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match=r"optpass.models.*no attribute 'lost'"):
        models.lost  # noqa: B018


def test_listing_imports_no_torch() -> None:
    script = """
import sys
from optpass import models
from optpass.errors import ConfigError
for name in models.names():
    models.sizes(name), models.describe(name)
try:
    models.build("lama")
except ConfigError:
    pass
assert "torch" not in sys.modules, "torch was imported"
models.loss
assert "torch" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("settings", "why"), [({"batch": 10**18}, "overflowed"), ({"width": 3 * 10**30}, "64 bits")])
def test_tensors_that_cannot_be_are_a_config_error(settings: dict[str, int], why: str) -> None:
    with torch.device("meta"), pytest.raises(ConfigError, match=f"^gpt:tiny .*cannot be made: .*{why}"):
        models.build("gpt", "tiny", **settings)
