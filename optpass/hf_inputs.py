"""Inputs for a transformers model, made from what its forward takes and what its configuration says about sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from optpass.errors import ConfigError
from optpass.naming import setting

#: Sizes of inputs that are no fields of a configuration, with their defaults.
SETTINGS: Mapping[str, int] = {"batch": 1, "seq": 512, "frames": 0, "samples": 16000}
#: Heads whose loss is computed from labels of the shape of the tokens.
_TOKEN_LABELS = tuple(f"AutoModelFor{head}" for head in ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageTextToText"))
#: Heads whose labels are a class each.
_CLASS_LABELS = tuple(f"AutoModelFor{kind}Classification" for kind in ("Image", "Audio", "Video"))
#: Fields that hold the configuration of a part.
_PARTS = ("text_config", "vision_config", "encoder", "decoder")


def make_inputs(model: Any, config: Any, auto: str, shape: Mapping[str, int], *, train: bool) -> dict[str, Any]:
    """Keyword inputs for `model.forward`, drawn at random; made under the active fake mode.

    Args:
        model: a transformers model.
        config: its configuration.
        auto: name of the Auto class that built it.
        shape: sizes given by the user, of `SETTINGS`.
        train: add labels where the head computes its loss from them.

    Raises:
        ConfigError: an input that has no rule, or a sequence longer than the model's positions.
    """
    maker = _Maker(config, shape)
    main = str(model.main_input_name)
    takes = inspect.signature(model.forward).parameters
    wanted = [main]
    composite = {"text_config", "vision_config"} <= set(vars(config)) and auto == "AutoModel"
    if composite:  # a pair of towers needs both of its inputs
        wanted += [name for name in ("input_ids", "pixel_values") if name in takes and name != main]
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        wanted.append("decoder_input_ids")
    if "bbox" in takes and main == "input_ids":
        wanted.append("bbox")
    inputs = {name: maker.make(name) for name in wanted}
    if train and "labels" in takes:
        if auto in _TOKEN_LABELS:
            inputs["labels"] = maker.make("labels")
        elif auto in _CLASS_LABELS:
            inputs["labels"] = maker.classes()
    return inputs


class _Maker:
    """Makes inputs by name."""

    def __init__(self, config: Any, shape: Mapping[str, int]) -> None:
        self.config, self.given = config, shape
        self.batch = shape.get("batch", SETTINGS["batch"])

    def make(self, name: str) -> Any:
        """The input called `name`."""
        rules: dict[str, Callable[[], Any]] = {
            "input_ids": self._tokens,
            "decoder_input_ids": self._tokens,
            "labels": self._tokens,
            "bbox": self._boxes,
            "pixel_values": self._pixels,
            "pixel_values_videos": self._pixels,
            "input_values": self._samples,
            "input_features": self._features,
        }
        if name not in rules:
            raise ConfigError(
                f"hf:{self.config.model_type}: no rule makes its input {name!r}; write a factory that builds the model "
                "and its inputs, and give file.py:factory"
            )
        return rules[name]()

    def classes(self) -> Any:
        """A class for each item of the batch."""
        import torch

        return torch.randint(int(self._find("num_labels", 2)), (self.batch,))

    def _tokens(self) -> Any:
        import torch

        return torch.randint(int(self._find("vocab_size", 2)), (self.batch, self._length()))

    def _boxes(self) -> Any:
        import torch

        return torch.zeros(self.batch, self._length(), 4, dtype=torch.int64)

    def _length(self) -> int:
        """Tokens: as given, else the default or as many positions as the model has."""
        limits = [self._find(k) for k in ("max_position_embeddings", "max_target_positions", "n_positions")]
        most = next((n for n in limits if isinstance(n, int) and n > 0), None)
        if "seq" not in self.given:
            return min(SETTINGS["seq"], most) if most else SETTINGS["seq"]
        if most is not None and self.given["seq"] > most:
            raise ConfigError(
                f"{setting('seq', self.given['seq'])}: hf:{self.config.model_type} has {most} positions; "
                f"set max_position_embeddings too"
            )
        return self.given["seq"]

    def _pixels(self) -> Any:
        import torch

        size = self._find("image_size", 224)
        height, width = (size, size) if isinstance(size, int) else tuple(_sides(size))
        frames = self.given.get("frames") or self._find("num_frames", 0)
        lead = (self.batch, int(frames)) if frames else (self.batch,)
        return torch.randn(*lead, int(self._find("num_channels", 3)), int(height), int(width))

    def _samples(self) -> Any:
        import torch

        return torch.randn(self.batch, self.given.get("samples", SETTINGS["samples"]))

    def _features(self) -> Any:
        """Spectrograms: [batch, mel bins, frames] where the encoder halves the frames (Whisper), else the other way."""
        import torch

        bins = int(self._find("num_mel_bins", self._find("input_feat_per_channel", 80)))
        positions = int(self._find("max_source_positions", 1500))
        if hasattr(self.config, "num_mel_bins"):
            return torch.randn(self.batch, bins, 2 * positions)
        return torch.randn(self.batch, min(positions, 1000), bins)

    def _find(self, key: str, default: Any = None) -> Any:
        """A field of the configuration, or of the tower it belongs to."""
        parts = [self.config, *(getattr(self.config, name, None) for name in _PARTS)]
        found = (getattr(part, key, None) for part in parts if part is not None)
        return next((v for v in found if v is not None), default)


def _sides(size: Any) -> tuple[int, int]:
    """(height, width) of an image size that is not one number."""
    if isinstance(size, Mapping):
        return int(size["height"]), int(size["width"])
    return int(size[0]), int(size[-1])
