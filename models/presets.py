"""Sizes and settings of the reference models: looking up a size by name, replacing fields by name, checking values.

Standard library only: the registry and the command line use this without importing torch. What touches tensors
lives in `common.py`; the sizes themselves live with each model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from optpass.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")
I = TypeVar("I", bound="DataclassInstance")  # noqa: E741  (I for inputs, next to C for config)

_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True)
class Preset(Generic[C, I]):
    """One named size: the model's `config` and the shape of its example `inputs` (batch, sequence, ...)."""

    config: C
    inputs: I


def unknown(what: str, value: str, valid: Iterable[str]) -> ConfigError:
    """The error for a name that is not in `valid`; it names the value and the nearest valid ones."""
    return ConfigError(f"unknown {what} {value!r}: {did_you_mean(value, valid)}")


def require(condition: bool, message: str) -> None:
    """Raises ConfigError(message) unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def check_ranges(config: DataclassInstance) -> None:
    """Raises ConfigError unless every int field (and every int of a tuple field) is at least 1, every float at
    least 0, and `dropout`, where there is one, below 1."""
    for key, value in _values(config).items():
        numbers = value if isinstance(value, tuple) else (value,)
        if any(not isinstance(n, bool) and isinstance(n, int) and n < 1 for n in numbers):
            raise ConfigError(f"{key} is {value!r}: must be at least 1")
        if any(isinstance(n, float) and not 0.0 <= n < float("inf") for n in numbers):
            raise ConfigError(f"{key} is {value!r}: must be a finite number, at least 0")
        if key == "dropout" and value >= 1.0:
            raise ConfigError(f"dropout is {value!r}: must be below 1")


def resolve(model: str, sizes: Mapping[str, Preset[C, I]], size: str, overrides: Mapping[str, object]) -> tuple[C, I]:
    """The config and input shape of `size`, with the fields named in `overrides` replaced.

    A value may be a string (as it comes from a command line): it is read as the type of the field it replaces;
    a tuple field takes a sequence or a comma-separated string.
    Raises ConfigError for an unknown size, an unknown field, a wrong type, or a value the model cannot have.
    """
    if size not in sizes:
        raise unknown(f"size of {model}", size, sizes)
    preset = sizes[size]
    of_config, of_inputs = _values(preset.config), _values(preset.inputs)
    known = of_config | of_inputs
    for key in overrides:
        if key not in known:
            raise unknown(f"setting of {model}", key, known)
    values = {key: _coerced(f"{model}: {key}", value, known[key]) for key, value in overrides.items()}
    config = dataclasses.replace(preset.config, **{k: v for k, v in values.items() if k in of_config})
    inputs = dataclasses.replace(preset.inputs, **{k: v for k, v in values.items() if k in of_inputs})
    check_ranges(inputs)
    return config, inputs


def _values(config: DataclassInstance) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _coerced(what: str, value: object, like: Any) -> Any:
    """`value` as the type of `like` (bool, int, float or tuple of int), or ConfigError."""
    if isinstance(like, tuple):
        parts = value.split(",") if isinstance(value, str) else value
        require(isinstance(parts, (list, tuple)), f"{what} is {value!r}: expected integers separated by commas")
        assert isinstance(parts, (list, tuple))
        return tuple(_coerced(what, part, 1) for part in parts)
    if isinstance(value, str):
        value = _parsed(what, value, type(like))
    if isinstance(like, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    require(type(value) is type(like), f"{what} is {value!r}: expected {type(like).__name__}")
    return value


def _parsed(what: str, text: str, kind: type) -> object:
    try:
        return _BOOLEANS[text.strip().lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{what} is {text!r}: expected {kind.__name__}") from None
