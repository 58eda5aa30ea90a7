"""The graphs of one step planned together, once a step has been seen: what each may use from its next call on.

The first step is planned graph by graph, as they are compiled. Nobody knows then how often a graph runs, which graphs
follow, and what the eager code around them holds. When the next step begins, what was seen (`runs`) is held against the
budget; where it does not fit, or where much is computed again for nothing, plans are chosen for all graphs at once
(`allot`), and each graph is compiled again on its next call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from optpass.backend.compat.data_parallel import not_gathered
from optpass.backend.memory.budget import ENGINE_BYTES
from optpass.backend.memory.filing import predict_anew
from optpass.backend.memory.optimizing import Optimizing
from optpass.backend.memory.partition.outcome import SAFE
from optpass.backend.memory.plans.alike import made_alike
from optpass.backend.memory.plans.allot import above, choices_of, least, select
from optpass.backend.memory.plans.bounds import Bound, Choice, beside, excess, total
from optpass.backend.memory.seen.leaves import Leaf
from optpass.backend.memory.seen.parameters import idle_in, own_of, parameters_of
from optpass.backend.memory.seen.runs import Steps
from optpass.backend.memory.seen.share import Share
from optpass.backend.memory.seen.stores import Stores
from optpass.backend.memory.together import words
from optpass.backend.memory.together.figures import bounds_of, choices_for, equal_among, present_of
from optpass.backend.memory.together.replayed import chosen_by_replays
from optpass.passes.memory.optimizers.search import states_of
from optpass.passes.memory.plan import Ledger

log = logging.getLogger(__name__)

#: Times that one graph is planned anew for what was seen of its steps.
GENERATIONS = 3
#: Plans that compute something again are left as they are where the step uses this part of the budget.
USED = 0.95
#: Graphs that the usual effort is made for each of; what more of them take is as much together.
FEW = 1


@dataclass
class Step:
    """A step as it was seen: its leaves, the bytes always there, all of those while the optimizer steps, and without
    outputs of which it was not seen whether they are there then, those while graphs without gradients run ahead of it,
    the bounds, and the plans in force."""

    leaves: list[Leaf]
    always: Ledger
    at_optimizer: int
    sure_at_optimizer: int
    ahead: int
    optimizer: str
    bounds: list[Bound]
    present: list[Choice]


def settle(leaves: Sequence[Leaf], beside: Sequence[Leaf] = ()) -> None:
    """Plan the step that `leaves` make up anew, where it does not fit or does not use its budget. What those `beside`
    have is there, too.

    Raises:
        BudgetInfeasibleError: no plans of these graphs together fit.
    """
    ran = [leaf for leaf in leaves if leaf.situations and leaf.next is None]
    blind = [leaf for leaf in ran if leaf.partitioner.outcome.replayed is None]
    dependent = [leaf for leaf in ran if len(ran) > 1 or not _alone(leaf)]
    unknown = [leaf for leaf in blind if leaf in dependent]
    for leaf in unknown:  # the caches gave a compiled graph without what its plan was chosen from
        leaf.share = _as_before(leaf)
    planned = [leaf for leaf in ran if leaf not in blind]
    for leaf in dependent:
        _plan_always(leaf)
    failed = [leaf for leaf in planned if leaf.partitioner.search is None]  # to compile: its next call tries again
    if unknown or failed or not planned:
        return
    parameters, final = parameters_of([*planned, *beside]), any(leaf.generation >= GENERATIONS for leaf in ran)
    for leaf in planned:
        leaf.note_inputs()
        leaf.note_lying(planned, parameters)
        if not final:  # one that nothing was compiled for yet was chosen for what was known then
            leaf.share = None
    words.warn_of_kept_graphs(planned)
    step = _seen(planned, [*beside, *(leaf for leaf in leaves if leaf.next is None and not leaf.situations)])
    _predict_anew(step)
    budget = min(leaf.partitioner.budget.bytes for leaf in step.leaves)
    if step.ahead > budget:
        raise words.too_much_ahead(step)
    if step.sure_at_optimizer > budget:
        raise words.too_much_at_the_optimizer(step)
    words.warn_of_the_optimizer(step)
    worst = excess(step.present, step.bounds)
    again = any(choice.seconds > 0 for choice in step.present)
    used = max((total(step.present, b) / b.limit for b in step.bounds), default=1.0)
    used = 0.0 if any(leaf.partitioner.budget.apart is not None for leaf in ran) else used  # for what is known now
    enough = (used >= USED or not again) and not any(leaf.partitioner.as_it_stands for leaf in ran)
    if not step.bounds or (worst <= 0 and enough) or (worst > 0 and final):
        return
    choices, runs = _choices(step), [leaf.runs for leaf in step.leaves]
    equal = equal_among(step.leaves)
    chosen, over, choices = chosen_by_replays(
        step.leaves, choices, lambda found: _chosen(step, found, runs, equal), lambda plans: _use_it(step, plans)
    )
    last = [leaf.loss for leaf in step.leaves if not leaf.again and leaf.loss.between[1] == inf]  # else between graphs
    if over > sum(loss.forward_bytes + loss.backward_bytes for loss in last):
        raise words.infeasible(step, chosen, over)
    if not final:
        _share_out(step, chosen, worst, over)
    if worst <= 0 and all(leaf.share is None for leaf in step.leaves):
        words.next_plan(step, above(chosen, choices, runs, step.bounds))


def _chosen(
    step: Step, choices: Sequence[Sequence[Choice]], runs: Sequence[int], equal: Sequence[Sequence[int]]
) -> tuple[list[Choice], int]:
    """A plan for each graph, and by how many bytes they are over. A run that waits for its backward holds what it does:
    those that come in this step, as a GAN's critic behind its own backward, are to fit beside that."""
    waiting = set(STEPS.waiting())
    if waiting.intersection(step.leaves):
        present = zip(step.leaves, step.present, choices, strict=True)
        chosen = select([[now] if leaf in waiting else found for leaf, now, found in present], runs, step.bounds)
        if (over := excess(chosen, step.bounds)) <= 0:
            return chosen, over
    chosen = select(choices, runs, step.bounds)
    plans = [leaf.partitioner.outcome.plan for leaf in step.leaves]
    seconds = sum(plan.step_seconds * times for plan, times in zip(plans, runs, strict=True) if plan is not None)
    chosen = made_alike(chosen, choices, equal, runs, step.bounds, seconds)
    return chosen, excess(chosen, step.bounds)


def _use_it(step: Step, plans: Sequence[Choice]) -> bool:
    """Whether `plans` fit, and use the budget."""
    used = max((total(plans, bound) / bound.limit for bound in step.bounds), default=1.0)
    return excess(plans, step.bounds) <= 0 and used >= USED


def _share_out(step: Step, chosen: Sequence[Choice], worst: int, over: int) -> None:
    """Give each graph what it may use for the plan chosen for it, unless that in force is as good."""
    words.planned_together(step, chosen, worst, over)
    for i, leaf in enumerate(step.leaves):
        stands = leaf.partitioner.as_it_stands
        if stands or not _does(step, i, chosen):
            leaf.share = replace(_share(step, i, chosen), optional=not stands and _fits(step, i, chosen))
            _plan_always(leaf)


def _plan_always(leaf: Leaf) -> None:
    """Its plan depends on more than the graph: where the caches know it, it is planned anew all the same."""
    if not leaf.partitioner.outcome.together:
        leaf.partitioner.outcome.together = True
        leaf.partitioner.outcome.keep()


def _as_before(leaf: Leaf) -> Share:
    """What a graph was first planned for."""
    budget = leaf.partitioner.budget
    return Share(budget.statics, budget.tail, budget.follow, budget.at_optimizer, budget.optimizer)


def _predict_anew(step: Step) -> None:
    """What the plans in force need, and the least and the most that plans of this step do, now that the rest of it is
    known."""
    apart = max(step.at_optimizer, step.ahead)
    floor, top = (max(figure + ENGINE_BYTES, apart) for figure in _ends(step))
    for i, leaf in enumerate(step.leaves):
        most = max((total(step.present, bound) for bound in step.bounds if bound.graph == i), default=0)
        plan = leaf.partitioner.outcome.plan
        if plan is not None and len(step.bounds) == 1:  # a budget is to compile before its loss was seen, too
            floor = min(max(floor, plan.floor_bytes), top)
        predict_anew(leaf.partitioner, max(most + ENGINE_BYTES, apart), floor, top)


def _ends(step: Step) -> tuple[int, int]:
    """Bytes of the whole step with the plans that need least, rather too many where an inner compiler generates code,
    and with those that compute nothing again."""
    choices, now = _choices(step, brief=True), max((total(step.present, b) for b in step.bounds), default=0)
    plans, floor = least(choices, [leaf.runs for leaf in step.leaves], step.bounds), 0
    for bound in step.bounds:
        generated = step.leaves[bound.graph].partitioner.executor == "inductor"
        needed = total(plans, bound) - bound.fixed
        floor = max(floor, bound.fixed + (int(needed * SAFE) if generated else needed))
    fastest = [min(found, key=lambda choice: choice.seconds) for found in choices]
    if not any(choice.seconds for choice in step.present):
        fastest = step.present
    return min(floor, now), max((total(fastest, b) for b in step.bounds), default=0)


def _does(step: Step, index: int, chosen: Sequence[Choice]) -> bool:
    """Whether the plan in force of graph `index` is as good as the one that was chosen. Where that does not fit, a new
    compile says whether any does."""
    present = step.present[index]
    return (
        _fits(step, index, chosen)
        and present.held <= chosen[index].held
        and present.seconds <= 1.02 * chosen[index].seconds
    )


def _fits(step: Step, index: int, chosen: Sequence[Choice]) -> bool:
    """Whether the plan in force of graph `index` does, beside those chosen for the others."""
    return excess([*chosen[:index], step.present[index], *chosen[index + 1 :]], step.bounds) <= 0


def _alone(leaf: Leaf) -> bool:
    """Whether its plan cannot depend on others, nor on eager code that needs more than was assumed."""
    return set(leaf.situations) == {frozenset()} and leaf.loss.backward_bytes <= 3 * leaf.outputs


def _seen(leaves: Sequence[Leaf], others: Iterable[Leaf]) -> Step:
    """The step of `leaves`, with what is there of `others`: they ran in it and had no backward, as a generator has none
    while its critic is trained, or had it before."""
    leaves = list(leaves)
    index = {leaf: i for i, leaf in enumerate(leaves)}
    parameters = parameters_of(leaves)
    options = leaves[0].options
    idle = idle_in(leaves)
    optimizer = Optimizing.of(options, not_gathered(parameters), idle)
    parameters = list({id(p): p for p in (*parameters, *optimizer.parameters, *idle)}.values())
    untrained = {id(p) for p in idle}
    trained = Stores([p for p in parameters if p.requires_grad and id(p) not in untrained]).bytes()
    buffers = Stores()
    for leaf in leaves:
        buffers.update(leaf.buffers)
    for leaf in leaves:
        buffers.update(leaf.elsewhere)
    given = Stores()
    for leaf in others:
        there = parameters_of([leaf])
        given.update(leaf.inputs.with_those_of(Stores([*there, *states_of(there)])))
        given.update(leaf.buffers)
    for leaf in leaves:
        given.drop(leaf.inputs)
    buffers.update(given)
    buffers.drop(Stores(states_of(parameters)))
    buffers.drop(Stores(parameters))  # frozen ones that some of the graphs read
    always = Ledger(
        parameters=Stores(own_of(parameters, leaves)).bytes(),
        optimizer=optimizer.state,
        buffers=buffers.bytes(),
        temporaries=max(leaf.partitioner.budget.statics.temporaries for leaf in leaves),  # beside tensors, on a GPU
    )
    bounds = [bound for leaf in leaves for bound in bounds_of(leaf, index, always.total)]
    present = [present_of(leaf) for leaf in leaves]
    inputs = max((leaf.given for leaf in leaves), default=0)
    left = max((leaf.left - leaf.left_gone for leaf in leaves), default=0)
    sure = max((leaf.left - leaf.left_gone for leaf in leaves if leaf.left_known), default=0)
    compiled = [leaf.stepping + 2 * ENGINE_BYTES for leaf in leaves if leaf.stepping is not None]  # and a few numbers
    stepping = always.total + inputs + trained + max(compiled, default=optimizer.stepping)
    ran = max((leaf.ahead for leaf in leaves), default=0)
    ahead = always.total + ran + ENGINE_BYTES if ran else 0
    return Step(leaves, always, stepping + left, stepping + sure, ahead, optimizer.name, bounds, present)


def _choices(step: Step, *, brief: bool = False) -> list[list[Choice]]:
    handed_on = any(bound.handed_on for bound in step.bounds)
    effort = min(1.0, FEW / len(step.leaves))  # the more graphs, the finer are the steps that each makes
    return [
        choices_for(leaf, waits=_waits(step, i), handed_on=handed_on, brief=brief, effort=effort)
        for i, leaf in enumerate(step.leaves)
    ]


def _share(step: Step, index: int, chosen: Sequence[Choice]) -> Share:
    """What graph `index` may use beside the others' chosen plans."""
    leaf, plan = step.leaves[index], chosen[index]
    own = [b for b in step.bounds if b.graph == index]
    at_peak = max(own, key=lambda b: total(chosen, b))
    since = 0 if leaf.again else at_peak.since_loss  # the loss is over before it begins
    there = at_peak.fixed - since - step.always.total
    gradients = min(there, max(b.gradients for b in leaf.situations.values()))
    others = sum(chosen[g].held * n for g, n in at_peak.others)
    since += at_peak.holds_on(index, plan) + beside(chosen, at_peak) - at_peak.fixed - others
    statics = replace(step.always, gradients=gradients, inputs=there - gradients, activations=others)
    room = at_peak.limit - statics.total
    # Where its loss runs, or others do, no more may be held than what is left then.
    elsewhere = [room - b.limit + beside(chosen, b) + b.with_loss(plan) - plan.held for b in own if b is not at_peak]
    follow = max(0, room - plan.held if _waits(step, index) else 0, *elsewhere)
    search, frozen = leaf.partitioner.search, plan.state
    state = None if search is None or frozen is None else (len(search.problem.operations), frozen)
    tail = leaf.tail(since_loss=since, loss=at_peak.loss)
    apart = max(step.at_optimizer, step.ahead)
    whole = leaf.partitioner.executor == "inductor" and len(step.leaves) > 1
    return Share(statics, tail, 0 if leaf.again else follow, apart, step.optimizer, state, whole)


def _waits(step: Step, index: int) -> bool:
    """Whether other runs come between the forward and the backward of graph `index`."""
    return any(g == index for b in step.bounds for g, _ in b.others)


def relief() -> int:
    """Bytes that the runs which wait for their backward could hold less of, were they planned anew."""
    return sum(max(0, leaf.held - _least_held(leaf)) for leaf in STEPS.waiting())


def _least_held(leaf: Leaf) -> int:
    """The least that any plan of its graph holds."""
    search = leaf.partitioner.search
    return leaf.held if search is None else min(one.held for one in choices_of(search, search.problem.tail))


STEPS = Steps(settle)
