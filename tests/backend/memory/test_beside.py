"""A budget in steps whose eager part decides the peak: what loss, engine and caller hold beside the compiled graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import optpass
from optpass.backend.memory.together.together import STEPS

ROWS, WIDTH = 128, 32


def network(inputs=WIDTH, outputs=WIDTH, layers=5):
    """Layers with an activation between them."""
    found = [nn.Linear(inputs, WIDTH)]
    for i in range(layers - 1):
        found += [nn.GELU(), nn.Linear(WIDTH, outputs if i == layers - 2 else WIDTH)]
    return nn.Sequential(*found)


def adversarial(call):
    """Two models and two losses; one model runs three times, twice in one backward, where its gradients wait."""
    made, judge = network(8), network(outputs=1)
    make, judged = call(made), call(judge)
    real, noise = torch.randn(ROWS, WIDTH), torch.randn(ROWS, 8)

    def step():
        fake = make(noise)
        (F.softplus(-judged(real)).mean() + F.softplus(judged(fake.detach())).mean()).backward()
        judge.zero_grad()
        F.softplus(-judged(fake)).mean().backward()
        found = [p.grad for p in (*made.parameters(), *judge.parameters())]
        made.zero_grad()
        judge.zero_grad()
        return found

    return step, (made, judge), (real, noise)


def taught(call, model=None):
    """A target of the loss, which is no input of the graph, and a result in a storage as large as the outputs."""
    model = model or network()
    compiled, given, target = call(model), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)

    def step():
        F.mse_loss(compiled(given), target).backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    return step, (model,), (given, target)


def squashed(call):
    """Outputs that the graph has saved for its own backward, and nobody else holds then."""
    return taught(call, nn.Sequential(network(), nn.Sigmoid()))


def lost(call):
    """Outputs that only the loss holds, and a loss that is a graph of its own."""
    model = network(outputs=96)
    compiled, loss = call(model), call(lambda out, of: F.cross_entropy(out, of))
    given, target = torch.randn(ROWS, WIDTH), torch.randint(0, 96, (ROWS,))

    def step():
        loss(compiled(given), target).backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    return step, (model,), (given, target)


def distilled(call):
    """A target that is computed from another model's output, and that the loss alone holds."""
    model, teacher = network(), network().requires_grad_(False)
    compiled, taught = call(model), call(teacher)
    given = torch.randn(ROWS, WIDTH)

    def step():
        with torch.no_grad():
            wanted = taught(given)
        F.kl_div(F.log_softmax(compiled(given), -1), F.softmax(wanted / 2, -1), reduction="sum").backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    return step, (model, teacher), (given,)


class Labelled(nn.Module):
    """Scores, and the loss of them, as models with labels return both."""

    def __init__(self):
        super().__init__()
        self.body, self.head = network(layers=16), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, given, classes):
        scores = self.head(self.body(given))
        return {"loss": F.cross_entropy(scores, classes), "scores": scores}


def labelled(call):
    """Of what a graph returns the caller keeps the loss, a small part."""
    model = Labelled()
    compiled, given, classes = call(model), torch.randn(ROWS, WIDTH), torch.arange(ROWS) % (2 * WIDTH)

    def step():
        loss = compiled(given, classes)["loss"]
        loss.backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    return step, (model,), (given, classes)


def contrasted(call):
    """A matrix that the caller holds while two graphs run backward, and that is read transposed."""
    models, given = (network(), network(layers=3)), torch.randn(2, ROWS, WIDTH)
    calls = [call(model) for model in models]

    def step():
        one, other = (F.normalize(run(x), dim=-1) for run, x in zip(calls, given, strict=True))
        alike = 5.0 * one @ other.t()
        classes = torch.arange(ROWS)
        (F.cross_entropy(alike, classes) + F.cross_entropy(alike.t(), classes)).backward()
        found = [p.grad for model in models for p in model.parameters()]
        for model in models:
            model.zero_grad()
        return found

    return step, models, (given,)


def handed_back(call):
    """An input that is an output, too."""
    model, given = network(), torch.randn(ROWS, WIDTH)
    compiled = call(lambda x: (model(x).square().mean(), x, x.view(-1)))

    def step():
        held = compiled(given)
        held[0].backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    return step, (model,), (given,)


def whole(call):
    """A step that is compiled with its backward, which Dynamo breaks at and runs."""
    model, given = network(), torch.randn(ROWS, WIDTH)

    def both(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    compiled = call(both)

    def step():
        found = [compiled(given), *(p.grad for p in model.parameters())]
        model.zero_grad()
        return found

    return step, (model,), (given,)


def headed(call):
    """A part of the model that is not compiled, whose gradients and activations are the loss's."""
    model, head = network(), nn.Sequential(nn.Linear(WIDTH, 160), nn.GELU(), nn.Dropout(0.1), nn.Linear(160, 10))
    compiled, given, classes = call(model), torch.randn(ROWS, WIDTH), torch.randint(0, 10, (ROWS,))

    def step():
        F.cross_entropy(head(compiled(given)), classes).backward()
        found = [p.grad for p in (*model.parameters(), *head.parameters())]
        model.zero_grad()
        head.zero_grad()
        return found

    return step, (model, head), (given, classes)


def summed(call):
    """Two calls, each with a loss of its own, in one backward."""
    model, given = network(), torch.randn(2, ROWS, WIDTH)
    compiled = call(model)

    def step():
        (compiled(given[0]).square().mean() + compiled(given[1]).abs().mean()).backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    return step, (model,), (given,)


def compared(call):
    """Three calls that a loss compares, with gradients that share their storage."""
    model, given = network(), torch.randn(3, ROWS, WIDTH)
    compiled = call(model)

    def step():
        F.triplet_margin_loss(*(compiled(part) for part in given)).backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    return step, (model,), (given,)


def unrolled(call):
    """Calls that go on from what the one before returned; the caller holds what the last returned."""

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.of_input, self.of_state = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x, state):
            states = []
            for part in x.unbind(1):
                state = torch.tanh(self.of_input(part) + self.of_state(state))
                states.append(state)
            return torch.stack(states, 1), state

    model, given, first = Cell(), torch.randn(ROWS, 9, WIDTH), torch.zeros(ROWS, WIDTH)
    compiled = call(model)

    def step():
        state, loss = first, 0
        for part in given.chunk(3, 1):
            out, state = compiled(part, state)
            loss = loss + out.square().mean()
        loss.backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    return step, (model,), (given, first)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        adversarial, taught, squashed, lost, distilled, labelled, contrasted, handed_back, whole, headed, summed,
        compared, unrolled,
    ],
)  # fmt: skip
def test_what_is_held_beside_the_graphs_is_counted(program, steps):
    peak, results, predicted, held = steps.measured(program, 10**10)
    assert abs(predicted - peak) <= 0.005 * peak
    budget = int(held + (0.9 if program is unrolled else 0.8) * (peak - held))  # its smallest peak is 0.85
    less, same, _, _ = steps.measured(program, budget)
    assert less <= budget
    for mine, theirs in zip(results, same, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_states_of_generators_are_held_until_their_backward(steps):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(lambda y: F.dropout(F.gelu(y) * y.sigmoid(), 0.2), layer(x), use_reentrant=False)
            return x.square().mean()

    ran = steps.run(Checkpointed(), [torch.randn(ROWS, WIDTH)])
    assert ran.error <= 0.001


def test_a_step_that_failed_is_no_part_of_the_next():
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = network(), network()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    options = {"inner": "aot_eager", "optimizer": "none", "memory_budget": 100_000}
    torch._dynamo.reset()
    with pytest.raises(optpass.BudgetInfeasibleError) as error:
        torch.compile(Broken(), backend="optpass", options=options)(torch.randn(ROWS, WIDTH))
    assert error.value.floor_bytes > 100_000
    assert STEPS.held()[0] == 0  # the error holds the frames, and they what the first graph has saved
