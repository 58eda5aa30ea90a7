"""`optpass train` from the outside: output, files and exit codes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from optpass.cli import app

pytestmark = pytest.mark.usefixtures("hasty")

TEXT = "".join(f"def f{i}(x): return x + {i}\n" for i in range(400))

JOB = """
[training]
size = "tiny"
data = "text.txt"
micro_batch = 2
sequence = 16
steps = 3
log_every = 2
{training}
[training.model_config]
vocab = 257
layers = 1
[options]
inner = "aot_eager"
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)

    def write(training: str = "") -> str:
        (tmp_path / "text.txt").write_text(TEXT)
        (tmp_path / "job.toml").write_text(JOB.format(training=training))
        return "job.toml"

    return write


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        app.run(["train", *arguments])
    return int(caught.value.code or 0)


def test_plain_lines_report_and_files(job: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(job(), "--steps", "5", "--out", "here", "--html", "page.html") == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("step ") and "loss" in line]
    assert [line.split()[1] for line in lines] == ["1/5", "2/5", "4/5", "5/5"]
    assert all("tokens/s" in line and "/step" in line for line in lines)
    assert "in 5 steps" in out and "on held-out text" in out and "here/job/report.json" in out
    assert {path.name for path in Path("here/job").iterdir()} == {"report.json", "report.html"}
    assert Path("page.html").stat().st_size > 1000


def test_json_on_standard_output_is_json_alone(job: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(job(), "--json", "-", "--seed", "7", "-O", "strict=1") == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["schema"] == "optpass.report/1" and data["training"]["config"]["seed"] == 7
    assert data["options"]["strict"] is True and data["options"]["inner"] == "aot_eager"
    assert "step " in captured.err


def test_compare_holds(job: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(job(), "--compare", "eager") == 0
    out = capsys.readouterr().out
    assert "against eager: largest difference" in out and out.count(": holds") == 1
    assert "optpass" in out and "difference" in out


def test_compare_that_does_not_hold_exits_1(
    job: Callable[..., str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from optpass.training.outcome import Outcome

    monkeypatch.setattr(Outcome, "max_difference", lambda self: (0.5, 2))
    assert run(job(), "--compare", "eager") == 1
    assert "5.0e-01 at step 2" in capsys.readouterr().out


@pytest.mark.slow
def test_a_budget_is_planned_measured_and_held(job: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(job('memory_budget = "1GB"')) == 0
    out = capsys.readouterr().out
    assert out.index("Ledger") < out.index("Saved") < out.index("step     1/3")
    (line,) = [line for line in out.splitlines() if line.startswith("memory: ")]
    assert "predicted" in line and "measured" in line and line.endswith("it fits")


@pytest.mark.slow
def test_a_step_above_its_budget_exits_3(
    job: Callable[..., str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from optpass.training import run as runs

    more = runs.MemoryOutcome(budget=10**6, predicted=900_000, measured=10**6 + 1)
    monkeypatch.setattr(runs, "MemoryOutcome", lambda *_: more)
    assert run(job('memory_budget = "1GB"')) == 3
    assert "IT DOES NOT FIT" in capsys.readouterr().out


BAD = [
    (["gone.toml"], "gone.toml: no such file"),
    (["job.toml", "--compare", "jax"], "--compare 'jax'"),
    (["job.toml", "--steps", "0"], "--steps: steps = 0"),
    (["job.toml", "--device", "tpu9"], "--device 'tpu9' cannot be used"),
    (["job.toml", "-O", "strict"], "--option 'strict' is not KEY=VALUE"),
    (["job.toml", "-O", "stric=1"], "did you mean 'strict'"),
    (["job.toml", "--out", "text.txt"], "is a file"),
    (["job.toml", "--json", "."], "--json .: is a folder"),
    (["job.toml", "--html", "text.txt/page.html"], "--html text.txt/page.html:"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line_and_exit_2(
    job: Callable[..., str], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    job()
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("optpass: error: ") and captured.err.count("\n") == 1
    assert message in captured.err
    assert sorted(path.name for path in Path().iterdir()) == ["job.toml", "text.txt"]


def test_a_diverging_run_exits_3_and_says_where_its_report_is(
    job: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(job('learning_rate = 1e38\noptimizer = "sgd"\ngrad_clip = 0\nwarmup = 0')) == 3
    err = capsys.readouterr().err
    assert "what the run reached is in runs/job/report.json" in err
    assert "optpass: error: the loss is" in err and "Traceback" not in err
    assert json.loads(Path("runs/job/report.json").read_text())["training"]["status"] == "failed"


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals are sent otherwise there")
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"])
def test_a_signal_leaves_a_report(job: Callable[..., str], number: int, code: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "optpass", "train", job(), "--steps", "100000", "--json", "r.json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("step "):
            break
    child.send_signal(number)
    _, err = child.communicate(timeout=60)
    assert child.returncode == code, err
    assert "Traceback" not in err and "interrupted" in err
    for path in ("runs/job/report.json", "r.json"):
        training = json.loads(Path(path).read_text())["training"]
        assert training["status"] == "interrupted" and training["steps"], path


def test_a_reader_that_leaves_ends_the_run_with_its_report(
    job: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Left(io.StringIO):
        def write(self, text: str) -> int:
            if text.startswith("step "):
                raise BrokenPipeError
            return len(text)

        def fileno(self) -> int:
            return os.open(os.devnull, os.O_WRONLY)

    monkeypatch.setattr(sys, "stdout", Left())
    assert run(job(), "-O", "inner=eager", "--steps", "9") == 141
    assert "interrupted; what the run reached is in runs/job/report.json" in capfd.readouterr().err
    training = json.loads(Path("runs/job/report.json").read_text())["training"]
    assert training["status"] == "interrupted" and len(training["steps"]) == 1


MODEL = """
import os
import torch
from beside import WIDTH

CALLS = 0


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(257, WIDTH), torch.nn.Linear(WIDTH, 257)

    def forward(self, x, y):
        global CALLS
        CALLS += 1
        scores = self.head(self.tokens(x))
        return scores, torch.nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten())


def make():
    print("printed by the model")
    os.write(1, b"written by the model")
    return Model()
"""


def test_a_model_file_that_prints_imports_and_counts(
    job: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    Path("model.py").write_text(MODEL)
    Path("beside.py").write_text("WIDTH = 8\n")
    text = Path(job()).read_text().replace('size = "tiny"', 'model = "model.py:make"')
    Path("job.toml").write_text(text.replace("[training.model_config]\nvocab = 257\nlayers = 1\n", ""))
    assert run("job.toml", "--json", "-") == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["training"]["status"] == "done"
    assert "printed by the model" in err and "written by the model" in err


def test_an_option_that_the_file_sets_is_said_to_have_no_effect(
    job: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(job(), "-O", "inner=eager", "--steps", "1") == 0
    said = capsys.readouterr().err
    assert "optpass: --option inner=eager has no effect: job.toml: [options] inner comes first" in said
    assert run(job(), "-O", "inner=5e", "-O", "strict=maybe") == 2
    assert "command line: strict='maybe' is not a boolean" in capsys.readouterr().err
