"""Ranks that share one file: who shows the whole, and who is alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from optpass.auditing.ranks import together
from optpass.reporting.audit.files import read
from optpass.reporting.audit.model import Audit
from optpass.reporting.model import ProcessRecord


def of_rank(rank: int, host: str = "here") -> Audit:
    return Audit(processes=[ProcessRecord(pid=rank, host=host, rank=rank, world_size=4)])


def test_the_last_rank_of_a_machine_shows_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTPASS_RUN_ID", "a run/1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    environ = {"OPTPASS_RUN_ID": "a run/1", "RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    shared = str(tmp_path / "shared.json")
    shows = [together(of_rank(rank, f"host{rank // 2}"), shared, environ)[1] for rank in (1, 2, 0, 3)]
    assert shows == [False, False, True, True]
    assert [process.rank for process in read(shared).processes] == [0, 1, 2, 3]
    # Without a path, the file in between is removed.
    assert [together(of_rank(rank), None, environ)[1] for rank in (0, 1)] == [False, True]
    assert sorted(tmp_path.iterdir()) == [tmp_path / "shared.json"]


def test_who_is_alone_shows_itself(tmp_path: Path) -> None:
    made = of_rank(0)
    for environ in (
        {},
        {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"},
        {"RANK": "0", "WORLD_SIZE": "4"},
        {"WORLD_SIZE": "many", "RANK": "0", "TORCHELASTIC_RUN_ID": "x"},
    ):
        assert together(made, str(tmp_path / "a.json"), environ) == (made, True)
    assert not (tmp_path / "a.json").exists()
