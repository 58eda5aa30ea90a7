"""What `analyze` can be pointed at by name: a reference model, a factory in a file, a transformers type, an ONNX file.

Everything is built under fake tensors, so nothing is allocated. Here: the forms and the first two's names; files of
factories are `factory`'s, transformers models `hf`'s. Analysing is `api`'s.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpass.errors import ConfigError, did_you_mean, nearest
from optpass.models.registry import names as model_names
from optpass.models.registry import sizes as model_sizes
from optpass.naming import argument, given, setting

if TYPE_CHECKING:
    import torch

#: Spellings of the dtypes that a model can be built in, with torch's name first.
DTYPES: Mapping[str, tuple[str, ...]] = {
    "float32": ("fp32", "f32", "float"),
    "bfloat16": ("bf16",),
    "float16": ("fp16", "f16", "half"),
    "float64": ("fp64", "f64", "double"),
}
#: Settings that are arguments of their own.
RESERVED = {"size": "size", "dtype": "dtype", "torch_dtype": "dtype", "device": "device", "train": "train"}
FORMS = "write a model's name (optpass analyze --list), path/to/file.py:factory, hf:<model_type>, or a .onnx file"
_FILE_FORM = re.compile(r"(?P<file>.*\.py)(?::(?P<factory>[^:]*))?$", re.DOTALL)


@dataclass
class Target:
    """A model ready to be analysed.

    Attributes:
        model: module or callable, its tensors fake.
        args, kwargs: example inputs.
        name: the target as the user would write it again.
        loss: what reduces the output to a scalar when training; None for the generic one.
        fake_mode: mode that everything was built in; None for a model of real tensors.
        dtype: what is still to be cast to (a registered model is built in its dtype).
        rebuild: the same model with real tensors, for models whose Python depends on values; None where impossible.
        notes: assumptions that the user should know of.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    loss: Callable[[Any], torch.Tensor] | None = None
    fake_mode: Any = None
    dtype: torch.dtype | None = None
    rebuild: Callable[[], Target] | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class OnnxTarget:
    """An ONNX file, and sizes for its symbolic dimensions by name."""

    path: Path
    dims: Mapping[str, int]
    name: str


def load(
    target: str,
    *,
    sets: Mapping[str, str] | None = None,
    dtype: str | None = None,
    size: str | None = None,
    train: bool = False,
    forms: str = FORMS,
    onnx: bool = True,
) -> Target | OnnxTarget:
    """Build what `target` names.

    Args:
        target: a registered model, with its size after a colon or in `size`; `file.py:factory`; `hf:<model_type>`; or a
            path ending in `.onnx`.
        sets: settings of the model, as text: fields of its config, keyword arguments of the factory, symbolic
            dimensions of the ONNX graph.
        dtype: dtype of parameters and floating inputs, e.g. "bf16"; None leaves the model's own.
        size: size of a registered model; default "small".
        train: whether the analysis will train, so that a transformers model gets labels.
        forms: what a message says that the target can be.
        onnx: whether an ONNX file, which has no backward, is of use.

    Raises:
        ConfigError: the target does not exist, or cannot be built as asked; one line with the remedy.
    """
    chosen = {key: str(value) for key, value in (sets or {}).items()}
    wanted = parse_dtype(dtype)
    for key, value in chosen.items():
        if key == "name" or key in RESERVED:
            instead = "the target itself" if key == "name" else f"{argument(RESERVED[key])} itself"
            raise ConfigError(f"{setting(key, value)}: {key} is not a setting; use {instead}")
    text = target.strip()
    if text.startswith("hf:"):
        from optpass.hf import load_hf

        _no_size(size, text, f"its dimensions are settings: {setting('hidden_size', '...')}")
        return load_hf(text.removeprefix("hf:"), chosen, wanted, train=train)
    if text.lower().endswith(".onnx"):
        if not onnx:
            there = Path(text).exists()
            what = "holds a forward graph only" if there else "no such file, and an ONNX file has no backward"
            raise ConfigError(f"{text}: {what}; give the torch model that it was made from: {forms}")
        _no_size(size, text, "an ONNX file has the size it has")
        return OnnxTarget(Path(text), _dims(chosen), text)
    found = _FILE_FORM.fullmatch(text)
    if found is not None:
        from optpass.factory import load_factory

        _no_size(size, text, "give the factory a parameter for it, and set that")
        return load_factory(Path(found["file"]), found["factory"], chosen, wanted)
    return _registered(text, chosen, wanted, size, forms)


def parse_dtype(text: str | None) -> torch.dtype | None:
    """`"bf16"`, `"bfloat16"`, `"torch.bfloat16"` as `torch.bfloat16`.

    Raises:
        ConfigError: no dtype that parameters can have.
    """
    if text is None:
        return None
    short = text.strip().lower().removeprefix("torch.")
    for name, aliases in DTYPES.items():
        if short == name or short in aliases:
            import torch

            return getattr(torch, name)  # type: ignore[no-any-return]
    known = [spelling for name, aliases in DTYPES.items() for spelling in (name, *aliases)]
    close = nearest(short, known)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"valid: {', '.join(DTYPES)}"
    raise ConfigError(f"{given('dtype', text)}: not a dtype to build a model in; {hint}")


def _no_size(size: str | None, target: str, instead: str) -> None:
    if size is not None:
        raise ConfigError(f"{given('size', size)}: {target} has no sizes; {instead}")


def _dims(sets: Mapping[str, str]) -> dict[str, int]:
    dims = {}
    for key, text in sets.items():
        try:
            dims[key] = int(text)
        except ValueError:
            raise ConfigError(f"{setting(key, text)}: a dimension of an ONNX graph is an integer") from None
        if dims[key] < 0:
            raise ConfigError(f"{setting(key, text)}: a dimension cannot be negative")
    return dims


def _registered(text: str, sets: Mapping[str, str], dtype: torch.dtype | None, size: str | None, forms: str) -> Target:
    name, colon, suffix = text.partition(":")
    if name not in model_names():
        raise ConfigError(_unknown(text, forms))
    if colon and size is not None and size != suffix:
        raise ConfigError(f"{text!r} and {given('size', size)} name two sizes; give one")
    chosen = (suffix if colon else size) or "small"
    if chosen not in model_sizes(name):
        raise ConfigError(f"{text!r}: {name} has no size {chosen!r}; {did_you_mean(chosen, model_sizes(name))}")

    def build(mode: Any) -> Target:
        import contextlib

        from optpass.models.registry import build as build_model

        with mode if mode is not None else contextlib.nullcontext():
            model, args = build_model(name, chosen, dtype=dtype, **dict(sets))
        settings = "".join(f" {key}={value}" for key, value in sets.items())
        return Target(model, args, {}, f"{name}:{chosen}{settings}", fake_mode=mode, rebuild=lambda: build(None))

    from optpass.backend import compat

    return build(compat.fake_mode_for_planning())


def _unknown(text: str, forms: str) -> str:
    if not text:
        return f"no target given; {forms}"
    name = text.partition(":")[0]
    if not name:
        return f"unknown target {text!r}: nothing stands before the colon; {forms}"
    if os.sep in text or Path(name).exists():
        what = "is a folder" if Path(name).is_dir() else "is none of these by its name"
        return f"unknown target {text!r}: {name} {what if Path(name).exists() else 'does not exist'}; {forms}"
    close = nearest(name, model_names())
    if close:
        return f"unknown target {text!r}: did you mean {' or '.join(map(repr, close))}? Otherwise {forms}"
    return f"unknown target {text!r}; {forms}; the models are {', '.join(model_names())}"
