"""`optpass report` and the output that every verb shares."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from optpass.cli.app import run
from optpass.cli.output import console, emit, result_only
from optpass.errors import ReportError
from optpass.reporting.files import read_json, write_json
from optpass.reporting.model import Analysis, DeviceRecord, GraphRecord, Op, ProcessRecord, Report, Totals
from optpass.reporting.plan.model import LedgerRecord, PlanReport


def make_report(pid: int = 1, run_id: str = "run") -> Report:
    return Report(
        run_id=run_id,
        name="small",
        processes=[ProcessRecord(pid=pid, host="here", rank=pid - 1)],
        graphs=[GraphRecord(id="0", function="model.py:3 forward", t_compile_s=1.5)],
    )


def make_analysis() -> Analysis:
    op = Op(name="mm", target="aten.mm.default", flops=2e9, bytes_read=1e6, time_us=12.0, bound="compute")
    device, totals = DeviceRecord(key="x", name="X"), Totals(flops=2e9, time_us=12)
    return Analysis(target="toy", device=device, totals=totals, ops=[op])


def optpass(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "optpass", "report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_shows_a_report_and_an_analysis(tmp_path: Path) -> None:
    write_json(make_report(), tmp_path / "r.json")
    write_json(make_analysis(), tmp_path / "a.json")
    done = optpass(tmp_path / "r.json", tmp_path / "a.json")
    assert done.returncode == 0 and done.stderr == ""
    assert "optpass report: small" in done.stdout and "optpass analysis: toy" in done.stdout
    assert "\x1b" not in done.stdout


def test_merges_reports_and_prints_only_json(tmp_path: Path) -> None:
    paths = [tmp_path / f"{pid}.json" for pid in (1, 2)]
    for pid, path in enumerate(paths, 1):
        write_json(make_report(pid), path)
    done = optpass(*paths, "--json", "-", "--html", tmp_path / "new" / "page.html")
    data = json.loads(done.stdout)
    assert [graph["id"] for graph in data["graphs"]] == ["0/0", "1/0"]
    assert done.stderr == f"wrote {tmp_path / 'new' / 'page.html'}\n"
    assert (tmp_path / "new" / "page.html").read_text().startswith("<!DOCTYPE html>")


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, analysis = tmp_path / "good.json", tmp_path / "bad.json", tmp_path / "a.json"
    write_json(make_report(), good)
    write_json(make_analysis(), analysis)
    bad.write_text('{"schema": "optpass.report/7"}')
    for arguments, expected in (
        ((tmp_path / "none.json",), "no such file"),
        ((bad,), "'optpass.report/7', expected 'optpass.report/1'"),
        ((good, "--json", good / "x.json"), "is a file, not a folder; choose another place"),
        ((good, "--html", tmp_path), "is a folder; give a file name"),
        ((good, analysis, "--json", "-"), "one report, analysis or plan"),
        ((good, "--html", "-"), "only --json writes to standard output"),
        ((good, "--json", tmp_path / "o", "--html", tmp_path / "sub" / ".." / "o"), "--json writes to that file too"),
        ((good, "--html", good), "would overwrite the file that is read"),
    ):
        with pytest.raises(SystemExit) as caught:
            run(["report", *map(str, arguments)])
        captured = capsys.readouterr()
        assert caught.value.code == 2 and captured.out == "", captured
        assert expected in captured.err and captured.err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == sorted([good, bad, analysis])
    assert optpass(good, "--top", "0").returncode == 2


def test_a_plan_is_shown_and_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = PlanReport(
        target="toy", device=DeviceRecord(key="x", name="X"), predicted_peak_bytes=3, floor_bytes=3,
        unconstrained_bytes=3, optimizer_step_bytes=1, ledger=LedgerRecord(),
    )  # fmt: skip
    write_json(plan, tmp_path / "p.json")
    write_json(make_report(), tmp_path / "r.json")
    for arguments in (["p.json", "r.json"], ["p.json", "--json", "-", "--html", "page.html"]):
        with pytest.raises(SystemExit) as caught:
            run(["report", *(a if a.startswith("-") else str(tmp_path / a) for a in arguments)])
        assert not caught.value.code
    shown, _, text = capsys.readouterr().out.partition("{")
    assert "optpass plan: toy" in shown and "optpass report: small" in shown
    assert json.loads("{" + text)["target"] == "toy" and (tmp_path / "page.html").read_text().startswith("<!DOCTYPE")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_output_that_is_full_or_not_read(tmp_path: Path) -> None:
    write_json(make_report(), tmp_path / "r.json")
    command = [sys.executable, "-m", "optpass", "report", str(tmp_path / "r.json")]
    for extra in ([], ["--json", "-"]):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run([*command, *extra], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert "standard output cannot be written: No space left on device" in done.stderr
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert done.returncode == 141 and done.stderr == ""


def test_no_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    emit(make_report())
    assert "optpass report: small" in capsys.readouterr().out


def test_what_is_printed_below_python_is_no_result(capfd: pytest.CaptureFixture[str]) -> None:
    with result_only():
        print("by Python")
        os.write(1, b"by the system")
        ctypes.CDLL(None).printf(b"by C")
    print("the result")
    out, err = capfd.readouterr()
    assert out == "the result\n" and all(f"by {who}" in err for who in ("Python", "the system", "C"))


def test_emit_writes_before_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ReportError):
        emit(make_report(), html=str(tmp_path))
    assert capsys.readouterr().out == ""
    emit(make_analysis(), json=str(tmp_path / "a.json"), html=str(tmp_path / "a.html"), top=1)
    captured = capsys.readouterr()
    assert "aten.mm.default" in captured.out
    assert captured.err.splitlines() == [f"wrote {tmp_path / 'a.json'}", f"wrote {tmp_path / 'a.html'}"]
    assert read_json(tmp_path / "a.json") == make_analysis()


def test_console_is_plain_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console().print("[bold]as written[/bold]")
    console(stderr=True).print("errors")
    captured = capsys.readouterr()
    assert captured.out == "[bold]as written[/bold]\n" and captured.err == "errors\n"


def test_names_that_the_stream_cannot_encode_do_not_fail(tmp_path: Path) -> None:
    report = make_report()
    report.name = "модель"
    write_json(report, tmp_path / "r.json")
    command = [sys.executable, "-m", "optpass", "report", str(tmp_path / "r.json")]
    done = subprocess.run(command, capture_output=True, timeout=60, env={"PYTHONIOENCODING": "ascii", "PATH": ""})
    assert done.returncode == 0, done.stderr
    assert b"optpass report: ??????" in done.stdout
