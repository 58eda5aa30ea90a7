"""`path/to/file.py:factory`: running a user's file and its factory, with errors that point into it."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from optpass.errors import ConfigError, OptPassError, did_you_mean, first_line, nearest
from optpass.naming import setting
from optpass.targets import Target

if TYPE_CHECKING:
    import torch

#: What a factory returns, for messages.
RETURNS = "(module, inputs) or (module, inputs, kwargs), inputs a tensor, a tuple or a dict"


def load_factory(file: Path, factory: str | None, sets: Mapping[str, str], dtype: torch.dtype | None) -> Target:
    """The target that `factory` in `file` makes, under fake tensors; for real where it needs values.

    The file runs with its folder first on `sys.path`; `sets` are keyword arguments of the factory, as Python literals
    or else as text.

    Raises:
        ConfigError: no such file or factory, arguments that it does not take, an exception in it, or a wrong result.
    """
    path = _existing(file)
    with on_path(path.parent):
        module = _executed(path, file)
        function = _attribute(module, file, factory)
        arguments = _arguments(function, f"{file}:{factory}", sets)
    settings = "".join(f" {key}={value}" for key, value in sets.items())
    name = f"{file}:{factory}{settings}"

    def build(mode: Any) -> Target:
        with on_path(path.parent), mode if mode is not None else contextlib.nullcontext():
            result = function(**arguments)
        model, args, kwargs = _checked(result, f"{file}:{factory}")
        return Target(model, args, kwargs, name, fake_mode=mode, dtype=dtype, rebuild=lambda: build(None))

    from optpass.backend import compat

    try:
        return build(compat.fake_mode_for_planning())
    except OptPassError:
        raise
    except (Exception, SystemExit) as first:  # noqa: BLE001  # whatever fake tensors cannot do; the second try tells
        try:
            target = build(None)
        except OptPassError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{file}:{factory} raised {_where(error, path)}") from error
        target.rebuild = None
        target.notes.append(
            f"built with real tensors, because the factory does not run on fake ones: {_where(first, path)}"
        )
        return target


def literal(text: str) -> Any:
    """A setting as a Python literal (`3`, `1e-3`, `True`, `none`, `[1, 2]`), else the text itself."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.strip().lower() in words:
        return words[text.strip().lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _existing(file: Path) -> Path:
    if file.is_dir():
        raise ConfigError(f"{file}: is a folder; give the Python file in it")
    if not file.is_file():
        around = file.parent if file.parent.is_dir() else Path()
        there = [p.name for p in around.glob("*.py")]
        close = nearest(file.name, there)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise ConfigError(f"{file}: no such file{hint}")
    return file.resolve()


@contextlib.contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """The folder first on `sys.path`, as for a script that is run."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


def _executed(path: Path, shown: Path) -> ModuleType:
    name = f"optpass_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up there
    try:
        spec.loader.exec_module(module)
    except OptPassError:
        raise
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        raise ConfigError(f"{shown}: cannot be run: {_where(error, path)}") from error
    return module


def _attribute(module: ModuleType, file: Path, factory: str | None) -> Callable[..., Any]:
    theirs = {k: v for k, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__}
    own = [key for key, value in theirs.items() if inspect.isfunction(value) and not key.startswith("_")]
    if not factory:
        example = f"{file}:{own[0] if own else 'factory'}"
        raise ConfigError(f"{file}: name the factory in it, as {example}; it returns {RETURNS}")
    if not hasattr(module, factory):
        raise ConfigError(f"{file}: has no {factory!r}; {did_you_mean(factory, own)}")
    found = getattr(module, factory)
    if not callable(found) or _is_module(found):
        raise ConfigError(f"{file}:{factory} is a {type(found).__name__}, not a function; it must return {RETURNS}")
    return found  # type: ignore[no-any-return]


def _arguments(function: Callable[..., Any], name: str, sets: Mapping[str, str]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {key: literal(text) for key, text in sets.items()}
    kinds = inspect.Parameter
    takes = [k for k, p in parameters.items() if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    open_ended = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
    for key in sets:
        if key not in takes and not open_ended:
            hint = did_you_mean(key, takes) if takes else "it takes no arguments"
            raise ConfigError(f"{setting(key)}: {name} has no parameter {key!r}; {hint}")
    missing = [k for k in takes if parameters[k].default is kinds.empty and k not in sets]
    if missing:
        raise ConfigError(f"{name} needs {', '.join(missing)}; give {setting(missing[0], 'VALUE')}")
    return {key: literal(text) for key, text in sets.items()}


def _checked(result: Any, name: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    if not isinstance(result, (tuple, list)) or not 2 <= len(result) <= 3:
        size = f" of length {len(result)}" if isinstance(result, (tuple, list)) else ""
        raise ConfigError(f"{name} returned {type(result).__name__}{size}; it must return {RETURNS}")
    model, inputs = result[0], result[1]
    kwargs = result[2] if len(result) == 3 else {}
    if not callable(model):
        raise ConfigError(f"{name} returned {type(model).__name__} first, which is no module; it must return {RETURNS}")
    from optpass.backend.model_tensors import check_initialised

    check_initialised(model, name)
    if not isinstance(kwargs, Mapping):
        raise ConfigError(f"{name} returned {type(kwargs).__name__} third, which is no dict; it must return {RETURNS}")
    if isinstance(inputs, Mapping):
        return model, (), {**inputs, **kwargs}
    if isinstance(inputs, (tuple, list)):
        return model, tuple(inputs), dict(kwargs)
    if _is_tensor(inputs):
        return model, (inputs,), dict(kwargs)
    raise ConfigError(f"{name} returned {type(inputs).__name__} as inputs; it must return {RETURNS}")


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _is_module(value: Any) -> bool:
    from torch import nn

    return isinstance(value, nn.Module)


def _where(error: BaseException, path: Path) -> str:
    """`ValueError: what it said (file.py:12)`, the innermost line of the user's file."""
    said = f"{type(error).__name__}: {first_line(error)[:300]}"
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(path.parent)]
    return f"{said} ({frames[-1].filename}:{frames[-1].lineno})" if frames else said
