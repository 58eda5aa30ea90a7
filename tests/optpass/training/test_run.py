"""A whole run on a model small enough to compile in a second: its report, the comparison, and ends before the end."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from optpass.errors import ConfigError
from optpass.options import Options
from optpass.reporting.files import read_json
from optpass.reporting.model import Report
from optpass.reporting.writable import check_file, check_folder
from optpass.training import run
from optpass.training.config import load
from optpass.training.errors import TrainError
from optpass.training.loop import StepEvent, loss_of, train_steps
from optpass.training.outcome import Outcome

JobFile = Callable[..., Path]


def ignore(event: StepEvent, eager: StepEvent | None) -> None:
    """A run nobody watches."""


def report_of(folder: Path) -> Report:
    report = read_json(folder / "report.json")
    assert isinstance(report, Report)
    return report


def test_three_steps_leave_a_report(job_file: JobFile) -> None:
    seen: list[StepEvent] = []
    prepared = run.prepare(load(job_file()))
    assert not Path("runs").exists()
    outcome = run.execute(prepared, lambda event, eager: seen.append(event))
    assert seen == outcome.steps and [event.step for event in seen] == [1, 2, 3]
    training = report_of(Path("runs/job")).training
    assert training["status"] == "done" and training["config"]["model_config"] == {"vocab": 257}
    assert [entry["loss"] for entry in training["steps"]] == [event.loss for event in seen]
    assert 0 < training["validation_loss"] < math.log(257) + 1
    assert training["data"]["vocabulary"] == 256 and len(training["data"]["sha256"]) == 64
    assert "eager_loss" not in training and "tolerance" not in training
    assert outcome.report.graphs, "the backend filed no graph"
    assert sorted(path.name for path in Path("runs/job").iterdir()) == ["report.html", "report.json"]
    assert "<html" in Path("runs/job/report.html").read_text()


def test_threads_hold_for_the_run_alone(job_file: JobFile) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    prepared = run.prepare(load(job_file(threads=str(before + 1), steps="1")))
    run.execute(prepared, lambda event, eager: seen.append(torch.get_num_threads()))
    assert (seen, torch.get_num_threads()) == ([before + 1], before)


def test_a_micro_batch_larger_than_the_machine_is_refused_before_it_trains(job_file: JobFile) -> None:
    path = job_file(micro_batch=str(10**14))
    with pytest.raises(ConfigError, match=r"\[training\] micro_batch = 10{14}: its tokens alone take .*PiB"):
        run.prepare(load(path))
    assert not Path("runs").exists()


def test_a_folder_by_flag_is_named_as_the_flag(job_file: JobFile) -> None:
    job = load(job_file(), overrides={"out": "text.txt"})
    with pytest.raises(ConfigError, match=r"^--out 'text\.txt': .* is a file, not a folder"):
        run.prepare(job)


def test_compiled_is_the_plain_loop(job_file: JobFile) -> None:
    """With the eager inner compiler nothing may differ from a loop over the module itself."""
    prepared = run.prepare(load(job_file()))
    plain = copy.deepcopy(prepared.model)
    expected = [event.loss for event in train_steps(loss_of(plain), plain, prepared.batches, prepared.job.config)]
    found = [event.loss for event in run.execute(prepared, ignore).steps]
    assert found == pytest.approx(expected, rel=1e-6)


def test_compare_matches_eager_with_dropout_on(job_file: JobFile) -> None:
    path = job_file(model="vocab = 257\ndropout = 0.2", options='inner = "aot_eager"', steps="5")
    job = load(path, overrides={"compare_tolerance": 1e-5})
    outcome = run.execute(run.prepare(job, compare=True), ignore)
    assert outcome.holds(1e-5) is True and len(outcome.eager) == 5
    training = report_of(Path("runs/job")).training
    assert training["holds"] is True and training["tolerance"] == 1e-5
    gaps = [abs(a["loss"] - b) for a, b in zip(training["steps"], training["eager_loss"], strict=True)]
    assert training["max_difference"] == max(gaps) <= 1e-5
    assert training["steps"][0]["loss"] != training["steps"][-1]["loss"]


@pytest.mark.slow
def test_compare_matches_eager_through_inductor_with_dropout_on(job_file: JobFile) -> None:
    path = job_file(model="vocab = 257\nlayers = 1\ndropout = 0.2", options='inner = "inductor"', steps="10")
    outcome = run.execute(run.prepare(load(path), compare=True), ignore)
    # One rounding unit at a loss of 5.5 is 4.8e-7; without eager's random stream the first step is off by 2e-2.
    assert outcome.holds(2e-5), outcome.max_difference()


def test_compare_says_when_it_does_not_hold(job_file: JobFile) -> None:
    outcome = Outcome(
        steps=[StepEvent(1, 2.0, 1, 1, 1), StepEvent(2, 1.5, 1, 1, 1)],
        eager=[StepEvent(1, 2.0, 1, 1, 1), StepEvent(2, 1.25, 1, 1, 1)],
    )
    assert outcome.max_difference() == (0.25, 2)
    assert outcome.holds(0.2) is False and outcome.holds(0.25) is True
    assert Outcome().holds(0.1) is None


def test_only_inductor_is_told_to_draw_as_eager_does() -> None:
    options = Options(inductor={"max_autotune": True})
    assert run.backend_options(options, compare=False)["inductor"] == {"max_autotune": True}
    assert run.backend_options(options, compare=True)["inductor"] == {"max_autotune": True, "fallback_random": True}
    assert run.backend_options(Options(inner="eager"), compare=True)["inductor"] == {}
    assert set(run.backend_options(options, compare=True)) == set(Options.model_fields)


def test_nan_leaves_a_partial_report(job_file: JobFile) -> None:
    prepared = run.prepare(load(job_file(steps="4")))

    def spoil(event: StepEvent, eager: StepEvent | None) -> None:
        if event.step == 2:
            with torch.no_grad():
                next(prepared.model.parameters()).fill_(math.nan)

    with pytest.raises(TrainError, match="loss is nan at step 3"):
        run.execute(prepared, spoil)
    training = report_of(Path("runs/job")).training
    assert training["status"] == "failed" and "nan at step 3" in training["error"]
    assert [entry["step"] for entry in training["steps"]] == [1, 2]
    assert training["validation_loss"] is None


def test_ctrl_c_leaves_a_partial_report(job_file: JobFile) -> None:
    def stop(event: StepEvent, eager: StepEvent | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.execute(run.prepare(load(job_file())), stop)
    training = report_of(Path("runs/job")).training
    assert training["status"] == "interrupted" and len(training["steps"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ('inner = "inductr"', r"inductr.*did you mean 'inductor'"),
        ('disable_passes = ["rooflin"]', r"rooflin.*did you mean 'roofline'"),
        ('device = "h1000"', r"h1000"),
        ("inductor = { max_autotun = true }", r"max_autotun.*did you mean 'max_autotune'"),
    ],
)
def test_names_in_the_options_are_checked_before_training(job_file: JobFile, options: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run.prepare(load(job_file(options=options)))
    assert not Path("runs").exists()


def test_an_error_of_ours_within_the_compiler_keeps_its_own_message(
    job_file: JobFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "check_names", lambda options: None)
    prepared = run.prepare(load(job_file(options='inner = "inductr"')))
    with pytest.raises(ConfigError, match=r"inductr.*did you mean 'inductor'"):
        run.execute(prepared, ignore)
    assert report_of(Path("runs/job")).training["status"] == "failed"


def test_a_failing_model_is_a_train_error_with_the_step(job_file: JobFile) -> None:
    prepared = run.prepare(load(job_file()))

    def spoil(event: StepEvent, eager: StepEvent | None) -> None:
        raise RuntimeError("out of luck\nand more")

    with pytest.raises(TrainError, match=r"step 2 failed: RuntimeError: out of luck; --debug"):
        run.execute(prepared, spoil)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "'gone.txt'"}, r"data = .*gone\.txt.*no such file"),
        ({"sequence": "32", "data_limit": "200"}, "sequence = 32: the held-out part"),
        ({"out": "'text.txt'"}, r"out = 'text\.txt': .*is a file"),
        ({"out": "'text.txt/runs'"}, "is a file"),
    ],
)
def test_what_can_be_known_before_training_is_an_error_before_training(
    job_file: JobFile, changes: dict[str, str], message: str
) -> None:
    path = job_file(**changes)
    before = sorted(path.parent.iterdir())
    with pytest.raises(ConfigError, match=message) as caught:
        run.prepare(load(path))
    assert "job.toml: [training]" in str(caught.value)
    assert sorted(path.parent.iterdir()) == before


def test_a_folder_without_permission_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(
        "optpass.reporting.writable.tempfile.TemporaryFile", refuse
    )  # the tests may run as root, whom no mode stops
    with pytest.raises(ConfigError, match=r"^out: cannot write in .*: Permission denied; choose another place$"):
        check_folder(tmp_path / "a" / "b", "out")
    with pytest.raises(ConfigError, match="is a folder"):
        check_file(tmp_path, "--json")


def test_report_is_strict_json(job_file: JobFile) -> None:
    run.execute(run.prepare(load(job_file(steps="1"))), ignore)

    def refuse(name: str) -> float:
        raise AssertionError(name)

    data = json.loads(Path("runs/job/report.json").read_text(), parse_constant=refuse)
    assert data["training"]["t_steady_s"] is None and data["training"]["t_first_s"] > 0
