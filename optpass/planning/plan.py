"""A request answered: the step captured, its graphs searched, a plan chosen, and what to say where none fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from optpass.backend.ahead import Capture
from optpass.backend.capture import Joint
from optpass.backend.memory.probe import library_workspace
from optpass.backend.model_tensors import main_dtype, owner, parameter_count
from optpass.errors import BudgetInfeasibleError, ConfigError, TraceError
from optpass.naming import argument, given
from optpass.passes.memory import infeasible
from optpass.passes.memory.budget import resolve as resolve_budget
from optpass.passes.memory.infeasible import Help
from optpass.passes.memory.optimizers import optimizers
from optpass.passes.memory.optimizers.optimizers import OptimizerCost
from optpass.passes.memory.plan import Ledger, MemoryPlan, Tensor
from optpass.passes.memory.pricing import node_prices
from optpass.passes.memory.workspace.call import Call
from optpass.planning import shard as sharding
from optpass.planning import step as steps
from optpass.planning.prepare import Prepared
from optpass.planning.record import plan_record
from optpass.planning.replayed import Replayed, replayable
from optpass.planning.request import Captured, Request
from optpass.planning.shard import Gathered
from optpass.planning.solve import Fixed, GraphWays, StepPlanner, problem_of
from optpass.planning.step import StepState
from optpass.reporting.plan.model import BatchRecord, PlanReport, ShardRecord
from optpass.units import format_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Solved:
    """A step captured and searched: everything that any budget needs."""

    captured: Captured
    state: StepState
    gathered: Gathered
    planner: StepPlanner
    prepared: Prepared
    joints: tuple[Joint, ...] = ()


def plan_step(request: Request) -> PlanReport:
    """The plan that a request asks for.

    Raises:
        ConfigError: an unknown optimizer, or a budget that the device cannot have.
        TraceError: the model cannot be captured, or has no backward.
        BudgetInfeasibleError: no plan fits; the message says what would help.
    """
    budget = budget_of(request)
    tried: list[tuple[int, int]] = []
    if request.search_batch:
        from optpass.planning.batch import largest_batch

        if budget is None:
            most = f"{given('batch', 'auto')} looks for the largest micro-batch within a budget"
            raise ConfigError(f"{most}; name one with {argument('memory_budget')}")
        solved, tried = largest_batch(request, budget)
    else:
        solved = solve(request, request.batch)
    notes: list[str] = []
    plan, floor = _plan(request, solved, budget, notes)
    while plan is None and request.search_batch and (solved.captured.batch or 1) > 1:
        batch = solved.captured.batch or 1
        solved = solve(request, batch - max(1, batch // _FEWER))
        plan, floor = _plan(request, solved, budget, notes)
        tried = sorted({**dict(tried), solved.captured.batch or 1: floor}.items())
    if plan is None:
        assert budget is not None  # without one there is always a plan
        raise no_plan(request, solved, budget, floor)
    chosen = solved.planner.choose(budget) or solved.planner.choose(None)
    assert chosen is not None
    report = plan_record(solved.captured.name, request.device, solved.planner, chosen, plan)
    return _completed(report, request, solved, tried, dict.fromkeys(notes))


def _plan(request: Request, solved: Solved, budget: int | None, notes: list[str]) -> tuple[MemoryPlan | None, int]:
    """The plan of a compile, where it can be had, or else what is counted, and the smallest peak; None where no plan
    fits. What to say of it goes to `notes`."""
    counted = solved.planner.plan(budget)
    if (
        solved.captured.capture.whole
        or not replayable(request, solved.joints)
        or (counted is not None and request.quick and request.options.inner == "inductor")
    ):
        return counted, solved.planner.floor
    replayed = Replayed(request, solved.state, solved.joints[0], solved.planner)
    try:
        plan = replayed.plan(budget)
        if plan is not None and plan.floor_estimated:
            notes.append(ESTIMATED)
        return plan, replayed.floor
    except Exception as error:  # what a replay runs is the inner compiler's; without it, what is counted is known
        said = next(iter(str(error).splitlines()), "no message")
        log.warning("plans are counted: a replay failed: %s", said, exc_info=log.isEnabledFor(logging.DEBUG))
        notes.append(f"plans are counted, not replayed: {type(error).__name__}: {said}")
        return counted, solved.planner.floor


def budget_of(request: Request) -> int | None:
    """The budget in bytes on the request's device."""
    if request.budget is None:
        return None
    named = request.options.device is not None
    return resolve_budget(request.budget, request.device, request.where, named=named)


def solve(request: Request, batch: int | None) -> Solved:
    """Capture the step at a micro-batch and search its graphs."""
    tell, device = request.progress, request.device
    prepared = Prepared(request.options, device)
    tell(None, "tracing" if batch is None else f"tracing at micro-batch {batch}")
    captured = request.capture(batch, prepared)
    capture = captured.capture
    joints = [item.joint for item in (capture.items[i] for i in capture.calls) if item.joint is not None]
    if not joints:
        raise TraceError("there is no backward: nothing that the loss depends on needs a gradient, so no step to plan")
    unit = steps.granularity(device)
    bare = steps.state_of(
        capture.model, capture.arguments, _NO_OPTIMIZER, unit=unit, accumulation=request.accumulation,
        graded=capture.trained,
    )  # fmt: skip
    state = replace(bare, optimizer=_optimizer(request, bare, _untrained(capture)))
    gathered, divide = Gathered(), 1
    if request.shard is not None:
        divide = request.shard.world_size
        gathered = sharding.gathered(capture.model, unit) if divide > 1 else Gathered()
        state = sharding.divided(state, request.shard)
    graphs = []
    fused = request.options.inner == "inductor"
    for number, joint in enumerate(joints):
        of = f" (graph {number + 1} of {len(joints)})" if len(joints) > 1 else ""
        tell(None, f"pricing {len(joint.graph.nodes):,} nodes{of}")
        library = _asked if device.kind == "cpu" else None
        price = node_prices(joint.graph, device, fused=fused, library=library, library_flops=_MOST_FLOPS)
        problem = problem_of(joint, price, unit=unit, divide_gradients=divide)
        graphs.append(GraphWays(problem, _searching(request, of)))
    fixed = Fixed(state.statics(), state.at_optimizer(0), gathered.bytes)
    return Solved(captured, state, gathered, StepPlanner(graphs, fixed), prepared, tuple(joints))


#: Operators up to so much work, half a second at most, and so many bytes are run on zeros to see what they allocate.
_MOST_FLOPS, _MOST_BYTES = 5e10, 1 << 30
#: Where the largest micro-batch that was counted does not fit, the next has this part fewer samples.
_FEWER = 32
#: What is said of a floor that was counted.
ESTIMATED = (
    "the smallest peak is an estimate, rather too large than too small: Inductor's plans near it were not replayed"
)
_NO_OPTIMIZER = OptimizerCost(optimizers.NONE, 0, 0)


def _asked(call: Call) -> int | None:
    """What the library says of a call; None of one that takes more than `_MOST_BYTES`."""
    return library_workspace(call) if call.nbytes <= _MOST_BYTES else None


def _searching(request: Request, of: str) -> Callable[[int], None]:
    return lambda peak: request.progress(None, f"planning{of}: down to {format_bytes(peak)} above the statics")


def _optimizer(request: Request, state: StepState, untrained: Collection[str]) -> OptimizerCost:
    if request.found is not None:
        return request.found(untrained)
    if request.optimizer is None:
        return _NO_OPTIMIZER
    gpu = request.device.kind != "cpu"
    where = request.options.where("optimizer")
    return optimizers.cost(
        request.optimizer, state.trained, gpu=gpu, settings=request.settings, where=where, library=library_workspace
    )


def _untrained(capture: Capture) -> set[str]:
    """Names of parameters that no backward of the step makes a gradient of."""
    module, trained = owner(capture.model), capture.trained
    named = module.named_parameters() if module is not None and trained is not None else ()
    return {name for name, p in named if p.requires_grad and id(p) not in (trained or ())}


def _completed(
    report: PlanReport, request: Request, solved: Solved, tried: list[tuple[int, int]], notes: Iterable[str]
) -> PlanReport:
    capture, state = solved.captured.capture, solved.state
    report.dtype = main_dtype(capture.model, capture.arguments)
    report.parameter_count = parameter_count(capture.model)
    report.inputs = capture.inputs
    report.optimizer = state.optimizer.name
    report.accumulation = state.accumulation
    report.batch = BatchRecord(size=solved.captured.batch, searched=request.search_batch, tried=tried)
    if request.shard is not None:
        report.shard = ShardRecord(
            kind=request.shard.kind, world_size=request.shard.world_size, layer=solved.gathered.layer,
            gathered_bytes=solved.gathered.parameters, gradient_bytes=solved.gathered.gradients,
        )  # fmt: skip
    report.notes = [*request.notes, *solved.captured.notes, *solved.prepared.notes(), *_notes(request, solved), *notes]
    return report


def _notes(request: Request, solved: Solved) -> list[str]:
    notes = []
    if request.optimizer is None and request.found is None:
        notes.append(f"no optimizer is counted: name one with {argument('optimizer')} (option `optimizer`)")
    if solved.captured.capture.eager:
        here = "planned as if compiled" if solved.captured.capture.whole else "left out"
        notes.append(
            "torch.compile leaves parts of this model to eager, which a run does not plan; here they are "
            f"{here} (optpass audit says what stops it)"
        )
    graphs = len(solved.planner.graphs)
    if graphs > 1:
        notes.append(f"{graphs} graphs: each is planned at the same share of its own range; the sum is an upper bound")
    if request.shard is not None:
        notes.append(
            "sharded: each layer is gathered alone, without prefetching the next, and given up after use; a rank's "
            "inputs and activations are its own"
        )
    return notes


# ---- where nothing fits ---------------------------------------------------------------------------------------------


def no_plan(request: Request, solved: Solved, budget: int, floor: int | None = None) -> BudgetInfeasibleError:
    """The error for a budget below the floor, with what would help.

    Args:
        floor: the smallest peak, where it is not the one that is counted.
    """
    planner = solved.planner
    floor = planner.floor if floor is None else floor
    ledger = planner.floor_plan().ledger
    largest = planner.largest_at_floor() or _largest_parameters(solved)
    return infeasible.explain_infeasible(
        budget, floor, ledger, largest, _helps(request, solved, budget, ledger), request.where
    )


def _largest_parameters(solved: Solved) -> list[Tensor]:
    """The trained parameters, largest first: what counts where the optimizer's step is the peak."""
    module = owner(solved.captured.capture.model)
    named = module.named_parameters() if module is not None else ()
    untrained = _untrained(solved.captured.capture)
    found = [
        Tensor(f"parameter {name}", p.numel() * p.element_size(), shape=f"{str(p.dtype)[6:]}{list(p.shape)}")
        for name, p in named
        if p.requires_grad and name not in untrained
    ]
    return sorted(found, key=lambda t: (-t.bytes, t.node))


def _helps(request: Request, solved: Solved, budget: int, ledger: Ledger) -> list[Help]:
    helps = []
    planner = solved.planner
    smaller = infeasible.smaller_batch(solved.captured.batch, planner.floor, planner.fixed.throughout, budget)
    if smaller is not None:
        helps.append(smaller)
    swapped = _attention_swapped(request, solved)
    if swapped is not None and swapped < planner.floor:
        helps.append(infeasible.attention_swapped(swapped))
    trained = solved.state.trained
    width = max((p.dtype.itemsize for p in trained), default=4)
    if request.shard is None:
        helps += infeasible.standard_helps(ledger, trained_itemsize=width, optimizer=solved.state.optimizer.name)
    return helps


def _attention_swapped(request: Request, solved: Solved) -> int | None:
    """The smallest peak with every attention site swapped that can be; None where that changes nothing."""
    mode = request.options.attention.mode
    if not solved.prepared.declined["attention"] and mode != "off":
        return None
    attention = request.options.attention.model_copy(update={"mode": "always"})
    options = request.options.model_copy(update={"attention": attention})
    request.progress(None, "looking for what would help")
    other = solve(replace(request, options=options), solved.captured.batch)
    return other.planner.floor if other.prepared.applied["attention"] else None
