"""Flags that several verbs share, so that `--json` and `--html` mean the same everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from optpass.errors import ConfigError

if TYPE_CHECKING:
    from optpass.options import Options

Json = Annotated[str | None, typer.Option("--json", metavar="PATH", help="Write JSON to PATH; '-' is standard output.")]
Html = Annotated[str | None, typer.Option("--html", metavar="PATH", help="Write one offline HTML page to PATH.")]
Device = Annotated[
    str | None,
    typer.Option("--device", "-d", help="Device to plan for: 'cpu' (this one, measured), 'h100', 'a100', ..."),
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a field of the model's config; repeat.")
]
OptionPairs = Annotated[
    list[str] | None,
    typer.Option("--option", "-O", metavar="KEY=VALUE", help="A backend option, e.g. inner=aot_eager; repeat."),
]


def pairs(values: list[str] | None, flag: str) -> dict[str, str]:
    """`["a=1", "b=2"]` as a dict; `ConfigError` names the flag and the text that has no '='."""
    result: dict[str, str] = {}
    for text in values or []:
        key, sep, value = text.partition("=")
        if not sep or not key.strip():
            raise ConfigError(f"{flag} {text!r} is not KEY=VALUE")
        result[key.strip()] = value.strip()
    return result


def tell_shadowed(options: Options, given: dict[str, str]) -> None:
    """Say which `--option` has no effect, since `[options]` of a training file or optpass.toml comes first.

    Args:
        options: as resolved with `given`.
        given: pairs of `--option`.
    """
    for key in options.shadowed(given):
        typer.echo(f"optpass: --option {key}={given[key]} has no effect: {options.where(key)} comes first", err=True)
