"""docs/generate.py: what is committed is up to date, and what is not is named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def generate(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(root / "docs"))
    import generate

    return generate


@pytest.fixture
def copied(root: Path, tmp_path: Path) -> Path:
    """A root with copies of the documents."""
    (tmp_path / "docs").mkdir()
    for path in (*root.glob("*.md"), *(root / "docs").glob("*.md")):
        shutil.copy(path, tmp_path / path.relative_to(root))
    return tmp_path


def test_documents_are_up_to_date(generate: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    status = generate.main(["--check"])
    assert (status, capsys.readouterr().err) == (0, "")


def test_check_names_the_file_and_the_command(
    generate: ModuleType, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main([], copied) == 0
    capsys.readouterr()
    page = copied / "docs" / "training.md"
    up_to_date = page.read_text(encoding="utf-8")
    page.write_text(up_to_date.replace("| `seed` |", "| `sed` |"), encoding="utf-8")
    assert generate.main(["--check"], copied) == 1
    assert capsys.readouterr().err == "docs/training.md: is out of date; run: python docs/generate.py\n"
    assert generate.main([], copied) == 0
    assert page.read_text(encoding="utf-8") == up_to_date
    assert generate.main(["--check"], copied) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- generated: optionz -->\n<!-- end: optionz -->\n", "no part is called 'optionz'; valid: options,"),
        ("<!-- generated: options -->\n", "a part needs"),
        ("<!-- end: options -->\n<!-- generated: options -->\n", "a part needs"),
    ],
)
def test_broken_markers_are_named(generate: ModuleType, copied: Path, text: str, message: str) -> None:
    (copied / "docs" / "new.md").write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match=rf"^new\.md: {message}"):
        generate.main(["--check"], copied)


def test_every_part_is_used_once(generate: ModuleType) -> None:
    used = [
        name
        for path in generate.documents(generate.ROOT)
        for name in generate._PART.sub(lambda m: f"\0{m['name']}\0", path.read_text(encoding="utf-8")).split("\0")[1::2]
    ]
    assert sorted(used) == sorted(generate.PARTS)


@pytest.mark.slow
def test_output_depends_on_nothing_of_the_terminal(root: Path) -> None:
    """Narrow, coloured, hashed otherwise, in another folder and with options in the environment: the same text."""
    environment = {
        **os.environ,
        "COLUMNS": "40",
        "TERMINAL_WIDTH": "40",
        "FORCE_COLOR": "1",
        "PYTHONHASHSEED": "7",
        "LANG": "C",
        "OPTPASS_STRICT": "1",
    }
    command = [sys.executable, str(root / "docs" / "generate.py"), "--check"]
    done = subprocess.run(
        command, cwd=root.parent, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_results_become_tables(generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line in the README, every row in docs/measured.md, each with the command that measures it again."""
    import generated_parts
    from optpass.bench.environment import environment
    from optpass.bench.result import Result, sample_rows

    rows = sample_rows({"inductor": [1.0, 1.1, 0.9], "optpass": [1.02, 1.0, 1.1]}, tolerance=0.03, group="a|b")
    result = Result(
        name="compile_time",
        claim="It costs little.",
        environment=environment(),
        config={"rounds": 3, "budget_s": 60.0, "seed": 0, "models": ("gpt",)},
        rows=tuple(rows),
        passed=None,
        finding="too few rounds",
        notes=("a note",),
    )
    folder = tmp_path / "bench" / "results"
    folder.mkdir(parents=True)
    (folder / "some-cpu-compile_time.json").write_text(result.to_json(), encoding="utf-8")
    monkeypatch.setattr(generated_parts, "ROOT", tmp_path)
    command = "`optpass bench compile_time --device cpu --rounds 3 --budget 60 --seed 0`"
    line = generated_parts.benchmarks().splitlines()[-1]
    assert line.startswith("| It costs little. | **undecided**: too few rounds | ") and line.endswith(f"| {command} |")
    full = generated_parts.measurements()
    assert f"Again with {command}" in full and "- a note\n" in full
    assert [text.startswith("| a\\|b | ") for text in full.splitlines()].count(True) == 2


def test_no_results_leave_nothing(generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import generated_parts

    monkeypatch.setattr(generated_parts, "ROOT", tmp_path)
    assert (generated_parts.benchmarks(), generated_parts.measurements()) == ("", "")
