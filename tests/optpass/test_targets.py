"""Targets by name: what each form builds, under fake tensors, and what each mistake says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from optpass import targets
from optpass.errors import ConfigError
from optpass.factory import literal
from optpass.naming import on_the_command_line
from optpass.targets import OnnxTarget, Target, load


def built(text: str, **options: object) -> Target:
    target = load(text, **options)  # type: ignore[arg-type]
    assert isinstance(target, Target)
    return target


def is_fake(value: object) -> bool:
    return hasattr(value, "fake_mode")


def test_a_registered_model_is_built_fake_in_its_size_and_dtype() -> None:
    target = built("mlp:tiny", dtype="bf16")
    assert target.name == "mlp:tiny" and isinstance(target.model, nn.Module)
    parameters = list(target.model.parameters())
    assert parameters and all(is_fake(p) and p.dtype is torch.bfloat16 for p in parameters)
    assert all(is_fake(a) for a in target.args)


def test_sets_and_size_reach_a_registered_model() -> None:
    target = built("gpt", size="tiny", sets={"layers": "1", "batch": "3", "seq": "9"})
    assert target.args[0].shape == (3, 9) and target.name == "gpt:tiny layers=1 batch=3 seq=9"


def test_the_70b_model_allocates_nothing() -> None:
    model = built("llama:70b", dtype="bfloat16").model
    assert isinstance(model, nn.Module)
    assert sum(p.numel() for p in model.parameters()) > 70e9 and all(is_fake(p) for p in model.parameters())


def test_rebuild_gives_real_tensors() -> None:
    target = built("mlp:tiny")
    assert target.rebuild is not None
    model = target.rebuild().model
    assert isinstance(model, nn.Module) and not any(is_fake(p) for p in model.parameters())


@pytest.mark.parametrize("factory", ["plain", "as_dict", "as_three"])
def test_the_three_ways_to_return_inputs(factories: Path, factory: str) -> None:
    target = built(f"factories.py:{factory}")
    inputs = [*target.args, *target.kwargs.values()]
    assert [tuple(t.shape) for t in inputs] == [(3, 8)] and all(is_fake(t) for t in inputs)
    assert set(target.kwargs) == ({"x"} if factory == "as_dict" else set())


def test_sets_are_keyword_arguments_of_the_factory(factories: Path) -> None:
    assert built("factories.py:plain", sets={"width": "16", "depth": "3"}).args[0].shape == (3, 16)
    assert built("factories.py:open_ended", sets={"width": "5"}).args[0].shape == (3, 5)


def test_the_file_may_import_its_neighbours(factories: Path) -> None:
    (factories.parent / "neighbour_of_the_factory.py").write_text("WIDTH = 12\n")
    factories.write_text("from neighbour_of_the_factory import WIDTH\n" + factories.read_text())
    assert built("factories.py:plain").args[0].shape == (3, 8)


def test_a_factory_that_needs_values_is_built_for_real_and_noted(factories: Path) -> None:
    target = built("factories.py:value_needed")
    assert target.fake_mode is None and "real tensors" in target.notes[0] and "factories.py:" in target.notes[0]


MISTAKES = [
    ("", {}, "no target given"),
    ("gtp", {}, "did you mean 'gpt'"),
    ("xyzzy", {}, "the models are gpt"),
    ("gpt:smal", {}, "did you mean 'small'"),
    ("gpt:small", {"size": "tiny"}, "two sizes"),
    ("gpt", {"sets": {"layrs": "3"}}, "did you mean 'layers'"),
    ("gpt", {"sets": {"layers": "three"}}, "expected int"),
    ("gpt", {"sets": {"dtype": "bf16"}}, "use dtype itself"),
    ("gpt", {"sets": {"size": "tiny"}}, "use size itself"),
    ("gpt", {"dtype": "bf17"}, "did you mean 'bf16'"),
    ("gpt", {"dtype": "int8"}, "not a dtype to build a model in"),
    ("factories.py", {}, "name the factory in it"),
    ("factories.py:", {}, "factories.py:plain"),
    ("factories.py:plian", {}, "did you mean 'plain'"),
    ("factoris.py:plain", {}, "did you mean 'factories.py'"),
    ("nowhere/factories.py:plain", {}, "no such file"),
    ("factories.py:constant", {}, "not a function"),
    ("factories.py:raises", {}, "ValueError: no luck ("),
    ("factories.py:leaves", {}, "SystemExit: 7"),
    ("factories.py:number", {}, "returned int"),
    ("factories.py:single", {}, "tuple of length 1"),
    ("factories.py:no_module", {}, "no module"),
    ("factories.py:text_inputs", {}, "returned str as inputs"),
    ("factories.py:needs", {}, "needs width"),
    ("factories.py:plain", {"sets": {"widht": "3"}}, "did you mean 'width'"),
    ("factories.py:number", {"sets": {"a": "3"}}, "takes no arguments"),
    ("factories.py:plain", {"size": "tiny"}, "has no sizes"),
    ("model.onnx", {"size": "tiny"}, "has the size it has"),
    ("model.onnx", {"sets": {"batch": "x"}}, "is an integer"),
    ("model.onnx", {"sets": {"batch": "-1"}}, "negative"),
    (".", {}, "is a folder"),
    (":build", {}, "nothing stands before the colon"),
    ("gpt:tiny", {"sets": {"batch": 10**18}}, "batch=1000000000000000000: tensors of these sizes cannot be made"),
    ("factories.py:lazy", {}, "0.weight and 1 more have no size yet"),
    ("factories.py:mute", {}, "raised Mute: <exception str() failed> ("),
    ("data", {"forms": "write this or that"}, "data is none of these by its name; write this or that"),
    ("nothing", {"forms": "write this or that"}, "unknown target 'nothing'; write this or that"),
    ("data", {}, "or a .onnx file"),
    ("none.onnx", {"onnx": False, "forms": "write this"}, "none.onnx: no such file, and an ONNX file has no backward"),
    ("there.onnx", {"onnx": False, "forms": "write this"}, "there.onnx: holds a forward graph only"),
    ("data/model.bin", {}, "does not exist"),
]


@pytest.mark.parametrize(("target", "options", "said"), MISTAKES, ids=[f"{t}-{s}" for t, _, s in MISTAKES])
def test_mistakes_name_the_cause_and_the_remedy(
    factories: Path, target: str, options: dict[str, object], said: str
) -> None:
    for name in ("data", "there.onnx"):
        (factories.parent / name).touch()
    with pytest.raises(ConfigError) as caught:
        load(target, **options)  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_on_the_command_line_messages_name_flags() -> None:
    with on_the_command_line():
        for options, said in (
            ({"sets": {"dtype": "bf16"}}, "--set dtype=bf16: dtype is not a setting; use --dtype itself"),
            ({"dtype": "bf17"}, "--dtype 'bf17': not a dtype"),
        ):
            with pytest.raises(ConfigError, match=said):
                load("gpt", **options)  # type: ignore[arg-type]


def test_a_file_that_does_not_parse_names_the_line(factories: Path) -> None:
    factories.write_text("def plain(:\n    pass\n")
    with pytest.raises(ConfigError, match=r"cannot be run: SyntaxError: .*factories\.py:1\)"):
        load("factories.py:plain")


def test_an_onnx_file_is_left_to_its_analysis() -> None:
    target = load("some/model.ONNX", sets={"batch": "4"})
    assert target == OnnxTarget(Path("some/model.ONNX"), {"batch": 4}, "some/model.ONNX")


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("1e-3", 1e-3), ("true", True), ("None", None), ("[1, 2]", [1, 2]), ("bf16", "bf16"), ("a b", "a b")],
)
def test_literals(text: str, value: object) -> None:
    assert literal(text) == value


def test_every_dtype_has_one_meaning() -> None:
    spellings = [s for name, aliases in targets.DTYPES.items() for s in (name, *aliases)]
    assert len(spellings) == len(set(spellings))
    assert targets.parse_dtype("torch.bfloat16") is targets.parse_dtype("BF16") is torch.bfloat16
