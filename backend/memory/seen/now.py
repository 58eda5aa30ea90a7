"""What runs of compiled graphs hold now, and what is known of the step that they are of: asked while plans are made."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from math import prod

import torch

from optpass.backend.memory.eager.timeline import Shapes
from optpass.backend.memory.replay.graph_values import ints
from optpass.backend.memory.seen.chains import Chains
from optpass.backend.memory.seen.expected import alike
from optpass.backend.memory.seen.leaves import Leaf
from optpass.backend.memory.seen.parameters import parameters_of
from optpass.backend.memory.seen.run import Run
from optpass.backend.memory.seen.stores import Stores
from optpass.backend.memory.seen.ungraded import Ahead, Lent
from optpass.backend.memory.seen.watch import Watch

#: Runs of a graph whose outputs are noted when these are over: others of the step may be looked at for a while.
NOTED = 24


class Now:
    """The runs of this process, as they are asked about."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._live: list[Run] = []
        self._chains = Chains()
        self._lent = Lent()
        self._after_backward, self._traced = True, False
        self._watch = Watch(Stores())
        self._unwatch: Callable[[], None] | None = None

    def held(self) -> tuple[int, Stores]:
        """Bytes that the runs hold which wait for their backward, and their outputs, which are part of it."""
        with self._lock:
            self._sweep()
            outputs = Stores()
            for run in self._live:
                outputs.update(run.outputs)
            return sum(run.leaf.held for run in self._live), outputs

    def lent(self) -> Stores:
        """What graphs without gradients have read and returned since the last backward, as a teacher's do."""
        with self._lock:
            return self._lent.lately()

    def kept(self) -> Stores:
        """As `Chains.collected`."""
        with self._lock:
            self._collect()
            return self._chains.collected()

    def ahead(self, inputs: Sequence[torch.Tensor]) -> list[Ahead]:
        """Graphs without gradients that ran just before the one that is given `inputs`, for the same step."""
        with self._lock:
            given, sizes = Stores(inputs), {prod(ints(t.shape)) for t in inputs}
            return [one for one in self._lent.about_to_step() if one.is_of_step(given, sizes, given)]

    def waiting(self) -> list[Leaf]:
        """The leaves of the runs that wait for their backward, one that runs several times as often."""
        with self._lock:
            self._sweep()
            return [run.leaf for run in self._live]

    def alike(self, parameters: Sequence[torch.Tensor], shapes: Shapes) -> Leaf | None:
        """A graph of the same parameters that was seen in a step lately, called with tensors of as many dimensions."""
        with self._lock:
            return alike(self._chains.leaves(), parameters, shapes)

    def parameters_with(self, origin: object) -> list[torch.Tensor]:
        """Parameters of the graphs that run in steps with one of `origin`."""
        with self._lock:
            return parameters_of(self._chains.step_with(origin))

    def earlier_parameters(self) -> list[torch.Tensor]:
        """Parameters of graphs that a program's first step has trained already: a critic's, when its generator is to be
        trained next."""
        with self._lock:
            return parameters_of(self._chains.earlier_parts())

    def earlier_tensors(self) -> Stores:
        """What those were given and have returned, as far as it is there."""
        with self._lock:
            found, leaves = Stores(), self._chains.earlier_parts()
            for leaf in leaves:
                found.update(leaf.inputs)
            found.update(self._chains.returned() if leaves else Stores())
            return found

    def waiting_parameters(self) -> list[torch.Tensor]:
        """Parameters of the runs that wait for their backward."""
        with self._lock:
            self._sweep()
            return [p for run in self._live for reference in run.parameters if (p := reference()) is not None]

    def traced(self) -> None:
        """A graph was compiled. What Dynamo has traced holds the tensors that it met, in cycles."""
        self._traced = True

    def _collect(self) -> None:
        if self._traced:  # else what earlier micro-batches returned counts as held, and is
            self._traced = False
            gc.collect()

    def _sweep(self) -> None:
        over = [run for run in self._live if run.is_over()]
        self._live = [run for run in self._live if run not in over]
        self._after_backward |= bool(over)
        for run in over:
            if run.leaf.runs <= NOTED:
                self._chains.note_returned(run.outputs, run.inputs)
        if self._unwatch is not None and not any(run.looked_at for run in self._live):
            self._unwatch()
            self._unwatch = None
            self._watch.end()
