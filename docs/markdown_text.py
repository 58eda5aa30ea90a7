"""Markdown from plain values: tables, types in words, defaults. Nothing here knows what the documents are about."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_UNIONS = (typing.Union, types.UnionType)


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; line breaks in cells become spaces, and `|` is escaped."""

    def line(cells: Sequence[object]) -> str:
        return "| " + " | ".join(" ".join(str(cell or "").split()).replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(headers), line(["---"] * len(headers)), *map(line, rows)]) + "\n"


def type_name(annotation: Any) -> str:
    """A type in words: 'list of strings' rather than `tuple[str, ...]`."""
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in inside)
    if origin in _UNIONS:
        return " or ".join(type_name(part) for part in inside)
    if origin is dict:
        mixed = inside[1] is Any or typing.get_origin(inside[1]) in _UNIONS
        return "table" if mixed else f"table of {_plural(type_name(inside[1]))}"
    if origin in (list, tuple):
        fixed = origin is tuple and inside[-1] is not Ellipsis
        return f"{len(inside)} {_plural(type_name(inside[0]))}" if fixed else f"list of {_plural(type_name(inside[0]))}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    plain = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
    return plain.get(annotation, "callable")


def _plural(word: str) -> str:
    return word if word.startswith("[") or word.endswith("s") else f"{word}s"


def default(field: FieldInfo) -> str:
    """A default as TOML writes it; empty where nothing is the default."""
    value = field.get_default(call_default_factory=True)
    if value is None:
        return ""
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


def records_in(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models that a type mentions, in order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [record for part in typing.get_args(annotation) for record in records_in(part)]
