"""Options: four layers, one answer, and errors that name the layer, the key, the value and the nearest valid one."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from optpass.errors import ConfigError
from optpass.option_files import find_toml, read_toml
from optpass.options import ARGUMENT, Options, environment_layer, resolve

NOWHERE = Path("/")


def from_layers(tmp_path: Path, present: set[str]) -> str | None:
    """`device` when the named layers each set it to their own name."""
    (tmp_path / "optpass.toml").write_text("device = 'toml'\n" if "toml" in present else "strict = true\n")
    return resolve(
        {"device": "dict"} if "dict" in present else {},
        cli={"device": "cli"} if "cli" in present else {},
        start=tmp_path,
        environ={"OPTPASS_DEVICE": "environment"} if "environment" in present else {},
    ).device


def test_precedence(tmp_path: Path) -> None:
    order = ["dict", "toml", "cli", "environment"]
    for count in range(1, 5):
        for present in itertools.combinations(order, count):
            assert from_layers(tmp_path, set(present)) == present[0]
    assert from_layers(tmp_path, set()) is None


def test_layers_add_up(tmp_path: Path) -> None:
    (tmp_path / "optpass.toml").write_text("disable_passes = ['roofline']\ninductor = {max_autotune = true}\n")
    options = resolve(
        {"inner": "eager"}, cli={"strict": "on"}, start=tmp_path,
        environ={"OPTPASS_DEVICE": "h200", "OPTPASS_RUN_ID": "x", "OPTPASS_DEBUG": "1", "OPTPASS_CACHE_DIR": "/x"},
    )  # fmt: skip
    assert options == Options(
        inner="eager", strict=True, device="h200", disable_passes=("roofline",), inductor={"max_autotune": True}
    )
    assert options.where("inner") == "options: inner"
    assert options.where("disable_passes") == f"{tmp_path / 'optpass.toml'}: disable_passes"
    assert options.where("strict") == "command line: strict"
    assert options.where("device") == "environment: OPTPASS_DEVICE"
    assert options.where("report") == "options: report"


def test_the_nearest_file_counts(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[tool.optpass]\ndevice = 'outer'\n")
    assert resolve(start=inner, environ={}).device == "outer"
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.other]\nx = 1\n")
    assert resolve(start=inner, environ={}).device == "outer"  # a project file without our table is passed by
    (tmp_path / "a" / "pyproject.toml").write_text("not [ toml")
    assert resolve(start=inner, environ={}).device == "outer"
    (tmp_path / "a" / "pyproject.toml").write_text("tool = 3\n")
    assert resolve(start=inner, environ={}).device == "outer"
    (tmp_path / "a" / "optpass.toml").write_text("device = 'nearer'\n")
    assert resolve(start=inner, environ={}).device == "nearer"
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.optpass]\ndevice = 'beside'\n")
    assert resolve(start=inner, environ={}).device == "nearer"
    found = find_toml(inner)
    assert found is not None and found[0] == tmp_path / "a" / "optpass.toml"


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("no", False), (" off ", False)]
)
def test_booleans_in_text(text: str, value: bool) -> None:
    assert resolve(start=NOWHERE, environ={"OPTPASS_STRICT": text}).strict is value


def test_lists_tables_and_none_in_text() -> None:
    options = resolve(
        start=NOWHERE,
        environ={
            "OPTPASS_DISABLE_PASSES": "redundant, roofline,",
            "OPTPASS_INDUCTOR": "{ max_autotune = true, 'cpp.threads' = 2 }",
            "OPTPASS_DEVICE": "none",
            "OPTPASS_REPORT": "",
        },
    )
    assert options.disable_passes == ("redundant", "roofline")
    assert options.inductor == {"max_autotune": True, "cpp.threads": 2}
    assert options.device is None and options.report is None


def test_values_that_are_converted(tmp_path: Path) -> None:
    options = resolve({"report": tmp_path / "r.json", "disable_passes": ["roofline"]}, start=NOWHERE, environ={})
    assert options.report == str(tmp_path / "r.json") and options.disable_passes == ("roofline",)
    with pytest.raises(Exception, match="frozen"):
        options.strict = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("explicit", "message"),
    [
        ({"strct": True}, "options: unknown option 'strct' (= True); did you mean 'strict'?"),
        ({"zzz": 1}, "options: unknown option 'zzz' (= 1); valid: inner, disable_passes, strict, "),
        ({3: 1}, "options: unknown option 3 (= 1); valid: "),
        ({"strict": "yes"}, "options: strict='yes' (str) is not a boolean"),
        ({"strict": 1}, "options: strict=1 (int) is not a boolean"),
        ({"inner": 3}, "options: inner=3 (int) is not a backend name or a callable"),
        ({"disable_passes": "roofline"}, "options: disable_passes='roofline' (str) is not a list of pass names"),
        ({"disable_passes": [1]}, "options: disable_passes=[1] (list) is not a list of pass names"),
        ({"device": 5}, "options: device=5 (int) is not a device name such as 'h200'"),
        ({"report": 5}, "options: report=5 (int) is not a path"),
        ({"inductor": True}, "options: inductor=True (bool) is not a table of torch._inductor.config settings"),
        ({"inductor": {1: 2}}, "options: inductor={1: 2} (dict) is not a table"),
        ([], "options: expected a table of options, got list []"),
        (["strict"], "options: expected a table of options, got list ['strict']"),
    ],
)
def test_errors_in_the_dict(explicit: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(explicit, start=NOWHERE, environ={})
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_errors_name_their_layer(tmp_path: Path) -> None:
    file = tmp_path / "optpass.toml"

    def message(**layers: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            resolve(**({"start": tmp_path, "environ": {}} | layers))
        return str(caught.value)

    assert message(environ={"OPTPASS_STRCT": "1"}) == (
        "environment: unknown option 'OPTPASS_STRCT' (= '1'); did you mean 'strict'?"
    )
    assert message(environ={"OPTPASS_STRICT": "maybe"}) == (
        "environment: OPTPASS_STRICT='maybe' is not a boolean; write 1 or 0"
    )
    assert message(environ={"OPTPASS_INDUCTOR": "{ x"}) == (
        "environment: OPTPASS_INDUCTOR='{ x' is not an inline table; write { max_autotune = true }"
    )
    assert message(environ={"OPTPASS_INDUCTOR": "3"}).startswith("environment: OPTPASS_INDUCTOR=3 (int) is not a table")
    assert message(cli={"strict": "maybe"}) == "command line: strict='maybe' is not a boolean; write 1 or 0"
    assert message(cli={"devise": "x"}) == "command line: unknown option 'devise' (= 'x'); did you mean 'device'?"
    file.write_text("device = 5\n")
    assert message() == f"{file}: device=5 (int) is not a device name such as 'h200'"
    file.write_text("devise = 'h100'\n")
    assert message() == f"{file}: unknown option 'devise' (= 'h100'); did you mean 'device'?"
    file.write_text("device = \n")
    assert message().startswith(f"{file}: not valid TOML: ") and "line 1" in message()
    file.write_bytes(b"\xff\xfe")
    assert message().startswith(f"{file}: cannot be read: ")
    file.unlink()
    (tmp_path / "pyproject.toml").write_text("[tool]\noptpass = 3\n")
    assert message() == f"{tmp_path / 'pyproject.toml'}: expected a table of options, got int 3"
    with pytest.raises(ConfigError, match="no such file"):
        read_toml(tmp_path / "absent.toml")


def test_a_layer_that_loses_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="environment: OPTPASS_STRICT='maybe'"):
        resolve({"strict": True}, start=NOWHERE, environ={"OPTPASS_STRICT": "maybe"})


def test_to_json_is_plain_data() -> None:
    import json

    def inner(gm: Any, inputs: Any) -> Any:
        return gm

    options = Options(inner=inner, disable_passes=("a",), inductor={"f": inner, "l": (1, inner)})
    data = json.loads(json.dumps(options.to_json()))
    assert data["inner"].endswith("test_to_json_is_plain_data.<locals>.inner")
    assert data["disable_passes"] == ["a"] and data["inductor"]["l"][0] == 1
    assert set(data) == set(Options.model_fields)


def test_the_layer_of_variables() -> None:
    assert environment_layer({"OPTPASS_STRICT": "1", "OPTPASS_RUN_ID": "x", "PATH": "/"}) == {"strict": "1"}


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    code = (
        "import os, sys; from optpass.options import resolve\n"
        "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')\n"
        "assert resolve({'strict': True}, environ={}).strict\n"
        "assert 'torch' not in sys.modules\n"
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith("OPTPASS_")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", ["['redundant', 'roofline']", "redundant, roofline"])
def test_a_list_from_text_is_toml_or_words_with_commas(text: str) -> None:
    options = resolve(cli={"disable_passes": text}, start=NOWHERE, environ={})
    assert options.disable_passes == ("redundant", "roofline")
    with pytest.raises(ConfigError, match=r"command line: disable_passes=\"\['a'\" is not a list; write \['name'"):
        resolve(cli={"disable_passes": "['a'"}, start=NOWHERE, environ={})


def test_the_first_layer_may_be_a_table_of_a_file() -> None:
    place = "job.toml: [options]"
    assert resolve({"inner": "eager"}, start=NOWHERE, environ={}, layer=place).where("inner") == f"{place} inner"
    for values, said in (
        ({"audit": "yes"}, "audit='yes' (str) is not a boolean; write true or false, in Python True or False"),
        ({"zzz": 1}, "unknown option 'zzz' (= 1)"),
        ("", "expected a table of options, got str ''"),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve(values, start=NOWHERE, environ={}, layer=place)  # type: ignore[arg-type]
        assert str(caught.value).startswith(f"{place} {said}")


def test_an_object_in_place_of_a_name_is_one_short_line() -> None:
    class Page:
        def __repr__(self) -> str:
            return "line of a page\n" * 40

    with pytest.raises(ConfigError) as caught:
        Options().override({"optimizer": Page()}, ARGUMENT)
    message = str(caught.value)
    assert message.startswith("optimizer=line of a page") and message.endswith(
        "the name of an optimizer such as 'adamw'"
    )
    assert "\n" not in message and len(message) < 220
