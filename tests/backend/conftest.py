"""A clean Dynamo, an empty report and no options from outside, for every test of the backend."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from optpass.backend.reporting import reset_report


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled before counts, and neither the repository's TOML files nor the caller's variables do."""
    for key in list(os.environ):
        if key.startswith("OPTPASS_"):
            monkeypatch.delenv(key)
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    reset_report()
    yield
    torch._dynamo.reset()
    reset_report()


@pytest.fixture
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's caches in a folder of the test's own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


@pytest.fixture(scope="session")
def harness() -> Any:
    """`tests/harness.py`, which no import path leads to under `--import-mode=importlib`."""
    path = Path(__file__).parents[1] / "harness.py"
    spec = importlib.util.spec_from_file_location("optpass_test_harness", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> torch.Generator:
    """Random numbers that are new in every run, from a seed that is printed if the test fails."""
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed of {request.node.name}: {seed}")
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)
