"""What a memory budget stands on in torch's private code, asked before a compile relies on it.

Without one of these there is no budget, and the compile goes on as without; what has a fallback is not listed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass


@dataclass(frozen=True)
class Need:
    """A name, and how it is called.

    Attributes:
        positional: how many positional arguments; None: it is not called, or its signature is asked elsewhere.
        keywords: keywords beside them.
    """

    module: str
    path: str
    positional: int | None = None
    keywords: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.module}.{self.path}"

    def problem(self) -> str | None:
        """Why it cannot be used in this torch; None when it can."""
        try:
            found = importlib.import_module(self.module)
            for part in self.path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            return f"{self.name} is missing"
        if self.positional is None or not callable(found):
            return None
        try:
            inspect.signature(found).bind(*(None,) * self.positional, **dict.fromkeys(self.keywords))
        except TypeError as error:
            return f"{self.name} is called otherwise ({error})"
        except ValueError:  # a builtin tells no signature
            return None
        return None


_LOWERING = (
    "inputs_to_check", "static_input_idxs", "cudagraphs", "is_backward", "graph_id", "cpp_wrapper", "is_inference",
    "boxed_forward_device_index", "layout_opt", "extern_node_serializer",
)  # fmt: skip

#: For any inner compiler that lets us partition.
PARTITIONING = (
    Need("torch._dynamo.exc", "BackendCompilerFailed"),
    Need("torch._functorch.compile_utils", "fx_graph_cse", 1),
    Need("torch._functorch.config", "donated_buffer"),
    Need("torch._functorch.partitioners", "_extract_fwd_bwd_modules"),
    Need("torch._functorch.partitioners", "_extract_fwd_bwd_outputs", 1, ("num_fwd_outputs",)),
    Need("torch._functorch.partitioners", "classify_nodes", 3),
    Need("torch._functorch._aot_autograd.graph_compile", "collect_fw_donated_buffer_idxs", 4),
)
#: For Inductor, whose buffers are known only from what it generates.
LOWERING = (
    Need("torch._dynamo.repro.after_aot", "save_graph_repro"),
    Need("torch._inductor.compile_fx", "_compile_fx_inner"),
    Need("torch._inductor.compile_fx", "fx_codegen_and_compile", 2, _LOWERING),
    Need("torch._inductor.compile_fx", "get_input_idxs_to_check", 2),
    Need("torch._inductor.compile_fx", "get_static_input_idxs", 1),
    Need("torch._inductor.config", "get_config_copy", 0),
    Need("torch._inductor.config", "patch"),
    Need("torch._inductor.debug", "DebugContext", 0),
    Need("torch._inductor.graph", "GraphLowering.compile_to_module", 1),
    Need("torch._inductor.graph", "get_donated_idxs", 0),
    Need("torch._inductor.utils", "BoxedBool", 1),
    Need("torch._inductor.utils", "count_tangents", 1),
    Need("torch._inductor.utils", "get_donated_idxs", 0),
    Need("torch._inductor.virtualized", "V"),
    Need("torch.utils._python_dispatch", "_disable_current_modes", 0),
)


def budget_problem(inductor: bool) -> str | None:
    """Why no memory budget can be kept with this torch; None if one can. `inductor`: Inductor compiles the graphs."""
    from optpass.backend.compat.inductor import HAS_PASS_HOOKS

    if not HAS_PASS_HOOKS:
        return "torch._inductor.custom_graph_pass is missing"
    return _problem((*PARTITIONING, *(LOWERING if inductor else ())))


@functools.cache
def _problem(needs: tuple[Need, ...]) -> str | None:
    return next((problem for need in needs if (problem := need.problem()) is not None), None)
