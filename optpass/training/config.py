"""The training file: its `[training]` and `[options]` tables, checked as a whole before anything else happens.

What a key means stands in its `description`; the documentation takes it from `keys`. Whether the model, the text
and the device exist is checked where they are used. Nothing here may import torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from optpass.errors import ConfigError, did_you_mean
from optpass.naming import flag
from optpass.option_files import read_toml
from optpass.options import ARGUMENT, Options, resolve
from optpass.units import parse_budget, parse_bytes

TABLES = ("training", "options")
#: Threads that are no slip of the pen on any machine; thousands more end the process where they are started.
MOST_THREADS = 256


class TrainingConfig(BaseModel):
    """The `[training]` table. Frozen; an unknown key or a wrong type is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True, allow_inf_nan=False)

    name: str = Field(
        default="run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the run; its folder under `out`. Letters, digits, '.', '_' and '-'.",
    )
    model: str = Field(
        default="gpt",
        min_length=1,
        description="A model of `optpass analyze --list` that takes tokens and targets and returns (logits, loss), or "
        "'file.py:factory' for a function without arguments that returns such a module; the path is relative to "
        "the training file.",
    )
    size: str = Field(default="small", description="Size of a model given by name; a factory has no sizes.")
    architecture: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        alias="model_config",
        description="Fields of the size to replace, e.g. { layers = 4, width = 150 }.",
    )
    data: str = Field(
        default="stdlib",
        min_length=1,
        description="'stdlib' for the sources of this Python's standard library, or a path to a text file in UTF-8, "
        "relative to the training file.",
    )
    data_limit: int | str = Field(
        default="4MB", description="Most text to read, an int in bytes or a size such as '500KB'; the rest is left."
    )
    tokenizer: Literal["byte", "char"] = Field(
        default="byte", description="A token per byte (256 of them), or per character that occurs in the text."
    )
    holdout: float = Field(
        default=0.05, gt=0, lt=1, description="Share of the tokens, at the end, kept for the validation loss."
    )
    micro_batch: int | Literal["auto"] = Field(
        default=8,
        description="Sequences that pass through the model at once, 1 or more, or 'auto' for the most that fit "
        "`memory_budget`.",
    )
    accumulation: int = Field(default=1, ge=1, description="Micro-batches whose gradients make one optimizer step.")
    sequence: int = Field(default=128, ge=1, description="Tokens per sequence; at most the model's context.")
    precision: Literal["fp32", "bf16", "bf16-true"] = Field(
        default="fp32",
        description="'bf16' runs the model under autocast, and parameters stay fp32; with 'bf16-true' parameters, "
        "gradients and optimizer state are bf16 too.",
    )
    optimizer: Literal["adamw", "adam", "sgd", "adafactor"] = Field(
        default="adamw",
        description="AdamW or Adam with betas 0.9 and 0.99, SGD with momentum 0.9, or Adafactor with torch's defaults.",
    )
    memory_budget: int | str | None = Field(
        default=None,
        description="Most memory that a step may take on its device, as the backend option of the same name: an int in "
        "bytes, '20GiB', '500MB', or '80%' of a GPU. The run says what it predicts and measures, and ends with exit "
        "code 3 if it needed more.",
    )
    learning_rate: float = Field(
        default=1e-3, gt=0, description="Peak: reached after `warmup`, then falls by a half cosine to a tenth."
    )
    weight_decay: float = Field(default=0.1, ge=0, description="On parameters of two or more dimensions only.")
    warmup: int = Field(default=20, ge=0, description="Steps over which the learning rate rises from 0, linearly.")
    grad_clip: float = Field(default=1.0, ge=0, description="Largest global gradient norm; 0 clips nothing.")
    steps: int = Field(default=300, ge=1, description="Optimizer steps.")
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**32,
        description="Seed of weights, batches and dropout: step n depends on it and on n alone.",
    )
    device: str = Field(default="cpu", min_length=1, description="Device to train on: 'cpu', 'cuda', 'cuda:1', ...")
    threads: int = Field(
        default=0,
        ge=0,
        description="CPU threads within an op; 0 leaves it to torch, which takes every core. On few cores that others "
        "use too, 1 is often fastest, for several threads wait for the last of them at the end of every op. At most "
        f"{MOST_THREADS}, or as many as the machine has CPUs.",
    )
    log_every: int = Field(default=10, ge=1, description="Steps between two lines of plain output.")
    out: str = Field(
        default="runs", min_length=1, description="Folder for the run's folder, relative to the working directory."
    )
    compare_tolerance: float = Field(
        default=1e-4,
        gt=0,
        description="With --compare: most that any step's loss may differ from eager's, in nats per token. Compiled "
        "and eager sum in another order, so that they differ by rounding, and training carries it on: a few 1e-6 on "
        "the fp32 example, as eager differs from itself with its first weights changed in the last bit. "
        "A learning rate so high that training is unstable makes both grow without bound; bf16 needs more too.",
    )

    @field_validator("data_limit")
    @classmethod
    def _size(cls, value: int | str) -> int | str:
        try:
            size = parse_bytes(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if size < 1:
            raise ValueError("at least 1 byte is needed")
        return value

    @field_validator("micro_batch")
    @classmethod
    def _at_least_one(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("it should be greater than or equal to 1, or 'auto'")
        return value

    @field_validator("threads")
    @classmethod
    def _startable(cls, value: int) -> int:
        most = max(MOST_THREADS, os.cpu_count() or 1)
        if value > most:
            raise ValueError(f"it should be at most {most} on this machine, which has {os.cpu_count()} CPUs")
        return value

    @field_validator("memory_budget")
    @classmethod
    def _budget(cls, value: int | str | None) -> int | str | None:
        if value is not None:
            try:
                parse_budget(value)
            except ConfigError as error:
                raise ValueError(str(error)) from None
        return value

    @property
    def samples(self) -> int:
        """`micro_batch` as a number; it must have been found where it is 'auto'."""
        if isinstance(self.micro_batch, str):
            raise ConfigError("micro_batch = 'auto' has not been turned into a number yet")
        return self.micro_batch

    @property
    def limit_bytes(self) -> int:
        """`data_limit` in bytes."""
        return parse_bytes(self.data_limit)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step learns from."""
        return self.samples * self.accumulation * self.sequence

    def to_json(self) -> dict[str, Any]:
        """The table as plain data, under the names that the file uses."""
        return self.model_dump(mode="json", by_alias=True)


@dataclass(frozen=True)
class Job:
    """A checked training file: where it stands, its `[training]` table, the backend options that hold, and the keys of
    `[training]` that flags have set."""

    path: Path
    config: TrainingConfig
    options: Options
    flags: frozenset[str] = frozenset()

    def said(self, key: str) -> str:
        """A key of `[training]` with its value, by the place that set it, for messages."""
        value = getattr(self.config, key)
        return f"{flag(key)} {value!r}" if key in self.flags else f"{self.path}: [training] {key} = {value!r}"


def load(
    path: Path, *, overrides: Mapping[str, Any] | None = None, option_pairs: Mapping[str, str] | None = None
) -> Job:
    """Read and check a training file.

    Args:
        path: the TOML file.
        overrides: fields of `[training]` from the command line; they win over the file.
        option_pairs: backend options from the command line; below `[options]`, as `optpass.options.resolve` has it.

    Raises:
        ConfigError: one line naming the file, the key, the value and what to write instead.
    """
    tables = read_toml(path)
    for key in tables:
        if key not in TABLES:
            raise ConfigError(f"{path}: unknown table or key {key!r}; {did_you_mean(key, TABLES)}")
    if not isinstance(tables.get("training"), dict):
        if "training" in tables:
            raise ConfigError(f"{path}: training = {tables['training']!r} is not a table; write [training], keys below")
        raise ConfigError(f"{path}: there is no [training] table; add one, e.g. with name = {path.stem!r}")
    config = _training(path, tables["training"], overrides or {})
    options = resolve(tables.get("options"), cli=option_pairs or {}, layer=f"{path}: [options]")
    job = Job(path, config, options, frozenset(overrides or {}))
    return replace(job, options=_budgeted(job))


def _budgeted(job: Job) -> Options:
    """The options with the budget of `[training]`, or of the flag that wins over both.

    Raises:
        ConfigError: `[options]` has another one than `[training]`, or the micro-batch is to be found without any.
    """
    config, options, flagged = job.config, job.options, "memory_budget" in job.flags
    if config.memory_budget is not None:
        other = options.memory_budget
        if not flagged and other is not None and other != config.memory_budget and "memory_budget" in options.given:
            raise ConfigError(
                f"{job.said('memory_budget')}, and {options.where('memory_budget')} = {other!r}; give one"
            )
        layer = ARGUMENT if flagged else f"{job.path}: [training]"
        options = options.override({"memory_budget": config.memory_budget}, layer)
    if config.micro_batch == "auto" and options.memory_budget is None:
        most = f"{job.said('micro_batch')} finds the most sequences that fit a budget"
        raise ConfigError(f"{most}; set memory_budget" + (f", or give {flag('memory_budget')}" if job.flags else ""))
    return options


def _training(path: Path, table: Mapping[str, Any], overrides: Mapping[str, Any]) -> TrainingConfig:
    _known(path, table)
    merged = {"name": path.stem, **table, **overrides}
    try:
        return TrainingConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_explained(path, merged, overrides, error)) from None


def _known(path: Path, table: Mapping[str, Any]) -> None:
    known = list(keys())
    for key in table:
        if key not in known:
            raise ConfigError(f"{path}: [training] has an unknown key {key!r}; {did_you_mean(key, known)}")


def _explained(path: Path, merged: Mapping[str, Any], overrides: Mapping[str, Any], error: ValidationError) -> str:
    first = error.errors()[0]
    key = str(first["loc"][0])
    value, place = merged[key], "[training]"
    # A key that may be of several types has an error for each.
    of_key = [each["msg"] for each in error.errors() if each["loc"][0] == key]
    if key == "model_config" and isinstance(value, dict) and len(first["loc"]) > 1:
        key, place, value = str(first["loc"][1]), "[training.model_config]", value[str(first["loc"][1])]
    where = f"{flag(key)}:" if key in overrides else f"{path}: {place}"
    wanted = first["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    if len(of_key) > 1:
        wanted += "".join(f" or {each.removeprefix('Input should be ')}" for each in of_key[1:])
    if place == "[training.model_config]":
        wanted = "it should be a number, a boolean or a string"
    help_text = _documented(key)
    return f"{where} {key} = {value!r} cannot be used: {wanted}{'. ' + help_text if help_text else ''}"


def _documented(key: str) -> str:
    field = keys().get(key)
    return (field.description or "") if field else ""


def keys() -> dict[str, FieldInfo]:
    """The keys of `[training]` as they are written, in the order of the class."""
    return {field.alias or name: field for name, field in TrainingConfig.model_fields.items()}
