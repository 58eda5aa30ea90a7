"""Runs the wrapper that Inductor generated, without its kernels: what it allocates, reuses and releases, and when.

The wrapper is Python: it allocates buffers, calls kernels and extern operators, and deletes names. It is executed as
it stands, on fake tensors; kernels do nothing, operators run as their fake selves, and every buffer is counted in
`Storages`. What Inductor generates, and how it is obtained, is `compat`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from optpass.backend import compat
from optpass.backend.compat import memory as inductor
from optpass.backend.memory.replay.decided import decided
from optpass.backend.memory.replay.storages import Operators, Storages
from optpass.passes.memory.workspace.workspace import SAVES_STATE, WITH_STATE

#: Runs an operator with the state of a GPU's generator, which is no tensor.
_ON_STATE = "graphsafe_run_with_rng_state"


class Wrapper:
    """A generated wrapper, ready to run on fake tensors of `mode`; `sizes`: of those that it reads from tensors."""

    def __init__(
        self, lowered: inductor.Lowered, mode: compat.FakeTensorMode, sizes: Mapping[str, int] | None = None
    ) -> None:
        self._lowered = lowered
        self._mode = mode
        self._code = compile(decided(lowered.source, sizes or {}), "<inductor wrapper>", "exec")

    def run(self, args: list[Any], storages: Storages) -> list[Any]:
        """Call the wrapper with `args`, a list that it takes the values out of; its outputs.

        Args:
            args: fake tensors and ints, in the graph's order. What nobody else holds is released when the wrapper
                deletes it.
            storages: where allocations are counted.
        """
        namespace = _Names(self._mode, storages, self._constants(storages))
        exec(self._code, namespace.globals, namespace)  # generated here, by Inductor
        call = namespace.globals["call"]
        with torch.no_grad(), self._mode, _Operators(storages):
            return list(call(args))

    def _constants(self, storages: Storages) -> dict[str, Any]:
        found = {}
        for name, value in self._lowered.constants.items():
            if isinstance(value, torch.Tensor):
                value = value if isinstance(value, compat.FakeTensor) else self._mode.from_tensor(value)
                storages.external(value)
            found[name] = value
        return found


class _Operators(Operators):  # type: ignore[no-untyped-call, unused-ignore]
    """Operators of the wrapper; what only data tells is as large as it can be."""

    supports_higher_order_operators = True

    def result(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is SAVES_STATE:  # a user's checkpoint, of what may draw numbers
            return torch.get_rng_state(), args[0](*args[1:], **kwargs)
        if func is WITH_STATE:
            return args[1](*args[2:], **kwargs)
        if isinstance(func, torch._ops.HigherOrderOperator) and str(func) == _ON_STATE:
            return args[0](*args[1:], **{key: value for key, value in kwargs.items() if key != "rng_state"})
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype.is_floating_point:
            return 1.0
        if func is torch.ops.aten.nonzero.default:
            count, dim = args[0].numel(), args[0].dim()
            return args[0].new_empty_strided((count, dim), (1, count), dtype=torch.int64)
        if func is torch.ops.aten.masked_select.default:
            return args[0].new_empty(torch.mul(*args).numel())
        if func is torch.ops.aten.index.Tensor:
            args = args[0], [place for index in args[1] for place in _places(index)]
        return super().result(func, args, kwargs)


def _places(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The indices that a mask stands for, if all of it is true; any other index as it is."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return [index.new_empty(index.numel(), dtype=torch.int64) for _ in index.shape]


class _Kernel:
    """A compiled kernel of the wrapper; it runs in place and allocates nothing."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self.name = "kernel"

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._storages.read(args)
        self._storages.mark(self.name)

    def __getattr__(self, name: str) -> Any:
        return self.__call__ if name in ("run", "kernel") else None


class _Compiler:
    """Stands where the wrapper has `AsyncCompile()`: whatever it compiles is a `_Kernel`."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages

    def __call__(self) -> _Compiler:
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == "wait":
            return lambda *args, **kwargs: None
        return lambda *args, **kwargs: _Kernel(self._storages)


class _Names(dict[str, Any]):
    """The namespace in which the wrapper is executed: some names are ours, whatever it assigns to them."""

    def __init__(self, mode: compat.FakeTensorMode, storages: Storages, constants: dict[str, Any]) -> None:
        super().__init__()
        make = _Buffers(mode, storages)
        compiler = _Compiler(storages)
        self._ours: dict[str, Any] = {
            "AsyncCompile": compiler,
            "async_compile": compiler,
            "reinterpret_tensor": make.view,
            "alloc_from_pool": make.from_pool,
            **dict.fromkeys(("assert_size_stride", "assert_alignment", "run_intermediate_hooks"), _nothing),
            **constants,
        }
        for device in ("cpu", "cuda", "xpu", "mtia"):
            self._ours[f"empty_strided_{device}"] = make.on(torch.device(device))
        self._ours["empty_strided_cpu_pinned"] = make.on(torch.device("cpu"))
        self._ours["empty_strided"] = make.anywhere
        self.globals: dict[str, Any] = {"__name__": "optpass_replay", **self._ours}

    def __getitem__(self, name: str) -> Any:
        return self.globals[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._ours:
            return
        if isinstance(value, _Kernel):
            value.name = name
        self.globals[name] = value

    def __delitem__(self, name: str) -> None:
        if name not in self._ours:
            del self.globals[name]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What the wrapper checks of its inputs holds."""


class _Buffers:
    """Makes the wrapper's buffers and its views of them.

    A fake tensor is put together from a meta tensor: a tenth of the time of asking the fake mode for it, and wrappers
    allocate thousands.
    """

    def __init__(self, mode: compat.FakeTensorMode, storages: Storages) -> None:
        self._mode = mode
        self._storages = storages

    def on(self, device: torch.device) -> Callable[..., torch.Tensor]:
        def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            return self.make(size, stride, dtype, device)

        return empty_strided

    def anywhere(self, size: Sequence[int], stride: Sequence[int], **kwargs: Any) -> torch.Tensor:
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return self.make(size, stride, dtype, torch.device(kwargs.get("device") or "cpu"))

    def make(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        tensor = fake_tensor(self._mode, size, stride, dtype, device)
        self._storages.add(tensor)
        return tensor

    def view(self, base: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            meta = torch.as_strided(base, tuple(size), tuple(stride), base.storage_offset() + offset)
        return compat.FakeTensor(self._mode, meta, base.device)

    def from_pool(
        self, base: torch.Tensor, offset: int, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]
    ) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            meta = torch.empty((0,), dtype=dtype, device="meta")
            meta.set_(base.untyped_storage(), offset // dtype.itemsize, tuple(size), tuple(stride))
        return compat.FakeTensor(self._mode, meta, base.device)


def fake_tensor(
    mode: compat.FakeTensorMode,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A new fake tensor with a storage of its own, which nothing counts yet."""
    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device="meta")
    return compat.FakeTensor(mode, meta, device)
