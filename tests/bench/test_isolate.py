"""Fresh processes: what they inherit, what they hand back, and how their failures read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from optpass.bench.isolate import last_error, run_isolated
from optpass.bench.result import BenchError

_CODE = """
import os, pathlib, signal, sys, time

def probe(word):
    print("noise on standard output")
    return {"word": word, "pid": os.getpid(), "cwd": os.listdir("."), "torch": "torch" in sys.modules,
            "env": {k: v for k, v in os.environ.items() if k.startswith(("TORCH", "TRITON", "OPTPASS", "EXTRA"))},
            "cache_exists": pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).exists()}

def fails():
    raise RuntimeError("the flux is empty\\n\\nadvice over many lines")

def dies():
    os.kill(os.getpid(), signal.SIGKILL)

def hangs():
    time.sleep(60)
"""

_CHAINED = """Traceback (most recent call last):
  File 'x'
ValueError: a

The above exception was the direct cause

Traceback (most recent call last):
  File 'y'
Failed: 'b' raised:
ValueError: a

Set X=1
"""


@pytest.fixture
def child(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "child_code.py").write_text(_CODE, encoding="utf-8")
    return {"PYTHONPATH": str(tmp_path)}


def test_a_child_is_fresh(child: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTPASS_INNER", "eager")
    monkeypatch.setenv("OPTPASS_CACHE_DIR", "kept")
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    runs: list[dict[str, Any]] = [
        run_isolated("child_code:probe", {"word": "x"}, environ=child | {"EXTRA": "1"}) for _ in range(2)
    ]
    first, second = runs
    assert first["word"] == "x" and first["pid"] != os.getpid() and first["pid"] != second["pid"]
    assert not first["torch"] and not first["cwd"] and not first["cache_exists"]
    env = first["env"]
    assert set(env) == {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "OPTPASS_CACHE_DIR", "EXTRA"}
    assert env["TORCHINDUCTOR_CACHE_DIR"] != second["env"]["TORCHINDUCTOR_CACHE_DIR"]
    assert not Path(env["TORCHINDUCTOR_CACHE_DIR"]).parent.exists()  # removed afterwards


def test_a_failure_is_one_line(child: dict[str, str]) -> None:
    with pytest.raises(BenchError) as caught:
        run_isolated("child_code:fails", {}, environ=child)
    assert str(caught.value) == "fails(): RuntimeError: the flux is empty"


def test_a_killed_child_says_so(child: dict[str, str]) -> None:
    with pytest.raises(BenchError, match=r"dies\(\): killed by SIGKILL"):
        run_isolated("child_code:dies", {}, environ=child)


def test_a_hanging_child_is_ended(child: dict[str, str]) -> None:
    with pytest.raises(BenchError, match="took longer than 3 s"):
        run_isolated("child_code:hangs", {}, environ=child, timeout_s=3.0)


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        ("", "it said nothing"),
        ("warning: a\n\nfatal: b\n\n", "fatal: b"),
        ("Traceback (most recent call last):\n  File 'x'\n    y\nKeyError: 'z'\n", "KeyError: 'z'"),
        (
            _CHAINED,
            "Failed: 'b' raised: ValueError: a",
        ),
    ],
)
def test_the_line_that_says_what_went_wrong(stderr: str, line: str) -> None:
    assert last_error(stderr) == line
