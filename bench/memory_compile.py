"""What a memory budget costs while compiling: processor seconds of one cold compile, and of the planning alone.

Both run in a fresh process each (`isolate`). Verdicts are `memory_judge`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from optpass.bench import memory_ways
from optpass.bench.clocks import cpu_seconds

INDUCTOR, BUDGETED, AT_FLOOR = "inductor", "optpass, half-way to the floor", "optpass at its floor"
#: Part of the way from the floor to the unconstrained peak at which planning is measured.
_HALF = 0.5


def sample(
    model: str, size: str, overrides: Mapping[str, Any], inner: str, budget: int | None, seed: int
) -> dict[str, float]:
    """One cold compile and first step: processor seconds, the C++ compiler's included.

    Args:
        budget: bytes, everything counted; None for plain Inductor (or aot_eager), without optpass.
    """
    import torch

    from optpass import models

    torch.manual_seed(seed)
    options: dict[str, Any] | None = None if budget is None else {"inner": inner, "optimizer": "none"}
    backend = "optpass" if budget is not None else inner if inner == "inductor" else "aot_eager_decomp_partition"
    _first_use(backend, options)
    if options is not None:
        options["memory_budget"] = budget
    module, inputs = models.build(model, size, **dict(overrides))
    module.train()
    compiled = torch.compile(memory_ways.step_loss, backend=backend, options=options)  # as the curves' budgets mean it
    own, children = cpu_seconds()
    torch.autograd.backward(compiled(module, *inputs))
    own_after, children_after = cpu_seconds()
    return {"seconds": own_after - own + children_after - children}


def _first_use(backend: str, options: dict[str, Any] | None) -> None:
    """Compile something tiny, so that what is paid once in a process has been paid."""
    import torch

    def tiny(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x, -1).sin() + 1

    x = torch.randn(3, 3, requires_grad=True)
    torch.autograd.backward(torch.compile(tiny, backend=backend, options=options)(x).sum())


def planning(layers: int, seed: int) -> dict[str, float]:
    """Planning for a stack of so many layers: nodes of its joint graph, and processor seconds of the partitioner.

    The graphs are run as they stand, so that Inductor's own work, which `sample` counts, is no part of the figure; nor
    is the default partitioner's, which every compile without a budget does too (`default_s`).
    """
    import torch

    import optpass
    from optpass import models

    torch.manual_seed(seed)
    module, inputs = models.build("gpt", "tiny", layers=layers, targets=True, dropout=0.0)
    module.train()
    found: dict[str, float] = {}
    options: dict[str, Any] = {"inner": "aot_eager", "optimizer": "none", "memory_budget": 1 << 50}

    def once() -> None:
        torch.compiler.reset()
        optpass.reset_report()
        compiled = torch.compile(module, backend="optpass", options=options, fullgraph=True)
        torch.autograd.backward(models.loss(compiled(*inputs)))
        module.zero_grad(set_to_none=True)

    once()
    report = optpass.report()
    cost = next(s.cost for s in report.sites() + report.declined() if s.kind == "memory budget")
    low, high = cost["floor_bytes"], cost["unconstrained_bytes"]
    options["memory_budget"] = int(low + _HALF * (high - low))
    with _timed(found):
        once()
    return found


@contextlib.contextmanager
def _timed(found: dict[str, float]) -> Iterator[None]:
    """Inside, what the partitioner takes is written down."""
    from optpass.backend import compat
    from optpass.backend.memory.partition.partitioner import BudgetPartitioner

    default, whole = compat.min_cut_partition, BudgetPartitioner.__call__

    def timed_default(*args: Any, **kwargs: Any) -> Any:
        start = sum(cpu_seconds())
        try:
            return default(*args, **kwargs)
        finally:
            found["default_s"] = found.get("default_s", 0.0) + sum(cpu_seconds()) - start

    def timed(partitioner: Any, joint: Any, *args: Any, **kwargs: Any) -> Any:
        start = sum(cpu_seconds())
        found["nodes"] = float(len(joint.graph.nodes))
        try:
            return whole(partitioner, joint, *args, **kwargs)
        finally:
            found["seconds"] = sum(cpu_seconds()) - start - found.get("default_s", 0.0)

    with (
        mock.patch.object(compat, "min_cut_partition", timed_default),
        mock.patch.object(BudgetPartitioner, "__call__", timed),
    ):
        yield
