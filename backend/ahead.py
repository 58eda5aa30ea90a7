"""Ahead of time: the graphs of a model without running, compiling or allocating it.

The module is copied into fake tensors and compiled with a backend that traces each graph to ATen and then answers
with fake outputs, so that a model of several graphs (graph breaks) is captured whole.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from optpass.backend import capture, compat
from optpass.errors import OptPassError, TraceError
from optpass.passes.contract import AtenGraph

#: Graphs captured before giving up: a model that breaks this often recompiles for ever.
MAX_GRAPHS = 512


@dataclass
class Captured:
    """One graph of a model.

    Attributes:
        graphs: its ATen graphs, forward and (training) backward.
        nodes: nodes of the Dynamo graph.
        seconds: time that tracing took.
    """

    graphs: tuple[AtenGraph, ...]
    nodes: int
    seconds: float


@dataclass
class Capture:
    """All graphs of a model, in the order in which they were reached."""

    items: list[Captured] = field(default_factory=list)
    parameters: int = 0


def capture_model(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    train: bool,
    loss: Callable[[Any], torch.Tensor] | None = None,
    fake: compat.FakeTensorMode | None = None,
) -> Capture:
    """Capture every graph of `model(*args, **kwargs)`.

    Args:
        model: a module or a function, with real or fake parameters; it is not changed.
        args, kwargs: inputs, real or fake.
        train: also trace the backward.
        loss: reduces the output to a scalar inside the graph; without it the backward starts at the outputs.
        fake: the mode that the model was built in, if it was built under one.

    Raises:
        TraceError: the model raised, or something in it cannot be traced; says what.
    """
    mode = fake if fake is not None else compat.fake_mode_for_planning()
    result = Capture()

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if len(result.items) >= MAX_GRAPHS:
            raise TraceError(f"more than {MAX_GRAPHS} graphs: the model breaks or recompiles on every step")
        start = time.perf_counter()
        values = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
        nodes = len(gm.graph.nodes)
        graphs = capture.trace(copy.deepcopy(gm), values)
        result.items.append(Captured(graphs, nodes, time.perf_counter() - start))
        return gm.forward

    step = model if loss is None else _with_loss(model, loss)
    try:
        with mode:
            fake_model, fake_args, fake_kwargs = _fakes(mode, model, args, dict(kwargs or {}))
            result.parameters = _parameters(fake_model)
            step = fake_model if loss is None else _with_loss(fake_model, loss)
            with (
                compat.quiet_dynamo(allow_rnn=True, suppress_errors=False, capture_scalar_outputs=True),
                torch.set_grad_enabled(train),
            ):
                compat.reset_dynamo()
                torch.compile(step, backend=backend, dynamic=False)(*fake_args, **fake_kwargs)
    except OptPassError:
        raise
    except Exception as error:
        raise TraceError(f"the model could not be traced: {_reason(error)}") from error
    finally:
        compat.reset_dynamo()
    if not result.items:
        raise TraceError("no graph was captured: the model does no tensor work that torch.compile can see")
    return result


def _with_loss(model: Callable[..., Any], loss: Callable[[Any], torch.Tensor]) -> Callable[..., Any]:
    def step(*args: Any, **kwargs: Any) -> torch.Tensor:
        return loss(model(*args, **kwargs))

    return step


def _fakes(
    mode: compat.FakeTensorMode, model: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Copies of model and inputs with every tensor fake; what is fake already is used as it is."""
    tree = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t if isinstance(t, compat.FakeTensor) else mode.from_tensor(t, static_shapes=True),
        (tuple(args), kwargs),
    )  # fmt: skip
    if isinstance(model, nn.Module) and any(not isinstance(p, compat.FakeTensor) for p in _tensors(model)):
        with compat.FakeCopyMode(mode):
            model = copy.deepcopy(model)
    return model, tree[0], tree[1]


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _parameters(model: Any) -> int:
    return sum(p.numel() for p in model.parameters()) if isinstance(model, nn.Module) else 0


def _reason(error: BaseException) -> str:
    """The innermost cause's first line, with its kind."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
