"""What is known of a compiled graph with a memory budget from the steps in which it ran, and of the storages around it.

When these are seen is `runs`' to say, and what follows from them `together`'s.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from optpass.backend.memory.eager.part import EagerLoss
from optpass.backend.memory.eager.timeline import AS_SEEN, Resize, Shapes
from optpass.backend.memory.partition.partitioner import BudgetPartitioner
from optpass.backend.memory.replay.tail import Tail
from optpass.backend.memory.seen.in_parts import Asked, Graded
from optpass.backend.memory.seen.late import Late
from optpass.backend.memory.seen.leaving import Leaving
from optpass.backend.memory.seen.parameters import alive, lying_gradients, parameters_of
from optpass.backend.memory.seen.share import Share
from optpass.backend.memory.seen.situation import Beside
from optpass.backend.memory.seen.stores import Stores
from optpass.backend.memory.versions import ALIKE, first_trained
from optpass.options import Options
from optpass.passes.wrappers import nbytes_of


@dataclass(eq=False)
class Leaf:
    """One compiled graph with one plan.

    Attributes:
        partitioner: what decided the plan.
        origin: the same for all plans of one graph.
        options: of its compile.
        parameters, module_tensors: positions among its arguments: of parameters, and of other tensors of modules.
        own: its parameters, in that order.
        gradients: it serves steps that begin with gradients there.
        clears: when the program clears them, as other plans of the graph, and for other sizes, have seen it.
        buffers: the latter, of all calls looked at.
        elsewhere: frozen models that are there beside it, and what the program changes by hand from step to step.
        lent: what graphs had read and returned without gradients in its step, which the situations count.
        lent_by_step: of these, parameters that turned out to be of its step, which counts them.
        inputs: what it and other plans of the same graph were given, and the targets of their losses.
        inputs_seen: bytes of these that were there when it was looked at, at most.
        inputs_there: the same in its backward, with the targets that were found until then.
        returned_seen: bytes of what earlier runs of its step had returned that were there then, at most.
        lent_bytes: bytes of what graphs without gradients had read and returned that were there then, at most;
            `looks_again` where more are there since.
        idle: parameters of its modules, weakly, that get no gradient in its step, unless another graph makes one.
        ran_of: a parameter of each module that it was looked at for, by identity.
        known: parameters that its runs were given or that eager code around them reads, weakly, by identity.
        situations: what was held beside it, by the other runs that waited for their backward.
        held: bytes that it holds from forward to backward, outputs included; the most seen.
        outputs: of these, bytes of its outputs.
        loss: what eager code does between its outputs and what is differentiated; nothing where graphs come between.
        again: a checkpoint runs it again in the backward; it holds nothing but its outputs until then.
        seen, seen_at: a backward was seen, so that `loss` and what is kept are known; shapes of what it was given then.
        beside: bytes that were there in its backward beside what it was given, where nothing else waited.
        given: of these and what it was given, bytes of what eager operators have not made.
        since_loss: as in the situations, at most.
        retained: most bytes that the loss needs in a backward that keeps the graph.
        keeps_outputs: most outputs were still held by the caller in its backward.
        kept_outputs: bytes of those that were, at most.
        lying: bytes of gradients of parameters that are frozen in its step, of what trained them before, at most.
        others: bytes of gradients that were there then of parameters not known to be of its step, by identity.
        ran_with: `origin` of all that were known to be of its step then.
        left: bytes of outputs, and of what was made of them, that the caller held then.
        left_gone: of these, bytes that are gone when an optimizer steps; `leaving` sees it, `left_known` once it has.
        asked: where a backward of it was asked for last, of those that were looked at.
        graded: gradients that were there in its backward, or made in it, until a step has begun that it serves.
        old: bytes of outputs of earlier runs that the caller still holds in its forward, at most.
        ahead: bytes, beside parameters, buffers and optimizer state, while a graph without gradients runs that comes
            before it in the step, such as a teacher.
        stepping: bytes that a compiled step of an optimizer takes which trains it; None where none was seen.
        keeps_graph: a backward was asked to keep what it has saved, for another one; None once that was said.
        runs: calls with gradients.
        share: what it may use from its next call on, where that has changed; `next` is what then took its place.
        generation: how many leaves it has taken the place of after they were seen in a step.
        news: something was seen since the plans were last looked at.
    """

    partitioner: BudgetPartitioner
    origin: object
    options: Options
    parameters: tuple[int, ...] = ()
    own: tuple[weakref.ref[torch.Tensor], ...] = ()
    module_tensors: tuple[int, ...] = ()
    gradients: bool = False
    clears: Late = field(default_factory=Late)
    buffers: Stores = field(default_factory=Stores)
    elsewhere: Stores = field(default_factory=Stores)
    lent: Stores = field(default_factory=Stores)
    lent_by_step: Stores = field(default_factory=Stores)
    inputs: Stores = field(default_factory=Stores)
    inputs_seen: int = 0
    inputs_there: int = 0
    returned_seen: int = 0
    lent_bytes: int = 0
    looks_again: bool = False
    idle: tuple[weakref.ref[torch.Tensor], ...] = ()
    ran_of: set[int] = field(default_factory=set)
    known: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    situations: dict[frozenset[tuple[Leaf, int]], Beside] = field(default_factory=dict)
    held: int = 0
    outputs: int = 0
    loss: EagerLoss = field(default_factory=EagerLoss)
    again: bool = False
    seen: bool = False
    seen_at: Shapes = ()
    beside: int = 0
    given: int = 0
    since_loss: int = 0
    keeps_outputs: bool = False
    kept_outputs: int = 0
    lying: int = 0
    others: dict[int, int] = field(default_factory=dict)
    ran_with: frozenset[object] = frozenset()
    left: int = 0
    left_gone: int = 0
    left_known: bool = False
    leaving: Leaving | None = None
    asked: Asked | None = None
    graded: Graded | None = None
    old: int = 0
    ahead: int = 0
    stepping: int | None = None
    keeps_graph: bool | None = False
    retained: int = 0
    runs: int = 0
    share: Share | None = None
    next: Leaf | None = None
    generation: int = 0
    news: bool = True

    @property
    def waits(self) -> bool:
        """Whether other runs were seen to wait for their backward beside it."""
        return any(others for others in self.situations)

    def know(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Parameters that take part in a step with this graph; whether any was not known."""
        before = len(self.known)
        for parameter in parameters:
            reference = self.known.get(id(parameter))
            if reference is None or reference() is not parameter:
                self.known[id(parameter)] = weakref.ref(parameter)
        return len(self.known) > before

    def is_new_to(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether it was not looked at when it ran for another module that is alike, of these."""
        first = first_trained(parameters)
        return first is not None and id(first) not in self.ran_of and len(self.ran_of) < ALIKE

    def note_ran_of(self, parameters: Iterable[torch.Tensor]) -> None:
        """It was looked at when it ran for a module, of these."""
        first = first_trained(parameters)
        self.ran_of.update(() if first is None else (id(first),))

    def trained(self) -> set[int]:
        """Identities of those of its parameters that it makes a gradient of."""
        idle = {id(p) for p in alive(self.idle)}
        return {id(p) for p in alive(self.own) if p.requires_grad and id(p) not in idle}

    def note_trained(self, parameters: Collection[int]) -> None:
        """Another graph, which may be of other steps, makes gradients of `parameters`."""
        kept = tuple(reference for reference in self.idle if id(reference()) not in parameters)
        if len(kept) < len(self.idle):
            self.idle, self.news = kept, True

    def succeed(self, leaf: Leaf) -> None:
        """Take the place of `leaf`, and take over what was seen of it."""
        leaf.next, self.generation = self, leaf.generation + bool(leaf.situations)
        self.situations, self.buffers, self.inputs_seen = dict(leaf.situations), leaf.buffers, leaf.inputs_seen
        self.inputs_there, self.idle, self.returned_seen = leaf.inputs_there, leaf.idle, leaf.returned_seen
        self.learn(leaf)

    def learn(self, leaf: Leaf) -> None:
        """Take over what was seen of the loss behind another plan of the same graph."""
        self.known, self.inputs, self.ran_of = dict(leaf.known), leaf.inputs, leaf.ran_of
        self.elsewhere, self.lent, self.lent_by_step = leaf.elsewhere, leaf.lent, leaf.lent_by_step
        self.lent_bytes, self.looks_again = leaf.lent_bytes, leaf.looks_again
        self.loss, self.seen = leaf.loss, leaf.seen
        self.keeps_outputs, self.kept_outputs = leaf.keeps_outputs, leaf.kept_outputs
        self.since_loss, self.keeps_graph = leaf.since_loss, leaf.keeps_graph
        self.left, self.left_gone, self.left_known = leaf.left, leaf.left_gone, leaf.left_known
        self.leaving = leaf.leaving
        self.seen_at, self.beside, self.again, self.stepping = leaf.seen_at, leaf.beside, leaf.again, leaf.stepping
        self.given, self.old, self.ahead, self.lying = leaf.given, leaf.old, leaf.ahead, leaf.lying

    def see(self, loss: EagerLoss, retained: bool) -> None:
        """Take in a loss that was seen, of which the situations have what it needs beside what they hold. Where the
        graph is `retained` for another backward, which is not counted, what was seen at different times is added up."""
        seen = self.situations.values()
        self.retained = max(self.retained, loss.backward_bytes) if retained else self.retained
        self.keeps_graph = self.keeps_graph if self.keeps_graph is None else self.keeps_graph or retained
        self.loss = replace(
            loss.reading(self.loss),
            forward_bytes=self._in_loss(),
            held_bytes=max(self.loss.held_bytes, loss.held_bytes),
            backward_bytes=max(self.retained, self._fullest().behind),
        )
        self.since_loss = max(s.since_loss or 0 for s in seen)

    def _in_loss(self) -> int:
        """What the loss needs in its forward beside what the situations hold."""
        return max([0, *(s.in_loss - s.most for s in self.situations.values())])

    def note_updated(self, tensors: Iterable[torch.Tensor]) -> None:
        """The program changes `tensors` by hand from step to step."""
        found = Stores(tensors)
        for counted in (self.buffers, self.inputs, self.elsewhere, self.lent):
            found.drop(counted)
        if found.bytes():
            self.elsewhere, self.news = self.elsewhere.with_those_of(found), True

    def note_left(self, size: int, storages: Iterable[Any]) -> None:
        """The caller holds so many bytes in its backward, in `storages`."""
        trained = first_trained(alive(self.own))
        if size > self.left and trained is not None:
            self.leaving, self.left_gone, self.left_known = Leaving(storages, trained), 0, False
        self.left = max(self.left, size)

    def note_stepped(self) -> None:
        """The next step is about to begin: what of that had gone when an optimizer stepped. Where none has, another
        micro-batch begins, and what the caller holds of the last one is not known."""
        if self.leaving is not None and self.leaving.stepped():
            self.left_gone, self.left_known = min(self.left, self.leaving.gone()), True
            self.news |= self.left_gone > 0
        self.leaving = None

    def note_staying(self, gradients: int) -> None:
        """So many bytes of gradients, more than were there, are likely to be there in its backward."""
        for situation in self.situations.values() if gradients else ():
            situation.expect(gradients)
            self.news = True

    def note_old(self, size: int) -> None:
        """So many bytes of outputs of earlier runs, and of results of eager code, are there in its forward: a loop's
        variable is, until it is assigned anew."""
        if size > self.old:
            self.old, self.news = size, True
            line = self.loss.timeline
            if line is not None and not line.old and size >= line.kept() > 0:
                more = line.in_loop().forward() - line.forward()
                for situation in self.situations.values():
                    situation.expect_results(more)
                self.loss = replace(self.loss, forward_bytes=self._in_loss())

    def see_lent(self, values: Stores) -> None:
        """In its backward, `values` that graphs without gradients read and returned are there."""
        self.looks_again, self.lent_bytes = False, max(self.lent_bytes, self._lent_beside(values, Stores()))

    def note_lent(self, left: Stores) -> None:
        """A step begins beside what is `left` of such graphs: the last batch of an evaluation, for example."""
        more = self._lent_beside(left, self.inputs) - self.lent_bytes
        if self.seen and more > 0:
            for situation in self.situations.values():
                situation.expect_left(more)
            self.lent_bytes, self.looks_again, self.news = self.lent_bytes + more, True, True

    def _lent_beside(self, values: Stores, known: Stores) -> int:
        """Bytes of `values` that are neither `known` nor of modules."""
        there = Stores()
        there.update(values)
        for counted in (known, self.buffers, self.elsewhere, self.lent_by_step):
            there.drop(counted)
        return there.bytes()

    def inputs_now(self) -> int:
        """Bytes that are there of its inputs, and those of other plans of the same graph."""
        buffers = self.buffers.with_those_of(self.elsewhere).alive()  # which a later plan is given as inputs
        return sum(size for key, size in self.inputs.alive().items() if key not in buffers)

    def note_inputs(self) -> bool:
        """The next step is about to begin: what the caller holds of this one, such as further micro-batches, is there
        throughout. Whether that is more than was seen."""
        more = self.inputs_now() - self.inputs_there
        if self.seen and more > 0:
            for situation in self.situations.values():
                situation.grow(more)
            self.inputs_there += more
            self.given += more
        return self.seen and more > 0

    def note_lying(self, step: Sequence[Leaf], parameters: Sequence[torch.Tensor]) -> None:
        """The next step is about to begin, of which `parameters` are: what is there in it, and was not when it was
        looked at, or was not known to be of it. That is gradients, and inputs of graphs that ran behind it."""
        lying = lying_gradients(parameters)
        gradients = max(0, lying - self.lying) + sum(self.others.get(id(p), 0) for p in parameters)
        inputs = Stores()
        for leaf in step if self.ran_with else ():
            if leaf.origin not in self.ran_with:
                inputs.update(leaf.inputs)
        for counted in (self.inputs, self.buffers, self.elsewhere, self.lent, Stores(parameters)):
            inputs.drop(counted)
        for situation in self.situations.values() if self.seen else ():
            situation.grow(gradients, gradients=True)
            situation.grow(inputs.bytes() - self._belongs_to_step(situation, parameters))
        self.lying, self.others, self.ran_with = max(self.lying, lying), {}, frozenset()

    def _belongs_to_step(self, situation: Beside, parameters: Sequence[torch.Tensor]) -> int:
        """Bytes of what was taken for a teacher's and turns out to be of the step's `parameters`, which count anyway: a
        generator that has run without gradients before it is trained."""
        own = Stores(parameters)
        found = Stores.behind(s for s in situation.lent.storages() if own.has(s))
        situation.lent.drop(found)
        self.lent_by_step.update(found)
        return found.bytes()

    def note_others(self, leaves: Iterable[Leaf], step: Iterable[Leaf]) -> None:
        """It was looked at as one of `step`; others may turn out to be of that, too."""
        step = list(step)
        known = {id(p) for p in parameters_of(step)}
        self.others = {
            id(p): nbytes_of(p.grad) for p in parameters_of(leaves) if p.grad is not None and id(p) not in known
        }
        self.ran_with = frozenset(leaf.origin for leaf in step)

    def _fullest(self) -> Beside:
        """The situation in which most is there while its loss runs backward."""
        return max(
            self.situations.items(), key=lambda item: item[1].in_loss_backward + sum(n * o.held for o, n in item[0])
        )[1]

    def tail(
        self, sizes: Resize = AS_SEEN, since_loss: int | None = None, loss: tuple[int, int] | None = None
    ) -> Tail | None:
        """What happens between its forward and its backward: as it was seen (`loss` bytes), or as its plan has it."""
        if not self.seen:
            return self.partitioner.budget.tail
        seen = self.loss.at(sizes)
        forward, backward = loss or (seen.forward_bytes, seen.backward_bytes)
        kept = int(self.since_loss * sizes.most) if since_loss is None else since_loss
        if self.again:  # the loss has run backward before anything but outputs is there
            return Tail.of_checkpoint(self.outputs)
        old = self.late + max(0, self.old - min((s.old for s in self.situations.values()), default=0))
        return Tail(
            self.keeps_outputs, max(0, forward), 0, max(0, backward), kept, seen.reads_outputs,
            int(old * sizes.most), seen.gone, self.keeps_graph is not False,
        )  # fmt: skip

    def note_late(self, gradients: int) -> None:
        """A step begins beside so many bytes of gradients, which are likely to be cleared before its backward."""
        news = [s.note_late(gradients - s.gradients) for s in self.situations.values()] if gradients else []
        if any(news):
            self.loss, self.news = replace(self.loss, forward_bytes=self._in_loss()), True

    @property
    def late(self) -> int:
        """Bytes of gradients that were there in its forward and were cleared before its backward."""
        return max((s.late for s in self.situations.values()), default=0)

    def latest(self) -> Leaf:
        """What stands for it now."""
        leaf = self
        while leaf.next is not None:
            leaf = leaf.next
        return leaf
