"""Arguments of `plan` and `analyze` in Python: those of a type that is of no use are told in a line, by their name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optpass.errors import ConfigError
from optpass.naming import given

#: By argument: what it is, and what to write.
_TEXTS = {"name": "write a text, what the model is called", "size": "write the name of a size, such as 'small'"}
_MAPPINGS = {
    "kwargs": "write a dict of keyword inputs, such as {'mask': mask}",
    "sets": "write a dict of settings, such as {'seq': 2048}",
}
_FUNCTIONS = {
    "loss": "write a function that takes the model's output and returns a scalar",
    "progress": "write a function that takes the fraction done, or None, and what is being done",
}


def check_types(**arguments: Any) -> None:
    """Refuse an argument of another type than it can have; None is the default of all.

    Raises:
        ConfigError: names the argument, its value and what to write.
    """
    for name, value in arguments.items():
        if value is None:
            continue
        if name in _TEXTS:
            right, what = isinstance(value, str), _TEXTS[name]
        elif name in _MAPPINGS:
            right, what = isinstance(value, Mapping) and all(isinstance(key, str) for key in value), _MAPPINGS[name]
        else:
            right, what = callable(value), _FUNCTIONS[name]
        if not right:
            raise ConfigError(f"{given(name, value)}: {what}")


def settings_of(sets: Mapping[str, Any] | None) -> dict[str, str]:
    """Settings of a target as text, as the command line gives them."""
    return {key: str(value) for key, value in (sets or {}).items()}
