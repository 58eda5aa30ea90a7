"""Training steps under a budget, run and measured: what the tests of the memory budget share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import optpass
from optpass.backend.memory.measure import measure_peak, storage_bytes
from optpass.errors import BudgetInfeasibleError

#: A budget that nothing reaches.
PLENTY = 10**11

Step = Callable[[Callable[..., Any], Sequence[Any]], Any]


def loss_of(out: Any) -> torch.Tensor:
    """A scalar of every floating tensor in `out`; the scalars alone where there are any."""
    found = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    scalars = [t for t in found if t.dim() == 0]
    terms = scalars or [t.float().pow(2).mean() for t in found]
    return sum(terms[1:], start=terms[0])


class WithLoss(nn.Module):
    """A model whose output is its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> torch.Tensor:
        return loss_of(self.model(*args))


def plain_step(call: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Forward and backward; the loss is in the model."""
    out = call(*inputs)
    out.backward()
    return None


@dataclass
class Ran:
    """One step that was run: what it left behind, and what it needed.

    Attributes:
        result: what the step returned.
        gradients, buffers: by name, after the step.
        rng: state of the generator after the step.
        peak: bytes measured in a second run of the step, everything counted.
        budget: bytes it was given; None for `PLENTY`.
        records: what the report says of each graph.
        recomputed: sites of recomputed tensors.
        largest: bytes of the largest of them.
    """

    result: Any
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    rng: torch.Tensor
    peak: int
    budget: int
    records: list[dict[str, float]] = field(default_factory=list)
    recomputed: int = 0
    largest: int = 0

    def figure(self, name: str) -> int:
        """The largest of the graphs' figures of that name."""
        return int(max(record[name] for record in self.records))

    @property
    def error(self) -> float:
        """Relative error of the predicted peak."""
        return abs(self.figure("predicted_peak_bytes") - self.peak) / self.peak

    @property
    def used(self) -> float:
        """The part of the budget that the step needs."""
        return self.peak / self.budget


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal to the bit: tensors, and containers of them."""
    pairs = [torch.utils._pytree.tree_flatten(v) for v in (left, right)]
    if pairs[0][1] != pairs[1][1]:
        return False
    return all(_same_leaf(a, b) for a, b in zip(pairs[0][0], pairs[1][0], strict=True))


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
    return bool(a == b)


def equal(left: Ran, right: Ran) -> bool:
    """Whether two runs gave the same bits everywhere."""
    return (
        same(left.result, right.result) and same(left.gradients, right.gradients)
        and same(left.buffers, right.buffers) and torch.equal(left.rng, right.rng)
    )  # fmt: skip


def run(
    model: nn.Module,
    inputs: Sequence[Any],
    budget: int = PLENTY,
    *,
    step: Step = plain_step,
    inner: str = "aot_eager",
    settings: dict[str, Any] | None = None,
    measure: bool = True,
    **compile_settings: Any,
) -> Ran:
    """Compile `model` with a budget and run `step` once for its results and once for its peak.

    The model and its inputs are left as they were found, but for what mutates the inputs.
    """
    torch._dynamo.reset()
    optpass.reset_report()
    options = {"inner": inner, "optimizer": "none", "strict": True, "memory_budget": budget, **(settings or {})}
    call = torch.compile(model, backend="optpass", options=options, **compile_settings)
    before = copy.deepcopy(model.state_dict())
    given = [t.detach().clone() if isinstance(t, torch.Tensor) else t for t in inputs]

    def restore() -> None:
        model.load_state_dict(before)
        model.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(inputs, given, strict=True):
                if isinstance(mine, torch.Tensor):
                    mine.copy_(theirs)
                    mine.grad = None

    model.zero_grad()
    torch.manual_seed(7)
    result = step(call, inputs)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    gradients |= {f"input {i}": t.grad.clone() for i, t in enumerate(inputs) if _has_gradient(t)}
    ran = Ran(result, gradients, {n: b.clone() for n, b in model.named_buffers()}, torch.get_rng_state(), 0, budget)
    restore()
    if measure:
        torch.manual_seed(7)
        above = measure_peak(lambda: step(call, inputs)).bytes_above_start
        tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
        ran.peak = storage_bytes([*model.parameters(), *model.buffers(), *tensors]) + above
        restore()
    report = optpass.report()
    sites = [*report.sites(), *report.declined()]
    ran.records = [site.cost for site in sites if site.kind == "memory budget"]
    again = [int(site.cost["bytes"]) for site in sites if site.kind == "recompute"]
    ran.recomputed, ran.largest = len(again), max(again, default=0)
    return ran


def measured(program: Callable[..., Any], budget: int, steps: int = 3) -> tuple[int, list[Any], float, int]:
    """Peak of the last step, everything counted, what the steps returned, and what the report predicts."""
    torch._dynamo.reset()
    optpass.reset_report()
    torch.manual_seed(0)
    options = {"inner": "aot_eager", "optimizer": "none", "strict": True, "memory_budget": budget}
    step, models, tensors = program(lambda model: torch.compile(model, backend="optpass", options=options))
    results = [step() for _ in range(steps - 1)]
    held = storage_bytes([*(p for m in models for p in m.parameters()), *tensors])
    box = []
    peak = held + measure_peak(lambda: box.append(step())).bytes_above_start
    results += box
    report = optpass.report()
    said = [site.cost for site in (*report.sites(), *report.declined()) if site.kind == "memory budget"]
    return peak, results, max(cost["predicted_peak_bytes"] for cost in said), held


def smallest(trained: Callable[[int], tuple[Any, ...]]) -> tuple[Any, ...]:
    """The smallest budget that `trained` does not refuse, and what it returns of it."""
    budget = 1000
    for _ in range(8):
        try:
            return budget, *trained(budget)
        except BudgetInfeasibleError as error:
            assert error.floor_bytes > budget
            budget = error.floor_bytes
    raise AssertionError("refused again and again")


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_leaf and value.grad is not None


def budgets(unconstrained: Ran, shares: Sequence[float]) -> Iterator[int]:
    """Budgets between the floor (0) and the unconstrained peak (1)."""
    floor, top = unconstrained.figure("floor_bytes"), unconstrained.figure("unconstrained_bytes")
    for share in shares:
        yield int(floor + share * (top - floor))
