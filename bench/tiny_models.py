"""Tiny transformers models with random weights and inputs that their forward takes, from any configuration class.

Nothing is downloaded. How a configuration is shrunk is `tiny_configs`; the plain inputs are `optpass.hf_inputs`'.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optpass.bench.result import BenchError
from optpass.bench.tiny_configs import LEVELS, Level, shrunk
from optpass.bench.tiny_inputs import BATCH, LENGTH, Makers, parts
from optpass.errors import ConfigError
from optpass.hf_inputs import make_inputs

if TYPE_CHECKING:
    from torch import nn

#: Positions that are padding in the first row, so that masked and unmasked rows stand side by side.
PADDED = 5
#: Parameters above which an architecture that cannot be shrunk is left out.
MOST_PARAMETERS = 80_000_000
#: Which mask belongs to which input.
_MASKS = (
    ("input_ids", "attention_mask"), ("inputs_embeds", "attention_mask"), ("input_values", "attention_mask"),
    ("input_features", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask"),
    ("pixel_values", "pixel_mask"),
)  # fmt: skip
SHAPE = {"batch": BATCH, "seq": LENGTH, "samples": 4000}


@dataclass
class Tiny:
    """A model, inputs of its forward, and the same with a padding mask where it takes one."""

    model: nn.Module
    inputs: dict[str, Any]
    padded: dict[str, Any] | None
    level: Level


def model_types() -> list[str]:
    """Every model type that transformers has a configuration for and an Auto class builds, in alphabetical order."""
    transformers = _offline()
    return sorted(key for key in transformers.CONFIG_MAPPING if _config_class(key) in _known(transformers))


def build(model_type: str, *, dropout: float | None = None, seed: int = 0) -> Tiny:
    """The smallest model of a type that can be built and runs.

    Args:
        model_type: as in `transformers.CONFIG_MAPPING`.
        dropout: what every dropout is set to; None keeps the configuration's own.
        seed: of weights and inputs.

    Raises:
        BenchError: none of the levels of `tiny_configs` gives a model that runs; says the last error of the first.
    """
    import torch

    transformers = _offline()
    config_class = _config_class(model_type)
    first: Exception | None = None
    for level in LEVELS:
        try:
            config = shrunk(config_class, level, dropout)
            torch.manual_seed(seed)
            model = _model(transformers, config)
            inputs, padded = _inputs(model, config)
        except Exception as error:  # noqa: BLE001 - transformers checks configurations and inputs in many ways
            first = first or error
            continue
        return Tiny(model, inputs, padded, level)
    said = " ".join(f"{type(first).__name__}: {first}".split())[:300]
    raise BenchError(f"{model_type}: no tiny model of it runs: {said}") from first


def _offline() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub is imported
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers

    return transformers


def _config_class(model_type: str) -> Any:
    return _offline().CONFIG_MAPPING[model_type]


def _known(transformers: Any) -> set[Any]:
    return set(transformers.AutoModel._model_mapping.keys())


def _model(transformers: Any, config: Any) -> nn.Module:
    """The bare model, its attention written out, if it is small enough."""
    import torch

    for part in parts(config):
        part.architectures = part.architectures or []  # where a type has several bare models, None cannot choose
        if hasattr(part, "use_cache"):
            part.use_cache = False
    with torch.device("meta"):
        size = sum(p.numel() for p in transformers.AutoModel.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise BenchError(f"{size:,} parameters, more than {MOST_PARAMETERS:,}")
    model: nn.Module = transformers.AutoModel.from_config(config, attn_implementation="eager")
    return _drawn(model.eval())


def _drawn(model: nn.Module) -> nn.Module:
    """Weights of a size that keeps scores apart: initialisers as small as 0.02 make every softmax nearly uniform."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.dim() == 2:
                parameter.normal_(0.0, 1.0 / max(1, parameter.shape[1]) ** 0.5)
    return model


def _inputs(model: nn.Module, config: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The first set of inputs that the model takes, without and with padding."""
    last: Exception | None = None
    for candidate in _candidates(model, config):
        try:
            _forward(model, candidate)
        except Exception as error:  # noqa: BLE001 - see `build`
            last = error
            continue
        padded = _padded(model, candidate)
        if padded is not None:
            try:
                _forward(model, padded)
            except Exception:  # noqa: BLE001 - a mask of another form than ours: measured without one
                padded = None
        return candidate, padded
    raise last or BenchError("no inputs")


def _forward(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    import torch

    with torch.no_grad():
        return model(**inputs)


def _candidates(model: Any, config: Any) -> Iterator[dict[str, Any]]:
    """Sets of inputs to try: the plain ones, then what the forward requires in each of the forms that are made."""
    takes = inspect.signature(model.forward).parameters
    extra = {"use_cache": False} if "use_cache" in takes else {}
    made = Makers(config)
    required = [n for n, p in takes.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    plain: dict[str, Any] = {}
    with contextlib.suppress(ConfigError):
        plain = make_inputs(model, config, "AutoModel", SHAPE, train=False)
        plain = {k: made.tokens() if k.endswith("input_ids") else v for k, v in plain.items()}
        yield plain | extra
    main = str(getattr(model, "main_input_name", "input_ids"))
    known = [n for n in takes if n in made.rules and not n.endswith(("embeds", "states"))]
    for names in ([*plain, *required], ["input_ids"], [main, *required], known):
        for found in made.every([n for n in dict.fromkeys(names) if n in takes]):
            yield found | extra


def _padded(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The inputs with a mask whose first row has padding; None where the forward takes no such mask."""
    import torch

    takes = inspect.signature(model.forward).parameters
    masks: dict[str, Any] = {}
    for data, mask in _MASKS:
        value = inputs.get(data)
        if mask not in takes or value is None or mask in masks:
            continue
        shape = (BATCH, *value.shape[-2:]) if data == "pixel_values" else tuple(value.shape[:2])
        made = torch.ones(shape, dtype=torch.int64)
        if data == "decoder_input_ids":
            made[0, shape[1] - PADDED :] = 0
        elif data == "pixel_values":
            made[0, :, shape[-1] // 2 :] = 0
        elif value.dim() == 2 and value.is_floating_point():
            made[0, shape[1] * 3 // 4 :] = 0
        else:
            made[0, :PADDED] = 0
        masks[mask] = made
    return dict(inputs) | masks if masks else None
