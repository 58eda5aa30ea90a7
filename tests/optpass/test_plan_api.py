"""What `plan` and `analyze` say in Python of arguments that cannot be: in a line, by the argument's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import optpass
from optpass.errors import ConfigError

MISTAKES = [
    ({"accumulation": "2"}, "accumulation='2': write a number of micro-batches"),
    ({"accumulation": True}, "accumulation=True: write a number"),
    ({"shard": 8}, "shard=8: write fsdp:N"),
    ({"batch": 1.5}, "batch=1.5: write a number of samples"),
    ({"batch": "auto"}, "batch='auto' looks for the largest micro-batch within a budget; name one with memory_budget"),
    ({"device": "nope"}, "device='nope': no device 'nope'"),
    ({"dtype": "fp7"}, "dtype='fp7': not a dtype"),
    ({"memory_budget": 0}, "memory_budget=0 leaves no memory"),
    ({"options": {"disable_passes": ["attn"]}}, "options: disable_passes: no pass is called 'attn'"),
]


@pytest.mark.parametrize(("given", "said"), MISTAKES, ids=[str(given) for given, _ in MISTAKES])
def test_mistakes_in_python_name_arguments_and_no_flags(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        optpass.plan(torch.nn.Linear(16, 16), torch.randn(5, 16), **given)
    assert str(caught.value).startswith(said) and "--" not in str(caught.value).replace("--list-devices", "")


def test_an_optimizer_object_is_told_in_a_line() -> None:
    model = torch.nn.Linear(16, 16)
    with pytest.raises(ConfigError) as caught:
        optpass.plan(model, torch.randn(5, 16), optimizer=torch.optim.Adam(model.parameters()))  # type: ignore[arg-type]
    assert str(caught.value).startswith("optimizer=Adam (") and "\n" not in str(caught.value)


@pytest.mark.parametrize("verb", ["plan", "analyze"])
def test_what_cannot_be_a_model_is_told_by_the_function_that_was_called(verb: str) -> None:
    run = getattr(optpass, verb)
    with pytest.raises(ConfigError, match=f"^{verb}: int is neither a module"):
        run(3)
    with pytest.raises(ConfigError, match=f"^{verb}: .* weight and 1 more have no size yet, .* call the model once"):
        run(torch.nn.LazyLinear(3), torch.randn(5, 16))
    with pytest.raises(ConfigError, match=r"^device=device\(type='cpu'\)"):
        run(torch.nn.Linear(16, 16), torch.randn(5, 16), device=torch.device("cpu"))


WRONG_TYPES = [
    ({"kwargs": 3}, "kwargs=3: write a dict of keyword inputs"),
    ({"kwargs": {1: 2}}, "kwargs={1: 2}: write a dict of keyword inputs"),
    ({"name": 3}, "name=3: write a text"),
    ({"loss": "mse"}, "loss='mse': write a function that takes the model's output"),
    ({"progress": True}, "progress=True: write a function"),
    ({"sets": "seq=3"}, "sets='seq=3': write a dict of settings"),
    ({"size": 8}, "size=8: write the name of a size"),
]


@pytest.mark.parametrize("verb", ["plan", "analyze"])
@pytest.mark.parametrize(("given", "said"), WRONG_TYPES, ids=[str(given) for given, _ in WRONG_TYPES])
def test_arguments_of_another_type_are_told_in_a_line(verb: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        getattr(optpass, verb)(torch.nn.Linear(16, 16), torch.randn(5, 16), **given)
    assert str(caught.value).startswith(said)


def test_settings_of_a_target_need_not_be_text() -> None:
    assert optpass.plan("mlp:tiny", sets={"batch": 4}, device="h200").batch.size == 4
