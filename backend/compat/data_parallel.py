"""Models that are spread over processes: the parts into which Dynamo splits a graph for DistributedDataParallel, a
bucket of gradients each, and the parameters that `fully_shard` gathers."""

from __future__ import annotations

import contextlib
import math
import sys
import types
from collections.abc import Iterable
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
    return sum(int(p.nbytes) for name, p in named if p.requires_grad and name not in ignored)


def shards_behind(gathered: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """Where `fully_shard` has `gathered` parameters: the shards of all parameters of that model, and the bytes that
    gathering takes beside them. That is what stays gathered of other modules, and of the largest three times: gathered
    ahead, on its way there, and on the way back as gradients."""
    wanted = {id(p) for p in gathered}
    found = [(getattr(state, "_state_ctx", None), group) for state in _states() for group in _groups(state)]
    contexts = {id(context) for context, group in found if wanted & {id(p) for p in _gathered(group)}}
    groups = [group for context, group in found if id(context) in contexts]
    sizes = [sum(_gathered_bytes(part) for part in group.fsdp_params) for group in groups]
    kept = [
        size for size, group in zip(sizes, groups, strict=True) if not getattr(group, "_reshard_after_forward", True)
    ]
    shards = [part.sharded_param for group in groups for part in group.fsdp_params]
    return shards, sum(kept) + 3 * max(sizes, default=0)


def not_gathered(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those that `fully_shard` has not gathered, of which optimizers know the shards."""
    gathered = {id(p) for state in _states() for group in _groups(state) for p in _gathered(group)}
    return [p for p in parameters if id(p) not in gathered]


def _states() -> list[Any]:
    shared = sys.modules.get("torch.distributed._composable_state")  # nobody has imported it: nothing is sharded
    return [reference() for reference in list(getattr(shared, "_module_state_mapping", {}).values())]


def _groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)
    one = getattr(state, "_fsdp_param_group", None) if several is None else None
    return list(several or ([] if one is None else [one]))


def _gathered(group: Any) -> list[Any]:
    return [getattr(part, "_unsharded_param", None) for part in group.fsdp_params]


def _gathered_bytes(part: Any) -> int:
    dtype = getattr(part, "param_dtype", None) or getattr(part, "orig_dtype", None) or part.sharded_param.dtype
    return int(math.prod(part._orig_size)) * int(dtype.itemsize)


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
