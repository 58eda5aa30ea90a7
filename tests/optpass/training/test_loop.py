"""The loop: its schedule, its events, and that a step depends on nothing but the seed and its number."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from optpass.training.config import TrainingConfig
from optpass.training.data import Batches
from optpass.training.errors import TrainError
from optpass.training.loop import (
    StepEvent,
    learning_rate,
    loss_of,
    make_optimizer,
    steady_seconds,
    train_steps,
    validation_loss,
)


class Bigram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 32)
        self.bias = nn.Parameter(torch.zeros(32))
        self.dropout = nn.Dropout(0.2)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.dropout(self.table(idx)) + self.bias
        return logits, F.cross_entropy(logits.view(-1, 32), targets.view(-1))


def config(**values: object) -> TrainingConfig:
    base = {"steps": 4, "warmup": 1, "micro_batch": 2, "sequence": 8, "learning_rate": 0.01}
    return TrainingConfig.model_validate({**base, **values})


def source(config: TrainingConfig) -> Batches:
    tokens = torch.randint(32, (500,), generator=torch.Generator().manual_seed(3))
    return Batches(
        tokens, sequence=config.sequence, batch=config.micro_batch, holdout=0.1, seed=config.seed, device="cpu"
    )


def losses(model: nn.Module, config: TrainingConfig) -> list[float]:
    return [event.loss for event in train_steps(loss_of(model), model, source(config), config)]


def test_schedule_rises_then_falls_to_a_tenth() -> None:
    settings = config(steps=101, warmup=10, learning_rate=1.0)
    rates = [learning_rate(settings, step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55)  # halfway down the cosine
    assert rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_schedule_of_a_run_shorter_than_its_warmup_only_rises() -> None:
    assert [learning_rate(config(steps=2, warmup=4, learning_rate=1.0), step) for step in range(2)] == [0.25, 0.5]
    assert learning_rate(config(steps=1, warmup=0, learning_rate=1.0), 0) == 1.0


def test_vectors_are_not_decayed() -> None:
    model = Bigram()
    decayed, plain = make_optimizer(model, config(weight_decay=0.3)).param_groups
    assert [p is model.table.weight for p in decayed["params"]] == [True] and decayed["weight_decay"] == 0.3
    assert [p is model.bias for p in plain["params"]] == [True] and plain["weight_decay"] == 0.0


def test_a_step_is_the_same_whatever_the_random_state_was() -> None:
    model = Bigram()
    first = losses(copy.deepcopy(model), config())
    torch.manual_seed(12345)
    torch.rand(7)
    assert losses(copy.deepcopy(model), config()) == first
    assert losses(copy.deepcopy(model), config(seed=1)) != first


def test_accumulation_is_the_mean_of_its_micro_batches() -> None:
    """Against the gradient of all micro-batches in one, in float64 and without dropout."""
    settings = config(steps=1, accumulation=3, optimizer="sgd", grad_clip=0.0, weight_decay=0.0, warmup=0)
    model = Bigram().double()
    model.dropout.p = 0.0
    whole = copy.deepcopy(model)
    batches = source(settings)
    event = next(train_steps(loss_of(model), model, batches, settings))
    parts = [batches.train(0, micro) for micro in range(3)]
    _, loss = whole(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))
    loss.backward()
    assert event.loss == pytest.approx(loss.item(), rel=1e-6)
    assert event.lr == 0.01
    for stepped, before in zip(model.parameters(), whole.parameters(), strict=True):
        assert before.grad is not None
        torch.testing.assert_close(stepped, before - 0.01 * before.grad, rtol=1e-12, atol=1e-12)


def test_the_gradient_is_clipped() -> None:
    settings = config(steps=1, optimizer="sgd", grad_clip=1e-3, weight_decay=0.0, warmup=0, learning_rate=1.0)
    model = Bigram()
    before = copy.deepcopy(model)
    list(train_steps(loss_of(model), model, source(settings), settings))
    moved = sum(
        float((a - b).detach().square().sum()) for a, b in zip(model.parameters(), before.parameters(), strict=True)
    )
    assert math.sqrt(moved) == pytest.approx(1e-3, rel=1e-3)


def test_bf16_runs_under_autocast_and_keeps_parameters() -> None:
    seen = []

    class Probe(Bigram):
        def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().forward(idx, targets)

    model = Probe()
    settings = config(precision="bf16", steps=1)
    losses(model, settings)
    validation_loss(model, source(settings).validation(1), settings)
    assert seen == [True, True] and model.table.weight.dtype == torch.float32


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    class Bad(Bigram):
        calls = 0

        def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            self.calls += 1
            logits, loss = super().forward(idx, targets)
            return logits, loss * (math.nan if self.calls == 3 else 1.0)

    model = Bad()
    events = []
    with pytest.raises(TrainError, match=r"loss is nan at step 3; lower learning_rate"):
        events.extend(train_steps(loss_of(model), model, source(config()), config()))
        pytest.fail("no error")
    assert model.calls == 3


def test_validation_is_the_mean_per_token_in_evaluation_mode() -> None:
    settings = config()
    model = Bigram().train()
    pairs = list(source(settings).validation(3))
    found = validation_loss(model, pairs, settings)
    model.eval().requires_grad_(False)
    each = torch.cat([F.cross_entropy(model(i, t)[0].view(-1, 32), t.view(-1), reduction="none") for i, t in pairs])
    assert found == pytest.approx(float(each.double().mean()), rel=1e-5)
    model.train()
    validation_loss(model, pairs, settings)
    assert model.training


def test_steady_time_leaves_out_the_first_steps() -> None:
    events = [StepEvent(i + 1, 0.0, seconds, 1.0, 0.1) for i, seconds in enumerate([40.0, 9.0, 8.0, 1.0, 3.0, 2.0])]
    assert steady_seconds(events) == 2.0
    assert steady_seconds(events[:3]) is None
