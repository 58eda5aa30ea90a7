"""The parts into which Dynamo splits a graph for DistributedDataParallel, a bucket of gradients each."""

from __future__ import annotations

import contextlib
import types
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx, nn

from optpass.backend.compat.dynamo import TracingContext, traced_frame


def is_part(gm: fx.GraphModule) -> bool:
    """Whether a graph is such a part. All of them are handed over, with fake tensors, before the first one runs."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return str(getattr(reason, "reason", "")).startswith("DDPOptimizer")


def whole_graph() -> Any:
    """What is the same for all parts of the graph that Dynamo is compiling, and of no other."""
    return TracingContext.try_get()


def breaks_behind() -> bool:
    """Whether the graph that Dynamo is compiling ends in a graph break, as far as is known."""
    reason = getattr(getattr(traced_frame(), "output", None), "compile_subgraph_reason", None)
    return reason is None or bool(getattr(reason, "graph_break", True))


def all_train() -> bool:
    """Whether each trained parameter of the DistributedDataParallel whose forward runs gets a gradient in its step."""
    return not getattr(_running(), "find_unused_parameters", True)


def bucket_bytes() -> int:
    """Bytes of the buckets that the running DistributedDataParallel holds beside gradients, to add them up over all
    processes: those of what it trains."""
    running = _running()
    ignored = getattr(running, "parameters_to_ignore", ())
    named = running.module.named_parameters() if running is not None else ()
    return sum(p.nbytes for name, p in named if p.requires_grad and name not in ignored)


def handed_on_by(function: Any) -> types.CodeType | None:
    """What a DistributedDataParallel calls, which is given or whose method is; None for others."""
    parallel = getattr(nn.parallel, "DistributedDataParallel", None)
    called = getattr(function, "__self__", function)
    if parallel is None or not issubclass(type(called), parallel):
        return None
    return getattr(getattr(type(called.module), "forward", None), "__code__", None)


def _running() -> Any:
    return getattr(getattr(nn.parallel, "DistributedDataParallel", None), "_active_ddp_module", None)


def unsplit() -> AbstractContextManager[Any]:
    """What is compiled inside, in the forward of a DistributedDataParallel too, is not split."""
    return contextlib.nullcontext() if _running() is None else torch._dynamo.config.patch(optimize_ddp=False)
