"""What Dynamo gives up on never gets to the backend: with a budget, that is said."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import optpass

BUDGET = {"inner": "aot_eager", "memory_budget": "1GiB"}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.rnn(x)[0])
        return out


class Encoder(nn.Module):
    """A break, and a graph on each side of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        torch._dynamo.graph_break()
        return y * 2


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "eager" in r.getMessage()]
    assert [text for text in optpass.report().warnings if "runs in eager" in text] == said
    return said


def run(model: nn.Module, calls: int = 2, **settings: Any) -> None:
    call = torch.compile(model, backend="optpass", **settings)
    for _ in range(calls):
        call(torch.randn(2, 3, 8)).sum().backward()


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    run(Recurrent(), options=BUDGET)
    (said,) = warnings(caplog)
    line = Recurrent.forward.__code__.co_firstlineno
    assert said.startswith("memory budget: Recurrent.forward (") and f"test_uncompiled.py:{line})" in said
    assert "LSTM" in said


def test_what_follows_a_break_in_a_container_of_torchs_is_eager(caplog: pytest.LogCaptureFixture) -> None:
    """Such as a batch norm that averages over all batches, whose momentum is read of a tensor."""
    run(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(3, momentum=None), nn.Linear(8, 8)), options=BUDGET)
    (said,) = warnings(caplog)
    assert said.startswith("memory budget: Sequential.forward (") and "behind a graph break" in said


def test_and_where_the_budget_is_the_environments(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTPASS_MEMORY_BUDGET", "1GiB")
    run(Recurrent(), options={"inner": "aot_eager"})
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (Recurrent, {"options": {"inner": "aot_eager"}}),
        (Encoder, {"options": BUDGET}),  # two graphs, both planned
    ],
)
def test_there_is_nothing_to_say(model: type[nn.Module], settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    run(model(), **settings)
    assert not warnings(caplog)


def test_a_budget_that_is_none_is_not_taken_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    run(Recurrent(), options=BUDGET | {"memory_budget": "20GX"})
    assert len(warnings(caplog)) == 1


def test_what_is_raised_is_not_said_again(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported):
        run(Recurrent(), fullgraph=True, options=BUDGET)
    assert not warnings(caplog)


def test_nor_is_a_budget_that_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(optpass.BudgetInfeasibleError):
        run(Encoder(), options=BUDGET | {"memory_budget": 10})
    assert not warnings(caplog)


def test_a_function_that_was_compiled_too_often(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    call = torch.compile(model, backend="optpass", options=BUDGET, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in range(2, 6):
            call(torch.randn(rows, 8)).sum().backward()
    assert len(warnings(caplog)) == 1


def test_a_backward_of_compiled_autograd(capfd):
    """Its graph is given a list, and is not replayed for what it needs."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    x = torch.randn(4, 16)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(step, backend="optpass", options=BUDGET)
        for _ in range(3):
            model.zero_grad()
            compiled(x)
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    step(x)
    for a, b in zip(ours, (p.grad for p in model.parameters()), strict=True):
        torch.testing.assert_close(a, b)
    assert "Traceback" not in capfd.readouterr().err
    assert not [text for text in optpass.report().warnings if "is not counted" in text]
