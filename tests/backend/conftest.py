"""A clean Dynamo, an empty report and no options from outside, for every test of the backend."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from optpass.backend.memory.together.together import STEPS
from optpass.backend.reporting import reset_report


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled before counts, and neither the repository's TOML files nor the caller's variables do."""
    for key in list(os.environ):
        if key.startswith("OPTPASS_"):
            monkeypatch.delenv(key)
    monkeypatch.setenv("OPTPASS_CACHE_DIR", str(tmp_path / "optpass"))  # a calibration made meanwhile is another device
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    reset_report()
    yield
    torch._dynamo.reset()
    reset_report()
    STEPS.forget()


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
def fresh(drawn: int) -> torch.Generator:
    """Random numbers that are new in every run."""
    return torch.Generator().manual_seed(drawn)


@dataclass
class Finished:
    """A process that ended: what it printed, and the JSON of its last line."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """The last line of standard output as JSON."""
        assert self.returncode == 0, self.stderr[-4000:]
        return json.loads(self.stdout.strip().splitlines()[-1])


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., Finished]:
    """Runs Python text in a process of its own, in the test's folder, with Inductor's caches there too."""

    def run(text: str, *argv: str, **environ: str) -> Finished:
        script = tmp_path / f"script_{abs(hash(text)) % 10**8}.py"
        script.write_text(textwrap.dedent(text), encoding="utf-8")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("OPTPASS_", "TORCH_"))}
        own = {
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
            "OPTPASS_CACHE_DIR": str(tmp_path / "optpass"),
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, str(script), *argv], cwd=tmp_path, env=clean | own | environ, capture_output=True,
            text=True, timeout=240, check=False,
        )  # fmt: skip
        return Finished(done.returncode, done.stdout, done.stderr)

    return run
