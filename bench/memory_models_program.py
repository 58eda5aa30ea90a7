"""The training program that a cell of `memory_models` runs, made anew for each budget, and what a step of it gives.

Nothing here chooses budgets or knows a claim.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from optpass.bench.memory_ways import compiled_anew, step_loss

if TYPE_CHECKING:
    import numpy as np

#: A gradient that is smaller than this part of the largest is compared with that part: some are nothing but rounding.
ROUNDING = 1e-3


def forward(module: Any, *inputs: Any) -> Any:
    """What is compiled where the loss is outside of the graph."""
    return module(*inputs)


@dataclass
class Seen:
    """What one step gave: numbers as numpy has them, so that no tensor of it is there in the next step.

    Attributes:
        planned: figures of the report when the forward of the last micro-batch had been compiled.
    """

    values: list[float] = field(default_factory=list)
    gradients: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    rng: bytes = b""
    planned: dict[str, Any] = field(default_factory=dict)


@dataclass
class Program:
    """A training program, made anew for each budget."""

    model: str
    size: str
    overrides: dict[str, Any]
    outside: bool
    micro: int
    optimizer_name: str
    seed: int
    module: Any = None
    inputs: Any = None
    labels: Any = None
    optimizer: Any = None
    call: Any = None

    def start(self, inner: str, budget: int | None) -> None:
        """Build the model and compile the step with a budget; None for none."""
        import torch

        import optpass
        from optpass import models

        torch.compiler.reset()
        optpass.reset_report()
        self.module = self.inputs = self.labels = self.optimizer = self.call = None
        gc.collect()
        torch.manual_seed(self.seed)
        module, inputs = models.build(self.model, self.size, **self.overrides)
        self.module, self.inputs = module.train(), inputs
        if self.outside and self.overrides.get("targets"):
            self.inputs, self.labels = inputs[:-1], inputs[-1]
        if self.optimizer_name == "adamw":
            self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
        options: dict[str, Any] = {"inner": inner}
        if budget is not None:
            options |= {"memory_budget": budget, "optimizer": self.optimizer_name, "strict": True}
        self.call = compiled_anew(forward if self.outside else step_loss, "optpass", options)

    def step(self, seen: Seen | None = None) -> None:
        """One training step; without an optimizer the gradients stay, for `clear`."""
        for _ in range(self.micro):
            self._micro_batch(seen)
        if seen is not None:
            named = self.module.named_parameters()
            seen.gradients = {n: p.grad.double().numpy().copy() for n, p in named if p.grad is not None}
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def _micro_batch(self, seen: Seen | None) -> None:
        output = self.call(self.module, *self.inputs)
        if seen is not None:
            seen.planned = planned()
        loss = self._loss(output)
        if self.micro > 1:
            loss = loss / self.micro
        loss.backward()
        if seen is not None:
            seen.values.append(loss.item())

    def _loss(self, output: Any) -> Any:
        from torch.nn import functional as F

        from optpass import models

        if not self.outside:
            return output
        if self.labels is not None:
            return F.cross_entropy(output.view(-1, output.size(-1)), self.labels.view(-1))
        return models.loss(output)

    def clear(self) -> None:
        """Let go of the gradients."""
        self.module.zero_grad(set_to_none=True)

    def seeded(self) -> Seen:
        """One step from the seed, with what it gives."""
        import torch

        seen = Seen()
        torch.manual_seed(self.seed + 1)
        self.step(seen)
        seen.rng = torch.get_rng_state().numpy().tobytes()
        self.clear()
        return seen

    def again(self) -> Seen:
        """The same with the parameters as they were at the start."""
        import torch

        from optpass import models

        torch.manual_seed(self.seed)
        fresh, _ = models.build(self.model, self.size, **self.overrides)
        state = fresh.state_dict()
        del fresh
        self.module.load_state_dict(state)
        del state
        return self.seeded()

    def peak(self) -> int:
        """Bytes of a step, everything counted, that has been compiled before."""
        from optpass.backend.memory.measure import step_peak

        measured = step_peak(self.module, self.step, self.optimizer, [self.inputs, self.labels])
        self.clear()
        return measured.total


def planned() -> dict[str, Any]:
    """What the report says of the plans in force: the largest of each figure, and how many plans there have been."""
    import optpass

    report = optpass.report()
    sites = [site for site in (*report.sites(), *report.declined()) if site.kind.startswith("memory budget")]
    in_force = [site for site in sites if site.kind == "memory budget"]
    if not in_force:
        return {"plans": 0}
    return {
        "plans": len(sites),
        "predicted": int(max(site.cost["predicted_peak_bytes"] for site in in_force)),
        "slowdown": max(site.cost["predicted_slowdown"] for site in in_force),
        "gap": any("the next plan, which recomputes less, needs" in site.reason for site in in_force),
    }


def difference(reference: Seen, own: Seen) -> float:
    """Largest relative error of a loss or of a gradient, as a norm; 0.0 if both are equal to the bit."""
    import numpy as np

    if reference.gradients.keys() != own.gradients.keys():
        return float("inf")
    norms = {name: float(np.linalg.norm(value)) for name, value in reference.gradients.items()}
    least = ROUNDING * max(norms.values(), default=0.0)
    errors = []
    for name, value in reference.gradients.items():
        distance = float(np.linalg.norm(value - own.gradients[name]))
        errors.append(distance / max(norms[name], least, 1e-30))
    errors += [abs(a - b) / max(abs(a), 1e-30) for a, b in zip(reference.values, own.values, strict=True)]
    return float("inf") if any(error != error for error in errors) else max(errors)
