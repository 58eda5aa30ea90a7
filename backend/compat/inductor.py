"""Inductor and the partitioners: compiling with it, its configuration, modes, compilers, passes and caches."""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from optpass.backend.compat.attention_matcher import shielded
from optpass.backend.compat.dynamo import boxed_nop
from optpass.backend.compat.kernel_files import joined
from optpass.backend.compat.lowerings import install
from optpass.backend.compat.memory_drawn import draw_as_generated
from optpass.backend.compat.memory_reuse import STANDING, Work, reusing

try:
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
    from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn

    HAS_PASS_HOOKS = True
except ImportError:  # the joint stage then does not run under Inductor; `self_test` says so
    CustomGraphPass = CustomPartitionerFn = object  # type: ignore[misc, assignment]
    HAS_PASS_HOOKS = False

Compiled = Callable[..., Any]


def compile_fx(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    config_patches: dict[str, Any],
    on_compiled: Callable[[bool, float], None],
    lowered: Callable[[bool], Work | None] | None = None,
) -> Compiled:
    """TorchInductor, without its attention matcher. Takes ownership of `gm`.

    `on_compiled(is_backward, seconds)` is called after each graph is lowered; the backward's is at the first backward.
    `lowered(is_backward)` gives what was lowered already while the graph was partitioned, to go on from; `STANDING`
    where the graph is to run as it stands.
    """
    from torch._inductor.async_compile import maybe_warm_pool
    from torch._inductor.compile_fx import compile_fx as inductor
    from torch._inductor.compile_fx import compile_fx_inner

    @functools.wraps(compile_fx_inner)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            work = lowered(bool(kwargs.get("is_backward", False))) if lowered is not None else None
            if work is STANDING:
                return boxed_nop(draw_as_generated(args[0]), args[1])
            # The backward is lowered later, and elsewhere.
            with shielded(), _partitioned(args[0], work, kwargs), reusing(work), joined():
                return compile_fx_inner(*args, **kwargs)
        finally:
            on_compiled(bool(kwargs.get("is_backward", False)), time.perf_counter() - start)

    maybe_warm_pool()
    install()
    with shielded(), joined():  # a cache may answer before `timed` is called
        return inductor(gm, inputs, inner_compile=timed, config_patches=config_patches)  # type: ignore[return-value, arg-type, unused-ignore]


@contextlib.contextmanager
def _partitioned(gm: fx.GraphModule, work: Work | None, kwargs: dict[str, Any]) -> Iterator[None]:
    """Inside, the hooks that have run count in the cache's key as what they left, and with what that key lacks: which
    inputs may be overwritten, which outputs the user sees, how kernels are ordered."""
    from torch._inductor.utils import get_donated_idxs

    overwritten = tuple(get_donated_idxs() or ()) if kwargs.get("is_backward") else ()
    visible = tuple(gm.graph.find_nodes(op="output")[0].meta.get("user_visible_output_idxs") or ())
    improve = work.improve if work is not None else None
    decides = (overwritten, visible, improve and f"{improve.__module__}.{improve.__qualname__}")
    patches: dict[str, Any] = {}
    for name in ("joint_custom_post_pass", "custom_partitioner_fn"):
        hook: Any = getattr(inductor_config(), name, None)
        if hasattr(hook, "past"):
            patches[name] = hook.past(decides)
    with inductor_config().patch(patches):
        yield


def inductor_config() -> Any:
    """`torch._inductor.config`, a module."""
    import torch._inductor.config as config

    return config


def inductor_config_keys() -> dict[str, Any]:
    """Every setting of Inductor and its present value."""
    return inductor_config().get_config_copy()  # type: ignore[no-any-return]


def lays_out_convolutions() -> bool:
    """Whether Inductor may give the tensors around a convolution another layout."""
    return bool(getattr(inductor_config(), "layout_optimization", False))


def runs_beside() -> bool:
    """Whether Inductor's present settings leave operators their own streams, and call them from Python: not inside of
    CUDA graphs, nor from C++."""
    config = inductor_config()
    return not (getattr(config, "cpp_wrapper", False) or getattr(config.triton, "cudagraphs", False))


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
    """Inductor's own joint-graph passes, as `compile_fx` here has them, for tracing without compiling."""
    try:
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes as passes
    except ImportError:
        return None
    return shielded()(passes)


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
