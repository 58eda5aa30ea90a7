"""The backend function that `torch.compile(backend="optpass")` finds through its entry point."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from optpass.backend import compat, exit_report, inner
from optpass.backend.audit.standing import STANDING
from optpass.backend.bound_sizes import take_sizes_from_tensors
from optpass.backend.compat.data_parallel import unsplit
from optpass.backend.content_guard import Guarded
from optpass.backend.contents import Contents
from optpass.backend.device import fingerprint, spec_for
from optpass.backend.identity import identity
from optpass.backend.memory import attach, kept
from optpass.backend.memory.filing import record_of
from optpass.backend.memory.partition.growth import Growth
from optpass.backend.memory.planned import Case, Planned
from optpass.backend.memory.seen.ungraded import needs_of
from optpass.backend.memory.step import StepTensors
from optpass.backend.memory.together.together import STEPS
from optpass.backend.memory.uncompiled import UNCOMPILED
from optpass.backend.parts import Around, Part, is_awaited
from optpass.backend.retrace import retraceable
from optpass.backend.session import SESSIONS, Session, Timed
from optpass.errors import BudgetInfeasibleError, OptPassError
from optpass.options import Options, resolve
from optpass.passes.contract import Stage
from optpass.passes.memory.infeasible import attention_swapped
from optpass.passes.memory.optimizers import optimizers
from optpass.passes.registry import selected
from optpass.reporting import store
from optpass.reporting.model import GraphRecord, PassRecord

log = logging.getLogger(__name__)


def optpass(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **_unused: Any,
) -> Callable[..., Any]:
    """Compile one Dynamo graph.

    Args:
        gm: the graph; ours to change.
        example_inputs: tensors and SymInts, one per placeholder.
        mode: as in `torch.compile(mode=...)`; passed on to Inductor.
        options: see `optpass.options.Options`.
        **_unused: what later versions of torch add to every backend call (2.15: `name`).

    Raises:
        ConfigError: an option is unknown, of the wrong type or impossible.
        PassError: a pass failed and `strict` is set.
    """
    resolved = resolve(options)
    if is_awaited(gm, resolved):
        return Part(gm, lambda part, name: _compile_again(part.original, name, resolved, mode, part=part))
    return _compile(gm, example_inputs, resolved, mode)


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    resolved: Options,
    mode: str | None,
    *,
    look: bool = True,
    case: Case | None = None,
    trial: bool = False,
    undone: Sequence[PassRecord] = (),
    around_call: Callable[[], Around] = attach.around_call,
) -> Callable[..., Any]:
    """Compile one graph.

    Args:
        look: passes may look at what the module's tensors hold.
        case: what a memory budget is for; default: what is the case now.
        trial: compiled to see what its smallest peak is, by a budget that nothing fits; nothing of it is reported.
        undone: passes whose graph could not be compiled; they are not selected here.
        around_call: finds what is around the call that is compiled.
    """
    start = time.perf_counter()
    ignored = inner.check(resolved, mode)
    optimizers.check(resolved)
    passes = selected(resolved)
    spec = spec_for(resolved, example_inputs)
    serving, problem = inner.serving(resolved, example_inputs)
    planned = attach.is_planned(gm, resolved)
    call, around, modules = around_call() if planned else ([], [], [])
    modules = modules if case is None else case.called()
    tensors = StepTensors.of(gm, example_inputs, call, around, modules) if planned else StepTensors((), (), ())
    dynamic = Growth.of(gm, example_inputs) if planned else []
    case = Planned.first_case(tensors, example_inputs if planned else (), modules) if case is None else case
    del call, around, modules
    memory, without_effect = attach.partitioner_of(
        gm, tensors, resolved, spec, serving, gradients=case.gradients,
        share=case.share_of(tensors, example_inputs), expected=case.expected(), new=case.is_new,
    )  # fmt: skip
    uuid = identity(resolved, passes, fingerprint(resolved, spec))
    exit_report.register(resolved)
    STANDING.ask(resolved.audit)

    session = Session(gm, resolved, passes, spec, attach.identity_of(uuid, memory), past_uuid=uuid)
    SESSIONS.add(session)
    session.record.inner = inner.name_of(serving)
    for record in undone:
        session.file(record)
    if not trial:
        _tell(resolved, serving, problem, [*ignored, *([without_effect] if without_effect else [])])
    undoable = inner.may_go_without(serving, passes) and not (resolved.strict or trial or undone)
    contents = Contents(gm, example_inputs if look else (), keep=memory is not None or undoable)
    if memory is not None:
        session.hooks.partition, session.hooks.lowered = memory, memory.lowered
        memory.patches = inner.own_patches(resolved, mode)
    guards = session.before_autograd(gm, contents)
    sources = kept.sources_of(gm) if memory is not None else []
    try:
        with (
            inner.cache_outcome(session.record),
            compat.autograd_cache_keys(functools.partial(kept.wanted, memory)) as keys,
        ):
            compiled = compat.undisabled(inner.compile_with(serving, gm, example_inputs, resolved, mode, session.hooks))
    except BudgetInfeasibleError as error:
        STEPS.forget()
        if not trial and case.share is None and _could_be_swapped(resolved, session.record):
            again = functools.partial(_compile, contents.original()(), example_inputs, mode=mode, look=look, case=case)
            _help_by_attention(error, again, resolved)
        raise
    except compat.RestartAnalysis:  # Dynamo traces the frame again, a symbol now a number: this graph never runs
        session.withdraw()
        raise
    except Exception as error:
        changed = session.changed() if undoable and not isinstance(error, OptPassError) else []
        if not changed:
            raise
        session.withdraw()
        without = functools.partial(_compile, contents.original()(), example_inputs, mode=mode, look=look, case=case)
        return _without(changed, error, without, resolved)
    finally:
        if memory is not None:
            memory.if_nothing_else_trains = None  # it holds what the graph was compiled with
        if trial:
            session.withdraw()
    alone = not any(isinstance(value, list) for value in example_inputs)  # compiled autograd's have theirs in one
    source = session.source if alone and not session.record.training else None
    session.after_compile()
    if memory is not None:
        kept.keep_or_find(memory, keys[-1] if keys else None, sources)
        session.file(record_of(memory))
        again = functools.partial(_compile_again, contents.original(), f"graph_{session.record.id}", resolved, mode)
        needs = None if source is None else needs_of(source, memory.executor, memory.patches)
        compiled = Planned(compiled, case, again, tensors, memory, resolved, session.supersede, dynamic, needs)
    if guards:
        name = f"graph_{session.record.id}_without_contents"
        without = functools.partial(_compile_again, contents.original(), name, resolved, mode)
        compiled = Guarded(compiled, contents.guarded(guards), without, session.record.id)
    with store.current().lock:
        session.record.t_compile_s += time.perf_counter() - start
    log.info("graph %s compiled by %s in %.2f s", session.record.id, session.record.inner, session.record.t_compile_s)
    exit_report.trace(session.record)
    return Timed(compiled, session.record)


def _without(
    changed: Sequence[str], error: Exception, again: Callable[..., Callable[..., Any]], resolved: Options
) -> Callable[..., Any]:
    """The graph compiled without the passes that changed it, where the inner compiler failed on what they made."""
    said = next(iter(str(error).strip().splitlines()), "no message")
    text = f"the inner compiler failed on the graph that it made: {type(error).__name__}: {said}"
    undone = [PassRecord(name=name, stage=Stage.DYNAMO, error=text) for name in changed]
    passes = (*resolved.disable_passes, *changed)
    try:
        compiled = again(resolved=resolved.model_copy(update={"disable_passes": passes}), undone=undone)
    except Exception:  # noqa: BLE001  # they are not what it fails on
        raise error from None
    words = f"{' and '.join(changed)} had to be undone on a graph: {text}"
    log.warning("%s", words)
    store.current().warn(words)
    return compiled


def _could_be_swapped(resolved: Options, record: GraphRecord) -> bool:
    """Whether another setting of the option may put attention on fused kernels."""
    mode = resolved.attention.mode
    declined = any(site.kind == "attention" for item in record.passes for site in item.declined)
    return mode == "off" or (mode == "auto" and declined)


def _help_by_attention(error: BudgetInfeasibleError, again: Callable[..., Any], resolved: Options) -> None:
    """Add to the error what the smallest peak would be with all attention on fused kernels, if that is less."""
    always = resolved.attention.model_copy(update={"mode": "always"})
    try:
        again(resolved=resolved.model_copy(update={"attention": always, "memory_budget": 1}), trial=True)
    except BudgetInfeasibleError as found:
        if found.floor_bytes < error.floor_bytes:
            error.add_help(str(attention_swapped(found.floor_bytes)))
    except Exception:  # advice must not stand in the way of the error that it is for
        log.debug("what attention on fused kernels would need was not found", exc_info=True)


def _tell(resolved: Options, serving: str | Callable[..., Any], problem: str | None, ignored: Sequence[str]) -> None:
    """Enter the user's settings in the report, and what of them has no effect or cannot be had here."""
    collected = store.current()
    collected.set_options(resolved.to_json())
    if problem is not None:
        inner.warn_once(problem)
        collected.warn(f"Inductor cannot build here ({problem}); aot_eager served instead")
    matcher = inner.matcher_warning() if serving == inner.INDUCTOR else None
    for text in (*ignored, *([matcher] if matcher is not None else [])):
        inner.log_once(text)
        collected.warn(text)


def _compile_again(
    original: Callable[[], fx.GraphModule],
    name: str,
    resolved: Options,
    mode: str | None,
    case: Case | None = None,
    part: Part | None = None,
) -> Callable[..., Any]:
    """The graph that `original` makes, compiled by Dynamo anew when it is called, with guards of its own; `part`: it is
    one that was not compiled before."""
    module, kept = take_sizes_from_tensors(retraceable(original()))

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **_unused: Any) -> Callable[..., Any]:
        if part is None:
            return _compile(gm, example_inputs, resolved, mode, look=False, case=case)
        part.tell(gm, module.graph.find_nodes(op="placeholder"))
        return _compile(gm, example_inputs, resolved, mode, around_call=part.around)

    def run(*args: Any) -> Any:  # Dynamo leaves the `forward` of a graph module alone, unless something calls it
        for value in args:  # inputs are numbered as they are first looked at: as before, for what a plan says of them
            isinstance(value, torch.Tensor)
        return module(*args)

    # Dynamo counts recompiles by code, and gives up after some: each graph has its own.
    run.__code__ = run.__code__.replace(co_name=name)
    compiled = torch.compile(run, backend=backend)

    def call(*args: Any) -> Any:
        with unsplit():
            return compiled(*[args[i] for i in kept])

    return call


def _reset() -> None:
    """Called by `torch._dynamo.reset()`, possibly several times. The report survives: it is about what was compiled."""
    UNCOMPILED.forget()


optpass.reset = _reset  # type: ignore[attr-defined]

# This module is imported when Dynamo looks the backend up. By the time it hands over a graph, the breaks of that frame
# are behind it: recording has to begin here.
STANDING.beside(UNCOMPILED)
STANDING.begin()
