"""A job small enough to compile and train in a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

#: Repeats, so that three steps teach something, and long enough for a held-out part.
TEXT = "".join(f"def f{i}(x): return x + {i}\n" for i in range(400))

JobFile = Callable[..., Path]


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobFile:
    """Writes `job.toml` beside its text and moves there; keywords replace lines of [training], `model` the model's."""
    monkeypatch.chdir(tmp_path)  # away from the repository's own pyproject.toml, and `runs` falls here

    def write(model: str = "vocab = 257", options: str = 'inner = "eager"', **training: str) -> Path:
        values = {
            "size": '"tiny"',
            "data": '"text.txt"',
            "micro_batch": "2",
            "sequence": "16",
            "steps": "3",
            "warmup": "1",
            "log_every": "2",
        } | training
        (tmp_path / "text.txt").write_text(TEXT)
        lines = [f"{key} = {value}" for key, value in values.items()]
        path = tmp_path / "job.toml"
        path.write_text("\n".join(["[training]", *lines, "[training.model_config]", model, "[options]", options]))
        return path

    return write
