"""Which compiled graphs with a memory budget run in a step, what each holds, and what else is held beside it.

A run begins with a graph's forward and ends with its backward, or when autograd lets go of it: an output that nobody
differentiates is dropped some time. What the runs of a step need together is seen here while the first steps run; the
plans that follow from it are made in `allot`. Nothing here changes what is computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from optpass.backend.compat import memory_autograd as autograd
from optpass.backend.compat.memory_backward import Held, held_by_nodes, untraced, watch_backwards
from optpass.backend.memory.eager.caller import held_in_call
from optpass.backend.memory.eager.held import held_upstream
from optpass.backend.memory.eager.inside import temporaries_of
from optpass.backend.memory.seen.eager_ahead import EagerAhead
from optpass.backend.memory.seen.expected import shapes_of
from optpass.backend.memory.seen.in_parts import Asked, graded_at, note_staying
from optpass.backend.memory.seen.late import NOTHING, Clearing
from optpass.backend.memory.seen.leaves import Leaf
from optpass.backend.memory.seen.look import LOOKS, LOOKS_ALONE, LOOKS_AT_NAMES, beside, note, note_names, others_of
from optpass.backend.memory.seen.now import Now
from optpass.backend.memory.seen.parameters import parameters_of
from optpass.backend.memory.seen.run import Run, largest_own, leaves_of, note_held, own_storages
from optpass.backend.memory.seen.stores import Stores
from optpass.backend.memory.seen.ungraded import ahead_of, note_stepping
from optpass.backend.memory.seen.updated import Updated
from optpass.backend.memory.seen.watch import Watch
from optpass.errors import BudgetInfeasibleError


class Steps(Now):
    """The runs of this process.

    Args:
        settle: told the leaves of a whole step when one has been seen and the next begins, and others that ran before.
    """

    def __init__(self, settle: Callable[[list[Leaf], list[Leaf]], None]) -> None:
        super().__init__()
        self._settle, self._gone = settle, 0
        self.begun = 0  #: steps
        self._asked: weakref.WeakSet[Callable[[], int]] = weakref.WeakSet()
        self._known: dict[int, Held] = {}
        self._eager_ahead = EagerAhead(self._chains.leaves, self._lock)

    def forget(self) -> None:
        """The step that is under way has failed: what it holds, in frames of an error, is no part of another one."""
        with self._lock:
            self._stop()
            self._chains.forget()

    def _stop(self) -> None:
        self._live.clear()
        self._sweep()  # nobody looks at backwards any more
        self._eager_ahead.step()
        self._lent.begin()
        self._after_backward = True

    def _go_back(self, step: Sequence[Leaf]) -> None:
        """The step that was to begin does not fit: whoever begins it again is told again."""
        with self._lock:
            self._stop()
            self._chains.go_back()
            for leaf in step:
                leaf.news = True

    # ---- what happens -------------------------------------------------------------------------------------------

    def enter(
        self, origin: object, gradients: bool, updated: Updated, clearing: Clearing = NOTHING,
        trained: Sequence[torch.Tensor] = (), args: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        """A graph is called with `args`, these `trained` parameters among them, when gradients of them are there
        or not, or are cleared late; `updated` is of it, and so is `clearing`."""
        with self._lock:
            self._sweep()
            eager = self._eager_ahead.step()
            self._gone = sum(run.released_outputs() for run in self._live)
            if self._live and not self._after_backward:
                return
            self._after_backward = False
            self._lent.step(eager)
            if self._chains.waits:
                return
            steps, old = self._chains.steps_of(origin), self._chains.returned_beside(args).bytes()
            if left := self._lent.left():
                left.drop(Stores(a for a in args if isinstance(a, torch.Tensor)))
                for leaf in steps[0] if steps else ():
                    leaf.note_lent(left)
            fresh = any(leaf.news or leaf.graded is not None for step in steps for leaf in step)
            earlier = self._chains.earlier_parts() if fresh else []
            self._chains.begin(origin)
            self.begun += 1
        updated.look(next(iter(steps), []))
        for i, step in enumerate(steps):
            around = [leaf for leaf in earlier if leaf not in step]
            for leaf in step:
                mine = leaf.origin is origin
                leaf.note_stepped()
                if mine and leaf.is_new_to(trained):
                    leaf.news |= leaf.know(trained)
                note_staying(leaf, [*step, *around], clearing, {id(p) for p in trained} if mine else None)
                serves = leaf.gradients == gradients or not any(
                    other.origin is origin and other.gradients == gradients for other in step
                )
                leaf.note_old(old if mine and serves else 0)
            # Earlier ones are of other micro-batches, which are there in this one, too.
            grown = [leaf.note_inputs() for leaf in step if i]
            if any(grown) or any(leaf.news for leaf in step):
                for leaf in step:
                    leaf.news = False
                try:
                    self._settle(step, around)
                except BudgetInfeasibleError:
                    self._go_back(step)
                    raise

    def leave(self, leaf: Leaf, args: Sequence[Any], result: Any) -> bool:
        """A leaf's forward has run; whether there is a backward to it."""
        if (node := autograd.compiled_node(result)) is None:
            return False
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        parameters = [args[i] for i in leaf.parameters]
        with self._lock:
            self._sweep()
            self._eager_ahead.forget()
            leaf.note_old((old := self._chains.returned_beside(args)).bytes())
            if not self._live:
                self._chains.note_parameters(parameters)
            given, made = Stores(tensors), Stores(t for t in tree_leaves(result) if isinstance(t, torch.Tensor))
            leaf.inputs.prune()
            of_modules = {*leaf.parameters, *leaf.module_tensors}
            leaf.inputs.add(a for i, a in enumerate(args) if isinstance(a, torch.Tensor) and i not in of_modules)
            looked_at = self._looks_at(leaf, parameters)
            saved, leaves = held_upstream(tensors) if looked_at else ([], [])
            released = largest_own(kept := autograd.saved_now(node), made, given)
            run = Run(
                leaf, weakref.ref(node), released, given, made, Stores(saved),
                [weakref.ref(p) for p in parameters], leaves_of(tensors, parameters),
                shapes_of(args, leaf.parameters) if looked_at else (), looked_at, self._gone, made=made.sizes(),
            )  # fmt: skip
            if run.looked_at:
                trained = {id(p): p for p in (*parameters, *parameters_of(self._chains.under_way()))}.values()
                run.watch(old, Stores([p.grad for p in trained if p.grad is not None]))
            if looked_at:
                leaf.know([*parameters, *leaves])
                leaf.note_ran_of(parameters)
                leaf.inputs.add(held_in_call((t.device for t in tensors), parameters, 2))  # noise that a loss reads
                leaf.inputs_seen = max(leaf.inputs_seen, leaf.inputs.bytes())
                leaf.returned_seen = max(leaf.returned_seen, self._chains.returned_in_step().bytes())
                leaf.buffers.add(args[i] for i in leaf.module_tensors)
            if not leaf.runs:
                leaf.again = autograd.is_checkpointed()
                note_held(leaf, own_storages(kept, made, given), made, given, self._live)
                for before in self._chains.leaves():
                    before.note_trained(leaf.trained())
                    leaf.note_trained(before.trained())
            leaf.runs += 1
            for other in self._live:
                other.leaves += run.leaves
            self._live.append(run)
            self._chains.count(leaf)
            if run.looked_at and self._unwatch is None:
                self._unwatch = watch_backwards(self._begins)
        begins = self._backward if run.looked_at else self._names
        if run.looked_at or leaf.runs <= LOOKS_AT_NAMES:  # a hook is not to stay
            node.register_prehook(untraced(lambda *_: begins(run)))
        elif released is None:  # else nobody would tell when it is over
            node.register_prehook(untraced(lambda *_: self._backward(run)))
        return True

    def _looks_at(self, leaf: Leaf, parameters: Sequence[torch.Tensor]) -> bool:
        if leaf.is_new_to(parameters):
            return True
        beside = leaf.situations.get(others_of(self._live))
        # Micro-batches that the caller holds are all there in each of their steps, and are known when they have run.
        more = leaf.inputs.bytes() > leaf.inputs_seen or self._chains.returned_in_step().bytes() > leaf.returned_seen
        more |= leaf.looks_again
        if more or beside is None or beside.times >= LOOKS:
            return more or beside is None
        others = self._live or any(other.origin is not leaf.origin for other in self._chains.under_way())
        return beside.times < LOOKS_ALONE or bool(others) or beside.expected > 0 or beside.repeated > 0

    def lend(self, args: Sequence[Any], result: Any, needs: Callable[[], int] | None = None) -> None:
        """A graph has run without gradients: what the caller holds of it is there in the step, too.

        Args:
            args, result: of the call.
            needs: bytes that it needed beside what it was given.
        """
        with self._lock:
            self._lent.add(args)
            if needs is not None:
                self._sweep()
                run = self._live[-1] if self._live else None
                if run is None:
                    self._lent.run_ahead(ahead_of(self._chains.leaves(), args, result, needs))
                    self._eager_ahead.graph_ran(needs, (args, result))
                if run is None and needs not in self._asked:
                    self._asked.add(needs)
                    note_stepping(self._chains.leaves(), args, needs)
                if run is not None and run.looked_at:
                    around = self._lent.stores, self._chains.returned_in_step(), self._chains.under_way()
                    there = beside(run, None, [], self._live, *around)
                    gone = there.gone + run.released_outputs()
                    run.ungraded(there.gradients + there.other - gone, needs(), result)
            self._lent.add(result)

    def _begins(self, roots: list[Any]) -> None:
        """A backward is about to begin."""
        with self._lock:
            self._collect()
            nodes = [n for n in autograd.walk(roots, lambda _: False) if not autograd.is_compiled(n)]
            elsewhere, outermost = Stores(), autograd.running_backward() is None
            if outermost:
                self._known.clear()
                for run in self._live:
                    run.let_go_before = len(run.let_go)
                    elsewhere.update(run.inputs)
                    elsewhere.update(run.outputs)
                elsewhere.add(parameters_of(self._chains.under_way()))
                elsewhere.add(leaf for node in nodes if (leaf := autograd.leaf_of(node)) is not None)
                self._watch.end()
                self._watch = Watch(elsewhere)
            self._known.update(held_by_nodes(nodes))
            if outermost:
                elsewhere.update(self._lent.stores)
                for run in self._live:
                    run.note_saved(self._known, elsewhere)
            self._watch.follow(
                nodes, self._known, lambda node: temporaries_of(node, self._known.get(autograd.order(node)))
            )

    def _backward(self, run: Run) -> None:
        """A run's backward is about to begin."""
        running = autograd.running_backward()
        run.leaf.clears.begin_backward()
        with self._lock:
            self._sweep()
            self._after_backward = True
            self._lent.begin()
            run.begin_backward(keeps=running is not None and running.keeps)
            if run.looked_at:
                step, old = self._chains.under_way(), self._chains.returned_in_step()
                note(run, running, self._live, self._watch, self._known, self._lent, old, step)
                run.leaf.latest().note_others(self._chains.leaves(), step)
                run.leaf.latest().asked = Asked.at(run)
                run.leaf.latest().graded = graded_at(run, running, self._chains.leaves())
            self._chains.note_returned(run.outputs.with_those_of(run.results), run.inputs)
            self._sweep()

    def _names(self, run: Run) -> None:
        """The same, beside whose like it was looked before."""
        if run.released is not None:
            run.leaf.clears.begin_backward()
        with self._lock:
            around = autograd.running_backward(), self._live, self._lent
            note_names(run, *around, self._chains.returned(), self._chains.under_way())
        if run.released is None:  # nothing else tells when it is over
            self._backward(run)
