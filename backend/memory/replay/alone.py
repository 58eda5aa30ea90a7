"""The peak of one graph that is not half of a step: of inference, or of a part that keeps nothing for a backward.

As `replay`, on fake tensors, before it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from optpass.backend import compat
from optpass.backend.compat import memory as inductor
from optpass.backend.memory.replay.graph_run import GraphRun
from optpass.backend.memory.replay.graph_values import concrete, copied, sizes_read, values_of_inputs
from optpass.backend.memory.replay.storages import Moment, Storages
from optpass.backend.memory.replay.wrapper import Wrapper


@dataclass(frozen=True)
class Replayed:
    """One graph, replayed; bytes are above those of its static inputs.

    Attributes:
        peak_bytes: most bytes at one time.
        end_bytes: bytes of outputs and of inputs that are still held when it returns.
        peak_label: what ran at the peak: a node or a kernel.
        timeline: bytes after each operation.
    """

    peak_bytes: int
    end_bytes: int
    peak_label: str
    timeline: tuple[Moment, ...] = field(repr=False)


def replay_graph(gm: fx.GraphModule, *, static_inputs: Iterable[int] = ()) -> Replayed:
    """The peak of an ATen graph as aot_eager runs it.

    Args:
        gm: forward, backward or inference graph whose placeholders have `meta["val"]`. It is not changed.
        static_inputs: indices of inputs that live on whatever the graph does (parameters, what the user holds); they
            do not count. The others are there at the start, and are released after their last use.
    """
    return _replay_one(gm, static_inputs, lambda mode: GraphRun(gm, mode))


def replay_inductor(
    gm: fx.GraphModule,
    *,
    is_backward: bool,
    static_inputs: Iterable[int] = (),
    user_outputs: Sequence[int] = (),
    donated: Sequence[int] = (),
    config_patches: dict[str, Any] | None = None,
) -> Replayed:
    """The peak of what Inductor generates for a graph. Nothing is compiled, and `gm` is not changed.

    Arguments as for `replay_graph` and `compat.memory.lower`. Raises what Inductor raises.
    """
    lowered = inductor.lower(
        copied(gm), values_of_inputs(gm), is_backward=is_backward, user_outputs=user_outputs, donated=donated,
        config_patches=config_patches,
    )  # fmt: skip
    return _replay_one(gm, static_inputs, lambda mode: Wrapper(lowered, mode, sizes_read(gm)))


def replay_compiled(compiled: Any, gm: fx.GraphModule, *, static_inputs: Iterable[int] = ()) -> Replayed:
    """As `replay_inductor`, of a graph that Inductor has compiled: `compiled` is its `CompiledFxGraph`."""
    return _replay_one(gm, static_inputs, lambda mode: Wrapper(inductor.lowered_from(compiled), mode, sizes_read(gm)))


def _replay_one(
    gm: fx.GraphModule, static_inputs: Iterable[int], program: Callable[[compat.FakeTensorMode], Any]
) -> Replayed:
    mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
    storages, static = Storages(), set(static_inputs)
    args = [concrete(value, mode) for value in values_of_inputs(gm)]
    kept = [value for i, value in enumerate(args) if i in static]
    for i, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            (storages.external if i in static else storages.add)(value)
    storages.mark("inputs")
    del value
    outputs = program(mode).run(args, storages)
    storages.mark("end")
    result = Replayed(storages.peak, storages.live, storages.peak_label, tuple(storages.timeline))
    del outputs, kept
    return result
