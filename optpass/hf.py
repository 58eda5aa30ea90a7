"""`hf:<model_type>`: a transformers model from its configuration, with random weights under fake tensors.

Nothing is downloaded and nothing allocated. Which inputs a model takes is `hf_inputs`' business.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from optpass.errors import ConfigError, did_you_mean, nearest
from optpass.factory import literal
from optpass.hf_inputs import SETTINGS, make_inputs
from optpass.naming import setting
from optpass.targets import Target

if TYPE_CHECKING:
    import torch

#: Auto classes by the head they put on, in the order in which they are tried: what a type is known for comes first.
ENCODER_DECODER = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")
ENCODER = ("AutoModelForMaskedLM",)
HEADS = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForImageClassification",
    "AutoModelForImageTextToText",
    "AutoModelForCTC",
    "AutoModelForAudioClassification",
    "AutoModelForVideoClassification",
    "AutoModelForObjectDetection",
    "AutoModelForSemanticSegmentation",
    "AutoModelForDepthEstimation",
    "AutoModel",
)
ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2")


def load_hf(model_type: str, sets: Mapping[str, str], dtype: torch.dtype | None, *, train: bool) -> Target:
    """The target `hf:<model_type>`.

    Args:
        model_type: as in `transformers.CONFIG_MAPPING`: "llama", "bert", "vit", ...
        sets: fields of the config, nested ones with dots ("text_config.hidden_size"); `batch`, `seq` and the like of
            `hf_inputs.SETTINGS`; and `attn_implementation`, "eager" by default.
        dtype: dtype of parameters and floating inputs; float32 where None.
        train: add labels where the head computes a loss from them.

    Raises:
        ConfigError: transformers is missing, the type or a setting is unknown, or the model cannot be built so.
    """
    transformers = _transformers()
    config_class = _config_class(transformers, model_type)
    shape = {key: _count(key, sets[key]) for key in SETTINGS if key in sets}
    attention = sets.get("attn_implementation", "eager")
    if attention not in ATTENTION:
        raise ConfigError(f"{setting('attn_implementation', attention)}: {did_you_mean(attention, ATTENTION)}")
    own = {k: v for k, v in sets.items() if k not in SETTINGS and k != "attn_implementation"}
    config = _config(config_class, model_type, own)
    auto = _auto_class(transformers, config, model_type)
    settings = "".join(f" {key}={value}" for key, value in sets.items())

    def build(mode: Any, *, drawn: bool) -> Target:
        import torch

        from optpass.models.common import default_dtype

        with contextlib.ExitStack() as stack:
            if mode is not None:
                stack.enter_context(mode)
            if not drawn:
                stack.enter_context(_without_values())
            stack.enter_context(default_dtype(dtype or torch.float32))
            model = auto.from_config(config, attn_implementation=attention)
            model.train(train)
            inputs = make_inputs(model, config, auto.__name__, shape, train=train)
        name = f"hf:{model_type}{settings}"
        target = Target(model, (), inputs, name, fake_mode=mode, rebuild=lambda: build(None, drawn=True))
        target.notes.append(f"{type(model).__name__} with {attention} attention and random weights")
        return target

    from optpass.backend import compat
    from optpass.backend.trace_error import reason

    try:
        try:
            return build(compat.fake_mode_for_planning(), drawn=False)
        except Exception as error:
            if not compat.needs_values(error):
                raise
            # A constructor that reads a tensor back. Real weights that nobody draws are memory that nobody touches.
            return build(None, drawn=False)
    except ConfigError:
        raise
    except Exception as error:  # transformers checks its configs in many places, and raises many kinds
        raise ConfigError(f"hf:{model_type}{settings} cannot be built: {reason(error)}") from error


def _transformers() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub is imported: a configuration may name files to fetch
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"hf: targets need transformers ({error}); pip install 'optpass[hf]'") from None
    return transformers


def _without_values() -> contextlib.AbstractContextManager[Any]:
    """Skips drawing weights, which fake tensors do not have; some initialisers read them back."""
    import importlib

    for module in ("transformers.initialization", "transformers.modeling_utils"):  # since 5.0, before it
        with contextlib.suppress(ImportError):
            found = getattr(importlib.import_module(module), "no_init_weights", None)
            if found is not None:
                return found()  # type: ignore[no-any-return]
    return contextlib.nullcontext()


def _config_class(transformers: Any, model_type: str) -> Any:
    known = list(transformers.CONFIG_MAPPING.keys())
    if not model_type:
        raise ConfigError("hf: names no model type; write e.g. hf:llama, hf:bert or hf:vit")
    if model_type not in known:
        close = nearest(model_type, known)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "write e.g. hf:llama, hf:bert or hf:vit"
        org = " (a repository's name is not looked up: nothing is downloaded)" if "/" in model_type else ""
        version = transformers.__version__
        raise ConfigError(f"hf:{model_type}: transformers {version} has no such model type{org}; {hint}")
    try:
        return transformers.CONFIG_MAPPING[model_type]
    except Exception as error:  # a configuration that needs a package which is not installed
        raise ConfigError(f"hf:{model_type}: cannot be imported: {' '.join(str(error).split())[:200]}") from error


def _count(key: str, text: str) -> int:
    value = literal(text)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{setting(key, text)}: must be an integer of at least 1")
    return value


def _config(config_class: Any, model_type: str, sets: Mapping[str, str]) -> Any:
    """The configuration with `sets` in place, each checked against the default's name and type."""
    try:
        default = config_class()
    except Exception as error:  # a composite configuration that has no default
        said = " ".join(str(error).split())[:200]
        raise ConfigError(f"hf:{model_type}: has no default configuration: {said}") from error
    if not sets:
        return _prepared(default)
    values: dict[str, Any] = {}
    for key, text in sets.items():
        _place(values, default.to_dict(), _aliases(default), key, literal(text), setting(key, text), model_type)
    try:
        return _prepared(config_class(**values))
    except Exception as error:  # the configuration's own checks
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ConfigError(f"hf:{model_type}: the configuration is refused: {' '.join(lines)[:300]}") from error


def _prepared(config: Any) -> Any:
    """Without the key-value cache: an analysis is of one pass over the whole sequence."""
    for part in (config, *(v for v in vars(config).values() if hasattr(v, "use_cache") and hasattr(v, "to_dict"))):
        if hasattr(part, "use_cache"):
            part.use_cache = False
    return config


def _aliases(config: Any) -> Mapping[str, str]:
    return getattr(config, "attribute_map", None) or {}


def _place(
    values: dict[str, Any], known: Mapping[str, Any], aliases: Mapping[str, str], key: str, value: Any, flag: str,
    model_type: str,
) -> None:  # fmt: skip
    """Put `value` at the dotted `key`, which the default configuration must have, with a value of a like type."""
    head, dot, rest = key.partition(".")
    head = aliases.get(head, head)
    if head not in known:
        names = [*known, *aliases, *SETTINGS, "attn_implementation"]
        raise ConfigError(f"{flag}: hf:{model_type} has no setting {head!r}; {_hint(head, names)}")
    if dot:
        inner = known[head]
        if not isinstance(inner, Mapping):
            raise ConfigError(f"{flag}: {head} of hf:{model_type} is no table of settings")
        _place(values.setdefault(head, {}), inner, {}, rest, value, flag, model_type)
        return
    _check_type(value, known[head], flag)
    values[head] = float(value) if isinstance(known[head], float) and isinstance(value, int) else value


def _hint(name: str, names: list[str]) -> str:
    close = nearest(name, names)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else "see the type's config class in transformers"


def _check_type(value: Any, default: Any, flag: str) -> None:
    if default is None or value is None:
        return
    fits = isinstance(value, bool) if isinstance(default, bool) else isinstance(value, _like(default))
    if not fits or (isinstance(value, bool) and not isinstance(default, bool)):
        raise ConfigError(f"{flag}: expected {type(default).__name__}, as the default {default!r}"[:300])


def _like(default: Any) -> tuple[type, ...]:
    if isinstance(default, float):
        return (float, int)
    if isinstance(default, int):
        return (int, list, tuple)  # an image size may be one number or two
    return (list, tuple, int) if isinstance(default, (list, tuple)) else (type(default),)


def _auto_class(transformers: Any, config: Any, model_type: str) -> Any:
    """The first Auto class that has a model for this configuration."""
    first: tuple[str, ...] = ENCODER_DECODER if getattr(config, "is_encoder_decoder", False) else ()
    if not first and not getattr(config, "is_decoder", False):
        first = ENCODER
    for name in (*first, *HEADS):
        auto = getattr(transformers, name, None)
        if auto is not None and type(config) in auto._model_mapping:
            return auto
    raise ConfigError(f"hf:{model_type}: no Auto class of transformers {transformers.__version__} builds this type")
