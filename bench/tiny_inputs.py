"""Inputs of transformers models that `optpass.hf_inputs` has no rule for, by the name that forwards give them.

One name may stand for tensors of different forms; they are tried one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from optpass.bench.tiny_configs import FIRST_SPECIAL

if TYPE_CHECKING:
    import torch

BATCH, LENGTH = 2, 16
#: Sides of an image in patches, where patches are given one by one.
GRID = 4
_EMBEDDED = ("inputs_embeds", "hidden_states", "encoder_hidden_states", "query_embeds")
#: Combinations of forms that are tried for one set of names.
_MOST_FORMS = 12


def parts(config: Any) -> Iterator[Any]:
    """A configuration and those inside it."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from parts(value)


class Makers:
    """Makes inputs by name; `rules` gives the forms that a name may have, the commonest first."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.rules: Mapping[str, Sequence[Callable[[], Any]]] = {
            "input_ids": [self.tokens],
            "decoder_input_ids": [self.tokens],
            "qformer_input_ids": [self.tokens],
            "bbox": [lambda: _zeros(BATCH, LENGTH, 4).long()],
            **{name: [self.embeds] for name in _EMBEDDED},
            "inputs": [self.tokens, self.embeds],
            **self._images(),
            **self._sounds(),
            **self._series(),
        }

    def every(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The inputs of these names that have rules, in each of their forms."""
        known = [name for name in names if name in self.rules]
        if "hidden_states" in known and "grid_thw" in known:
            known = [n for n in known if n != "hidden_states"]
            fixed: dict[str, Callable[[], Any]] = {"hidden_states": self.flat_patches}
        else:
            fixed = {}
        forms = itertools.product(*(self.rules[name] for name in known))
        for chosen in itertools.islice(forms if known or fixed else (), _MOST_FORMS):
            yield {n: make() for n, make in fixed.items()} | {n: m() for n, m in zip(known, chosen, strict=True)}

    def tokens(self) -> torch.Tensor:
        """Ids that are no special token's, as far as the rules of `tiny_configs` place them."""
        import torch

        most = min(int(self._find("vocab_size", FIRST_SPECIAL)), FIRST_SPECIAL)
        return torch.randint(min(10, most - 1), most, (BATCH, LENGTH))

    def embeds(self) -> torch.Tensor:
        return _randn(BATCH, LENGTH, self._number("d_model", self._number("hidden_size", 64)))

    def pixels(self) -> torch.Tensor:
        return _randn(BATCH, self._number("num_channels", 3), *self._sides())

    def pixel_pairs(self) -> torch.Tensor:
        return _randn(BATCH, 2, self._number("num_channels", 3), *self._sides())

    def patches(self) -> torch.Tensor:
        """[batch, patches, values of a patch]"""
        return _randn(BATCH, GRID * GRID, self._patch())

    def flat_patches(self) -> torch.Tensor:
        """[patches of all images, values of a patch]"""
        return _randn(BATCH * GRID * GRID, self._patch() * self._number("temporal_patch_size", 1))

    def plane_patches(self) -> torch.Tensor:
        """[patches of all images, channels, height, width]"""
        side = self._number("patch_size", 16)
        return _randn(BATCH * GRID * GRID, self._number("num_channels", 3), side, side)

    def _images(self) -> dict[str, list[Callable[[], Any]]]:
        import torch

        def grid() -> Any:
            return torch.tensor([[1, GRID, GRID]] * BATCH)

        return {
            "pixel_values": [self.pixels, self.patches, self.flat_patches, self.pixel_pairs, self.plane_patches],
            "pixel_values_videos": [self.pixel_pairs],
            "flattened_patches": [lambda: torch.cat([torch.ones(BATCH, GRID * GRID, 2), self.patches()], -1)],
            "grid_thw": [grid],
            "image_grid_thw": [grid],
            "merge_sizes": [lambda: torch.ones(BATCH, dtype=torch.int64)],
            "spatial_shapes": [lambda: torch.tensor([[GRID, GRID]] * BATCH)],
            "pixel_attention_mask": [lambda: torch.ones(BATCH, GRID * GRID, dtype=torch.int64)],
            "pixel_position_ids": [lambda: torch.cartesian_prod(*[torch.arange(GRID)] * 2).expand(BATCH, -1, -1)],
            "visual_feats": [lambda: _randn(BATCH, 6, self._number("visual_feat_dim", 64))],
            "visual_pos": [lambda: _randn(BATCH, 6, 4).abs()],
            "task_inputs": [self.tokens],
        }

    def _sounds(self) -> dict[str, list[Callable[[], Any]]]:
        import torch

        bins = self._number("num_mel_bins", self._number("feature_size", 80))
        inner = self._number("feature_projection_input_dim", 2 * bins)
        return {
            "input_values": [
                lambda: _randn(BATCH, 4000),
                lambda: _randn(BATCH, 1, 4000),
                lambda: _randn(BATCH, self._number("max_length", 32), bins),
            ],
            "input_features": [
                lambda: _randn(BATCH, 64, bins), lambda: _randn(BATCH, bins, 64), lambda: _randn(BATCH, 64, inner),
                lambda: _randn(BATCH, 1, 64, bins),
            ],
            "input_features_mask": [lambda: torch.ones(BATCH, 64, dtype=torch.int64)],
            "audio_values": [lambda: _randn(BATCH, 1, 4000)],
        }  # fmt: skip

    def _series(self) -> dict[str, list[Callable[[], Any]]]:
        import torch

        context = self._number("context_length", 32)
        past = context + max(self._find("lags_sequence") or [0])
        times = self._number("num_time_features", 0)
        ahead = self._number("prediction_length", 8)
        return {
            "past_values": [
                lambda: _randn(BATCH, past), lambda: _randn(BATCH, context, self._number("num_input_channels", 1)),
            ],
            "past_time_features": [lambda: _randn(BATCH, past, times)],
            "past_observed_mask": [lambda: torch.ones(BATCH, past)],
            "future_values": [lambda: _randn(BATCH, ahead)],
            "future_time_features": [lambda: _randn(BATCH, ahead, times)],
            "past_values_padding": [lambda: torch.zeros(BATCH, past)],
            "freq": [lambda: torch.zeros(BATCH, 1, dtype=torch.int64)],
            "states": [lambda: _randn(BATCH, LENGTH, self._number("state_dim", 17))],
            "actions": [lambda: _randn(BATCH, LENGTH, self._number("act_dim", 4))],
            "rewards": [lambda: _randn(BATCH, LENGTH, 1)],
            "returns_to_go": [lambda: _randn(BATCH, LENGTH, 1)],
            "timesteps": [lambda: torch.arange(LENGTH).expand(BATCH, -1)],
        }  # fmt: skip

    def _sides(self) -> tuple[int, int]:
        size = self._find("image_size", self._find("crop_size", 64))
        return (size, size) if isinstance(size, int) else (int(min(size)), int(max(size)))

    def _patch(self) -> int:
        """Values of one patch of an image."""
        channels = self._number("num_channels", self._number("in_channels", self._number("in_chans", 3)))
        return channels * self._number("patch_size", 16) ** 2

    def _number(self, key: str, default: int) -> int:
        found = self._find(key, default)
        return int(found[-1] if isinstance(found, (list, tuple)) else found)

    def _find(self, key: str, default: Any = None) -> Any:
        """A field of the configuration, or of the first one inside it that has the field."""
        found = (getattr(part, key, None) for part in parts(self.config))
        return next((v for v in found if v is not None), default)


def _randn(*shape: int) -> torch.Tensor:
    import torch

    return torch.randn(*shape)


def _zeros(*shape: int) -> torch.Tensor:
    import torch

    return torch.zeros(*shape)
