"""Dynamo, AOTAutograd's frontends, guards, tracing contexts and fake modes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd as aot_autograd
from torch._dynamo.backends.debugging import boxed_nop as boxed_nop
from torch._dynamo.backends.registry import list_backends as _list_backends
from torch._dynamo.backends.registry import lookup_backend as _lookup_backend
from torch._dynamo.callback import callback_handler as _callbacks
from torch._dynamo.exc import RestartAnalysis as RestartAnalysis
from torch._guards import TracingContext as TracingContext
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._guards import tracing as tracing
from torch._logging._internal import trace_structured as _trace_structured
from torch._subclasses.fake_tensor import FakeCopyMode as FakeCopyMode
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

from optpass.backend.compat.frames import globals_read


def backends() -> list[str]:
    """Names that `torch.compile(backend=...)` accepts here, debugging and experimental ones included."""
    return sorted(set(_list_backends(exclude_tags=())))  # type: ignore[no-untyped-call, unused-ignore]


def call_when_compiled(callback: Callable[[Any], None]) -> None:
    """Call `callback` after each compile of this process, before what was compiled runs."""
    _callbacks.register_end_callback(callback)


def lookup_backend(name: str) -> Callable[..., Any]:
    """The registered backend function."""
    return _lookup_backend(name)  # type: ignore[no-any-return, unused-ignore]


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """A structured-trace artifact (JSON), shown by tlparse; `payload` is called only when tracing is on."""
    _trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "json"},
        payload_fn=payload,
        expect_trace_id=False,
    )


def compile_id() -> str:
    """Dynamo's id of the frame being compiled ('0/1'), or '' outside of a compile."""
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    return str(current) if current is not None else ""


@contextlib.contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """The user's `saved_tensors_hooks` are not called with what is saved inside: tensors of nothing that ever runs."""
    disabled = getattr(torch._dynamo.utils, "_disable_saved_tensors_hooks_during_tracing", None)
    with torch.autograd.graph.saved_tensors_hooks(_same, _same) if disabled is None else disabled():
        yield


def _same(value: Any) -> Any:
    return value


def real_tensors() -> AbstractContextManager[Any]:
    """Real tensors can be read inside, amid a compile, too."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def traced_frame() -> Any:
    """The frame of the user's that Dynamo compiles; None where it compiles none."""
    from torch._dynamo import symbolic_convert

    now = getattr(getattr(symbolic_convert, "tls", None), "current_tx", None)
    return getattr(getattr(now, "output", None), "root_tx", None)


def modules_of_call() -> list[nn.Module]:
    """Modules in the variables of the function that Dynamo compiles, its own first of all, and in the globals that it
    reads."""
    root = traced_frame()
    code, variables = getattr(root, "f_code", None), getattr(root, "f_locals", None)
    if code is None or not isinstance(variables, dict):
        return []
    around = getattr(root, "f_globals", None) or {}
    values = [*variables.values(), *(around.get(name) for name in globals_read(code))]
    return [value for value in values if issubclass(type(value), nn.Module)]


def tensors_of_call() -> list[torch.Tensor]:
    """Tensors that the call was given which Dynamo compiles, read by its graph or not, in containers too. None where it
    is not called by the user: behind a graph break, and without Dynamo."""
    root = traced_frame()
    code, variables = getattr(root, "f_code", None), getattr(root, "f_locals", None)
    if code is None or not isinstance(variables, dict) or code.co_name.startswith("torch_dynamo_resume_in"):
        return []
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    values = [variables.get(name) for name in code.co_varnames[:count]]
    return [t for t in torch.utils._pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]


class PlanningMode(FakeTensorMode):  # type: ignore[no-untyped-call, unused-ignore]
    """A fake mode in which modules can be built and run without allocating; it tells of ops run outside of graphs.

    Attributes:
        watch: called with each op that runs under the mode while nothing is being compiled; None to be left alone.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.watch: Callable[[Any], None] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watch = self.watch
        if watch is None or compile_id():
            return super().__torch_dispatch__(func, types, args, kwargs)
        watch(func)
        self.watch = None  # what the fake implementation of the op runs is not the program's
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.watch = watch


def fake_mode_for_planning() -> PlanningMode:
    """A new `PlanningMode`."""
    return PlanningMode()


def needs_values(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, says that fake tensors lack the values that the program asks for."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    kinds = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
    while error is not None:
        if isinstance(error, kinds):
            return True
        error = error.__cause__
    return False


@contextlib.contextmanager
def aot_for_analysis(fake: FakeTensorMode) -> Any:
    """AOTAutograd under `fake`, traced for real: no cache answers for it, and nothing it traces is stored.

    Tracing patches `nn.Module.__call__` for the whole process, so it must look like a compile of Dynamo's to other
    threads: never two at a time, and with the flag set that lets compiled code run meanwhile.
    """
    import torch._functorch.config as config
    from torch._dynamo.convert_frame import compile_lock
    from torch._inductor.virtualized import V

    known = {k: False for k in ("enable_autograd_cache", "bundled_autograd_cache") if hasattr(config, k)}
    with compile_lock, _compiling(), tracing(TracingContext(fake)), V.set_fake_mode(fake), config.patch(known):
        yield


@contextlib.contextmanager
def _compiling() -> Any:
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def quiet_dynamo(**patches: Any) -> Any:
    """Dynamo's configuration for capturing ahead of time, restored afterwards."""
    import torch._dynamo.config as config

    known = {key: value for key, value in patches.items() if hasattr(config, key)}
    with config.patch(known):
        yield


def reset_dynamo() -> None:
    """`torch._dynamo.reset()`."""
    torch._dynamo.reset()


def disable_dynamo(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, never traced by Dynamo."""
    return torch._dynamo.disable(fn)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]


def undisabled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What `disable_dynamo` was given; `fn` itself where it is none of its results.

    Dynamo disables itself around whatever a backend returns, so that inside of that it would do so twice at every call.
    """
    inner: Callable[..., Any] | None = getattr(fn, "_torchdynamo_orig_callable", None)
    return fn if inner is None or not getattr(fn, "_torchdynamo_disable", False) else inner
