"""Models to train: by name, by factory, and everything that cannot be trained, said before training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from optpass.errors import ConfigError
from optpass.training.config import load
from optpass.training.network import build

FACTORY = """
import torch
from torch import nn
from torch.nn import functional as F

class Tiny(nn.Module):
    def __init__(self, vocab=256, context=16, answer="pair"):
        super().__init__()
        self.table = nn.Embedding(vocab, vocab)
        self.place = nn.Parameter(torch.zeros(context, 1))
        self.answer = answer
    def forward(self, idx, targets):
        logits = self.table(idx) + self.place[torch.arange(idx.size(1))]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return {"pair": (logits, loss.mean()), "logits": logits, "vector": (logits, loss)}[self.answer]

def good(): return Tiny()
def narrow(): return Tiny(vocab=128)
def short(): return Tiny(context=8)
def logits(): return Tiny(answer="logits")
def vector(): return Tiny(answer="vector")
def frozen(): return Tiny().requires_grad_(False)
def number(): return 3
def raises(): raise ValueError("no weights")
value = 3
"""

JobFile = Callable[..., Path]


def test_a_model_by_name_in_training_mode_with_its_fields_replaced(job_file: JobFile) -> None:
    module = build(load(job_file(model="vocab = 259\nlayers = 3")), 256)
    assert module.training
    assert module.config.vocab == 259 and len(module.blocks) == 3  # type: ignore[union-attr, arg-type]


def test_weights_follow_from_the_seed_and_not_from_the_batch(job_file: JobFile) -> None:
    def weights(**changes: str) -> torch.Tensor:
        return next(build(load(job_file(**changes)), 256).parameters())

    assert torch.equal(weights(), weights(micro_batch="5", sequence="9"))
    assert not torch.equal(weights(), weights(seed="1"))


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_every_decoder_trains(job_file: JobFile, name: str) -> None:
    path = job_file()
    path.write_text(path.read_text().replace("[training]", f'[training]\nmodel = "{name}"', 1))
    tokens = torch.randint(256, (2, 16))
    assert build(load(path), 256)(tokens, tokens)[1].dim() == 0


def test_a_factory(job_file: JobFile) -> None:
    path = with_model(job_file, "nets.py:good")
    assert build(load(path), 256).training


def with_model(job_file: JobFile, model: str, **training: str) -> Path:
    """The job with `model = ...`, without [training.model_config]; factories stand in nets.py beside it."""
    path = job_file(model="", **training)
    (path.parent / "nets.py").write_text(FACTORY)
    path.write_text(path.read_text().replace("[training]", f'[training]\nmodel = "{model}"', 1))
    return path


MODELS = {
    "gtp": "did you mean 'gpt'",
    "vit": "not a language model",
    "mlp": "not a language model",
    "bert": "cannot take 16 tokens",
    "nets.py:narrow": "cannot take 16 tokens up to 255",
    "nets.py:short": "cannot take 16 tokens",
    "nets.py:logits": "returned a tensor",
    "nets.py:vector": r"returned \(a tensor .*, a tensor \[16\]\)",
    "nets.py:frozen": "no parameter that requires a gradient",
    "nets.py:number": "returned int",
    "nets.py:raises": "ValueError: no weights",
    "nets.py:goo": "no function 'goo'; did you mean 'good'",
    "nets.py:value": "no function 'value'",
    "gone.py:good": "no file",
    "nets.txt:good": "no file",
}


@pytest.mark.parametrize("model", MODELS)
def test_unsuitable_models_are_named_in_one_line(job_file: JobFile, model: str) -> None:
    size = {} if ":" in model else {"size": '"tiny"'}
    with pytest.raises(ConfigError, match=MODELS[model]) as caught:
        build(load(with_model(job_file, model, **size)), 131 if model == "bert" else 256)
    assert "job.toml" in str(caught.value) and "\n" not in str(caught.value)


SETTINGS = [
    ({"model": "vocab = 200"}, "vocab = 200 is smaller than the 256 tokens of tokenizer = 'byte'"),
    ({"model": "vocab = 257", "sequence": "33"}, "sequence = 33 is longer than the model's context = 32"),
    (
        {"model": "vocab = 257\nlayer = 2"},
        r"\[training.model_config\] unknown setting of gpt 'layer': did you mean 'layers'",
    ),
    ({"model": "vocab = 257\nlayers = 'two'"}, r"\[training.model_config\] gpt: layers is 'two': expected int"),
    ({"model": "vocab = 257\nheads = 5"}, "heads .5. must divide width .33."),
    ({"model": "batch = 5"}, "batch is not set here; use 'micro_batch'"),
    ({"size": "'huge'"}, r"\[training\] size = 'huge': no such size of gpt; valid: tiny"),
    ({"model": "vocab = 257\nwidth = 999_999_999_999"}, r"\[training.model_config\] gpt:tiny .*tensors of these sizes"),
    ({"device": "'gpu'"}, r"\[training\] device = 'gpu' cannot be used"),
    ({"device": "'meta'"}, "device = 'meta' cannot be used"),
]


@pytest.mark.parametrize(("changes", "message"), SETTINGS)
def test_impossible_values_are_named(job_file: JobFile, changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(load(job_file(**changes)), 256)
    assert "job.toml" in str(caught.value)


def test_a_device_by_flag_is_named_as_the_flag(job_file: JobFile) -> None:
    with pytest.raises(ConfigError, match=r"^--device 'tpu' cannot be used: .*; try 'cpu' or 'cuda'"):
        build(load(job_file(), overrides={"device": "tpu"}), 256)
