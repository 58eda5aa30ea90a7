"""The model to train: by name from `optpass.models`, or from a user's factory; checked with one call before training.

Nothing here compiles or steps it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optpass import models
from optpass.errors import ConfigError, did_you_mean, first_line
from optpass.factory import on_path
from optpass.training.config import Job
from optpass.training.data import stream_seed

#: Settings of a reference model that the training file sets by other keys.
_OTHER_KEYS = {"batch": "micro_batch", "seq": "sequence", "targets": "data", "dtype": "precision"}
#: What a call of an unsuitable model may raise.
_CALL_ERRORS = (TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError, RuntimeError)


def skeleton(job: Job) -> nn.Module:
    """The model in training mode, in its own dtype and on the default device; to be built under fake tensors.

    Raises:
        ConfigError: no such model, size, field or file.
    """
    return (_from_file(job) if ":" in job.config.model else _by_name(job)).train()


def build(job: Job, vocabulary: int) -> nn.Module:
    """The model in training mode on its device, its weights drawn from the seed of the training file.

    Args:
        job: the training file.
        vocabulary: number of tokens that the tokenizer may give.

    Raises:
        ConfigError: no such model, size, field, file or device, or a model that cannot take these tokens.
    """
    config = job.config
    device = _device(job)
    torch.manual_seed(stream_seed(config.seed))
    module = _from_file(job) if ":" in config.model else _by_name(job)
    check_sizes(job, module, vocabulary)
    if config.precision == "bf16-true":
        module = module.to(torch.bfloat16)
    try:
        module = module.to(device)
    except RuntimeError as error:
        raise ConfigError(f"{job.said('device')}: {first_line(error)}; choose a smaller model") from error
    _check_call(job, module, vocabulary)
    return module.train()


def device_named(job: Job) -> torch.device:
    """The device that a training file or `--device` names, which need not be here.

    Raises:
        ConfigError: torch knows none of that name.
    """
    try:
        return torch.device(job.config.device)
    except RuntimeError as error:
        raise ConfigError(
            f"{job.said('device')} cannot be used: {first_line(error)}; try 'cpu' or 'cuda'; a device "
            "that is only planned for is named by --device of optpass plan, or in [options]"
        ) from None


def _device(job: Job) -> torch.device:
    device = device_named(job)
    try:
        torch.empty(1, device=device).cpu()  # a build without CUDA says so by an assertion; "meta" has no data to copy
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"{job.said('device')} cannot be used: {first_line(error)}; try 'cpu'") from None
    return device


def _by_name(job: Job) -> nn.Module:
    name, size, overrides = job.config.model, job.config.size, dict(job.config.architecture)
    for key in overrides:
        if key in _OTHER_KEYS:
            raise ConfigError(f"{job.path}: [training.model_config] {key} is not set here; use {_OTHER_KEYS[key]!r}")
    try:
        if size not in models.sizes(name):
            raise ConfigError(f"size = {size!r}: no such size of {name}; {did_you_mean(size, models.sizes(name))}")
        if not _token_settings(name, size):
            raise ConfigError(f"model = {name!r} is not a language model; {_trainable()}")
    except ConfigError as error:
        raise ConfigError(f"{job.path}: [training] {error}") from None
    try:
        # Example inputs are drawn before the weights: one token of them, so that weights do not depend on micro_batch.
        settings: dict[str, Any] = {**overrides, "batch": 1, "seq": 1, "targets": True}
        module, _ = models.build(name, size, **settings)
    except ConfigError as error:  # the name and the size are there: it is about a field of the size
        raise ConfigError(f"{job.path}: [training.model_config] {error}") from None
    return module


def _token_settings(name: str, size: str) -> bool:
    inputs = importlib.import_module(f"optpass.models.{name}").SIZES[size].inputs
    return {"seq", "targets"} <= {field.name for field in fields(inputs)}


def _trainable() -> str:
    return "choose one that takes (tokens, targets) and returns (logits, loss), such as 'gpt', or 'file.py:factory'"


def _from_file(job: Job) -> nn.Module:
    where = f"{job.path}: [training] model = {job.config.model!r}"
    if job.config.architecture:
        raise ConfigError(f"{where}: [training.model_config] is for models given by name; set sizes in the factory")
    text, _, name = job.config.model.rpartition(":")
    path = (job.path.parent / text).resolve()
    factory = _load(where, path, name)
    try:
        with on_path(path.parent):
            module = factory()
    except _CALL_ERRORS as error:
        raise ConfigError(f"{where}: the factory raised {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{where}: the factory returned {type(module).__name__}; return a torch.nn.Module")
    return module


def _load(where: str, path: Path, name: str) -> Any:
    if not path.is_file():
        raise ConfigError(f"{where}: there is no file {path}; write 'file.py:factory', relative to the training file")
    registered = f"optpass_model_{path.stem}"  # the plain name may be that of a package which the file imports
    spec = importlib.util.spec_from_file_location(registered, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: {path} is not a Python file; write 'file.py:factory'")
    module = importlib.util.module_from_spec(spec)
    sys.modules[registered] = module  # Dynamo looks up there what a forward reads and writes of its globals
    try:
        with on_path(path.parent):
            spec.loader.exec_module(module)
    except (SyntaxError, ImportError, NameError, OSError, *_CALL_ERRORS) as error:
        sys.modules.pop(registered, None)
        raise ConfigError(f"{where}: {path} cannot be imported: {type(error).__name__}: {first_line(error)}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        valid = [key for key, value in vars(module).items() if inspect.isfunction(value) or inspect.isclass(value)]
        raise ConfigError(f"{where}: {path.name} has no function {name!r}; {did_you_mean(name, valid)}")
    return factory


def check_sizes(job: Job, module: nn.Module, vocabulary: int) -> None:
    """The two mistakes that people make, in their own words, where the model says its sizes.

    Raises:
        ConfigError: there are more tokens than its vocabulary has, or the sequence is longer than its context.
    """
    own = getattr(module, "config", None)
    sizes = own if isinstance(own, Mapping) else {key: getattr(own, key, None) for key in ("vocab", "context")}
    vocab, context = sizes.get("vocab"), sizes.get("context")
    if isinstance(vocab, int) and vocab < vocabulary:
        raise ConfigError(
            f"{job.path}: the model's vocab = {vocab} is smaller than the {vocabulary} tokens of tokenizer = "
            f"{job.config.tokenizer!r}; set vocab = {vocabulary} or more in [training.model_config]"
        )
    if isinstance(context, int) and context < job.config.sequence:
        raise ConfigError(
            f"{job.path}: [training] sequence = {job.config.sequence} is longer than the model's context = {context}; "
            "shorten it, or set a larger context in [training.model_config]"
        )


def _check_call(job: Job, module: nn.Module, vocabulary: int) -> None:
    """One sequence of the highest token through the model: what it cannot take shows here and not in a kernel."""
    tokens = torch.full((1, job.config.sequence), vocabulary - 1, dtype=torch.int64, device=job.config.device)
    where = f"{job.path}: [training] model = {job.config.model!r}"
    try:
        with torch.no_grad():
            module.eval()
            output = module(tokens, tokens.clone())
    except _CALL_ERRORS as error:
        raise ConfigError(
            f"{where} cannot take {job.config.sequence} tokens up to {vocabulary - 1} and as many targets: "
            f"{type(error).__name__}: {first_line(error)}; {_trainable()}"
        ) from error
    loss = output[1] if isinstance(output, tuple) and len(output) == 2 else None
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        raise ConfigError(f"{where} returned {_kind(output)}, not (logits, loss) with a scalar loss; {_trainable()}")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(f"{where} has no parameter that requires a gradient; there is nothing to train")


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_kind(part) for part in value)})"
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
