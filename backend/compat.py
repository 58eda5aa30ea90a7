"""Every private torch import of optpass, in one place, each with what to do where it is missing.

`self_test()` names the hooks that this torch lacks; a missing one degrades its feature with a message instead of
failing the user's run. Nothing here holds logic of optpass.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd as aot_autograd
from torch._dynamo.backends.debugging import boxed_nop as boxed_nop
from torch._dynamo.backends.registry import list_backends as _list_backends
from torch._dynamo.backends.registry import lookup_backend as _lookup_backend
from torch._guards import TracingContext as TracingContext
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._guards import tracing as tracing
from torch._logging._internal import trace_structured as _trace_structured
from torch._subclasses.fake_tensor import FakeCopyMode as FakeCopyMode
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

try:
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
    from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn

    HAS_PASS_HOOKS = True
except ImportError:  # the joint stage then does not run under Inductor; `self_test` says so
    CustomGraphPass = CustomPartitionerFn = object  # type: ignore[misc, assignment]
    HAS_PASS_HOOKS = False

Compiled = Callable[..., Any]


def backends() -> list[str]:
    """Names that `torch.compile(backend=...)` accepts here, debugging and experimental ones included."""
    return sorted(set(_list_backends(exclude_tags=())))  # type: ignore[no-untyped-call, unused-ignore]


def lookup_backend(name: str) -> Callable[..., Any]:
    """The registered backend function."""
    return _lookup_backend(name)  # type: ignore[no-any-return, unused-ignore]


def compile_fx(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    config_patches: dict[str, Any],
    on_compiled: Callable[[bool, float], None],
) -> Compiled:
    """TorchInductor. Takes ownership of `gm`.

    `on_compiled(is_backward, seconds)` is called after each graph is lowered; the backward's is at the first backward.
    """
    from torch._inductor.async_compile import maybe_warm_pool
    from torch._inductor.compile_fx import compile_fx as inductor
    from torch._inductor.compile_fx import compile_fx_inner

    @functools.wraps(compile_fx_inner)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return compile_fx_inner(*args, **kwargs)
        finally:
            on_compiled(bool(kwargs.get("is_backward", False)), time.perf_counter() - start)

    maybe_warm_pool()
    return inductor(gm, inputs, inner_compile=timed, config_patches=config_patches)  # type: ignore[return-value, arg-type, unused-ignore]


def inductor_config() -> Any:
    """`torch._inductor.config`, a module."""
    import torch._inductor.config as config

    return config


def inductor_config_keys() -> dict[str, Any]:
    """Every setting of Inductor and its present value."""
    return inductor_config().get_config_copy()  # type: ignore[no-any-return]


def mode_patches(mode: str, dynamic: bool | None = None) -> dict[str, Any]:
    """What `torch.compile(mode=...)` means to Inductor. `RuntimeError` for an unknown mode."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode, dynamic))


def modes() -> list[str]:
    """Names that `torch.compile(mode=...)` accepts."""
    from torch._inductor import list_mode_options

    return list(list_mode_options())


def min_cut_partition(gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """PyTorch's default partitioner of a joint graph into forward and backward."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)


def default_partition(gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The partitioner that saves everything and recomputes nothing: linear in the graph."""
    from torch._functorch.partitioners import default_partition as partition

    return partition(gm, joint_inputs, **kwargs)


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decomposition table that Inductor traces with."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def joint_graph_passes() -> Callable[[fx.GraphModule], Any] | None:
    """Inductor's own joint-graph passes (constant folding, no-op removal), for tracing without compiling."""
    try:
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes as passes
    except ImportError:
        return None
    return passes  # type: ignore[no-any-return, unused-ignore]


def cpp_compiler_problem(cxx: Any = None) -> str | None:
    """Why Inductor cannot build C++ kernels here, or None if it can. `cxx`: its `cpp.cxx`, default the one in force.

    Asked once for each compiler: the answer costs a process, and the setting can change between two compiles.
    """
    wanted = inductor_config().cpp.cxx if cxx is None else cxx
    return _cpp_compiler_problem(tuple(wanted) if isinstance(wanted, (list, tuple)) else (wanted,))


@functools.cache
def _cpp_compiler_problem(cxx: tuple[str | None, ...]) -> str | None:
    from torch._inductor import cpp_builder

    try:
        with inductor_config().patch({"cpp.cxx": cxx}):
            compiler = cpp_builder.get_cpp_compiler()
    except Exception as error:  # noqa: BLE001  # torch raises several kinds here; each means the same to us
        lines = str(error).strip().splitlines()
        return f"no working C++ compiler ({lines[0] if lines else type(error).__name__})"
    return None if shutil.which(compiler) else f"C++ compiler {compiler!r} is not on PATH"


@functools.cache
def triton_problem() -> str | None:
    """Why Inductor cannot build GPU kernels here, or None if it can."""
    from torch.utils._triton import has_triton

    return None if has_triton() else "Triton is not installed, or does not support this GPU"


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


def cache_counters() -> dict[str, int]:
    """Hits, misses and bypasses so far of AOTAutogradCache and FxGraphCache in this process."""
    from torch._dynamo.utils import counters

    names = ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass")
    found = {name: counters["aot_autograd"][name] for name in names}
    fx_names = ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass")
    return found | {name: counters["inductor"][name] for name in fx_names}


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


def self_test() -> list[str]:
    """Hooks that this torch lacks, each with the feature that is less precise for it; empty when all is well."""
    missing: list[str] = []
    if not HAS_PASS_HOOKS:
        missing.append("torch._inductor.custom_graph_pass: joint-graph passes do not run under Inductor")
    if joint_graph_passes() is None:
        missing.append("Inductor's joint-graph passes: bytes after fusion are predicted without them")
    for name in ("joint_custom_post_pass", "custom_partitioner_fn"):
        if not hasattr(inductor_config(), name):
            missing.append(f"torch._inductor.config.{name}: joint-graph passes do not run under Inductor")
    return missing


# ---- Inductor's schedule, for `kernel_bytes` --------------------------------------------------------------------


def scheduler_class() -> Any:
    """`torch._inductor.scheduler.Scheduler`."""
    from torch._inductor.scheduler import Scheduler

    return Scheduler


def current_graph_is_backward() -> bool:
    """Whether Inductor is lowering a backward graph."""
    from torch._inductor.virtualized import V

    return bool(V.graph.is_backward)


def symbol_hint(expression: Any) -> int:
    """An int for one of Inductor's size expressions."""
    from torch._inductor.virtualized import V

    sizes: Any = V.graph.sizevars
    hint = getattr(sizes, "optimization_hint", None) or sizes.size_hint  # the name before torch 2.12
    return int(hint(expression, fallback=1))


def buffer_layout(name: str) -> tuple[int, int] | None:
    """(elements, bytes of an element) of a buffer or input of the graph being lowered; None if it has no size."""
    from torch._inductor.virtualized import V

    graph = V.graph
    buffer = graph.name_to_buffer.get(name) or graph.graph_inputs.get(name)
    return _ir_layout(buffer)


def extern_inputs(node: Any) -> list[int]:
    """Bytes of each distinct input of an extern kernel, as the view that is passed."""
    found: dict[tuple[Any, ...], int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
            return
        layout = _ir_layout(value)
        if layout is not None:
            offset = str(getattr(getattr(value, "layout", None), "offset", 0))
            found[value.get_name(), offset, layout] = layout[0] * layout[1]

    visit(list(node.inputs))
    return list(found.values())


def _ir_layout(buffer: Any) -> tuple[int, int] | None:
    import math

    if buffer is None or not hasattr(buffer, "get_size"):
        return None
    try:
        sizes, dtype = buffer.get_size(), buffer.get_dtype()
    except (NotImplementedError, AttributeError, AssertionError):
        return None  # a buffer without a layout of its own, such as the tuple of a multi-output kernel
    return math.prod(symbol_hint(size) for size in sizes), dtype.itemsize
