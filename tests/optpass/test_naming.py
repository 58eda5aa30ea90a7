"""How messages name what was given, on the command line and in Python."""

from __future__ import annotations

from optpass.naming import argument, given, on_the_command_line, setting, shown


def test_arguments_are_flags_on_the_command_line_alone() -> None:
    def names() -> list[str]:
        return [argument("memory_budget"), given("dtype", "fp7"), setting("batch", 0), setting("batch")]

    python = ["memory_budget", "dtype='fp7'", "sets: batch=0", "sets: batch"]
    assert names() == python
    with on_the_command_line():
        assert names() == ["--budget", "--dtype 'fp7'", "--set batch=0", "--set batch"]
    assert names() == python


def test_a_value_is_one_line_that_is_not_long() -> None:
    class Page:
        def __repr__(self) -> str:
            return "line of a page\n" * 40

    text = shown(Page())
    assert text.startswith("line of a page line") and text.endswith(" ...") and len(text) <= 120
    assert shown("a") == "'a'"
