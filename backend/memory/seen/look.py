"""What is seen beside one run of a compiled graph when its backward is about to begin: its loss, gradients, inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from optpass.backend.compat import memory_autograd as autograd
from optpass.backend.compat.memory_backward import Held
from optpass.backend.compat.memory_callers import tensors_of_callers
from optpass.backend.memory.budget import ENGINE_BYTES
from optpass.backend.memory.eager.caller import held_in_backward, named_in_backward
from optpass.backend.memory.eager.held import due, held_in, pending
from optpass.backend.memory.eager.part import EagerLoss, loss_of
from optpass.backend.memory.seen.held_by_caller import held_aside, kept_outputs, made_before, target_among
from optpass.backend.memory.seen.leaves import Leaf
from optpass.backend.memory.seen.parameters import lying_gradients, own_of, parameters_of
from optpass.backend.memory.seen.run import Run
from optpass.backend.memory.seen.situation import Beside
from optpass.backend.memory.seen.stores import Stores
from optpass.backend.memory.seen.ungraded import Lent
from optpass.backend.memory.seen.watch import Watch
from optpass.passes.memory.optimizers.search import states_of

#: How often a graph is looked at beside the same other runs: where nothing else runs, once says all.
LOOKS_ALONE, LOOKS = 1, 2
#: Runs of a graph in whose backward it is looked what the caller's variables hold.
LOOKS_AT_NAMES = 6


@dataclass(frozen=True)
class There:
    """What is there beside a run, in bytes.

    Attributes:
        gradients: of all parameters known.
        other: what else is there.
        old: of these, what earlier runs have returned.
        gone: of outputs of others, what is not there any more.
        handed_on: what of that graphs had been given, by graph.
        lent: of `other`, what was lent to graphs without gradients.
    """

    gradients: int
    other: int
    old: int
    gone: int
    handed_on: Mapping[Leaf, int]
    lent: Stores


def others_of(live: Sequence[Run], run: Run | None = None) -> frozenset[tuple[Leaf, int]]:
    """The runs that wait for their backward, beside `run`."""
    return frozenset(Counter(r.leaf for r in live if r is not run).items())


def note(
    run: Run, running: autograd.RunningBackward | None, live: Sequence[Run], watch: Watch, known: Mapping[int, Held],
    lent: Lent, old: Stores, step: Sequence[Leaf],
) -> None:  # fmt: skip
    """Note what is beside a run whose backward is about to begin; arguments as for `loss_behind` and `beside`."""
    leaf = run.leaf.latest()
    before, loss, made = leaf.loss, EagerLoss(), 0
    waiting, saved = (0, []) if running is None else pending(running.roots, run.node())
    if running is not None:
        others = held_aside(running, saved, live, lent.stores, old, step)
        loss, made = loss_behind(run, running, saved, live, watch, known, old, step, others)
    around = beside(run, running, saved, live, lent.stores, old, step)
    gradients, other, gone, late = around.gradients, around.other, around.gone, run.late(around.gradients)
    # Of what is there now, gradients that wait and those of the loss's parameters were not there in its forward,
    # and are part of what was seen in its backward.
    there, since = gradients + other - made, loss.kept_bytes - gone
    situation = leaf.situations.setdefault(others_of(live, run), Beside())
    situation.gone, situation.handed_on, situation.made = around.gone, around.handed_on, made
    situation.lent.update(around.lent)
    leaf.see_lent(lent.values)
    behind = there + since + loss.backward_bytes if loss.backward_bytes else 0
    # Outputs that had gone before its forward are not there in it, and what is gone behind the loss is less.
    early = min(run.gone_before, other, gone)
    # Gradients that were cleared late are among what the loss ran beside, as far as its operators are known.
    cleared = 0 if loss.timeline is not None and loss.timeline.part else run.late(gradients - made)
    in_loss = there - early + cleared + loss.forward_bytes + run.among
    in_loss = max(in_loss, run.behind + run.behind_saved, run.behind_again(loss.early_bytes))
    mine = other - early + waiting
    news = situation.widen(gradients, mine, since + early, in_loss, behind, around.old, late, waiting)
    if loss.backward_bytes < before.backward_bytes and leaf.seen_at:
        loss = replace(loss, timeline=before.timeline)
    else:
        leaf.seen_at = run.shapes
    leaf.see(loss, running is not None and running.keeps)
    leaf.inputs_there = max(leaf.inputs_there, leaf.inputs_now())
    sizes = {prod(shape) for r in live for shape in r.shapes}
    ran = lent.needed_ahead(_given_to(live), sizes, known, other, parameters_of(step)) if lent.ahead else 0
    leaf.news |= news or leaf.loss != before or ran > leaf.ahead
    leaf.ahead = max(leaf.ahead, ran)


def note_names(
    run: Run, running: autograd.RunningBackward | None, live: Sequence[Run], lent: Lent, old: Stores,
    step: Sequence[Leaf],
) -> None:  # fmt: skip
    """A backward is about to begin beside whose like it was noted what is there: variables of the caller may hold what
    was not there yet, such as the gradient of an input from the run before. Arguments as for `note`."""
    leaf = run.leaf.latest()
    situation = leaf.situations.get(frozenset())
    if situation is None or running is None or others_of(live, run):
        return
    devices = {s.device for s in (*run.inputs.storages(), *run.outputs.storages())}
    named = Stores(named_in_backward(devices, [p for r in leaf.known.values() if (p := r()) is not None]))
    for counted in (old, *(other.outputs for other in live)):
        named.drop(counted)
    leaf.inputs.update(named)
    waiting, saved = pending(running.roots, run.node())
    around = beside(run, running, saved, live, lent.stores, old, step)
    more = around.gradients + around.other + waiting - situation.gradients - situation.other
    if more > 0:
        situation.grow(more)
        leaf.inputs_there = max(leaf.inputs_there, leaf.inputs_now())
        leaf.news = True


def loss_behind(
    run: Run, running: autograd.RunningBackward, saved: Sequence[torch.Tensor], live: Sequence[Run], watch: Watch,
    known: Mapping[int, Held], old: Stores, step: Sequence[Leaf], aside: Stores,
) -> tuple[EagerLoss, int]:  # fmt: skip
    """The loss of a run, and the bytes of what it has made that is there and counts as what it is: gradients.

    Args:
        saved: what operators hold that are still to run.
        live: the runs that wait for their backward, this one too.
        watch: of the backward that is running.
        known: what nodes held before it.
        old: what earlier runs have returned, and is there.
        step: graphs of the step.
        aside: what operators hold for other backwards.
    """
    node, leaf = run.node(), run.leaf.latest()
    outputs = kept_outputs(run, node)
    part = sum(s.nbytes() for s in outputs)
    if 2 * part > leaf.outputs and not leaf.keeps_outputs and not leaf.again:
        leaf.keeps_outputs = leaf.news = True
    leaf.kept_outputs = max(leaf.kept_outputs, part)
    if not leaf.seen:
        leaf.seen = leaf.news = True
    held = tensors_of_callers()
    made = [t for t in held if t.grad_fn is not None]
    results = Stores(made)
    if not running.keeps:  # what is there of what nodes have released, somebody holds: an object that the caller has
        results.update(watch.saved())
        others = Stores(saved)
        others.update(leaf.inputs)
        others.keep((one.key, one.storage) for nodes in known.values() for one in nodes.outside)
        results.drop(others)
    for other in live:  # these are counted as what they are
        for counted in (other.inputs, other.outputs, other.eager):
            results.drop(counted)
    for counted in (old, *(known_leaf.inputs for known_leaf in step)):
        results.drop(counted)
    # Some losses reduce in place: their result is a number in a storage as large as what it is made of.
    # A few numbers are among what the engine is taken to need; a loss of many terms may hold more of them.
    run.results = Stores.behind(s for s in results.storages() if s.nbytes() > ENGINE_BYTES)
    sizes = results.alive().values()
    kept = sum(sizes) - min(sum(size for size in sizes if size <= ENGINE_BYTES), ENGINE_BYTES // 2)
    aside.drop(results)
    kept += aside.bytes()
    left = kept + part - min(part, ENGINE_BYTES // 4)  # a loss is among an optimizer's numbers
    leaf.note_left(left, [*results.storages(), *aside.storages(), *outputs])
    if node is not None:  # those that were made before it are there in its forward, too
        run.older = made_before(node, made, results)
        kept = max(0, kept - run.older.bytes())
        last = max((n for r in live if (n := r.node()) is not None), key=autograd.order, default=node)
        run.among = max(0, made_before(last, made, results).bytes() - run.older.bytes())
    kept += 0 if leaf.keeps_outputs else part
    if node is None or all(n is not node for n in autograd.walk(running.roots, lambda n: n is node)):
        return EagerLoss(kept_bytes=kept), 0
    targets = [t for t in held if not t.requires_grad]
    if not leaf.situations:  # once: what it keeps from step to step, say outputs in a list, only grows
        devices = {s.device for s in (*run.inputs.storages(), *run.outputs.storages())}
        leaf.inputs.add(held_in_backward(devices, [p for r in leaf.known.values() if (p := r()) is not None]))
    found = loss_of(
        running.roots,
        autograd.is_compiled,
        lambda *one: target_among(targets, leaf.inputs, *one),
        known,
        [t.grad_fn for t in made],
        node,
        watch.forward(),
        run.let_go[: run.let_go_before],
        run.old,
        run.cleared,
        run.behind_at,
    )
    # Whoever held them then: operators, or a checkpoint that reads them again.
    read = len(run.let_go) > run.let_go_before
    gone = tuple(sorted(size for _, size in run.let_go[: run.let_go_before]))
    found = replace(found, reads_outputs=found.reads_outputs or read, gone=gone)
    leaf.inputs.keep((one.key, one.storage) for nodes in known.values() for one in nodes.outside)
    leaf.know(found.leaves)
    # What later graphs have made for this one waits while its own loss runs backward.
    waits = due(running.roots, node, found.between[1])
    seen = watch.peak(*found.between, run.outputs)
    if seen is None:
        return replace(found, kept_bytes=kept, backward_bytes=found.backward_bytes + waits), 0
    there = Stores([*held, *saved])
    there.update(leaf.inputs)
    there.update(results)
    there.update(run.older)
    there.update(aside)
    gradients = watch.gradients(found.leaves)
    backward = max(0, seen - watch.among(there)) + waits
    return replace(found, kept_bytes=kept, backward_bytes=backward), gradients


def _given_to(runs: Sequence[Run]) -> Stores:
    """What graphs were given, parameters and buffers aside."""
    given = Stores()
    for run in runs:
        given.update(run.inputs)
    for run in runs:
        given.drop(Stores(p for ref in run.parameters if (p := ref()) is not None))
        given.drop(run.leaf.buffers.with_those_of(run.leaf.elsewhere))
    return given


def beside(
    run: Run, running: autograd.RunningBackward | None, saved: Sequence[torch.Tensor], live: Sequence[Run],
    lent: Stores, old: Stores, step: Sequence[Leaf],
) -> There:  # fmt: skip
    """What is there beside a run.

    Args:
        running: the backward; None before it.
        saved, live: as for `loss_behind`.
        lent: what graphs have read and returned that ran without gradients.
        old: what earlier runs have returned, and is there.
        step: graphs of the step.
    """
    leaf = run.leaf.latest()
    if running is not None and running.outer:  # which nodes of theirs are still to run is seen by what they hold
        saved = [*saved, *held_in(running.outer)]
    others = [r for r in live if r is not run]
    waiting = [p for r in (run, *others) for reference in r.parameters if (p := reference()) is not None]
    parameters = list({id(p): p for p in (*parameters_of(step), *waiting)}.values())  # a step may begin between them
    there = Stores()
    there.update(lent)
    there.drop(leaf.lent_by_step)
    leaf.lent.update(lent)
    if lent.alive():  # to an optimizer whose step is compiled: counted as its state
        there.drop(Stores(states_of(parameters)))
    for r in (run, *others):
        there.update(r.inputs)
    for known_leaf in step:  # what the caller gave to other graphs, and still holds
        there.update(known_leaf.inputs)
    there.add(t for t in saved if t.grad_fn is None)
    given = there.alive()
    there.add(saved)
    for r in (run, *others):
        there.update(r.eager.with_those_of(r.graded))
    there.update(run.older)
    known = Stores(own_of(parameters, step)).alive()
    gradients = Stores([p.grad for p in parameters if p.grad is not None]).alive()
    leaf.lying = max(leaf.lying, lying_gradients(parameters))
    gradients.update(Stores(g for r in (run, *others) for g in r.gradients_of_leaves()).alive())
    for r in (run, *others):
        own = r.inputs.alive()  # what is handed back as it came is no result
        known.update({key_: size for key_, size in r.outputs.alive().items() if key_ not in own})
        known.update({**r.leaf.buffers.alive(), **r.leaf.elsewhere.alive()})
    bytes_of_gradients = sum(size for key_, size in gradients.items() if key_ not in known)
    counted = known.keys() | gradients.keys()
    lending = Stores.behind(s for s in lent.storages() if there.has(s) and s._cdata not in counted)
    since = _bytes_but(counted | there.alive().keys(), old.alive())
    there.update(old)
    other = _bytes_but(counted, there.alive())
    if not others and running is not None:
        leaf.beside = max(leaf.beside, other - _bytes_but(counted, {**run.inputs.alive(), **run.eager.alive()}))
        leaf.given = max(leaf.given, _bytes_but(counted, given))
    handed_on: Counter[Leaf] = Counter()
    for r in others:
        handed_on.update(r.handed_on(live))
    return There(bytes_of_gradients, other, since, sum(r.released_outputs() for r in others), dict(handed_on),
                 lending)  # fmt: skip


def _bytes_but(counted: Collection[int], there: Mapping[int, int]) -> int:
    return sum(size for key, size in there.items() if key not in counted)
