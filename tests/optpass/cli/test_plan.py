"""`optpass plan` from the outside: output, files, exit codes, one-line errors."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from optpass.cli import app
from optpass.reporting.schema import load_schema

pytestmark = pytest.mark.usefixtures("hasty")


LLAMA = "llama:tiny", "--set", "targets=true", "--set", "layers=2"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        app.run(["plan", *arguments])
    return int(caught.value.code or 0)


@pytest.mark.slow
def test_a_model_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    code = run(*LLAMA, "--device", "h100", "--optimizer", "adamw", "--json", "p.json",
               "--html", "p.html")  # fmt: skip
    assert code == 0
    out = capsys.readouterr().out
    assert "llama:tiny" in out and "NVIDIA H100" in out and "No budget" in out and "optpass/models/llama.py" not in out
    assert "llama.py:" in out and "blocks.*" in out
    data = json.loads(Path("p.json").read_text())
    jsonschema.validate(data, load_schema("optpass.plan/1"))
    ledger = data["ledger"]
    assert sum(ledger.values()) == data["predicted_peak_bytes"] == data["unconstrained_bytes"]
    assert ledger["optimizer"] == 2 * 4 * data["parameter_count"]
    assert Path("p.html").read_text().startswith("<!DOCTYPE html>")

    # A budget half way down: less memory, more time, and the same record on standard output.
    budget = (data["floor_bytes"] + data["unconstrained_bytes"]) // 2
    assert run(*LLAMA, "-d", "h100", "--optimizer", "adamw", "-b", str(budget), "--json",
               "-") == 0  # fmt: skip
    tight = json.loads(capsys.readouterr().out)
    assert tight["budget_bytes"] == budget >= tight["predicted_peak_bytes"]
    assert tight["floor_bytes"] == data["floor_bytes"]

    # Below the floor: exit code 2 and one line that says what would help.
    assert run(*LLAMA, "-d", "h100", "--optimizer", "adamw", "-b", "100KB") == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "smallest peak of any plan" in message and "What would help" in message

    assert run("mlp:tiny", "-d", "h100", "--budget", "1MB", "--batch", "auto", "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    size, tried = found["batch"]["size"], dict(found["batch"]["tried"])
    assert found["batch"]["searched"] and found["inputs"] == f"float32[{size}, 33]"
    assert tried[size] <= 10**6 < tried[size + 1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mlp:tiny", "--budget", "20GX"], "'20GX' is not a memory budget; write an int in bytes, '20GiB'"),
        (["mlp:tiny", "--budget", "0"], "leaves no memory"),
        (["mlp:tiny", "--budget=-1"], "'-1' is not a memory budget"),
        (["mlp:tiny", "--budget", "800GiB", "-d", "h100"], "more than NVIDIA H100"),
        (["mlp:tiny", "--optimizer", "adamx"], "did you mean 'adamax'"),
        (["mlp:tiny", "--device", "h1000"], "h100"),
        (["mlp:tiny", "--shard", "ddp:2", "-d", "h100"], "write fsdp:N"),
        (["mlp:tiny", "--batch", "few", "-d", "h100"], "'auto'"),
        (["mlp:tiny", "--batch", "0", "-d", "h100"], "at least 1"),
        (["mlp:tiny", "--option", "nonsense=1"], "unknown option 'nonsense'"),
        (["mlp:tiny", "--option", "inner=nope"], "command line: inner='nope': no such backend"),
        (["mlp:tiny", "-O", "disable_passes=['attn']"], "no pass is called 'attn'; did you mean 'attention'?"),
        (["mlp:tiny", "--budget", "0"], "error: --budget='0' leaves no memory"),
        (["mlp:tiny", "--batch", "1" + 18 * "0"], "tensors of these sizes cannot be made"),
        (["factories.py:plain", "--batch", "1" + 18 * "0"], "--batch 1000000000000000000: tensors of these sizes"),
        (["factories.py:lazy"], "have no size yet"),
        (["mlp:tiny", "--dtype", "bf17"], "--dtype 'bf17'"),
        (["x.onnx"], "x.onnx: no such file, and an ONNX file has no backward"),
        (["nothing"], "a training file that ends in .toml; the models are"),
        (["nothing"], "unknown target 'nothing'"),
        (["missing.toml"], "no such file"),
        (["missing.toml", "--size", "8b"], "--size belongs to a model by name"),
    ],
)
def test_bad_input_is_one_line(
    factories: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("optpass: error: ") and err.count("\n") == 1 and said in err


def test_a_share_without_a_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from optpass import api
    from optpass.passes import devices

    monkeypatch.setattr(api, "present_device", lambda target, tell: devices.resolve("cpu"))
    assert run("mlp:tiny", "--budget", "80%") == 2
    assert "is not known" in capsys.readouterr().err


def test_batch_auto_needs_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("mlp:tiny", "-d", "h100", "--batch", "auto") == 2
    assert "--budget" in capsys.readouterr().err
