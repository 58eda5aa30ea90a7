"""What the error of a budget below the floor says would help is true."""

from __future__ import annotations

import gc
import re
import weakref

import pytest
import torch

import optpass


def _refused(steps, model, x, budget, **settings):
    with pytest.raises(optpass.BudgetInfeasibleError) as caught:
        steps.run(model, [x], budget, settings={"optimizer": "adamw", **settings}, measure=False)
    return caught.value


@pytest.mark.slow
def test_the_micro_batch_that_fits(steps, programs):
    torch.manual_seed(0)
    model, x = programs.Stack(1, 32, 2), torch.randn(16, 32, 32)
    floor = _refused(steps, model, x, 1).floor_bytes
    budget = floor // 2
    said = _refused(steps, model, x, budget)
    (size,) = re.findall(r"What would help: .*micro-batch (\d+), about \(smallest peak", str(said))
    assert 1 <= int(size) < 16 and any(one.startswith(f"micro-batch {size}") for one in said.helps)
    ran = steps.run(model, [x[: int(size)]], budget, settings={"optimizer": "adamw"})
    assert ran.peak <= budget
    _refused(steps, model, x[: int(size) + 2], budget)


def test_no_micro_batch_is_named_where_the_parameters_alone_do_not_fit(steps, programs):
    error = _refused(steps, torch.nn.Linear(32, 32), torch.randn(4, 32), 1000)
    assert error.helps and not any("micro-batch" in one for one in error.helps)


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_attention_on_fused_kernels(steps, programs, mode):
    """Named with the floor that it really leads to; nothing of looking for that is reported."""
    torch.manual_seed(0)
    model, x = programs.Stack(1, 32, 2), torch.randn(1, 128, 32)
    optpass.reset_report()
    error = _refused(steps, model, x, 1000, attention=mode)
    report = optpass.report()
    assert len(report.graphs) == 1 and report.options["memory_budget"] == 1000
    fused = _refused(steps, model, x, 1000, attention="always")
    named = [one for one in error.helps if one.startswith("attention = 'always'")]
    assert bool(named) is (fused.floor_bytes < error.floor_bytes)
    assert not any("attention" in one for one in fused.helps)
    assert named or mode == "auto"


@pytest.mark.slow
def test_the_floor_beside_gradients_of_earlier_micro_batches(steps, programs):
    """The first micro-batch finds no gradients; those that follow do, and hold the floor that was named for them."""
    torch.manual_seed(0)
    model, x = steps.WithLoss(programs.Stack(2, 32, 2)), torch.randn(4, 32, 32)

    def accumulated(call, inputs):
        for _ in range(3):
            call(*inputs).backward()

    with pytest.raises(optpass.BudgetInfeasibleError) as caught:
        steps.run(model, [x], 1000, measure=False)
    (named,) = re.findall(r"or [0-9.]+ [KM]iB \((\d+) bytes\) beside gradients", str(caught.value))
    assert int(named) > caught.value.floor_bytes and "named before" not in str(caught.value)
    ran = steps.run(model, [x], int(named), step=accumulated)
    assert ran.peak <= int(named) <= 1.01 * ran.peak
    with pytest.raises(optpass.BudgetInfeasibleError):
        steps.run(model, [x], int(0.99 * int(named)), step=accumulated)


def test_a_floor_that_is_named_before_the_loss_ran_says_so(steps):
    assert "named before the loss outside of the graph ran" in str(
        _refused(steps, torch.nn.Linear(32, 32), torch.randn(4, 32), 1000)
    )


def test_what_was_refused_is_let_go():
    """A program that tries a smaller batch then has room for it."""
    model, x = torch.nn.Linear(32, 32), torch.randn(64, 32)
    compiled = torch.compile(model, backend="optpass", options={"inner": "aot_eager", "memory_budget": 1000})
    with pytest.raises(optpass.BudgetInfeasibleError):
        compiled(x)
    held = [weakref.ref(x.untyped_storage()), weakref.ref(model.weight)]
    del model, compiled, x
    torch._dynamo.reset()
    gc.collect()
    assert [one() for one in held] == [None, None]


class Broken(torch.nn.Module):
    """Graphs of which each trains a part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (torch.nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).sin()
        torch._dynamo.graph_break()
        x = self.second(x).sin()
        torch._dynamo.graph_break()
        return self.third(x).sin().mean()


def test_a_first_graph_names_what_those_that_follow_are_likely_to_need(programs):
    """It cannot know that they train anything, and named a floor that was refused graph after graph."""
    model, x = Broken(), torch.randn(32, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    step = torch.compile(model, backend="optpass", options={"inner": "aot_eager", "memory_budget": 1000})
    with pytest.raises(optpass.BudgetInfeasibleError) as caught:
        step(x)
    (likely,) = map(
        int, re.findall(r"and likely [^(]*\((\d+) bytes\) where graphs that follow train", str(caught.value))
    )
    trained = sum(p.nbytes for p in model.parameters())
    assert caught.value.floor_bytes < 4 * trained <= likely <= 4 * trained + 6 * x.nbytes
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "memory_budget": int(1.03 * likely)}
    step = torch.compile(model, backend="optpass", options=options)
    for _ in range(4):
        step(x).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_whole_graph_names_one_floor(programs):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    step = torch.compile(model, backend="optpass", options={"inner": "aot_eager", "memory_budget": 1000})
    with pytest.raises(optpass.BudgetInfeasibleError) as caught:
        step(torch.randn(32, 64))
    assert "likely" not in str(caught.value) and optimizer
