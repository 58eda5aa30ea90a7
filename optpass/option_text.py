"""Options from text: how a flag or an environment variable writes a boolean, a list, a table or a size.

Which options there are is `optpass.options`' business. Nothing here may import torch.
"""

from __future__ import annotations

import tomllib
import types
import typing
from typing import Any

from pydantic.fields import FieldInfo

from optpass.errors import ConfigError
from optpass.option_tables import TABLES

_WORDS = {
    "1": True, "true": True, "yes": True, "on": True,
    "0": False, "false": False, "no": False, "off": False,
}  # fmt: skip


def parse(key: str, field: FieldInfo, text: str, place: str) -> Any:
    """Text as the option's type; tables are written as TOML, lists too or with commas alone.

    Args:
        key: the option.
        field: its declaration.
        place: what to call it in a message, e.g. `command line: strict`.

    Raises:
        ConfigError: it cannot be read as that type, naming place, text and what to write.
    """
    stripped = text.strip()
    kinds = typing.get_args(field.annotation) if _is_union(field.annotation) else ()
    origin = typing.get_origin(field.annotation) or field.annotation
    if origin is bool:
        if stripped.lower() not in _WORDS:
            raise ConfigError(f"{place}={text!r} is not a boolean; write 1 or 0")
        return _WORDS[stripped.lower()]
    if origin is tuple:
        if stripped.startswith("["):
            found = _inline(field, text, place, "a list", "['name', 'other']")
            return tuple(found) if isinstance(found, list) else found
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if key in TABLES:
        value = _inline(field, text, place) if stripped.startswith("{") else stripped
        return TABLES[key].read(value, place)
    if origin is dict:
        return _inline(field, text, place)
    if type(None) in kinds and stripped.lower() in ("", "none"):
        return None
    return text


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _inline(
    field: FieldInfo, text: str, place: str, what: str = "an inline table", example: str = "{ key = value }"
) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        example = next(iter(field.examples or ()), example)
        raise ConfigError(f"{place}={text!r} is not {what}; write {example}") from None
