"""`optpass analyze` from the outside: output, files, exit codes, one-line errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optpass.cli import app


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        app.run(["analyze", *arguments])
    return int(caught.value.code or 0)


def test_a_model_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("mlp:tiny", "--train", "--device", "h100", "--top", "2") == 0
    out = capsys.readouterr().out
    assert "mlp:tiny" in out and "forward and backward" in out and "H100" in out and "optpass/models/mlp.py:" in out


def test_json_on_standard_output_is_json_alone(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("factories.py:noisy", "--device", "h100", "--json", "-") == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["schema"] == "optpass.analysis/1" and data["totals"]["flops"] > 0
    assert "noise" in captured.err  # what the model prints is kept, elsewhere


def test_files(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("factories.py:plain", "--set", "width=16", "-d", "a100", "--json", "a.json", "--html", "b/a.html") == 0
    data = json.loads(Path("a.json").read_text())
    assert data["parameters"] == 2 * (16 * 16 + 16) and data["device"]["key"].startswith("a100")
    assert Path("b/a.html").read_text().startswith("<!")
    assert sorted(p.name for p in Path().iterdir() if p.name != "__pycache__") == ["a.json", "b", "factories.py"]


def test_an_onnx_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    onnx = pytest.importorskip("onnx")
    monkeypatch.chdir(tmp_path)
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weight = helper.make_tensor("w", kind, [4, 6], [0.5] * 24)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", kind, ["batch", 4])],
        [helper.make_tensor_value_info("y", kind, ["batch", 6])],
        [weight],
    )
    onnx.save(helper.make_model(graph), "m.onnx")
    assert run("m.onnx", "--set", "batch=8", "--device", "h100", "--json", "-") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["totals"]["flops"] == 2 * 8 * 4 * 6 and data["parameters"] == 24 and data["dtype"] == "float32"
    assert run("m.onnx", "--train", "--device", "h100") == 2
    assert "forward graph only" in capsys.readouterr().err


MISTAKES = [
    ([], "no target given"),
    (["gtp"], "did you mean 'gpt'"),
    (["mlp:tiny", "--device", "h1000"], "no device 'h1000'"),
    (["mlp:tiny", "--dtype", "bf17"], "did you mean 'bf16'"),
    (["mlp:tiny", "--set", "depth"], "is not KEY=VALUE"),
    (["mlp:tiny", "--set", "wdth=3"], "width"),
    (["mlp:tiny", "--json", "."], "is a folder"),
    (["mlp:tiny", "--html", "factories.py/x.html"], "is a file"),
    (["factories.py:raises"], "ValueError: no luck"),
    (["factories.py:mismatch", "--device", "h100"], "same reduction dim"),
    (["factories.py:integers", "--device", "h100", "--train"], "no floating-point tensor"),
    (["missing.py:make"], "no such file"),
    (["missing.onnx", "--device", "h100"], "no such file"),
    (["garbage.onnx", "--device", "h100"], "not an ONNX model"),
    (["mlp:tiny", "--top", "0"], "top"),
    (["mlp:tiny", "--no-such-flag"], "no-such-flag"),
]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES, ids=[" ".join(a) or "none" for a, _ in MISTAKES])
def test_mistakes_are_one_line_and_exit_2(
    factories: Path, arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("garbage.onnx").write_bytes(b"\x00\xffnot a model" * 9)
    before = {p.name for p in Path().iterdir()}
    assert run(*arguments, *(["--json", "out.json"] if "--json" not in arguments else [])) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and said in captured.err and "Traceback" not in captured.err
    if not {"--top", "--no-such-flag"} & set(arguments):  # what typer itself refuses, it shows with the usage
        assert captured.err.startswith("optpass: error: ") and captured.err.count("\n") == 1
    assert {p.name for p in Path().iterdir()} - {"__pycache__"} == before - {"__pycache__"}


def test_debug_shows_the_traceback(factories: Path) -> None:
    from optpass.errors import ConfigError

    with pytest.raises(ConfigError) as caught:
        app.run(["--debug", "analyze", "factories.py:raises"])
    assert isinstance(caught.value.__cause__, ValueError)


def test_list_names_every_model_and_size(capsys: pytest.CaptureFixture[str]) -> None:
    from optpass.models import names, sizes

    assert run("--list") == 0
    out = capsys.readouterr().out
    assert all(name in out and ", ".join(sizes(name)) in out for name in names())


def test_list_devices_shows_figures_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list-devices") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert "989.5" in lines["h100"] and "3350" in lines["h100"] and "datasheet" in lines["h100"]
    assert "cpu" not in lines
