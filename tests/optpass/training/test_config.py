"""The training file: what it accepts, and one line for everything that it does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from optpass.errors import ConfigError
from optpass.training.config import TrainingConfig, keys, load

ROOT = Path(__file__).parents[3]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


def test_the_example_loads_and_is_off_alignment() -> None:
    job = load(ROOT / "examples" / "gpt-demo.toml")
    architecture = job.config.architecture
    assert job.config.name == "gpt-demo"
    assert job.options.inner == "inductor"
    assert architecture["dropout"] == 0.1
    assert isinstance(architecture["vocab"], int) and architecture["vocab"] % 8
    assert isinstance(architecture["width"], int) and architecture["width"] % 8


def test_defaults_name_after_the_file_and_freeze(tmp_path: Path) -> None:
    config = load(write(tmp_path, "[training]\n")).config
    assert config == TrainingConfig(name="job")
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 3  # type: ignore[misc]


def test_flags_win_over_the_file_and_the_table_over_option_flags(tmp_path: Path) -> None:
    path = write(tmp_path, "[training]\nsteps = 7\n[options]\nstrict = true\n")
    job = load(path, overrides={"steps": 2, "seed": 5}, option_pairs={"strict": "0", "inner": "eager"})
    assert (job.config.steps, job.config.seed) == (2, 5)
    assert (job.options.strict, job.options.inner) == (True, "eager")


BAD = {
    "unknown key": ("[training]\nstep = 3", ["[training]", "'step'", "did you mean 'steps'"]),
    "unknown table": ("[training]\n[option]\n", ["'option'", "did you mean 'options'"]),
    "no table": ("steps = 3", ["unknown table or key 'steps'"]),
    "empty": ("", ["no [training] table"]),
    "training is no table": ("training = 3", ["training = 3 is not a table"]),
    "wrong type": ("[training]\nsteps = 'many'", ["steps = 'many'", "integer"]),
    "a float for an integer": ("[training]\nsteps = 3.5", ["steps = 3.5", "integer"]),
    "a bool for an integer": ("[training]\nsteps = true", ["steps = True", "integer"]),
    "one of two types": ("[training]\nmicro_batch = 'autoo'", ["micro_batch = 'autoo'", "a valid integer or 'auto'"]),
    "neither type": ("[training]\nmemory_budget = 1.5", ["memory_budget = 1.5", "a valid integer or a valid string"]),
    "threads": ("[training]\nthreads = 100000", ["threads = 100000", "at most 256 on this machine, which has 2 CPUs"]),
    "too small": ("[training]\nmicro_batch = 0", ["micro_batch = 0", "greater than or equal to 1"]),
    "infinite": ("[training]\nlearning_rate = inf", ["learning_rate = inf", "finite"]),
    "no such choice": ("[training]\ntokenizer = 'word'", ["tokenizer = 'word'", "'byte' or 'char'"]),
    "no such precision": ("[training]\nprecision = 'fp16'", ["precision = 'fp16'", "'fp32', 'bf16' or 'bf16-true'"]),
    "name with a slash": ("[training]\nname = '../x'", ["name = '../x'", "Letters"]),
    "size": ("[training]\ndata_limit = '4 apples'", ["data_limit = '4 apples'", "'20GiB'"]),
    "no data": ("[training]\ndata_limit = 0", ["data_limit = 0", "at least 1 byte"]),
    "holdout": ("[training]\nholdout = 1.0", ["holdout = 1.0", "less than 1"]),
    "deep": ("[training.model_config]\nlayers = [1]", ["[training.model_config] layers = [1]"]),
    "TOML": ("[training\n", ["not valid TOML", "line 1"]),
    "unknown option": ("[training]\n[options]\ninnr = 'eager'", ["[options]", "'innr'", "did you mean 'inner'"]),
    "another option type": ("[training]\n[options]\naudit = 'yes'", ["[options] audit='yes'", "a boolean; write true"]),
    "options are no table": ("options = ''\n[training]", ["[options] expected a table"]),
    "option type": ("[training]\n[options]\nstrict = 'yes'", ["[options]", "strict='yes'", "boolean"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_one_line_naming_file_key_value_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    text, needles = BAD[case]
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    for needle in needles:
        assert needle in message, message


def test_missing_file() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: no such file"):
        load(Path("nowhere.toml"))


def test_a_bad_flag_is_named_as_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--steps: steps = 0 cannot be used: it should be greater"):
        load(write(tmp_path, "[training]\n"), overrides={"steps": 0})


def test_a_flag_with_another_name_than_its_key_is_named_as_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--budget: memory_budget = '0' cannot be used"):
        load(write(tmp_path, "[training]\n"), overrides={"memory_budget": "0"})
    with pytest.raises(ConfigError, match=r"^--batch 'auto' finds the most sequences .* or give --budget"):
        load(write(tmp_path, "[training]\n"), overrides={"micro_batch": "auto"})


def test_a_value_is_told_by_the_place_that_set_it(tmp_path: Path) -> None:
    path = write(tmp_path, "[training]\nout = 'a'\nseed = 3\n")
    job = load(path, overrides={"out": "b"})
    assert job.said("out") == "--out 'b'" and job.said("seed") == f"{path}: [training] seed = 3"


def test_a_budget_by_flag_wins_over_both_tables(tmp_path: Path) -> None:
    path = write(tmp_path, "[training]\nmemory_budget = '1GB'\n[options]\nmemory_budget = '2GB'\n")
    with pytest.raises(ConfigError, match="give one"):
        load(path)
    options = load(path, overrides={"memory_budget": "3GB"}).options
    assert options.memory_budget == "3GB" and "[" not in options.where("memory_budget")


def test_options_are_named_by_their_table(tmp_path: Path) -> None:
    path = write(tmp_path, "[training]\n[options]\ninner = 'egaer'\n")
    assert load(path).options.where("inner") == f"{path}: [options] inner"


def test_threads_for_every_cpu_of_a_large_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    assert load(write(tmp_path, "[training]\nthreads = 1000")).config.threads == 1000


def test_every_key_is_named_as_the_file_does_and_documented() -> None:
    found = keys()
    assert "model_config" in found and "architecture" not in found
    assert len(found) == len(TrainingConfig.model_fields) and all(field.description for field in found.values())


def test_json_uses_the_names_of_the_file() -> None:
    data = TrainingConfig(architecture={"layers": 2}).to_json()
    assert data["model_config"] == {"layers": 2}
    assert TrainingConfig.model_validate(data).architecture == {"layers": 2}
