"""Ahead of time: the graphs of a model without running, compiling or allocating it.

The module is copied into fake tensors and compiled with a backend that traces each graph to ATen and then answers
with fake outputs, so that a model of several graphs (graph breaks) is captured whole. `real=True` runs the model
for real instead, for those whose Python depends on values.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from optpass.backend import capture, compat, model_tensors
from optpass.backend.compat.partition import ungraded_inputs
from optpass.backend.eager_ops import watched
from optpass.backend.fake_copy import fake_copy
from optpass.backend.trace_error import reason
from optpass.backend.whole import whole_graph
from optpass.errors import TraceError, deliberate
from optpass.passes.contract import AtenGraph

log = logging.getLogger(__name__)

#: Graphs captured before giving up: a model that breaks this often recompiles for ever.
MAX_GRAPHS = 512


@dataclass
class Captured:
    """One graph of a model.

    Attributes:
        graphs: its ATen graphs, forward and (training) backward.
        nodes: nodes of the Dynamo graph.
        seconds: time that tracing took.
        ended_by: why Dynamo ended the graph here, with the line; "" where it is the last one.
        linear: the linear partitioner split it (see `capture.MIN_CUT_NODES`).
        joint: the joint graph, where it was asked for and there is a backward.
    """

    graphs: tuple[AtenGraph, ...]
    nodes: int
    seconds: float
    ended_by: str = ""
    linear: bool = False
    joint: capture.Joint | None = None


@dataclass
class Capture:
    """All graphs of a model, each once.

    Attributes:
        items: in the order in which they were first reached.
        calls: indices into `items`, in the order in which one step runs them; a graph may run several times.
        parameters: number of parameters.
        dtype: dtype of most of them, e.g. 'bfloat16'; that of the inputs where there are none, '' for integers alone.
        inputs: the input tensors, e.g. 'int64[1, 8192]'.
        eager: ops that torch.compile leaves to eager, by name: those of frames that Dynamo gave up.
        whole: the graph was traced without Dynamo, because of those.
        seconds: time that everything took.
        trained: identities of the model's parameters that a backward makes a gradient of, where joint graphs were asked
            for; None where that is not known: it was traced without Dynamo, or parts of it are eager.
        model, arguments: the copy of the model that was traced, and its inputs, where joint graphs were asked for.
    """

    items: list[Captured] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    parameters: int = 0
    dtype: str = ""
    inputs: str = ""
    eager: Counter[str] = field(default_factory=Counter)
    whole: bool = False
    seconds: float = 0.0
    trained: set[int] | None = field(default_factory=set)
    model: Any = None
    arguments: tuple[Any, ...] = ()


def capture_model(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    train: bool,
    loss: Callable[[Any], torch.Tensor] | None = None,
    fake: compat.FakeTensorMode | None = None,
    dtype: torch.dtype | None = None,
    real: bool = False,
    joint: bool = False,
    prepare: Callable[[fx.GraphModule], None] | None = None,
    as_inductor: bool = True,
    ready: capture.Ready | None = None,
) -> Capture:
    """Capture every graph of `model(*args, **kwargs)`.

    Args:
        model: a module or a function, with real, meta or fake parameters; it is not changed.
        args, kwargs: inputs, real, meta or fake. Meta tensors are taken for CPU tensors.
        train: also trace the backward; the copy of the module is put into training or evaluation mode accordingly.
        loss: reduces the output to a scalar inside the graph; without it the backward starts at the outputs.
        fake: the mode that the model was built in, if it was built under one.
        dtype: what floating-point parameters, buffers and inputs are cast to.
        real: run a copy of the model on its real tensors; for models that branch on values.
        joint: keep the joint graphs too, and the copy of the model.
        prepare: changes each Dynamo graph before it is traced on, as the backend's passes would.
        as_inductor, ready: as in `capture.trace`.

    Raises:
        TraceError: the model raised, or something in it cannot be traced; says what, and the user's line.
    """
    start = time.perf_counter()
    mode = fake if fake is not None else compat.fake_mode_for_planning()
    result, how = Capture(), _Trace(joint, as_inductor, ready)
    try:
        with _no_collection(), contextlib.nullcontext() if real else mode:
            inner, inputs, named = fake_copy(mode, model, args, dict(kwargs or {}), dtype, real=real)
            if isinstance(inner, nn.Module) and inner.training != train:
                inner.train(train)
            result.parameters = model_tensors.parameter_count(inner)
            result.dtype = model_tensors.main_dtype(inner, (inputs, named))
            result.inputs = model_tensors.described((inputs, named))
            with watched(mode, result.eager) as unwatched:
                step = inner if loss is None else _with_loss(inner, loss)
                _run(step, inputs, named, _backend(result, real, unwatched, how, prepare), train)
        if result.eager:
            result.trained = None
        if result.eager and not real:
            _trace_whole(result, inner, inputs, named, loss, train, how)
        if joint:
            result.model, result.arguments = inner, (*inputs, *named.values())
    except Exception as error:
        meant = deliberate(error)
        if meant is not None:
            raise meant from meant.__cause__
        raise TraceError(f"the model could not be traced: {_where(error, result)}") from error
    finally:
        compat.reset_dynamo()
    if not result.items:
        raise TraceError(
            "no graph was captured: the model does no tensor work, or does all of it where torch.compile cannot follow "
            "(a graph break inside a loop or a try block)"
        )
    result.seconds = time.perf_counter() - start
    return result


def _run(
    step: Callable[..., Any], inputs: tuple[Any, ...], named: dict[str, Any], backend: Callable[..., Any], train: bool
) -> None:
    with (
        compat.quiet_dynamo(
            allow_rnn=True,
            suppress_errors=False,
            capture_scalar_outputs=True,
            recompile_limit=MAX_GRAPHS,
            accumulated_recompile_limit=MAX_GRAPHS,
        ),
        torch.random.fork_rng(devices=[]),
        torch.set_grad_enabled(train),
    ):
        compat.reset_dynamo()
        torch.compile(step, backend=backend, dynamic=False)(*inputs, **named)


def _trace_whole(
    result: Capture,
    model: Any,
    inputs: tuple[Any, ...],
    named: dict[str, Any],
    loss: Any,
    train: bool,
    how: _Trace,
) -> None:
    """Replace the graphs by one of the whole model, where it can be traced without Dynamo; else leave them."""
    start = time.perf_counter()
    item = Captured((), 0, 0.0)
    try:
        with torch.set_grad_enabled(train), torch.random.fork_rng(devices=[]):
            gm, values = whole_graph(model, model_tensors.owner(model), inputs, named, loss)
            item.nodes = len(gm.graph.nodes)
            item.graphs = _traced(gm, values, item, how)
    except Exception as error:  # noqa: BLE001  # the graphs that there are still say most; `eager` says what is missing
        log.info("the model could not be traced whole: %s", reason(error))
        return
    item.seconds = time.perf_counter() - start
    result.items, result.calls, result.whole = [item], [0], True


def _backend(
    result: Capture,
    real: bool,
    unwatched: Callable[[], contextlib.AbstractContextManager[None]],
    how: _Trace,
    prepare: Callable[[fx.GraphModule], None] | None,
) -> Callable[..., Any]:
    """A Dynamo backend that files each graph in `result`, and each call of it."""

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if len(result.items) >= MAX_GRAPHS:
            raise TraceError(f"more than {MAX_GRAPHS} graphs: the model breaks or recompiles on every step")
        start = time.perf_counter()
        index = len(result.items)
        values = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
        item = Captured((), len(gm.graph.nodes), 0.0, _end_of(gm))
        own = copy.deepcopy(gm)
        if prepare is not None:
            prepare(own)
        item.graphs = _traced(own, values, item, how)
        item.seconds = time.perf_counter() - start
        result.items.append(item)
        answer = gm.forward if real else _fake_answer(gm)

        def call(*args: Any) -> Any:
            result.calls.append(index)
            if item.joint is not None and result.trained is not None:
                without = set(ungraded_inputs(item.joint.graph, item.joint.forward_outputs))
                result.trained.update(id(a) for i, a in enumerate(args) if i not in without)
            with unwatched():
                return answer(*args)

        return call

    return backend


@dataclass(frozen=True)
class _Trace:
    """How a graph is traced: whether its joint graph is kept, as which inner compiler would, and in which form."""

    joint: bool
    as_inductor: bool
    ready: capture.Ready | None


def _traced(gm: fx.GraphModule, values: list[Any], item: Captured, how: _Trace) -> tuple[AtenGraph, ...]:
    return capture.trace(
        gm,
        values,
        on_linear=lambda: setattr(item, "linear", True),
        on_joint=(lambda found: setattr(item, "joint", found)) if how.joint else None,
        as_inductor=how.as_inductor,
        ready=how.ready,
    )


def _fake_answer(gm: fx.GraphModule) -> Callable[..., Any]:
    """`gm` on fake tensors: its outputs' metadata is known, so that nothing has to run to answer.

    A graph with outputs that are no plain tensors (scalars read from tensors, sparse ones) is run.
    """
    outputs = next(n for n in reversed(gm.graph.nodes) if n.op == "output").args[0]
    if not isinstance(outputs, (tuple, list)) or not all(isinstance(a, fx.Node) for a in outputs):
        return gm.forward
    known = [a.meta.get("example_value") for a in outputs]
    if not all(isinstance(v, torch.Tensor) and v.layout == torch.strided and _static(v) for v in known):
        return gm.forward
    position = {n: i for i, n in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}

    def answer(*args: Any) -> tuple[Any, ...]:
        return tuple(
            args[position[a]] if a in position else _like(v) for a, v in zip(outputs, known, strict=True)
        )  # fmt: skip

    return answer


def _static(value: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def _like(value: torch.Tensor) -> torch.Tensor:
    """A new tensor of the same metadata, in the mode that is active."""
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.requires_grad_() if value.requires_grad and torch.is_grad_enabled() else made


def _with_loss(fn: Callable[..., Any], loss: Callable[[Any], torch.Tensor]) -> Callable[..., Any]:
    # `fn` is what `source.clean_path` strips from module paths: the user's model starts below it.
    def step(*args: Any, **kwargs: Any) -> torch.Tensor:
        return loss(fn(*args, **kwargs))

    return step


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without the cycle collector: tracing makes millions of objects that live, and looking at them again and again
    takes a third of the time. What the program froze itself stays frozen."""
    was_enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    if not frozen:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _where(error: Exception, result: Capture) -> str:
    """What failed, and where: a value that is missing is missed where the graph ended to read it."""
    last = result.items[result.calls[-1]].ended_by if result.calls else ""
    if last and compat.needs_values(error):
        return f"{reason(error, place=False)}; {last}"
    return reason(error)


def _end_of(gm: fx.GraphModule) -> str:
    """Why Dynamo ended the graph, and where; '' for the end of the function."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", True):
        return ""
    lines = [line.strip() for line in str(reason.reason).splitlines() if line.strip()]
    if lines and lines[0].startswith("generic_jump"):
        lines = ["Python branches on a tensor's value"]
    said = next((line for line in lines if line.startswith("Explanation:")), lines[0] if lines else "graph break")
    frames = list(getattr(reason, "user_stack", ()))
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return said.removeprefix("Explanation: ").rstrip(".") + place
