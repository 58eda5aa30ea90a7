"""What was seen of a graph in its steps, as the figures plans are compared by: its bounds, its plan, and others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from optpass.backend.memory.budget import ENGINE_BYTES
from optpass.backend.memory.plans.allot import Around, choices_of
from optpass.backend.memory.plans.bounds import Bound, Choice
from optpass.backend.memory.replay.graph_values import hint
from optpass.backend.memory.replay.replay import StepReplay
from optpass.backend.memory.replay.tail import Tail
from optpass.backend.memory.seen.leaves import Leaf
from optpass.backend.memory.seen.situation import Beside
from optpass.passes.memory.problem import Problem
from optpass.passes.memory.search.known import graph_key_of
from optpass.passes.memory.storage import nbytes

#: Labels of a replay's moments between forward and backward, which a loss that was seen replaces; and of the next one.
BETWEEN, TANGENTS = ("loss", "backward of the loss"), "tangents"


def bounds_of(leaf: Leaf, index: Mapping[Leaf, int], always: int) -> Iterator[Bound]:
    """One for each situation of a graph; of those that differ by plans that were replaced, the latest."""
    latest: dict[frozenset[tuple[Leaf, int]], Beside] = {}
    for replaced in (True, False):
        for others, situation in leaf.situations.items():
            if replaced == any(other.next is not None for other, _ in others):
                counts = Counter[Leaf]()
                for other, n in others:
                    counts.update({other.latest(): n})
                latest[frozenset(counts.items())] = situation
    limit = leaf.partitioner.budget.bytes - ENGINE_BYTES
    for others, situation in latest.items():
        since = (situation.since_loss or 0) + situation.waiting
        around = tuple(sorted((index[other], n) for other, n in others if other in index))
        # Nothing asks for the backward of some, of whose outputs the loss reads values alone: their plan stays.
        unplanned = sum(max(other.held, 0) * n for other, n in others if other not in index)
        to = {index[g.latest()]: size for g, size in situation.handed_on.items() if g.latest() in index}
        yield Bound(
            index[leaf], around, always + unplanned + situation.most, limit, since, _loss_in(leaf, situation),
            _early(leaf, situation) - (0 if leaf.again else since), situation.gone, to,
        )  # fmt: skip


def _loss_in(leaf: Leaf, situation: Beside) -> tuple[int, int]:
    """What the loss of a graph needs in a situation, in its forward and in its backward."""
    return situation.in_loss - situation.most, max(leaf.retained, situation.behind)


def present_of(leaf: Leaf) -> Choice:
    """The plan in force, beside the loss as it was seen."""
    outcome = leaf.partitioner.outcome
    seconds = outcome.plan.recompute_seconds if outcome.plan is not None else 0.0
    if outcome.replayed is None:
        return Choice(0, leaf.held, seconds)
    if not leaf.seen:
        return Choice(outcome.replayed.peak_bytes, max(leaf.held, 0), seconds)
    return _of_replay(leaf, outcome.replayed, leaf.partitioner.tail, max(leaf.held, 0), seconds)


def _of_replay(leaf: Leaf, replayed: StepReplay, tail: Tail, held: int, seconds: float) -> Choice:
    """A plan that was replayed with `tail`, beside the loss as it was seen."""
    handed, lent = replayed.handed_bytes, leaf.kept_outputs if leaf.keeps_outputs else 0
    # Outputs that are saved, too, do not go when the caller lets go of them.
    released = min(leaf.outputs, max(0, handed - sum(replayed.saved_bytes.values())))
    handed = leaf.outputs if leaf.again else handed
    released = min(released, sum(leaf.loss.gone)) if leaf.loss.reads_outputs else released
    later = handed - max(0, released - lent)
    forward, backward = _own_peaks(replayed, lent, retained=leaf.keeps_graph is not False)
    if not tail.holds_outputs and not leaf.again:  # it was planned as if the caller let go of them
        backward += lent
    return Choice(backward, held, seconds, handed, later, forward)


def replayed_choice(leaf: Leaf, counted: Choice) -> tuple[Choice, StepReplay] | None:
    """A plan as `choices_for` has it, with the figures of its replay, and that; None where it cannot be replayed."""
    carrier = leaf.partitioner.carrier
    replayed = None if carrier is None or counted.state is None else carrier.replayed(counted.state)
    if replayed is None:
        return None
    held = counted.held if leaf.again else replayed.handed_bytes
    found = _of_replay(leaf, replayed, leaf.partitioner.tail, held, counted.seconds)
    return replace(found, reads=counted.reads, returns=counted.returns, state=counted.state), replayed


def _own_peaks(replayed: StepReplay, lent: int, *, retained: bool) -> tuple[int, int]:
    """The peaks of its forward and of its backward, where the caller keeps `lent` bytes of its outputs, and the graph
    where it is `retained`."""
    peaks, now = [0, 0], 0
    for moment in replayed.timeline:
        now = 1 if moment.label == TANGENTS else now
        live = moment.live_bytes - replayed.kept_bytes * now - max(0, moment.lent_bytes - lent)
        live += moment.released_bytes if retained else 0
        peaks[now] = max(peaks[now], live) if moment.label not in BETWEEN else peaks[now]
    return peaks[0], peaks[1]


def _early(leaf: Leaf, situation: Beside) -> int:
    """What is there in its forward, and gone before its backward, that its plan does not know of: what a checkpoint
    needs to run it again, or outputs of earlier runs that a variable of the caller's holds until it returns, and
    gradients that are cleared late."""
    there = Tail.of_checkpoint(leaf.outputs).early_bytes if leaf.again else max(0, leaf.old - situation.old)
    return situation.late + there - leaf.partitioner.tail.early_bytes


def choices_for(leaf: Leaf, *, waits: bool, handed_on: bool, brief: bool, effort: float) -> list[Choice]:
    """Plans of a graph beside the loss as it was seen.

    Args:
        waits: other runs come between its forward and its backward.
        handed_on: graphs of the step were given outputs of others that were gone in the backward.
        brief: few of them.
        effort: part of the usual effort.
    """
    partitioner = leaf.partitioner
    search, replayed = partitioner.search, partitioner.outcome.replayed
    assert search is not None and replayed is not None  # it has a plan
    problem, tail = search.problem, leaf.tail(since_loss=0)
    between, released = problem.tail, 0
    if tail is not None:
        tangents = sum(s.bytes for s in problem.storages if s.tangent)
        outputs = sum(problem.storages[s].bytes for s in problem.forward_outputs)
        between, problem.outputs_held = tail.beside(tangents, outputs), tail.holds_outputs
        problem.kept, problem.saved_held = tail.kept_bytes, tail.retains
        released = tail.released(outputs)
    less = max(0, partitioner.counted - replayed.peak_bytes) if partitioner.runner == "inductor" else 0
    around = Around(released, _given(leaf, problem) if handed_on else {})
    choices = choices_of(search, between, around, waits=waits and not leaf.again, brief=brief, effort=effort)
    if less:  # in what Inductor generates, as far as it is known of the plan in force
        choices = [replace(one, peak=one.peak - less, forward=one.forward - less) for one in choices]
    if leaf.again:
        choices = [replace(one, held=leaf.held, handed=leaf.outputs, later=leaf.outputs) for one in choices]
    return choices


def equal_among(leaves: Sequence[Leaf]) -> list[list[int]]:
    """Groups of indices of graphs that are equal and that the inner compiler would compile once."""
    groups: dict[str, list[int]] = {}
    for i, leaf in enumerate(leaves):
        search = leaf.partitioner.search
        if search is not None and leaf.partitioner.executor == "inductor":
            groups.setdefault(graph_key_of(search.problem), []).append(i)
    return [group for group in groups.values() if len(group) > 1]


def _given(leaf: Leaf, problem: Problem) -> dict[int, int]:
    """Storages of what a graph is given by its callers, with their bytes."""
    of_modules = {f"primals_{1 + i}" for i in (*leaf.parameters, *leaf.module_tensors)}
    given = [s for s in problem.storages if s.given and not s.tangent and str(s.node.target) not in of_modules]
    return {s.index: nbytes(s.node.meta["val"], hint) for s in given if s.node.op == "placeholder"}
