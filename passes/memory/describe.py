"""From a timeline to what people ask of it: the ledger at the peak, the largest tensors there, what is saved and what
is made again. Nothing here decides anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from torch import fx

from optpass.passes.memory import redraw
from optpass.passes.memory.plan import Ledger, Recomputed, Tensor
from optpass.passes.memory.problem import Problem, Storage
from optpass.passes.memory.search.schedule import Schedule, Timeline
from optpass.passes.memory.unbacked import value_of
from optpass.passes.roofline.extract import concrete, target_name, tensors
from optpass.passes.source import locate


def live_at_peak(schedule: Schedule, timeline: Timeline) -> tuple[list[int], int]:
    """Storages that are live where the step needs most, each once, largest first; and the workspace in use there."""
    problem = schedule.problem
    forward, backward = timeline.forward, timeline.backward
    in_forward = int(forward.max(initial=0))
    in_backward = int(backward.max(initial=0))
    workspace = 0
    if max(in_forward, in_backward) < timeline.boundary:
        found: Iterable[int] = {*timeline.saved, *problem.forward_outputs} - {o.storage for o in timeline.offloaded}
    elif in_forward >= in_backward:
        at = int(forward.argmax())
        found = _live_in_forward(schedule, timeline, at)
        workspace = problem.operations[schedule.order[at]].workspace
    else:
        at = int(backward.argmax())
        found = _live_in_backward(schedule, timeline, at)
        workspace = problem.operations[timeline.steps[at]].workspace
    sizes = [s.bytes for s in problem.storages]
    live = [s for s in dict.fromkeys(found) if sizes[s]]
    return sorted(live, key=lambda s: (-sizes[s], s)), workspace


def _live_in_forward(schedule: Schedule, timeline: Timeline, at: int) -> list[int]:
    gone = {item.storage for item in timeline.offloaded if item.gone < at}
    kept = {*timeline.saved, *schedule.problem.forward_outputs} - gone
    made: dict[int, int] = {}
    for position, index in enumerate(schedule.order[: at + 1]):
        for s in schedule.operations[index].outputs:
            made[s] = position
    last = schedule.forward_last
    inside = schedule.forward_inside
    return [s for s in made if s in kept or (last.get(s, made[s]) >= at and s not in inside)]


def _live_in_backward(schedule: Schedule, timeline: Timeline, at: int) -> list[int]:
    problem = schedule.problem
    lasting = {*problem.forward_outputs, *problem.backward_outputs}
    found = [*problem.forward_outputs, *(s.index for s in problem.storages if s.tangent)]
    away = {timeline.saved[item.storage] for item in timeline.offloaded if item.back > at}
    for instance, s in enumerate(timeline.storage):
        born, last = timeline.birth[instance], timeline.last[instance]
        if (born < 0 and last < 0) or not timeline.bytes[instance] or instance in away:
            continue  # kept by the state, and never read; or never stored; or not back yet
        if born <= at and (last >= at or s in lasting):
            found.append(s)
    return found


def ledger(
    problem: Problem, live: Iterable[int], workspace: int, peak: int, statics: Ledger, saved: Collection[int]
) -> Ledger:
    """The ledger of a peak: the statics, and what is live there by what it is; the rest is temporaries.

    Args:
        live, workspace: of `live_at_peak`.
        peak: bytes above the statics, which the new entries add up to.
        statics: what is there throughout.
        saved: storages kept for the backward.
    """
    sizes = [s.bytes for s in problem.storages]
    gradients = set(problem.backward_outputs)
    kept = {*saved, *problem.forward_outputs} - gradients
    found = list(live)
    of_gradients = sum(sizes[s] for s in found if s in gradients)
    activations = sum(sizes[s] for s in found if s in kept)
    return replace(
        statics,
        gradients=statics.gradients + of_gradients,
        activations=statics.activations + activations,
        temporaries=statics.temporaries + max(peak - of_gradients - activations, 0),
    )


def saved_tensors(problem: Problem, timeline: Timeline) -> tuple[Tensor, ...]:
    """Tensors that the plan keeps on the device from the forward, largest first."""
    elsewhere = {*problem.forward_outputs, *(item.storage for item in timeline.offloaded)}
    kept = [problem.storages[s] for s in timeline.saved if s not in elsewhere]
    return tuple(tensor_of(s) for s in _by_size(kept) if s.bytes)


def offloaded_tensors(problem: Problem, timeline: Timeline) -> tuple[Tensor, ...]:
    """Tensors that the plan keeps in host memory, largest first."""
    return tuple(tensor_of(s) for s in _by_size(problem.storages[item.storage] for item in timeline.offloaded))


def recomputed_tensors(schedule: Schedule, timeline: Timeline, base: Timeline) -> tuple[Recomputed, ...]:
    """Tensors that `base` keeps and this plan makes again, largest first.

    Flops and seconds of one include what has to be made on the way to it and is in no other, so that they add up to
    what the plan recomputes beyond `base` (which computes views and cheap pointwise work again too).

    Args:
        base: the unconstrained plan.
    """
    problem = schedule.problem
    steps = _extra_steps(schedule, timeline, base)
    kept = set(base.saved)
    reader = {i: min(uses) for i, uses in _reads_of_steps(timeline).items()}
    owner: dict[int, int] = {}
    for step in sorted(steps, reverse=True):  # a reader comes after what it reads, so its owner is known
        made = problem.operations[timeline.steps[step]].outputs
        first = reader.get(step)
        owner[step] = step if kept.intersection(made) or first not in owner else owner[first]
    return _gathered(problem, timeline, owner)


def _extra_steps(schedule: Schedule, timeline: Timeline, base: Timeline) -> list[int]:
    """Steps of the backward that compute something again which `base` computes less often."""
    allowed = Counter(i for i, a in zip(base.steps, base.anchors, strict=True) if schedule.anchors[a] != i)
    found = []
    for step, (index, anchor) in enumerate(zip(timeline.steps, timeline.anchors, strict=True)):
        if schedule.anchors[anchor] == index:
            continue
        if allowed[index] > 0:
            allowed[index] -= 1
        else:
            found.append(step)
    return found


def _reads_of_steps(timeline: Timeline) -> dict[int, list[int]]:
    """Steps that read what a step made."""
    found: dict[int, list[int]] = {}
    for instance, born in enumerate(timeline.birth):
        if born >= 0 and timeline.uses[instance]:
            found.setdefault(born, []).extend(timeline.uses[instance])
    return found


def _gathered(problem: Problem, timeline: Timeline, owner: dict[int, int]) -> tuple[Recomputed, ...]:
    """One record per operation that owns steps, with the flops and seconds of all of them."""
    copies: Counter[int] = Counter()
    flops: dict[int, float] = {}
    seconds: dict[int, float] = {}
    for step, own in owner.items():
        operation, target = problem.operations[timeline.steps[step]], timeline.steps[own]
        copies[target] += step == own
        flops[target] = flops.get(target, 0.0) + operation.flops
        seconds[target] = seconds.get(target, 0.0) + operation.seconds
    found = []
    for index, count in copies.items():
        operation = problem.operations[index]
        made = [problem.storages[s] for s in operation.outputs]
        largest = max(made, key=lambda s: s.bytes, default=None)
        if largest is None:
            continue
        base = tensor_of(largest, operation.node)
        found.append(
            Recomputed(
                base.node, sum(s.bytes for s in made), base.op, base.shape, base.file, base.line, base.module,
                flops=flops[index] / count, seconds=seconds[index] / count, copies=count,
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda r: (-r.bytes, r.node)))


def tensor_of(storage: Storage, node: fx.Node | None = None) -> Tensor:
    """A storage as the tensor that it first held, where the user's source makes it."""
    node = node or storage.node
    source = locate(node)
    shapes = tensors(concrete(node.meta.get("val"), _size))
    shape = str(max(shapes, key=lambda t: t.nbytes)) if shapes else ""
    return Tensor(
        node.name, storage.bytes, target_name(redraw.drawn_by(node)), shape, source.file, source.line, source.module
    )  # fmt: skip


def _by_size(storages: Iterable[Storage]) -> list[Storage]:
    return sorted(storages, key=lambda s: (-s.bytes, s.index))


def _size(value: Any) -> int:
    return int(value_of(value))
