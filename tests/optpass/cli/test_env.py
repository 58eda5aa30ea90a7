"""`optpass env`: everything a bug report needs, whatever state the machine is in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optpass.backend import compat
from optpass.cli import app, environment_facts
from optpass.passes.devices import resolve
from optpass.passes.roofline import calibration


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPTPASS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "cached_spec", lambda: None)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        app.run(["env", *arguments])
    return int(caught.value.code or 0)


def test_plain_text_has_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    out = capsys.readouterr().out
    for section in ("versions", "machine", "compilers", "hooks", "calibration", "options", "variables"):
        assert f"[{section}]" in out
    assert "torch: " in out and "not measured yet" in out and "inner: 'inductor' (default)" in out


def test_json_and_where_options_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "optpass.toml").write_text('inner = "aot_eager"\n')
    monkeypatch.setenv("OPTPASS_STRICT", "1")
    assert run("--json", "-") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "optpass.env/1"
    assert data["options"]["inner"] == f"'aot_eager' ({tmp_path / 'optpass.toml'})"
    assert data["options"]["strict"] == "True (OPTPASS_STRICT)" and data["variables"]["OPTPASS_STRICT"] == "1"
    assert str(tmp_path / "cache") in data["calibration"]["cache"]


def test_invalid_options_are_shown_rather_than_failing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPTPASS_INNR", "eager")
    assert run() == 0
    assert "did you mean 'inner'" in capsys.readouterr().out


def test_hooks_exit_1_when_one_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--hooks") == 0
    assert "all present" in capsys.readouterr().out
    monkeypatch.setattr(compat, "self_test", lambda: ["some hook: some feature"])
    assert run("--hooks") == 1
    assert "some hook: some feature" in capsys.readouterr().out


def test_calibrate_measures_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    forced = []
    monkeypatch.setattr(calibration, "calibrated_spec", lambda told, force: forced.append(force) or resolve("cpu"))
    assert run("--calibrate") == 0 and forced == [True]


def test_measured_figures_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "cached_spec", lambda: resolve("cpu"))
    found = environment_facts.calibrated()
    assert found["state"] == "measured" and "GFLOP/s" in found["matmul"]["float32"]


def test_json_goes_to_a_file_and_a_folder_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--hooks", "--json", "env.json") == 0
    assert json.loads(Path("env.json").read_text())["hooks"]["missing"] == []
    assert run("--json", ".") == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("optpass: error: --json .: is a folder")
