"""`optpass.analyze` on model objects: what is counted, what is left alone, what is said."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import optpass
from optpass.errors import ConfigError, TraceError
from optpass.passes.devices import resolve
from optpass.passes.roofline import calibration
from optpass.reporting.model import Analysis


class Chain(nn.Module):
    """Linear layers, with a graph break after each if `breaks`, where Dynamo can resume unless it is a `loop`."""

    def __init__(self, width: int = 16, depth: int = 3, breaks: bool = False, loop: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.breaks, self.loop = breaks, loop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.loop:
            for layer in self.layers:
                x = layer(x)
                if self.breaks:
                    print("noise")
            return x
        x = self.layers[0](x)
        print("noise")
        x = self.layers[1](x)
        print("noise")
        return cast(torch.Tensor, self.layers[2](x))


def analyze(model: object, *args: object, device: str = "h100", **options: object) -> Analysis:
    return optpass.analyze(model, *args, device=device, **options)  # type: ignore[arg-type]


def matmul_flops(analysis: Analysis) -> float:
    return sum(op.flops for op in analysis.ops if op.mnk is not None)


def test_forward_flops_are_those_of_the_matmuls() -> None:
    analysis = analyze(Chain(), torch.randn(5, 16))
    assert matmul_flops(analysis) == 3 * 2 * 5 * 16 * 16
    assert analysis.totals.flops_backward == 0 and not analysis.train
    assert analysis.parameters == 3 * 16 * 16 and analysis.dtype == "float32" and analysis.device.key == "h100"
    assert [g.id for g in analysis.graphs] == ["0"] and analysis.graphs[0].inner == "none (analysis)"
    assert analysis.target == "Chain" and "inputs: float32[5, 16]" in analysis.notes


def test_backward_is_counted_from_the_joint_graph() -> None:
    """The first layer's input needs no gradient: 3 weight gradients, 2 input gradients, and not twice the forward."""
    analysis = analyze(Chain(), torch.randn(5, 16), train=True)
    one = 2 * 5 * 16 * 16
    assert matmul_flops(analysis) == 3 * one + 3 * one + 2 * one
    assert analysis.graphs[0].training and {op.phase for op in analysis.ops} == {"forward", "backward"}
    assert analysis.totals.flops == analysis.totals.flops_forward + analysis.totals.flops_backward


def test_op_names_are_unique_and_groups_name_them() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.Softmax(-1))
    analysis = analyze(model, torch.randn(4, 16), train=True)
    names = [op.name for op in analysis.ops]
    assert len(names) == len(set(names))
    assert analysis.groups and all(set(group.ops) <= set(names) for group in analysis.groups)
    members = {group.index: group.ops for group in analysis.groups}
    assert all(op.group is None or op.name in members[op.group] for op in analysis.ops)


@pytest.mark.parametrize("kind", ["real", "meta", "fake"])
def test_real_meta_and_fake_models_give_the_same(kind: str) -> None:
    with torch.device("meta") if kind == "meta" else FakeTensorMode() if kind == "fake" else torch.device("cpu"):
        model, x = Chain(), torch.randn(5, 16)
    analysis = analyze(model, x, train=True)
    reference = analyze(Chain(), torch.randn(5, 16), train=True)
    assert analysis.totals == reference.totals and analysis.parameters == reference.parameters


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model.eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    ids = [id(p) for p in model.parameters()]
    analyze(model, torch.randn(3, 4), train=True, dtype="bf16")
    assert not model.training and ids == [id(p) for p in model.parameters()]
    assert all(torch.equal(v, before[k]) and v.dtype == before[k].dtype for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_the_random_state_is_left_as_it_was() -> None:
    x = torch.randn(3, 4)
    state = torch.get_rng_state()
    analyze(nn.Dropout(0.5), x, train=True)
    analyze(lambda v: v * float(v.sum().item()) + torch.rand(4) if v.sum().item() > -1e30 else v, x)
    assert torch.equal(torch.get_rng_state(), state)


def test_training_mode_follows_train() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    training = {op.target for op in analyze(model, torch.randn(3, 8), train=True).ops}
    inference = {op.target for op in analyze(model, torch.randn(3, 8)).ops}
    assert len(training) > len(inference) and not any("rand" in t or "dropout" in t for t in inference)


def test_dtype_is_cast_and_tied_weights_stay_tied() -> None:
    model = Chain(depth=2)
    model.layers[1].weight = model.layers[0].weight  # type: ignore[union-attr,assignment]
    analysis = analyze(model, torch.randn(5, 16), dtype=torch.bfloat16)
    assert analysis.dtype == "bfloat16" and analysis.parameters == 16 * 16
    assert {op.dtype for op in analysis.ops if op.mnk} == {"bfloat16"}


def test_a_loss_and_keyword_inputs() -> None:
    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.sum(0).norm()

    analysis = analyze(Chain(), kwargs={"x": torch.randn(5, 16)}, train=True, loss=loss, name="mine")
    assert analysis.target == "mine" and analysis.graphs[0].training


def test_graph_breaks_are_followed_and_told() -> None:
    analysis = analyze(Chain(loop=False), torch.randn(5, 16), train=True)
    assert matmul_flops(analysis) == 8 * 2 * 5 * 16 * 16
    ids = [g.id for g in analysis.graphs]
    assert ids == ["0", "1", "2", "3"] and {op.graph for op in analysis.ops} == set(ids)  # the last one is the loss
    told = "\n".join(analysis.notes)
    assert "4 graphs are run" in told and "graph break: " in told and f"{Path(__file__).name}:" in told


@pytest.mark.parametrize("train", [False, True])
def test_a_break_in_a_loop_is_traced_whole(train: bool) -> None:
    """Dynamo gives up the whole frame there, and would leave all of it to eager."""
    analysis = analyze(Chain(breaks=True), torch.randn(5, 16), train=train)
    assert matmul_flops(analysis) == (8 if train else 3) * 2 * 5 * 16 * 16
    assert len(analysis.graphs) == 1
    told = next(note for note in analysis.notes if "leaves a part of the model to eager" in note)
    assert "aten.mm.default x3" in told
    products = [op for op in analysis.ops if op.mnk and op.phase == "forward"]
    assert [op.module for op in products] == ["layers.0", "layers.1", "layers.2"]
    assert all(op.file == __file__ for op in products)


def test_a_graph_that_runs_several_times_counts_each_time() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            torch._dynamo.graph_break()
            return y.relu()

    analysis = analyze(nn.Sequential(*(Block() for _ in range(12))), torch.randn(5, 16))
    assert matmul_flops(analysis) == 12 * 2 * 5 * 16 * 16
    assert len({g.id for g in analysis.graphs}) == len(analysis.graphs)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        if y.sum().item() > 1e30:  # branch
            return y
        return self.a(y)


def test_a_model_that_branches_on_values_is_run_once_for_real() -> None:
    analysis = analyze(Branch(), torch.randn(5, 16), train=True)
    assert matmul_flops(analysis) >= 2 * 2 * 5 * 16 * 16
    assert "run once for real" in analysis.notes[0]


@pytest.mark.parametrize("share", [0.25, 0.0])
def test_a_model_that_cannot_be_run_says_on_which_line(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optpass.api.REAL_SHARE", share)
    with torch.device("meta") if share else torch.device("cpu"):
        model, x = Branch(), torch.randn(5, 16)
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# branch"))
    with pytest.raises(TraceError, match="depends on values") as caught:
        analyze(model, x)
    assert f"{Path(__file__).name}:{line}" in str(caught.value)
    assert ("real tensors" if share else "too large") in str(caught.value)


def test_errors_of_the_model_name_its_line() -> None:
    class Mismatch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

    with pytest.raises(TraceError, match=rf"{Path(__file__).name}:\d+") as caught:
        analyze(Mismatch(), torch.randn(3, 8))
    assert "same reduction dim" in str(caught.value) and "\n" not in str(caught.value)


def test_what_needs_no_gradient_has_no_backward() -> None:
    analysis = analyze(lambda x: x * 2, torch.randn(3), train=True)
    assert any("no backward" in note for note in analysis.notes) and not analysis.graphs[0].training


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: analyze(3), "int is neither a module"),
        (lambda: analyze(Chain(), torch.randn(5, 16), device="h1000"), "h1000"),
        (lambda: analyze(Chain(), torch.randn(5, 16), dtype="int4"), "int4"),
        (lambda: analyze("mlp:tiny", torch.randn(1)), "its own inputs"),
        (lambda: analyze(Chain(), torch.randn(5, 16), size="tiny"), "belong to a target"),
        (lambda: analyze(lambda x: x, torch.arange(3), train=True), "no floating-point tensor"),
    ],
)
def test_bad_input_is_a_config_error(call: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()  # type: ignore[operator]
    assert said in str(caught.value)


def test_a_model_without_tensor_work() -> None:
    with pytest.raises(TraceError, match="no graph was captured"):
        analyze(lambda x: 3, torch.randn(3))


def test_large_joint_graphs_say_that_they_are_split_linearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optpass.backend.capture.MIN_CUT_NODES", 5)
    analysis = analyze(Chain(), torch.randn(5, 16), train=True)
    assert any("linear partitioner" in note for note in analysis.notes)


def test_the_cpu_is_measured_when_it_never_was(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    generic = resolve("cpu")

    def measured(progress: object, force: bool = False) -> object:
        progress(0.5, "copy bandwidth")  # type: ignore[operator]
        return generic

    monkeypatch.setattr(calibration, "cached_spec", lambda: None)
    monkeypatch.setattr(calibration, "calibrated_spec", measured)
    analysis = optpass.analyze(Chain(), torch.randn(5, 16), progress=lambda done, text: told.append((done, text)))
    assert analysis.device.key == "cpu" and (0.5, "measuring this CPU: copy bandwidth") in told
    assert any("never measured" in note for note in analysis.notes)  # the stand-in spec has no calibration


def test_methods_and_registered_targets() -> None:
    model = Chain()
    assert analyze(model.forward, torch.randn(5, 16)).parameters == 3 * 16 * 16
    assert analyze("mlp:tiny", dtype="bf16").dtype == "bfloat16"


def test_report_is_called_though_a_package_has_its_name() -> None:
    optpass.reset_report()
    for _ in range(2):
        empty = optpass.report("empty")
        assert empty.graphs == [] and empty.name == "empty"
