"""Files: atomic, merged between processes, and errors that name the cause."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from optpass.errors import ReportError
from optpass.reporting.files import read_json, write_json, write_merged, write_text
from optpass.reporting.model import Analysis, Report


def test_round_trip(tmp_path: Path, report: Report, analysis: Analysis) -> None:
    for obj in (report, analysis):
        path = tmp_path / "made" / "on the way" / "x.json"
        write_json(obj, path)
        assert read_json(path) == obj
        assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ReportError, match=r"r\.json: cannot write the report: No space left on device; free some"):
        write_json(report, path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_unwritable_paths_are_errors_of_one_line(tmp_path: Path, report: Report) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("x")
    cases = {
        blocker / "r.json": "a part of the path is a file",
        blocker / "deeper" / "r.json": "a part of the path is a file",
        tmp_path: "give a file name",
        tmp_path / ("n" * 300): "give a shorter name",
        tmp_path / "nul\0": "cannot write the report",
        Path("/proc/no-such/r.json"): "cannot write the report",
    }
    for path, expected in cases.items():
        for write in (write_json, write_merged):
            with pytest.raises(ReportError, match=expected) as caught:
                write(report, path)
            assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    assert sorted(tmp_path.iterdir()) == [blocker] and blocker.read_text() == "x"


def test_links_are_followed_and_devices_are_not_replaced(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    link.symlink_to(real)
    write_text("new", link)
    assert link.is_symlink() and real.read_text() == "new"
    write_text("gone", "/dev/null")
    assert Path("/dev/null").is_char_device()


def test_a_record_spoilt_after_it_was_made_is_not_written(tmp_path: Path, report: Report) -> None:
    report.graphs[0].t_compile_s = float("nan")
    with pytest.raises(ReportError, match=r"graphs\.0\.t_compile_s"):
        write_json(report, tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{", "not JSON: .* at line 1 column 2"),
        (b"\xff\xfe\x00", "not JSON text"),
        (b"[" * 100_000, "not JSON"),
        (b"[1, 2]", "it names no schema, expected 'optpass.report/1' or 'optpass.analysis/1'"),
        (b'{"schema": "optpass.report/2"}', "its schema is 'optpass.report/2', expected 'optpass.report/1'"),
        (b'{"schema": ["x"]}', r"its schema is \['x'\]"),
        (b'{"schema": "optpass.report/1", "graphs": [{}]}', r"not a valid optpass.report/1 file: graphs\.0\.id"),
        (b'{"schema": "optpass.report/1", "colour": 1}', "colour: Extra inputs"),
    ],
)
def test_reading_what_is_no_report(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(ReportError, match=expected) as caught:
        read_json(path)
    assert str(path) in str(caught.value)


def test_reading_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no such file"):
        read_json(tmp_path / "none.json")
    with pytest.raises(ReportError, match="is a folder"):
        read_json(tmp_path)


def test_write_merged_merges_its_run_and_overwrites_others(tmp_path: Path, new_report: Callable[..., Report]) -> None:
    path = tmp_path / "r.json"
    path.write_text("not a report")
    write_merged(new_report(pid=1, rank=1), path)
    write_merged(new_report(pid=2, rank=0), path)
    write_merged(new_report(pid=1, rank=1, graphs=3), path)  # the same process again
    merged = read_json(path)
    assert isinstance(merged, Report)
    assert [p.pid for p in merged.processes] == [2, 1] and [g.process for g in merged.graphs] == [0, 0, 1, 1, 1]
    write_merged(new_report(run_id="another", pid=9), path)
    other = read_json(path)
    assert isinstance(other, Report) and [p.pid for p in other.processes] == [9]
    assert list(tmp_path.iterdir()) == [path]


def test_a_page_keeps_its_data_beside_it(tmp_path: Path, new_report: Callable[..., Report]) -> None:
    for pid in (1, 2):
        write_merged(new_report(pid=pid, rank=pid), tmp_path / "page.html")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["page.html", "page.json"]
    data = read_json(tmp_path / "page.json")
    assert isinstance(data, Report) and len(data.processes) == 2
    assert "2 processes" in (tmp_path / "page.html").read_text()


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path, report: Report) -> None:
    start = tmp_path / "start.json"
    write_json(report, start)
    code = (
        "import os, sys\n"
        "from optpass.reporting.files import read_json, write_merged\n"
        "rank = int(sys.argv[1]); report = read_json(sys.argv[2])\n"
        "report.processes[0].pid, report.processes[0].rank = os.getpid(), rank\n"
        "for _ in range(5): write_merged(report, sys.argv[3])\n"
    )
    path = tmp_path / "out" / "r.json"
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), str(start), str(path)], stderr=subprocess.PIPE)
        for rank in range(4)
    ]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
    merged = read_json(path)
    assert isinstance(merged, Report)
    assert [p.rank for p in merged.processes] == [0, 1, 2, 3]
    assert len(merged.graphs) == 4 * len(report.graphs)
    assert list(path.parent.iterdir()) == [path]
    assert json.loads(path.read_text())["schema"] == "optpass.report/1"
