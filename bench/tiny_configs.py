"""Any transformers configuration, made small: the same architecture with few and narrow layers.

Rules go by the names that configurations give to their sizes, never by the names of models. Nothing here knows of
attention passes; building models and inputs is `tiny_models`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

VOCAB, POSITIONS = 256, 64
#: Special tokens get ids from here on; inputs are drawn below it.
FIRST_SPECIAL = 200

#: Names of sizes, as patterns over the whole name.
_LAYERS = "|".join(
    (
        r"(.*_)?num_hidden_layers", r"(.*_)?num_layers", r"n_layers?", r"(num_)?(en|de)coder_layers", r"(.*_)?depth",
        r"num_blocks", r"num_block_repeats",
    )
)  # fmt: skip
_HEADS = r"(.*_)?num_(attention_)?heads|n_heads?|nhead|(.*_)?attention_heads|num_.*_attention_heads|resampler_heads"
_KV = r"(.*_)?num_(key_value|kv)_heads|n_kv_heads?|kv_n_heads"
_WIDTHS = "|".join(
    (
        r"(.*_)?hidden_size(_.*)?", r"(.*_)?hidden_dim", r"(.*_)?embed_dim", r"(.*_)?embed_size", r"(.*_)?d_model",
        r"dim|n_embd|emb_dim|query_dim|projection_dim|model_dim|output_dim|d_embed", r"embedding_(size|dim)",
        r"(fpn_)?feature_size",
    )
)  # fmt: skip
_FFN = r"(.*_)?intermediate_size|.*ffn_(dim|size|hidden_size)|d_ffn?|mlp_dim|n_inner|d_inner|dim_feedforward|dim_ff|ff_dim|feedforward_dim"  # noqa: E501
_IDS = r".*(token_id|token_index|_token|_idx|bos_id|eos_id|token_ids)"
_EVERY = r".*(_period|_interval|_every_n|_every_n_layers|_frequency|_step|_pattern|_freq)"
_INDEX_LISTS = r".*(indexes|indices|_layers|_layer_ids|_index|layers?_idx|feature_layers?|out_features|_locs|_ids)"
_POSITIONS = "|".join(
    (
        r"(.*_)?max_position_embeddings(_.*)?", r"max_(source|target)_positions", r"max_seq(uence)?_len(gth)?",
        r"n_positions|n_ctx|max_2d_position_embeddings|context_length|prediction_length",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Level:
    """How far a configuration is shrunk; where one cannot be built, the next is tried."""

    width: int | None = 64
    """Of the hidden states; None keeps every width."""
    heads: int | None = 4
    """None keeps them."""
    kv_heads: int = 2
    layers: int = 2
    fill: bool = False
    """Give sizes that the default configuration leaves open a value."""

    @property
    def head_dim(self) -> int:
        return self.width // self.heads if self.width and self.heads else 0


#: From the smallest on. Some architectures want as many key-value heads as heads, some tie widths to other constants,
#: some have default configurations that no model can be built from as they are.
LEVELS = (
    Level(), Level(kv_heads=4), Level(kv_heads=4, fill=True), Level(layers=4), Level(layers=4, kv_heads=4),
    Level(width=512), Level(width=None), Level(width=None, heads=None, layers=4),
)  # fmt: skip
#: Settings under the numbers of layers, most of which are gone.
_BY_LAYER = frozenset({"per_layer_config"})
#: What `Level.fill` gives to fields that have no value.
FILLED: Mapping[str, Any] = {
    "num_key_value_heads": 4, "topk_group": 1, "n_group": 1, "vocab_size": 256, "prediction_length": 8,
    "pad_token_id": 1, "moe_topk": 1, "num_experts_per_tok": 2, "default_language": "en_XX",
}  # fmt: skip
#: Stands for a backbone that another library would have to provide.
_BACKBONE: Mapping[str, Any] = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}  # fmt: skip


def shrunk(config_class: Any, level: Level, dropout: float | None) -> Any:
    """The default configuration of a class at a level.

    Args:
        config_class: a subclass of `transformers.PreTrainedConfig`.
        level: what may be changed.
        dropout: what every dropout of the configuration is set to; None leaves them.

    Raises:
        ValueError, TypeError, ...: the configuration's own checks; their kinds are not ours to list.
    """
    return config_class(**changes(config_class().to_dict(), level, dropout))


def changes(default: Mapping[str, Any], level: Level, dropout: float | None) -> dict[str, Any]:
    """The fields that differ from a configuration's default, nested configurations as nested tables."""
    return _Shrinker(level, dropout, _ids()).table(default)


def _ids() -> Iterator[int]:
    return iter(range(FIRST_SPECIAL, VOCAB))


class _Shrinker:
    """One configuration's new values."""

    def __init__(self, level: Level, dropout: float | None, ids: Iterator[int]) -> None:
        self.level, self.dropout, self.ids = level, dropout, ids

    def table(self, default: Mapping[str, Any]) -> dict[str, Any]:
        """The changed fields of one table, and of the tables inside it."""
        kept = _kept_layers(default, self.level.layers)
        changed: dict[str, Any] = {}
        for key, value in default.items():
            nested = isinstance(value, dict) and ("model_type" in value or "transformers_version" in value)
            new = self.part(value) if nested else self.field(key, value, default, kept)
            if new is not None and new != value:
                changed[key] = new
        return changed | _handed_out(default, len(kept))

    def part(self, default: Mapping[str, Any]) -> dict[str, Any]:
        """A nested configuration, whole: the one around it may have other defaults for it than its own class has."""
        if default.get("model_type") in ("timm_backbone", "timm_wrapper"):
            kept = {k: default[k] for k in ("out_features", "out_indices") if default.get(k)}
            return dict(_BACKBONE) | ({"out_indices": kept["out_indices"]} if "out_indices" in kept else {})
        return {k: v for k, v in default.items() if k not in _BY_LAYER} | self.table(default)

    def field(self, key: str, value: Any, default: Mapping[str, Any], kept: list[int]) -> Any:
        """The new value of one field, or None where it stays."""
        if key in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            return self.rope(value)
        if value is None:
            return self.filled(key)
        if isinstance(value, (bool, str)):
            return None
        if isinstance(value, float):
            return self.dropped(key)
        if isinstance(value, (list, tuple)):
            return self.listed(key, list(value), default, kept)
        if isinstance(value, int):
            return self.dropped(key) if "drop" in key else self.number(key, value, default, len(kept))
        return None

    def filled(self, key: str) -> Any:
        """A value for a size that the default leaves open."""
        if not self.level.fill:
            return None
        return self.level.head_dim if key == "head_dim" else FILLED.get(key)

    def dropped(self, key: str) -> float | None:
        """Dropouts as asked for; what drops whole layers, or masks inputs by a random draw of its own, off."""
        if re.search(r"layer_?drop|drop_path|mask_(time|feature)_prob|stochastic", key):
            return 0.0
        return self.dropout if re.search(r"dropout|pdrop|drop_rate|drop_prob", key) else None

    def number(self, key: str, value: int, default: Mapping[str, Any], layers: int) -> int | None:
        """The new value of a field that holds an integer."""
        if re.fullmatch(_LAYERS, key):
            return min(value, layers)
        if re.fullmatch(_EVERY, key):
            return min(value, 2)
        if key.endswith("_offset"):
            return min(value, 1)
        if re.fullmatch(_IDS, key):
            return next(self.ids) if value >= FIRST_SPECIAL else None
        if re.fullmatch(r"(.*_)?vocab_size(_.*)?|n_vocab", key):
            return min(value, VOCAB)
        return _sized(key, value, staged="depths" in default) or self.wide(key, value, default)

    def wide(self, key: str, value: int, default: Mapping[str, Any]) -> int | None:
        """Widths and heads."""
        heads, width = self.level.heads, self.level.width
        if heads is not None and re.fullmatch(_KV, key):
            own = heads if any("lora_rank" in k for k in default) else self.level.kv_heads
            return min(value, own)
        if width is None or heads is None:
            return None
        return min(value, heads) if re.fullmatch(_HEADS, key) else self.narrow(key, value, default, width)

    def narrow(self, key: str, value: int, default: Mapping[str, Any], width: int) -> int | None:
        """A width, or what hangs on it."""
        exact = {
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "qk_head_dim": 24, "kv_lora_rank": 32,
            "q_lora_rank": 32, "rotary_dim": 8, "index_head_dim": 16, "index_n_heads": 4,
        }  # fmt: skip
        if key in exact:
            return min(value, exact[key])
        if re.fullmatch(r"(.*_)?head_dim|d_kv|d_head|dim_head|.*head_size|kv_channels|dim_per_head", key):
            rope = default.get("qk_rope_head_dim")
            return min(value, 8 if rope == value else self.level.head_dim)
        if re.fullmatch(_FFN, key):
            return min(value, 2 * width)
        if re.fullmatch(_WIDTHS, key):
            return _stage_width(value, default, width)
        return None

    def listed(self, key: str, value: list[Any], default: Mapping[str, Any], kept: list[int]) -> list[Any] | None:
        """A list's new value: an item per kept layer, indices within them, stages as deep and wide as allowed."""
        if "drop" in key and value and isinstance(value[0], float):
            rate = self.dropped(key)
            return None if rate is None else [rate] * len(value)
        numbers = all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        if key in ("stage_names", "out_features", "out_indices") and default.get("stage_names"):
            return None  # `_handed_out` knows
        if len(value) == _layer_count(default) and len(value) > len(kept):
            return [value[i] for i in kept]
        if key in ("depths", "layers", "stage_num_blocks", "num_layers") and numbers:
            return [min(v, self.level.layers) for v in value]
        if re.fullmatch(_INDEX_LISTS, key) and not key.startswith("stage") and numbers and value:
            return _placed(value, len(kept))
        if re.fullmatch(_IDS, key) and numbers:
            return [next(self.ids) if v >= FIRST_SPECIAL else v for v in value]
        heads = default.get("num_heads", default.get("num_attention_heads"))
        if self.level.width and numbers and isinstance(heads, list) and len(heads) == len(value):
            return [8 * h for h in heads] if re.fullmatch(_WIDTHS + "|hidden_sizes|embed_dims?|dims", key) else None
        if key in ("image_size", "img_size", "input_size") and numbers:
            return [_sized("image_size", v, staged="depths" in default) or v for v in value]
        return None

    def rope(self, value: dict[str, Any]) -> dict[str, Any]:
        """Rotary settings: sections and factors fill half of the head dim."""
        if not self.level.head_dim:
            return value
        new = dict(value)
        for key, item in value.items():
            if isinstance(item, dict):
                new[key] = self.rope(item)
            elif isinstance(item, list) and item:
                half = self.level.head_dim // 2
                if key == "mrope_section":
                    new[key] = _portions(item, half)
                elif key.endswith("factor"):
                    new[key] = item[:half]
        return new


def _sized(key: str, value: int, *, staged: bool = False) -> int | None:
    """Lengths, images, experts: what no width hangs on. Stages (`staged`) halve an image, down to one window."""
    limits = {
        _POSITIONS: POSITIONS,
        r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_local_experts": 8,
        r"context_size|max_length": 32,
        r"num_experts_per_tok(en)?|top_?k|moe_top_?k|moe_k": 2,
        r"n_group|topk_group|num_expert_group": 1,
        r"first_k_dense_replace|num_dense_layers|max_window_layers|num_kv_shared_layers|num_nextn_predict_layers": 1,
        r"(attention_|sliding_|local_)?(sliding_)?window(_size)?|attention_chunk_size": 8,
        r"num_queries|num_query_tokens|num_latents|d_latents|resampler_num_latents": 12,
    }
    if re.fullmatch(r"(.*_)?(image|img|crop)_size", key):
        small = 128 if staged else 56 if value % 14 == 0 and value % 16 else 64
        return small if value > small else None
    if staged and key == "window_size":
        return min(value, 4)
    if re.fullmatch(r"(attention_|sliding_|local_)?(sliding_)?window(_size)?", key) and value < 64:
        return None  # windows of images are small and tied to their sizes
    return next((min(value, limit) for pattern, limit in limits.items() if re.fullmatch(pattern, key)), None)


def _stage_width(value: int, default: Mapping[str, Any], width: int) -> int:
    """A width; where heads are listed by stage, the first stage's."""
    heads = default.get("num_heads", default.get("num_attention_heads"))
    return min(value, 8 * heads[0] if isinstance(heads, list) and heads else width)


def _layer_count(default: Mapping[str, Any]) -> int:
    found = (default.get(k) for k in ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth"))
    return next((v for v in found if isinstance(v, int)), 0)


def _kept_layers(default: Mapping[str, Any], layers: int) -> list[int]:
    """Which layers stay: the first of each kind, as the lists with an item per layer tell kinds apart; at least two."""
    count = _layer_count(default)
    lists = [v for v in default.values() if isinstance(v, list) and len(v) == count and count]
    kinds: dict[str, int] = {}
    for i in range(count):
        kinds.setdefault(repr([v[i] for v in lists]), i)
    chosen = list(kinds.values())[:4]
    for i in range(count):
        if len(chosen) >= min(layers, count):
            break
        if i not in chosen:
            chosen.append(i)
    return sorted(chosen) or list(range(layers))


def _placed(value: list[int], layers: int) -> list[int] | None:
    """Indices of layers, as many as there were where there is room, within the layers that stay."""
    if max(value) < layers:
        return None
    if min(value) < 0:
        return value
    first = 1 if min(value) > 0 else 0
    return sorted({first + i * max(1, (layers - first)) // len(value) for i in range(len(value))})


def _handed_out(default: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Which layers a backbone hands out, as many as before within those that stay; stages (`depths`) all do."""
    names, wanted = default.get("stage_names"), default.get("out_indices")
    if not names or not wanted or "depths" in default or layers + 1 >= len(names):
        return {}
    indices = sorted({-(-layers * (i + 1) // len(wanted)) for i in range(len(wanted))})
    return {"out_indices": indices, "out_features": [names[i] for i in indices]}


def _portions(parts: list[int], total: int) -> list[int]:
    """`parts` scaled to sum to `total`, none of them zero."""
    scaled = [max(1, math.floor(p * total / sum(parts))) for p in parts]
    scaled[0] += total - sum(scaled)
    return scaled
