"""What one graph's step holds beside what the graph makes: parameters, buffers, inputs, gradients, optimizer state.

Read from the tensors that Dynamo hands over with a graph, and from the live optimizers that hold its parameters. What
earlier graphs of the same step hold is counted too, where a model is compiled in several.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from optpass.backend import compat
from optpass.backend.memory.measure import storage_bytes
from optpass.backend.memory.partition import Budget, BudgetPartitioner
from optpass.options import Options
from optpass.passes.devices import DeviceSpec
from optpass.passes.memory import optimizers
from optpass.passes.memory.budget import budget_bytes
from optpass.passes.memory.optimizer_rehearsal import sizes_of
from optpass.passes.memory.optimizer_search import find_optimizer
from optpass.passes.memory.plan import Ledger
from optpass.reporting import store

log = logging.getLogger(__name__)


@dataclass
class _Pending:
    """Graphs whose forward has run in this step and whose backward has not."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    items: list[tuple[BudgetPartitioner, tuple[torch.Tensor, ...]]] = field(default_factory=list)

    def held(self) -> int:
        """Bytes that they hold: saved tensors, and outputs that the caller has."""
        with self.lock:
            plans = [p.outcome.plan for p, _ in self.items]
        return sum(sum(t.bytes for t in plan.saved) + plan.outputs_bytes for plan in plans if plan is not None)

    def add(self, partitioner: BudgetPartitioner, parameters: tuple[torch.Tensor, ...]) -> None:
        """A graph's forward has run."""
        with self.lock:
            self.items.append((partitioner, parameters))

    def parameters(self) -> list[torch.Tensor]:
        """Their parameters."""
        with self.lock:
            return [p for _, parameters in self.items for p in parameters]

    def clear(self, *_: Any) -> None:
        """A backward runs."""
        with self.lock:
            self.items.clear()


PENDING = _Pending()


@dataclass(frozen=True)
class StepTensors:
    """The tensors that a graph is given, by what they are.

    Attributes:
        parameters: with their positions among the inputs; only those that are trained can get gradients.
        buffers, inputs: everything else.
    """

    parameters: tuple[tuple[int, torch.Tensor], ...]
    buffers: tuple[torch.Tensor, ...]
    inputs: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, gm: fx.GraphModule, values: Sequence[Any]) -> StepTensors:
        """Those of a Dynamo graph and the values it is compiled with."""
        parameters: list[tuple[int, torch.Tensor]] = []
        buffers: list[torch.Tensor] = []
        inputs: list[torch.Tensor] = []
        nodes = gm.graph.find_nodes(op="placeholder")
        for position, (node, value) in enumerate(zip(nodes, values, strict=False)):
            if isinstance(value, nn.Parameter):
                parameters.append((position, value))
            elif isinstance(value, torch.Tensor):
                (inputs if compat.module_attribute(node) is None else buffers).append(value)
        held = [getattr(gm, str(n.target), None) for n in gm.graph.find_nodes(op="get_attr")]
        buffers += [value for value in held if isinstance(value, torch.Tensor)]
        return cls(tuple(parameters), tuple(buffers), tuple(inputs))

    @property
    def trained(self) -> list[torch.Tensor]:
        """Parameters that need a gradient."""
        return [p for _, p in self.parameters if p.requires_grad]


def budget_of(
    options: Options, device: Callable[[], DeviceSpec], tensors: StepTensors, *, more_follow: bool, gradients: bool
) -> Budget | None:
    """What the graph may use; None where no budget is asked for.

    Args:
        options: resolved options.
        device: finds the device's spec.
        tensors: the graph's.
        more_follow: the graph ends in a graph break.
        gradients: gradients of earlier micro-batches are there when the step begins.

    Raises:
        ConfigError: a budget or an optimizer that cannot be used as given.
    """
    if options.budget is None:
        return None
    total = budget_bytes(options, device())
    assert total is not None
    notes: list[str] = []
    found = find_optimizer(tensors.trained) if options.optimizer is None else None
    if options.optimizer is not None:
        name = optimizers.check(options) or "none"
        gpu = any(p.device.type != "cpu" for p in tensors.trained)
        cost = optimizers.cost(name, sizes_of(tensors.trained), gpu=gpu, where=options.where("optimizer"))
        state, step = cost.state_bytes, cost.step_bytes
    elif found is not None:
        name, state, step = found.name, found.state_bytes, found.step_bytes
        notes += [f"optimizer found: {name}", *found.notes]
    else:
        name, state, step = "none", 0, 0
        notes.append("no optimizer was found that holds the parameters: none is counted; name it with `optimizer`")
    before = PENDING.parameters()
    others = find_optimizer(tensors.trained) if found is None else found
    known = () if others is None else others.parameters
    everything = _distinct([*(p for _, p in tensors.parameters), *before, *known])
    trained = [p for p in everything if p.requires_grad]
    # Backwards run in the reverse order: the gradients of graphs that come after this one are there, those of graphs
    # that came before it are not.
    settled = {id(p) for p in (*tensors.trained, *before)}
    elsewhere = [p for p in trained if id(p) not in settled]
    outside = PENDING.held()
    size = storage_bytes(trained)
    statics = Ledger(
        parameters=storage_bytes(everything),
        gradients=size if gradients else storage_bytes(elsewhere),
        optimizer=state,
        buffers=storage_bytes(tensors.buffers),
        inputs=storage_bytes(tensors.inputs),
        activations=outside,
    )
    at_optimizer = statics.total - statics.gradients - outside + size + step
    return Budget(
        bytes=total,
        statics=statics,
        at_optimizer=at_optimizer,
        optimizer=name,
        trained_itemsize=max((p.element_size() for p in trained), default=4),
        shared=more_follow,
        where=f"{options.where('memory_budget')}={options.memory_budget!r}",
        notes=tuple(notes),
    )


def _distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(t): t for t in tensors}.values())


class Accumulating:
    """A compiled graph with a plan for each case: no gradients yet when the step begins, or those of earlier
    micro-batches.

    Args:
        compiled: compiled for the case at hand.
        gradients: that case: whether there were gradients.
        other: compiles for the other one; called once, when it first occurs.
        tensors: the graph's, as it was compiled.
        partitioner: of `compiled`.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        gradients: bool,
        other: Callable[[bool], Callable[..., Any]],
        tensors: StepTensors,
        partitioner: BudgetPartitioner,
    ) -> None:
        self._compiled = {gradients: compiled}
        self._other, self._partitioner = other, partitioner
        self._positions = [i for i, p in tensors.parameters if p.requires_grad]
        self._lock = threading.Lock()
        self._calls = 0  #: until the first backward
        self._settled = False

    def __call__(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return next(iter(self._compiled.values()))(*args)
        gradients = any(args[i].grad is not None for i in self._positions)
        function = self._compiled.get(gradients)
        if function is None:
            with self._lock:
                function = self._compiled.get(gradients) or self._other(gradients)
                self._compiled[gradients] = function
        result = function(*args)
        if not self._settled:
            self._watch(result, args)
        return result

    def _watch(self, result: Any, args: Sequence[Any]) -> None:
        """Until a first backward has run, graphs that are compiled after this one count what this one holds."""
        outputs = [r for r in torch.utils._pytree.tree_leaves(result) if isinstance(r, torch.Tensor)]
        node = next((r.grad_fn for r in outputs if r.grad_fn is not None), None)
        if node is None:
            return
        self._calls += 1
        PENDING.add(self._partitioner, tuple(args[i] for i in self._positions))
        node.register_prehook(self._backward)  # type: ignore[no-untyped-call, unused-ignore]
        if self._calls == 2:
            text = (
                "a graph with a memory budget runs several times in one step (blocks compiled one by one?): what each "
                "run keeps adds up, and the budget holds for one run; compile the whole model"
            )
            log.warning("%s", text)
            store.current().warn(text)

    def _backward(self, *_: Any) -> None:
        self._settled = True
        PENDING.clear()


def has_gradients(tensors: StepTensors) -> bool:
    """Whether any parameter has a gradient already."""
    return any(p.grad is not None for p in tensors.trained)
