"""Every reference model at its tiny size: trains, compiles in one graph, builds in any float dtype, takes overrides."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from optpass import models
from optpass.errors import ConfigError

TAKES_TARGETS = ("gpt", "llama", "bert", "t5")
every_model = pytest.mark.parametrize("name", models.names())


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters() if p.requires_grad}


@every_model
def test_every_parameter_gets_a_finite_gradient(name: str) -> None:
    module, inputs = models.build(name, "tiny")
    loss = models.loss(module(*inputs))
    assert loss.dim() == 0 and torch.isfinite(loss)
    loss.backward()
    for parameter, grad in gradients(module).items():
        assert grad is not None, f"{parameter} took no part in the loss"
        assert torch.isfinite(grad).all(), parameter


@every_model
def test_gradients_reach_the_parameters_in_earnest(name: str) -> None:
    module, inputs = models.build(name, "tiny")
    models.loss(module(*inputs)).backward()
    moved = [parameter for parameter, grad in gradients(module).items() if grad is not None and grad.abs().sum() > 0]
    # A key's bias shifts all scores of a row alike and softmax ignores that, up to rounding; a rare index may not be
    # drawn: so nearly all, not all.
    assert len(moved) >= 0.9 * len(gradients(module))


@every_model
def test_one_graph_under_compile_and_the_same_result_and_gradients(name: str) -> None:
    module, inputs = models.build(name, "tiny")
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    seen = []
    for run in (module, compiled):
        module.zero_grad()
        torch.manual_seed(7)  # dropout draws the same numbers in both
        output = run(*inputs)
        models.loss(output).backward()
        seen.append((output, gradients(module)))
    torch.testing.assert_close(seen[1], seen[0])


@every_model
def test_attention_is_written_out(name: str) -> None:
    targets: list[object] = []

    def capture(gm: torch.fx.GraphModule, _: object) -> object:
        targets.extend(node.target for node in gm.graph.nodes)
        return gm.forward

    module, inputs = models.build(name, "tiny")
    torch.compile(module, backend=capture, fullgraph=True)(*inputs)
    assert targets
    assert not [t for t in targets if "scaled_dot_product" in str(t) or "flex_attention" in str(t)]


@every_model
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_built_in_the_dtype_asked_for(name: str, dtype: torch.dtype) -> None:
    module, inputs = models.build(name, "tiny", dtype=dtype)
    assert torch.get_default_dtype() == torch.float32
    assert {p.dtype for p in module.parameters()} == {dtype}
    assert {x.dtype for x in inputs if x.is_floating_point()} <= {dtype}
    output = module(*inputs)
    assert output.dtype == dtype and torch.isfinite(output).all()
    models.loss(output).backward()
    assert all(grad is not None and torch.isfinite(grad).all() for grad in gradients(module).values())


@every_model
def test_a_size_far_off_alignment(name: str) -> None:
    """Tensor Cores want multiples of 8: each small size has widths that are odd, on purpose."""
    for size in ("tiny", "small"):
        with torch.device("meta"):
            module, _ = models.build(name, size)
        widths = {d for p in module.parameters() if p.dim() > 1 for d in p.shape if d > 1}
        assert any(d % 2 for d in widths), f"{size}: {sorted(widths)}"


@every_model
def test_traces_under_fake_tensors(name: str) -> None:
    """Ahead-of-time analysis: built and compiled with nothing allocated."""
    graphs: list[torch.fx.GraphModule] = []

    def capture(gm: torch.fx.GraphModule, _: object) -> object:
        graphs.append(gm)
        return gm.forward

    with FakeTensorMode(allow_non_fake_inputs=True):
        module, inputs = models.build(name, "tiny")
        models.loss(torch.compile(module, backend=capture, fullgraph=True)(*inputs)).backward()
    assert len(graphs) == 1


@every_model
def test_seeding_is_the_callers(name: str) -> None:
    built = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        module, inputs = models.build(name, "tiny")
        built.append((list(module.state_dict().values()), inputs))
    torch.testing.assert_close(built[1], built[0], rtol=0, atol=0)
    assert any(not torch.equal(a, b) for a, b in zip(built[0][1], built[2][1], strict=True))


@pytest.mark.parametrize("name", TAKES_TARGETS)
def test_with_targets_the_model_returns_its_own_loss(name: str) -> None:
    module, inputs = models.build(name, "tiny", targets=True)
    module.eval()
    output = module(*inputs)
    assert isinstance(output, tuple) and len(output) == 2
    logits, own = output
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), inputs[-1].flatten())
    torch.testing.assert_close(own, expected)
    assert models.loss(output) is own


@every_model
def test_every_setting_is_a_field_of_config_or_inputs(name: str) -> None:
    """Each field, set to its own value as a string, as from a command line, builds the same shapes."""
    module = import_module(f"optpass.models.{name}")
    preset = module.SIZES["tiny"]
    fields = dataclasses.asdict(preset.config) | dataclasses.asdict(preset.inputs)
    assert len(fields) == len(dataclasses.fields(preset.config)) + len(dataclasses.fields(preset.inputs))
    text = {k: ",".join(map(str, v)) if isinstance(v, tuple) else str(v) for k, v in fields.items()}
    assert shapes(*module.build("tiny", **text)) == shapes(*module.build("tiny"))


@every_model
def test_batch_can_be_set(name: str) -> None:
    module, inputs = models.build(name, "tiny", batch=3)
    assert all(3 in x.shape[:2] for x in inputs)
    assert module(*inputs).size(0) == 3


def shapes(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[list[torch.Size], list[torch.Size]]:
    return [p.shape for p in module.parameters()], [x.shape for x in inputs]


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("gpt", {"widht": 64}, ["widht", "'width'"]),
        ("gpt", {"heads": 5}, ["heads (5)", "width (33)"]),
        ("gpt", {"seq": 33}, ["seq (33)", "context (32)"]),
        ("gpt", {"seq": "many"}, ["seq", "'many'", "int"]),
        ("gpt", {"layers": 2.5}, ["layers", "2.5", "int"]),
        ("gpt", {"layers": True}, ["layers", "True", "int"]),
        ("gpt", {"batch": 0}, ["batch", "0", "at least 1"]),
        ("gpt", {"dropout": 1}, ["dropout", "1.0", "below 1"]),
        ("gpt", {"dropout": "nan"}, ["dropout", "nan", "finite"]),
        ("gpt", {"targets": "perhaps"}, ["targets", "'perhaps'", "bool"]),
        ("llama", {"kv_heads": 4}, ["kv_heads (4)", "heads (6)"]),
        ("llama", {"width": 30}, ["even head width", "5"]),
        ("bert", {"seq": 99}, ["seq (99)", "context (32)"]),
        ("vit", {"patch": 5}, ["patch (5)", "image (32)"]),
        ("t5", {"buckets": 6}, ["buckets (6)", "4"]),
        ("unet", {"image": 7}, ["image (7)", "even"]),
        ("unet", {"groups": 4}, ["groups (4)", "width (15)"]),
        ("dlrm", {"rows": "3,x"}, ["rows", "'x'", "int"]),
        ("dlrm", {"rows": (3, 0)}, ["rows", "(3, 0)", "at least 1"]),
    ],
)
def test_settings_the_model_cannot_have(name: str, settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        models.build(name, "tiny", **settings)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)
    assert torch.get_default_dtype() == torch.float32


def test_a_dtype_without_gradients_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch\.int8.*torch\.bfloat16"):
        models.build("mlp", "tiny", dtype=torch.int8)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_longer_than_the_context_is_refused(name: str) -> None:
    module, _ = models.build(name, "tiny")
    with pytest.raises(ValueError, match=r"33 tokens.*context of 32"):
        module(torch.zeros(1, 33, dtype=torch.long))
