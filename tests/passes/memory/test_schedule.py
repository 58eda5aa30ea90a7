"""Timelines against an executor that keeps live sets by hand, on states drawn at random."""

from __future__ import annotations

import gc
import random

import pytest

from optpass.passes.memory.search.schedule import Schedule, State
from optpass.passes.memory.uncollected import uncollected

NAMES = ("stack", "outside", "chain", "branches")


def random_state(schedule, rng):
    """Some of the forward's storages kept, and some evictions; what must not be computed again is kept."""
    problem = schedule.problem
    pinned = {s for o in problem.operations if o.kept_why for s in o.outputs}
    kept = {s for s in schedule._forward_made if rng.random() < 0.6} | (pinned & schedule._forward_made)
    state = State(kept=kept)
    again = [s for s in schedule._forward_made if s not in pinned]
    for _ in range(10):
        state.evicted.setdefault(rng.randrange(len(schedule.anchors)), set()).add(rng.choice(again))
    return state


def replayed(schedule, timeline):
    """Bytes live at each step of the backward: every instance lives from its birth to its last read."""
    problem, sizes = schedule.problem, schedule.sizes
    last_read = {}
    for step, reads in enumerate(timeline.reads):
        for instance in reads:
            last_read[instance] = step
    held = set(problem.forward_outputs)
    always = sum(int(sizes[s]) for s in held)
    found = []
    for step, index in enumerate(timeline.steps):
        live = always + problem.operations[index].workspace
        for instance, s in enumerate(timeline.storage):
            born = timeline.birth[instance]
            used = last_read.get(instance)
            if s in held or (born < 0 and used is None):
                continue
            if born <= step <= (born if used is None else used):
                live += int(sizes[s])
        found.append(live)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_are_those_of_an_executor_that_frees_at_last_use(joints, programs, name):
    schedule = Schedule(programs.problem_of(joints[name][2]))
    rng = random.Random(name)
    for _ in range(12):
        timeline = schedule.run(random_state(schedule, rng))
        assert timeline.backward.tolist() == replayed(schedule, timeline)
        assert timeline.peak >= max(timeline.boundary, int(timeline.forward.max()), int(timeline.backward.max()))


@pytest.mark.parametrize("name", NAMES)
def test_every_operation_reads_what_was_made_before_it(joints, programs, name):
    schedule = Schedule(programs.problem_of(joints[name][2]))
    rng = random.Random(name + "order")
    for _ in range(12):
        state = random_state(schedule, rng)
        timeline = schedule.run(state)
        for step, (index, reads) in enumerate(zip(timeline.steps, timeline.reads, strict=True)):
            wanted = [s for s in schedule.operations[index].inputs if not schedule.given[s]]
            assert [timeline.storage[i] for i in reads] == wanted
            assert all(timeline.birth[i] < step for i in reads)
        anchors = [i for i in timeline.steps if schedule.operations[i].backward]
        assert anchors == schedule.anchors  # each once, in order
        kept = state.kept | set(schedule.problem.forward_outputs)
        assert set(timeline.saved) <= kept


def test_keeping_everything_recomputes_nothing(joints, programs):
    schedule = Schedule(programs.problem_of(joints["stack"][2]))
    timeline = schedule.run(State(kept=set(schedule._forward_made)))
    assert not any(schedule.operations[i].forward for i in timeline.steps)


def test_a_kept_tensor_that_is_evicted_is_computed_again(joints, programs):
    schedule = Schedule(programs.problem_of(joints["chain"][2]))
    everything = State(kept=set(schedule._forward_made))
    plain = schedule.run(everything)
    used = {s: uses for s, i in plain.saved.items() if len(uses := plain.uses[i]) and s not in schedule._held}
    s, uses = max(used.items(), key=lambda item: item[1][-1])
    position = plain.anchors[uses[-1]]
    evicted = everything.copy()
    evicted.evicted.setdefault(position, set()).add(s)
    timeline = schedule.run(evicted)
    producer = schedule.problem.storages[s].producer
    assert producer in timeline.steps
    assert producer not in plain.steps


def test_planning_rests_the_collector_of_cycles_and_leaves_it_as_it_was():
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), uncollected():
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()  # the outer one still rests it
        raise ZeroDivisionError
    assert gc.isenabled()
