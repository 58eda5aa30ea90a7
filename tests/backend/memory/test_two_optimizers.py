"""Steps in parts, each with a backward and an optimizer of its own: generators and critics, actors and critics."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

import optpass
from optpass.backend.memory.measure import measure_peak, storage_bytes

ROWS, WIDTH = 256, 64


def network(out=WIDTH, layers=3):
    hidden = [layer for _ in range(layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, out))


def judged(scores, real):
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


class Pair:
    """Two networks and what trains them; `step` is one step of a program."""

    def __init__(self, second_out=1):
        self.first, self.second = network(), network(second_out)
        self.of_first = torch.optim.Adam(self.first.parameters())
        self.of_second = torch.optim.Adam(self.second.parameters())
        self.batch = torch.randn(ROWS, WIDTH)

    def compile(self, build):
        self.generate, self.judge = build(self.first), build(self.second)
        return self

    def parameters(self):
        return [*self.first.parameters(), *self.second.parameters()]


class ClearedBeforeEach(Pair):
    """The generator runs before either is cleared; its gradients stay while the critic is trained."""

    def step(self):
        fake = self.generate(torch.randn(ROWS, WIDTH))
        self.of_second.zero_grad()
        loss = judged(self.judge(self.batch), True) + judged(self.judge(fake.detach()), False)
        loss.backward()
        self.of_second.step()
        self.of_first.zero_grad()
        judged(self.judge(fake), True).backward()
        self.of_first.step()


class Normalized(ClearedBeforeEach):
    """A graph of the critic that is compiled again is given less than before: it reads its vectors as they are now."""

    def __init__(self):
        super().__init__()
        for layer in (layer for layer in self.second if isinstance(layer, nn.Linear)):
            spectral_norm(layer)
        self.of_second = torch.optim.Adam(self.second.parameters())


class InThreeBackwards(Pair):
    def step(self):
        self.second.zero_grad()
        judged(self.judge(self.batch), True).backward()
        fake = self.generate(torch.randn(ROWS, WIDTH))
        judged(self.judge(fake.detach()), False).backward()
        self.of_second.step()
        self.first.zero_grad()
        judged(self.judge(fake), True).backward()
        self.of_first.step()


class CriticTwice(Pair):
    """The critic is trained twice for each time that the generator is, whose first runs have no backward."""

    def step(self):
        for _ in range(2):
            self.of_second.zero_grad()
            fake = self.generate(torch.randn(ROWS, WIDTH)).detach()
            (self.judge(fake).mean() - self.judge(self.batch).mean()).backward()
            self.of_second.step()
        self.of_first.zero_grad()
        (-self.judge(self.generate(torch.randn(ROWS, WIDTH))).mean()).backward()
        self.of_first.step()


class InMethods(Pair):
    def step(self):
        self.train_second()
        self.train_first()

    def train_second(self):
        self.of_second.zero_grad()
        with torch.no_grad():
            fake = self.generate(torch.randn(ROWS, WIDTH))
        (judged(self.judge(self.batch), True) + judged(self.judge(fake), False)).backward()
        self.of_second.step()

    def train_first(self):
        self.of_first.zero_grad()
        judged(self.judge(self.generate(torch.randn(ROWS, WIDTH))), True).backward()
        self.of_first.step()


class CriticFrozen(Pair):
    def step(self):
        fake = self.generate(self.batch)
        self.second.requires_grad_(False)
        self.of_first.zero_grad()
        judged(self.judge(fake), True).backward()
        self.of_first.step()
        self.second.requires_grad_(True)
        self.of_second.zero_grad()
        (judged(self.judge(self.batch), True) + judged(self.judge(fake.detach()), False)).backward()
        self.of_second.step()


class Matched(Pair):
    """Features of what is real are wanted as values: that run of the critic waits for a backward that never comes."""

    def __init__(self):
        super().__init__(WIDTH)

    def step(self):
        fake = self.generate(torch.randn(ROWS, WIDTH))
        self.of_second.zero_grad()
        (judged(self.judge(self.batch), True) + judged(self.judge(fake.detach()), False)).backward()
        self.of_second.step()
        self.of_first.zero_grad()
        real, made = self.judge(self.batch), self.judge(fake)
        (judged(made, True) + F.l1_loss(made, real.detach())).backward()
        self.of_first.step()


class Alike(Pair):
    """Two networks of one shape, which share a graph, one trained behind the other."""

    def __init__(self):
        super().__init__(WIDTH)

    def step(self):
        for call, optimizer in ((self.generate, self.of_first), (self.judge, self.of_second)):
            loss = call(self.batch).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


PROGRAMS = (ClearedBeforeEach, Normalized, InThreeBackwards, CriticTwice, InMethods, CriticFrozen, Matched, Alike)


def trained(kind, budget, steps=3):
    """The peak of so many steps from the first on, and the parameters then."""
    torch._dynamo.reset()
    optpass.reset_report()
    torch.manual_seed(0)
    options = {"inner": "aot_eager", "memory_budget": budget}
    program = kind().compile(lambda f: torch.compile(f, backend="optpass", options=options))
    found = measure_peak(lambda: [program.step() for _ in range(steps)])
    peak = storage_bytes([*program.parameters(), program.batch]) + found.bytes_above_start
    return peak, [p.detach().clone() for p in program.parameters()]


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_budget_holds_from_the_first_step_on(kind, steps):
    top, reference = trained(kind, 10**9)
    floor, peak, parameters = steps.smallest(partial(trained, kind))
    assert peak <= floor < top
    assert all(map(torch.equal, parameters, reference))
    budget = (floor + top) // 2
    peak, parameters = trained(kind, budget)
    assert 0.9 * budget <= peak <= budget
    assert all(map(torch.equal, parameters, reference))
