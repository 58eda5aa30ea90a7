"""What an optimizer of torch.optim allocates, read off two steps on meta tensors: state, and the peak of a step.

The class's own code runs, with the settings of the user's parameter groups, so that no table of factors can go stale.
Nothing of the size of a parameter is allocated. Nothing here knows names, budgets or graphs.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optpass.passes.memory.workspace.call import Call
from optpass.passes.memory.workspace.workspace import Library, call_workspace
from optpass.passes.wrappers import plain_tensors

#: Steps that are rehearsed: the first makes the state, the second is as all that follow.
_STEPS = 2
#: Rehearsals that are remembered: each graph of a step asks for the optimizer of all.
_MOST = 16
#: Settings that need a CUDA device or another value than a rehearsal has; none changes what a step allocates by more
#: than the scalars.
_DROPPED = frozenset({"capturable", "differentiable"})

_PLAIN = (bool, int, float, str, type(None))
_KNOWN: dict[tuple[Any, ...], tuple[int, int]] = {}


@dataclass(frozen=True)
class ParameterSize:
    """What an optimizer's memory depends on: the shape of a parameter and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter."""
        return self.numel * self.dtype.itemsize


def sizes_of(parameters: Sequence[Tensor]) -> list[ParameterSize]:
    """The sizes of tensors, of those that stand for others the sizes of these; symbolic ones must have been replaced by
    their hints before."""
    plain = (part for parameter in parameters for part in plain_tensors(parameter))
    return [ParameterSize(tuple(int(n) for n in p.shape), p.dtype) for p in plain]


def rehearse(
    kind: type[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    *,
    gpu: bool,
    library: Library | None = None,
) -> tuple[int, int]:
    """Bytes of the state of `kind`, and the most that one of its later steps has allocated beside it.

    Args:
        kind: a class of `torch.optim`.
        groups: parameter groups, `params` a list of `ParameterSize`, the other keys as in `Optimizer.param_groups`.
        gpu: the parameters are on a GPU, where an optimizer that is not told works on all of them at once.
        library: as for `workspace.op_workspace`; what products in half precision need (Muon's) is known to it alone.

    Raises:
        Exception: whatever the class raises for these groups, such as Muon for a vector.
    """
    settings = [_settings(kind, group, gpu) for group in groups]
    parameters = [list(group["params"]) for group in groups]
    fused = all(group.get("fused") for group in groups)  # one kernel that updates in place
    described = repr([sorted(own.items()) for own in settings]), repr(parameters), fused, gpu
    key = kind, described, library, torch.get_num_threads(), torch.get_default_dtype()
    found = _KNOWN.get(key)
    if found is None:
        found = _rehearsed(kind, settings, parameters, gpu=gpu, library=library)
        if all(isinstance(value, _PLAIN) for own in settings for value in tree_leaves(own)):
            _KNOWN[key] = found
        while len(_KNOWN) > _MOST:
            del _KNOWN[next(iter(_KNOWN))]
    return found[0], 0 if fused else found[1]


def _rehearsed(
    kind: type[torch.optim.Optimizer],
    settings: Sequence[Mapping[str, Any]],
    parameters: Sequence[Sequence[ParameterSize]],
    *,
    gpu: bool,
    library: Library | None,
) -> tuple[int, int]:
    own: list[dict[str, Any]] = []
    twins: list[torch.nn.Parameter] = []
    for mine, sizes in zip(settings, parameters, strict=True):
        made = [torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta")) for p in sizes]
        twins += made
        own.append({**mine, "params": made})
    if not twins:
        return 0, 0
    defaults: dict[str, Any] = {"lr": 1e-3} if "lr" not in own[0] else {}
    optimizer = kind(own, **defaults)
    for twin in twins:
        twin.grad = torch.empty_like(twin)
    peak = 0
    for _ in range(_STEPS):
        with _Allocations(inside=not gpu, library=library) as seen, torch.no_grad():
            optimizer.step()
        peak = seen.peak
    return _state_bytes(optimizer, twins, gpu), peak


def _settings(kind: type[torch.optim.Optimizer], group: Mapping[str, Any], gpu: bool) -> dict[str, Any]:
    settings = {k: v for k, v in group.items() if k != "params" and k not in _DROPPED and not k.startswith("_")}
    settings = {k: float(v) if isinstance(v, Tensor) else v for k, v in settings.items() if k != "param_names"}
    known = inspect.signature(kind).parameters
    if settings.get("fused"):
        settings["fused"] = False  # no meta tensor can be; the state is the same
    if "foreach" in known:
        # A meta tensor is not of the devices that torch takes all at once by default, so it is said here.
        chosen = settings.get("foreach")
        settings["foreach"] = gpu if chosen is None else bool(chosen)
    return settings


def _state_bytes(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], gpu: bool) -> int:
    """Bytes of the state on the parameters' device; step counts stay on the host, which is that device or is not."""
    held = {}
    for parameter in parameters:
        for value in tree_leaves(optimizer.state.get(parameter, {})):
            if isinstance(value, Tensor) and (value.device == parameter.device or not gpu):
                storage = value.untyped_storage()
                held[storage._cdata] = storage.nbytes()
    return sum(held.values())


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Bytes of the meta storages made inside and still alive, and their peak. Storages are followed by weak reference.

    A number read from a meta tensor is 1: what is allocated does not depend on it. With `inside`, what operators
    allocate within themselves on a CPU counts too, `library` answering as for `workspace.op_workspace`.
    """

    def __init__(self, *, inside: bool, library: Library | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._inside, self._library = inside, library
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        if func is torch.ops.aten._local_scalar_dense.default and given[0].device.type == "meta":
            return 1.0
        before = {v.untyped_storage()._cdata for v in given}
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.device.type == "meta":
                self._follow(value.untyped_storage(), before)
        call = Call.of(func, args, kwargs or {}, result) if self._inside else None
        if call is not None:
            self.peak = max(self.peak, self.now + call_workspace(call, self._library))
        return result

    def _follow(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key = storage._cdata
        if key in self._known or key in before:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
