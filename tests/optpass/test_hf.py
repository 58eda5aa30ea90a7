"""`hf:` targets: configuration, head, inputs and mistakes. Nothing is downloaded or allocated."""

from __future__ import annotations

import pytest
from torch import nn

from optpass.errors import ConfigError
from optpass.targets import Target, load

pytest.importorskip("transformers")

AUDIO = {"input_features", "decoder_input_ids"}
LLAMA = {"hidden_size": "64", "num_hidden_layers": "2", "num_attention_heads": "4", "intermediate_size": "96"}


def built(model_type: str, sets: dict[str, str] | None = None, *, train: bool = False) -> Target:
    target = load(f"hf:{model_type}", sets=sets, train=train)
    assert isinstance(target, Target) and isinstance(target.model, nn.Module)
    assert all(hasattr(p, "fake_mode") for p in target.model.parameters())
    return target


def test_a_decoder_with_settings_inputs_and_labels() -> None:
    target = built("llama", {**LLAMA, "batch": "2", "seq": "16"}, train=True)
    assert type(target.model).__name__ == "LlamaForCausalLM"
    assert {k: tuple(v.shape) for k, v in target.kwargs.items()} == {"input_ids": (2, 16), "labels": (2, 16)}
    config = target.model.config  # type: ignore[attr-defined]
    assert config.hidden_size == 64 and config.use_cache is False and config._attn_implementation == "eager"
    assert target.model.training  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("model_type", "sets", "head", "inputs"),
    [
        ("bert", {"num_hidden_layers": "1"}, "BertForMaskedLM", {"input_ids"}),
        ("t5", {"num_layers": "1"}, "T5ForConditionalGeneration", {"input_ids", "decoder_input_ids"}),
        ("vit", {"num_hidden_layers": "1"}, "ViTForImageClassification", {"pixel_values"}),
        (
            "whisper",
            {"encoder_layers": "1"},
            "WhisperForConditionalGeneration",
            {"input_features", "decoder_input_ids"},
        ),
    ],
)
def test_the_head_and_inputs_that_a_type_is_known_for(
    model_type: str, sets: dict[str, str], head: str, inputs: set[str]
) -> None:
    target = built(model_type, sets)
    assert type(target.model).__name__ == head and set(target.kwargs) == inputs


def test_attention_may_be_chosen() -> None:
    model = built("llama", {**LLAMA, "attn_implementation": "sdpa"}).model
    assert model.config._attn_implementation == "sdpa"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("model_type", "sets", "said"),
    [
        ("", {}, "names no model type"),
        ("lama", {}, "did you mean 'llama'"),
        ("meta-llama/Llama-3-8B", {}, "nothing is downloaded"),
        ("llama", {"hiden_size": "3"}, "did you mean 'hidden_size'"),
        ("llama", {"hidden_size": "big"}, "expected int"),
        ("llama", {"attention_bias": "3"}, "expected bool"),
        ("llama", {"hidden_size.x": "3"}, "no table of settings"),
        ("llama", {"batch": "0"}, "at least 1"),
        ("llama", {"seq": "100000"}, "positions"),
        ("llama", {"attn_implementation": "edger"}, "did you mean 'eager'"),
        ("llama", {"num_attention_heads": "7"}, "refused"),
    ],
)
def test_mistakes_name_the_cause(model_type: str, sets: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=r"hf:|sets: ") as caught:
        load(f"hf:{model_type}", sets=sets)
    assert said in str(caught.value)
