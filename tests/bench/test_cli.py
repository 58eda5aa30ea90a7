"""`optpass bench` from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optpass.bench import registry
from optpass.bench.registry import Bench, BenchConfig
from optpass.bench.result import Result, Row, from_json
from optpass.cli.app import run


def _run(*arguments: str) -> int:
    """The exit code of `optpass bench ...`."""
    with pytest.raises(SystemExit) as caught:
        run(["bench", *arguments])
    code = caught.value.code
    return code if isinstance(code, int) else 0 if code is None else 1


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[BenchConfig]:
    """A benchmark called demo, with `passed` from the parameter; the configs it was run with."""
    from optpass.bench.environment import environment

    seen: list[BenchConfig] = []

    def measure(config: BenchConfig, progress: object) -> Result:
        seen.append(config)
        rows = (Row(case="a", median=1.0, samples=(1.0,)),)
        return Result(
            name="demo",
            claim="c",
            environment=environment(),
            config={},
            rows=rows,
            passed=getattr(request, "param", None),
        )

    monkeypatch.setattr("optpass.bench.registry.load", lambda name: Bench(name, "c", measure))
    return seen


def test_every_registered_benchmark_has_a_claim_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == list(registry.names())
    assert all(len(line.partition(": ")[2]) > 20 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compile_tme"], "unknown benchmark 'compile_tme'; did you mean 'compile_time'"),
        (["compile_time", "--models", "gptt"], "--models: unknown model 'gptt'; did you mean 'gpt'?"),
        (["attention_coverage", "--models", "bertt"], "--models: unknown model 'bertt'; did you mean 'bert'"),
        (["compile_time", "--models", ","], "--models ',' names no model"),
        (["compile_time", "--size", "tinny"], "did you mean 'tiny'?"),
        (["compile_time", "--device", "tpu"], "device 'tpu'; valid: cpu, cuda"),
        (["compile_time", "--json", "."], "--json .: is a folder"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("name", registry.names())
def test_every_benchmark_knows_its_models(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(name, "--models", "no such model") == 2
    assert "unknown model 'no such model'" in capsys.readouterr().err


@pytest.mark.parametrize(("demo", "code"), [(True, 0), (None, 0), (False, 1)], indirect=["demo"])
def test_the_exit_code_tells_whether_the_claim_holds(demo: list[BenchConfig], code: int, tmp_path: Path) -> None:
    target = tmp_path / "new" / "r.json"
    assert _run("demo", "--json", str(target)) == code
    assert from_json(target.read_text(encoding="utf-8")).name == "demo"
    assert [path.name for path in target.parent.iterdir()] == ["r.json"]


def test_flags_reach_the_benchmark(demo: list[BenchConfig], capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--models gpt,mlp,gpt --size tiny --rounds 7 --budget 9 --quick --seed 3 --json -"
    assert _run("demo", *flags.split()) == 0
    assert demo == [
        BenchConfig(models=("gpt", "mlp"), size="tiny", rounds=7, budget_s=9.0, quick=True, seed=3, device="cpu")
    ]
    assert json.loads(capsys.readouterr().out)["name"] == "demo"  # nothing but JSON on standard output


@pytest.mark.parametrize(("flags", "kept"), [([], True), (["--quick"], False), (["--models", "gpt"], False)])
def test_only_a_full_run_is_kept(
    demo: list[BenchConfig], flags: list[str], kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optpass.bench.result.result_path", lambda result: tmp_path / "kept.json")
    assert _run("demo", *flags) == 0
    assert (tmp_path / "kept.json").exists() is kept
