"""Shell lines of the documents: verbs, flags, targets, files and extras that they name exist."""

from __future__ import annotations

import itertools
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

#: `optpass ...` and `make ...` in running text.
#: Words that stand for something else.
PLACEHOLDERS = {"VERB", "NAME", "TARGET", "FILE", "FILE...", "[OPTIONS]"}
_INLINE = re.compile(r"`((?:optpass|make|python|pip) [^`]+)`")


@pytest.fixture(scope="module")
def lines(documents: list[Path], blocks: Callable[..., list[Any]]) -> list[tuple[str, list[str]]]:
    """(document, words) of every command in a shell block or in the text; variables before a command are dropped."""
    found = []
    for path in documents:
        texts = [line for block in blocks(path, "sh") for line in block.text.splitlines()]
        texts += _INLINE.findall(re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.S | re.M))
        for text in texts:
            words = shlex.split(text.replace("|", " "), comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words:
                found.append((path.name, words))
    return found


def test_optpass_commands_parse(lines: list[tuple[str, list[str]]]) -> None:
    """Each is parsed by the command line itself, up to the point where it would run."""
    import typer

    from optpass.cli.app import app

    group: Any = typer.main.get_command(app)
    top = typer.Context(group, info_name="optpass", **group.context_settings)
    parsed = []
    for document, words in lines:
        if words[0] != "optpass" or words[1] in PLACEHOLDERS or words[1].startswith("-"):
            continue
        text = f"{document}: {shlex.join(words)}"
        assert words[1] in group.commands, text
        if len(words) == 2 or PLACEHOLDERS & set(words):
            continue  # the verb is spoken of, not used
        try:
            group.commands[words[1]].make_context(words[1], words[2:], parent=top)
        except Exception as error:  # noqa: BLE001  (typer's classes of errors differ between its versions)
            pytest.fail(f"{text}: {error}")
        parsed.append(text)
    assert len(parsed) > 8


def test_options_set_by_commands_exist(lines: list[tuple[str, list[str]]]) -> None:
    from optpass.options import Options

    for document, words in lines:
        for flag, value in itertools.pairwise(words):
            if flag in ("--option", "-O") and value != "KEY=VALUE":
                assert value.partition("=")[0] in Options.model_fields, f"{document}: {shlex.join(words)}"


def test_make_targets_exist(root: Path, lines: list[tuple[str, list[str]]]) -> None:
    """Targets, and variables that are set behind them."""
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z]+) *\?=", makefile, re.MULTILINE))
    named = {(document, word) for document, words in lines if words[0] == "make" for word in words[1:]}
    unknown = {(d, word) for d, word in named if word.partition("=")[0] not in (variables if "=" in word else targets)}
    assert named and unknown == set()


def test_extras_exist(root: Path, lines: list[tuple[str, list[str]]]) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {
        extra for _, words in lines if words[0] == "pip" for word in words for extra in re.findall(r"\[(\w+)\]", word)
    }
    assert named and named <= set(project["optional-dependencies"])


def test_files_named_by_commands_exist(root: Path, lines: list[tuple[str, list[str]]]) -> None:
    named = {
        (document, word.partition(":")[0])
        for document, words in lines
        for word in words
        if word.startswith(("examples/", "docs/", ".ci/", "tests/", "bench/"))
    }
    assert named and [(d, f) for d, f in sorted(named) if not (root / f).exists()] == []
