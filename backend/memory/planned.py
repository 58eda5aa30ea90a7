"""A compiled graph under a memory budget, with a plan for each case in which it is called."""

from __future__ import annotations

import gc
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from optpass.backend.compat.memory_autograd import is_in_backward, packs_what_is_saved
from optpass.backend.compat.memory_calls import LOOP
from optpass.backend.memory.eager.timeline import Shapes
from optpass.backend.memory.filing import grown
from optpass.backend.memory.idle import idle_of
from optpass.backend.memory.partition.carrier import Carrier
from optpass.backend.memory.partition.growth import Growth
from optpass.backend.memory.partition.partitioner import BudgetPartitioner
from optpass.backend.memory.seen.expected import Expected, resize, shapes_of, share_at
from optpass.backend.memory.seen.late import Clearing, Late
from optpass.backend.memory.seen.leaves import Leaf
from optpass.backend.memory.seen.share import Share
from optpass.backend.memory.seen.stores import Stores
from optpass.backend.memory.seen.updated import Updated
from optpass.backend.memory.step import StepTensors, has_gradients
from optpass.backend.memory.together.together import STEPS
from optpass.backend.memory.versions import Versions
from optpass.errors import BudgetInfeasibleError
from optpass.options import Options
from optpass.passes.memory.search.search import Search
from optpass.reporting import store

BESIDE_ITSELF = "planned to hold least, since runs of the same graph wait for their backward and more may follow"
FIRST_STEP = (
    "memory budget: a graph runs again before its backward, and such runs do not fit together; those that "
    "follow hold less, and the first step may need more than the budget"
)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Case:
    """What a plan is for.

    Attributes:
        gradients: gradients of earlier micro-batches are there when the step begins.
        share: what the graph may use, where its steps have been seen.
        origin: the same for all plans of one graph.
        before: whose place the new plan takes.
        like: another plan of the graph, behind which a loss was seen that is this one's too.
        shapes: of what it is called with, where `like` was seen at other sizes.
        crowded: as in `Expected`.
        late: of the same graph, too.
        modules: that are called, weakly, since who compiles another case does not see them.
    """

    gradients: bool
    share: Share | None = None
    origin: object = field(default_factory=object)
    before: Leaf | None = None
    like: Leaf | None = None
    shapes: Shapes | None = None
    crowded: bool = False
    late: Late = field(default_factory=Late)
    modules: tuple[weakref.ref[nn.Module], ...] = ()

    @property
    def is_new(self) -> bool:
        """Whether nothing is known of the graph's steps."""
        return self.share is None and self.before is None and self.like is None and not self.crowded

    def called(self) -> list[nn.Module]:
        """The modules that are called, as far as they are alive."""
        return [module for reference in self.modules if (module := reference()) is not None]

    def share_of(self, tensors: StepTensors, example_inputs: Sequence[Any]) -> Share | None:
        """What the graph may use where it is compiled with these: sizes may have changed since its steps were seen."""
        if self.share is None or self.before is None:
            return self.share
        return share_at(self.share, self.before, shapes_of(example_inputs, [i for i, _ in tensors.parameters]))

    def expected(self) -> Expected:
        """What is known of what will be around the graph."""
        found = Expected.of(self.like, self.shapes)
        if self.like is not None:
            found = replace(found, parameters=tuple(STEPS.parameters_with(self.like.origin)))
        return replace(found, notes=(*found.notes, BESIDE_ITSELF), crowded=self.crowded) if self.crowded else found


class Planned:
    """A compiled graph, and others of the same graph that are compiled when another case first occurs.

    Args:
        compiled: compiled for `case`.
        again: compiles for another one.
        tensors: the graph's, as it was compiled.
        partitioner: of `compiled`.
        options: of the compile.
        superseded: told whether another plan has taken the place of this one.
        dynamic: sizes that may change from call to call, as `Growth` takes them.
        needs: bytes that the graph needs beside what it is given where it has no backward; None where it has one.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        case: Case,
        again: Callable[..., Callable[..., Any]],
        tensors: StepTensors,
        partitioner: BudgetPartitioner,
        options: Options,
        superseded: Callable[[bool], None],
        dynamic: Sequence[tuple[int, Any, int]] = (),
        needs: Callable[[], int] | None = None,
    ) -> None:
        self._case, self._again, self._superseded = case, again, superseded
        self._leaf = Leaf(
            partitioner, case.origin, options, tuple(i for i, _ in tensors.parameters),
            tuple(weakref.ref(p) for _, p in tensors.parameters), tensors.module_tensors,
            gradients=case.gradients, clears=case.late,
        )  # fmt: skip
        if case.before is not None:
            self._leaf.succeed(case.before)
        elif case.like is not None and case.shapes is None:
            self._leaf.learn(case.like)
        self._leaf.know(tensors.shards)
        STEPS.traced()
        self._leaf.inputs.update(tensors.unread)
        self._leaf.buffers.update(tensors.unread_of_modules)
        self._leaf.elsewhere = self._leaf.elsewhere.with_those_of(tensors.elsewhere)
        if case.before is None and not partitioner.follows:
            idle = idle_of(tensors.idle, tensors.parameters, partitioner.ungraded, ())
            self._leaf.idle = tuple(weakref.ref(p) for p in idle)
        self._trained = [i for i, p in tensors.parameters if p.requires_grad]
        self._compiled: Callable[..., Any] | None = compiled
        self._growth = Growth(dynamic, partitioner.sizes) if dynamic else None
        self._grown = 0  #: bytes that it needs at most at larger sizes that it was called with
        self._others: dict[tuple[bool, bool], Callable[..., Any]] = {}
        self._served: Callable[..., Any] | None = None  #: what served the last forward
        self._lock = threading.Lock()
        self._needs, self._updated = needs, Updated()
        self._versions = Versions()
        #: What served until now, and its plans, while another plan that nothing depends on is compiled.
        self._before: tuple[Callable[..., Any], Search | None, Carrier | None] | None = None
        self._stood: int | None = None  #: the step in which it runs as it stands
        self._over = False  #: steps begin with gradients there, so that it serves none any more

    @staticmethod
    def first_case(tensors: StepTensors, example_inputs: Sequence[Any], modules: Iterable[nn.Module] = ()) -> Case:
        """That of a graph that Dynamo hands over: of the same parameters there may have been one, for other sizes."""
        parameters = [p for _, p in tensors.parameters]
        shapes = shapes_of(example_inputs, [i for i, _ in tensors.parameters])
        like = STEPS.alike(parameters, shapes)
        late, graded = Late() if like is None else like.clears, has_gradients(tensors)
        if like is not None and graded and late.are_expected([p for p in parameters if p.requires_grad]):
            graded = False
            like.note_late(Stores(p.grad for p in parameters if p.grad is not None).bytes())
        return Case(
            graded, like=like, shapes=None if like is None else shapes, late=late,
            modules=tuple(weakref.ref(module) for module in modules),
        )  # fmt: skip

    def __call__(self, *args: Any) -> Any:
        compiled = self._compiled
        if not torch.is_grad_enabled():
            result = (compiled or self._others[self._case.gradients, False])(*args)
            STEPS.lend(args, result, self._needs)
            return result
        if is_in_backward():  # a checkpoint runs its forward again, which must meet the plan that it met before
            return self._run(self._served or compiled, args)
        trained, origin = [args[i] for i in self._trained], self._case.origin
        with self._case.late.call(trained, lambda: STEPS.parameters_with(origin)) as clearing:
            beside = self._case.gradients or not clearing.bytes
            graded = beside and any(p.grad is not None for p in trained)
            return self._step(compiled, args, graded, clearing)

    def _step(
        self, compiled: Callable[..., Any] | None, args: Sequence[Any], gradients: bool, clearing: Clearing
    ) -> Any:
        trained = [args[i] for i in self._trained]
        STEPS.enter(self._case.origin, gradients, self._updated, clearing, trained, args)
        self._note_step(gradients, args)
        larger = self._growth is not None and self._outgrows(self._growth.at(args), args)
        mine = gradients == self._case.gradients and not larger
        planned_anew = self._leaf.share is not None or self._has_stood() or self._is_crowded()
        if mine and compiled is not None and not planned_anew:
            self._served = compiled
        else:
            self._served = self._other(gradients, larger, mine, args)
        try:
            return self._run(self._served, args)
        except BudgetInfeasibleError:
            if not self._goes_back(gradients, larger):
                raise
        finally:
            self._before = None
        gc.collect()  # frames of the compile that failed hold the tensors of this call, and each other
        return self._run(self._served, args)

    def _note_step(self, gradients: bool, args: Sequence[Any]) -> None:
        """Where an optimizer has stepped and gradients are there (`zero_grad(set_to_none=False)`), a plan for a step
        that begins without any was that of the first step."""
        before, now = self._versions.note([args[i] for i in self._trained])
        over = self._over if before == now else gradients
        if not self._case.gradients and over != self._over and self._compiled is not None:
            self._over = over
            self._superseded(over)

    def _run(self, serving: Callable[..., Any] | None, args: Sequence[Any]) -> Any:
        serving = serving or self._others[self._case.gradients, False]
        result = serving(*args)
        own = serving is self._compiled  # the others see to their runs themselves
        if own and not STEPS.leave(self._leaf, args, result) and self._needs is not None:
            STEPS.lend(args, result, self._needs)
        return result

    def _has_stood(self) -> bool:
        """Whether it ran as it stands, and that step is over."""
        if not self._leaf.partitioner.as_it_stands:
            return False
        self._stood = STEPS.begun if self._stood is None else self._stood
        return self._stood != STEPS.begun

    def _is_crowded(self) -> bool:
        """Whether the first step calls the graph again before its backward, and one more run of the same plan does not
        fit beside those that wait; of several that wait, as many more, unless its caller names the calls: a loop is
        likely to go on. Not inside of an activation checkpoint, which keeps nothing of a run, and whose backward must
        meet the plan that its forward met."""
        leaf, budget = self._leaf, self._leaf.partitioner.budget
        if leaf.seen or leaf.situations or self._case.crowded or packs_what_is_saved():
            return False
        waiting = sum(other.origin is leaf.origin for other in STEPS.waiting())
        if not waiting:
            return False
        outcome = leaf.partitioner.outcome
        if outcome.replayed is not None:
            peak = budget.statics.total + outcome.replayed.peak_bytes
        elif outcome.plan is not None:
            peak = outcome.plan.predicted_peak_bytes
        else:
            return False
        others = STEPS.held()[0] - budget.statics.activations
        more = 0 if 0 < budget.to_come < LOOP else (waiting - 1) * leaf.held
        return peak + others + more > budget.bytes

    def _outgrows(self, growth: float, args: Sequence[Any]) -> bool:
        """Whether the plan may not fit where tensors are so many times as large as it was made for, or where the loss
        needs more."""
        plan, budget = self._leaf.partitioner.outcome.plan, self._leaf.partitioner.budget
        if growth <= 1.0:
            return False
        line = self._leaf.loss.timeline
        if line is not None and line.backward():
            sizes = resize(self._leaf, shapes_of(args, self._leaf.parameters))
            growth = max(growth, line.backward(sizes) / line.backward())
        if plan is None or math.isinf(growth):  # the caches answered: what it needs is not known
            return True
        statics = budget.statics
        fixed = statics.parameters + statics.gradients + statics.optimizer + statics.buffers
        needed = int(fixed + growth * (plan.predicted_peak_bytes - fixed))
        if self._grown < needed <= budget.bytes:
            self._grown = needed
            grown(self._leaf.partitioner, needed)
        return needed > budget.bytes

    def _other(self, gradients: bool, larger: bool, mine: bool, args: Sequence[Any]) -> Callable[..., Any]:
        """What serves the case, compiled when it is first asked for."""
        with self._lock:
            if mine and self._compiled is not None:  # its plan is out of date
                now = self._leaf.partitioner
                if self._leaf.share is not None and self._leaf.share.optional:
                    self._before = self._compiled, now.search, now.carrier
                self._superseded(True)
                self._compiled = None
                now.search = now.carrier = None
            if (gradients, larger) not in self._others:
                leaf = self._leaf if mine else None
                share = self._leaf.share if mine else None
                shapes = shapes_of(args, self._leaf.parameters) if larger else None
                crowded = mine and share is None and not self._has_stood()
                if crowded:
                    _warn_of_first_step()
                case = replace(
                    self._case, gradients=gradients, share=share, before=leaf, like=self._leaf.latest(), shapes=shapes,
                    crowded=crowded,
                )  # fmt: skip
                self._others[gradients, larger] = self._again(case=case)
            return self._others[gradients, larger]

    def _goes_back(self, gradients: bool, larger: bool) -> bool:
        """A plan that was to use the budget better cannot be had: the one before serves on, where there is one."""
        with self._lock:
            if self._before is None:
                return False
            del self._others[gradients, larger]
            now = self._leaf.partitioner
            self._compiled, now.search, now.carrier = self._before
            self._leaf.share, self._served = None, self._compiled
            self._superseded(False)
        return True


def _warn_of_first_step() -> None:
    log.warning("%s", FIRST_STEP)
    store.current().warn(FIRST_STEP)
