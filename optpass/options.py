"""The options: one validated model, and how the dict, TOML, CLI and environment layers resolve into it.

Nothing here may import torch. Names of passes, devices and backends are checked where they are known
(`optpass.passes.registry`, `optpass.passes.devices`, `optpass.backend`), with the same error class.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, ValidationInfo, field_validator

from optpass.errors import ConfigError, did_you_mean
from optpass.naming import argument, shown
from optpass.option_files import find_toml
from optpass.option_tables import TABLES, AttentionOptions, TableOption
from optpass.option_text import parse
from optpass.units import Budget, parse_budget

ENV_PREFIX = "OPTPASS_"
_COMMAND_LINE, _ENVIRONMENT = "command line", "environment"
#: The layer of what a function or a verb takes by a name of its own, as `--budget` is `memory_budget`.
ARGUMENT = "argument"
#: Variables that start with the prefix but are not options: set by optpass for its own child processes, or places.
ENV_RESERVED = frozenset({"OPTPASS_RUN_ID", "OPTPASS_CACHE_DIR", "OPTPASS_DEBUG"})


class Options(BaseModel):
    """What `torch.compile(..., backend="optpass", options={...})` accepts.

    Resolved from four layers; a key in an earlier layer wins: the `options` dict, `optpass.toml` or
    `[tool.optpass]` in `pyproject.toml` (nearest folder upwards from the working directory), CLI flags
    (`--option key=value`), `OPTPASS_<KEY>` variables.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True)

    inner: str | Callable[..., Any] = Field(
        default="inductor",
        description="Compiler that gets the graph after our pre-autograd passes: 'inductor', 'aot_eager', 'eager', "
        "any registered backend, or a callable (gm, example_inputs) -> callable.",
    )
    disable_passes: tuple[str, ...] = Field(
        default=(), description="Names of passes that must not run, e.g. ['redundant', 'roofline']."
    )
    strict: bool = Field(
        default=False, description="Raise when a pass fails, instead of undoing it and reporting the failure."
    )
    device: str | None = Field(
        default=None, description="Device to plan for, by spec name ('h200'); default: the device the graph runs on."
    )
    report: str | None = Field(
        default=None, description="Path to write the report to when the process exits: .json, or .html for the page."
    )
    audit: bool = Field(
        default=True, description="Record graph breaks and recompiles for the report; costs compile time only."
    )
    inductor: dict[str, Any] = Field(
        default_factory=dict,
        description="Patches for torch._inductor.config, e.g. {'max_autotune': true}.",
        examples=["{ max_autotune = true }"],
    )
    attention: AttentionOptions = Field(
        default=AttentionOptions(),
        description="Hand-written attention on fused kernels: a word, the mode, or a table of the keys below, e.g. "
        "{ mode = 'always', dropout = 'swap' }.",
        examples=['{ mode = "always" }'],
    )
    memory_budget: int | str | None = Field(
        default=None,
        description="Most bytes that a training step may have allocated on its device at any time: parameters, "
        "buffers, optimizer state, gradients, inputs, saved tensors and temporaries. An int, '20GiB', '500MB', or "
        "'80%' of the memory of the option `device` or of the GPU that the graph runs on.",
    )
    offload: Literal["auto", "off"] = Field(
        default="auto",
        description="Whether a memory budget may have saved tensors in the host's memory between forward and backward: "
        "'auto', where a GPU's link to the host moves them behind the computing and that saves recomputing; or 'off'.",
    )
    optimizer: str | None = Field(
        default=None,
        description="Optimizer whose state counts in the budget, e.g. 'adamw', 'sgd_momentum', 'adafactor', or 'none'; "
        "default: the torch optimizer that holds the graph's parameters, where there is one.",
    )

    _origin: dict[str, str] = PrivateAttr(default_factory=dict)

    @field_validator(*TABLES, mode="before")
    @classmethod
    def _table(cls, value: Any, info: ValidationInfo) -> TableOption:
        """A word or a table given in code; a `ConfigError` passes through pydantic as it is."""
        key = str(info.field_name)
        return TABLES[key].read(value, key)

    @field_validator("memory_budget")
    @classmethod
    def _budget(cls, value: int | str | None) -> int | str | None:
        if value is not None:
            parse_budget(value)
        return value

    @property
    def budget(self) -> Budget | None:
        """`memory_budget` as it was asked for; `optpass.passes.memory.budget` turns it into bytes for a device."""
        return None if self.memory_budget is None else parse_budget(self.memory_budget)

    def where(self, key: str) -> str:
        """The layer that set `key` and the name it has there, for messages: `options: inner`."""
        return _where(self._origin.get(key, "options"), key)

    @property
    def given(self) -> tuple[str, ...]:
        """The options that some layer set, rather than left at their default."""
        return tuple(self._origin)

    def shadowed(self, cli: Mapping[str, str]) -> tuple[str, ...]:
        """The pairs from the command line that an earlier layer made void."""
        return tuple(key for key in cli if self._origin.get(key) != _COMMAND_LINE)

    def override(self, values: Mapping[str, Any], layer: str = "options") -> Options:
        """These options with some set anew by `layer`, which messages name. Raises ConfigError as `resolve` does."""
        merged = {key: getattr(self, key) for key in self.given} | dict(_checked(values, layer))
        return _validate(merged, {**self._origin, **dict.fromkeys(values, layer)})

    def __eq__(self, other: object) -> bool:
        """Equal settings; which layer they came from does not count."""
        return isinstance(other, Options) and all(
            getattr(self, k) == getattr(other, k) for k in type(self).model_fields
        )

    def to_json(self) -> dict[str, Any]:
        """The options as plain data; a callable stands as its qualified name."""
        data: dict[str, Any] = {}
        for key in type(self).model_fields:
            value = getattr(self, key)
            data[key] = value.to_json() if isinstance(value, TableOption) else _named(value)
        return data


def _named(value: Any) -> Any:
    """Callables by qualified name, containers deeply, everything else as it is."""
    if isinstance(value, dict):
        return {str(k): _named(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_named(v) for v in value]
    if callable(value):
        return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return value


def _where(layer: str, key: str) -> str:
    """`options: strict`, `/home/me/optpass.toml: strict`, `environment: OPTPASS_STRICT`, `--budget`."""
    if layer == ARGUMENT:
        return argument(key)
    return _head(layer) + (f"{ENV_PREFIX}{key.upper()}" if layer == _ENVIRONMENT else key)


def _head(layer: str) -> str:
    """What messages of a layer begin with: `options: `, or `train.toml: [options] ` for a table in a file."""
    return f"{layer} " if layer.endswith("]") else f"{layer}: "


def resolve(
    explicit: Mapping[str, Any] | None = None,
    *,
    cli: Mapping[str, str] | None = None,
    start: Path | None = None,
    environ: Mapping[str, str] | None = None,
    layer: str = "options",
) -> Options:
    """The options that hold, from the layers named in `Options`.

    Args:
        explicit: the dict given to `torch.compile`.
        cli: `key=value` pairs from the command line, as strings.
        start: folder where the search for a TOML file begins; default the working directory.
        environ: environment; default `os.environ`.
        layer: what messages call the first layer, e.g. `train.toml: [options]`.

    Raises:
        ConfigError: an unknown key, a wrong type or an impossible value, naming key, value, layer and remedy.
    """
    environ = os.environ if environ is None else environ
    layers: list[tuple[str, Mapping[str, Any]]] = [(layer, _checked({} if explicit is None else explicit, layer))]
    found = _toml_layer(start)
    if found is not None:
        layers.append((str(found[0]), _checked(found[1], str(found[0]))))
    layers.append((_COMMAND_LINE, _from_text(cli or {}, _COMMAND_LINE)))
    layers.append((_ENVIRONMENT, _from_text(environment_layer(environ), _ENVIRONMENT)))
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, values in layers:
        for key, value in values.items():
            if key not in merged:
                merged[key], origin[key] = value, name
    typed = dict(layers[-2][1])
    if any(origin[key] != _COMMAND_LINE for key in typed):  # typed just now, so told of although it has no effect
        _validate(typed, dict.fromkeys(typed, _COMMAND_LINE))
    return _validate(merged, origin)


def environment_layer(environ: Mapping[str, str]) -> dict[str, str]:
    """`OPTPASS_STRICT=1` as `{"strict": "1"}`; reserved variables are left out."""
    return {
        key[len(ENV_PREFIX) :].lower(): value
        for key, value in environ.items()
        if key.startswith(ENV_PREFIX) and key not in ENV_RESERVED
    }


def _toml_layer(start: Path | None) -> tuple[Path, Mapping[str, Any]] | None:
    try:
        return find_toml(start or Path.cwd())
    except FileNotFoundError:
        return None  # the working directory was removed under us: no folder, no file


def _checked(layer: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if not isinstance(layer, Mapping):
        raise ConfigError(f"{_head(where)}expected a table of options, got {type(layer).__name__} {shown(layer)}")
    for key in layer:
        if key not in Options.model_fields:
            named = f"{ENV_PREFIX}{key.upper()}" if where == _ENVIRONMENT else key
            known = tuple(Options.model_fields)
            value = shown(layer[key])
            raise ConfigError(f"{_head(where)}unknown option {named!r} (= {value}); {did_you_mean(str(key), known)}")
    return layer


def _from_text(layer: Mapping[str, str], where: str) -> dict[str, Any]:
    _checked(layer, where)
    fields = Options.model_fields
    return {key: parse(key, fields[key], text, _where(where, key)) for key, text in layer.items()}


def _validate(merged: dict[str, Any], origin: Mapping[str, str]) -> Options:
    values = {k: tuple(v) if k == "disable_passes" and isinstance(v, list) else v for k, v in merged.items()}
    report: Any = values.get("report")
    if isinstance(report, os.PathLike):
        values["report"] = os.fspath(report)
    for key in TABLES.keys() & values.keys():
        values[key] = TABLES[key].read(values[key], _where(origin.get(key, "options"), key))
    budget: Any = values.get("memory_budget")
    if budget is not None:
        try:
            parse_budget(budget)
        except ConfigError as error:
            raise ConfigError(f"{_where(origin.get('memory_budget', 'options'), 'memory_budget')}={error}") from None
    try:
        options = Options.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else "?"
        value = merged.get(key)
        place = _where(origin.get(key, "options"), key)
        raise ConfigError(f"{place}={shown(value)} ({type(value).__name__}) is not {_wanted(key)}") from None
    options._origin = dict(origin)
    return options


def _wanted(key: str) -> str:
    """What an option must be, in words."""
    field = Options.model_fields.get(key)
    if field is not None and field.annotation is bool:
        return "a boolean; write true or false, in Python True or False"
    return {
        "inner": "a backend name or a callable (gm, example_inputs) -> callable",
        "disable_passes": "a list of pass names",
        "device": "a device name such as 'h200'",
        "offload": "'auto' or 'off'",
        "report": "a path",
        "inductor": "a table of torch._inductor.config settings",
        "optimizer": "the name of an optimizer such as 'adamw'",
    }.get(key, "valid")
