"""Inductor's lowering stopped before it compiles kernels, and the names that its generated wrappers use.

For `backend.memory`; nothing here counts bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import fx

from optpass.backend.compat import memory_known
from optpass.backend.compat.attention_matcher import shielded
from optpass.backend.compat.inductor import inductor_config
from optpass.backend.compat.memory_index import indices_kept as indices_kept
from optpass.backend.compat.memory_known import keep as keep
from optpass.backend.compat.memory_order import Improve as Improve
from optpass.backend.compat.memory_order import ScheduledBuffer as ScheduledBuffer
from optpass.backend.compat.memory_order import tightened as tightened
from optpass.backend.compat.memory_reuse import STANDING as STANDING
from optpass.backend.compat.memory_reuse import Work as Work
from optpass.backend.compat.memory_reuse import key_of
from optpass.backend.compat.memory_reuse import reusing as reusing

#: Whether autograd hands gradients to a compiled backward so that it can release them (torch 2.13 and later).
TANGENTS_ARE_BOXED = hasattr(torch.autograd.Function, "boxed_grads_call")


@dataclass(frozen=True)
class Lowered:
    """What Inductor generates for one graph.

    Attributes:
        source: the Python module whose `call(args)` runs the graph.
        constants: what that module finds in its namespace: tensors and objects that the graph holds.
        work: what `reusing` compiles the graph from, or what it is to be compiled under where the text was remembered;
            None where it is compiled already.
    """

    source: str
    constants: dict[str, Any] = field(default_factory=dict)
    work: Work | None = field(default=None, repr=False, compare=False)


class _Stop(BaseException):
    """Carries the generated code out of Inductor; a BaseException, so that nothing on the way takes it for an error."""

    def __init__(self, lowered: Lowered) -> None:
        super().__init__()
        self.lowered = lowered


def lower(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    is_backward: bool,
    user_outputs: Sequence[int] = (),
    donated: Sequence[int] = (),
    config_patches: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    improve: Improve | None = None,
) -> Lowered:
    """Lower `gm` as Inductor would: its passes, its schedule, its generated wrapper; no kernel is compiled.

    Takes ownership of `gm`. The wrapper is the Python one, whatever the configuration says: the C++ one allocates and
    releases the same buffers. Raises what Inductor raises.

    Args:
        gm: forward or backward ATen graph, as the partitioner returns it.
        example_inputs: fake tensors and symbols, one per placeholder.
        is_backward: which of both it is.
        user_outputs: indices of the outputs that the user sees, whose strides Inductor keeps.
        donated: indices of the inputs whose buffers a backward may write to (`donated_inputs`).
        config_patches: Inductor settings for this compile.
        settings: further ones, which this lowering has and the compile has not.
        improve: orders the kernels (`memory_order.tightened`).
    """
    from torch._dynamo.repro import after_aot
    from torch._inductor import graph as module
    from torch._inductor.compile_fx import fx_codegen_and_compile, get_input_idxs_to_check, get_static_input_idxs
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import BoxedBool, count_tangents
    from torch._inductor.virtualized import V
    from torch.utils._python_dispatch import _disable_current_modes

    static_inputs = list(range(count_tangents(gm))) if is_backward else get_static_input_idxs(0)
    checked = get_input_idxs_to_check(list(example_inputs), static_inputs)

    def stop(self: Any) -> Any:
        code, _ = self.codegen()
        constants = {**self.constants, **self.torchbind_constants, **getattr(self, "opaque_value_type_classes", {})}
        work = Work(key, self, gm, V.fake_mode, code, further, improve, digest)
        raise _Stop(Lowered(code.value, constants, work))

    _output(gm).meta["user_visible_output_idxs"] = list(user_outputs)
    further = _known(settings or {})
    patches = _known({**(config_patches or {}), **further, "cpp_wrapper": False, "fx_wrapper": False})
    with (
        inductor_config().patch(patches),
        _disable_current_modes(),
        shielded(),
        tightened(improve),
        DebugContext(),
        mock.patch.object(GraphLowering, "compile_to_module", stop),
        mock.patch.object(module, "get_donated_idxs", lambda: list(donated)),
        mock.patch.object(after_aot, "save_graph_repro", lambda *args, **kwargs: None),  # text that nobody reads
        mock.patch.object(gm, "print_readable", lambda *args, **kwargs: "", create=True),
        _thawed(gm),
    ):
        key = key_of(gm, example_inputs, is_backward, checked, donated)
        digest = memory_known.digest_of(key, gm, example_inputs, improve)
        if (source := memory_known.known(digest)) is not None:
            work = memory_known.kept(digest) or Work(key, settings=further, improve=improve)
            return Lowered(source, work=work)
        try:
            fx_codegen_and_compile(
                gm,
                example_inputs,
                inputs_to_check=checked,
                static_input_idxs=static_inputs,
                cudagraphs=BoxedBool(False),
                is_backward=is_backward,
                graph_id=None,
                cpp_wrapper=False,
                is_inference=False,
                boxed_forward_device_index=None,
                layout_opt=None,
                extern_node_serializer=None,
            )
        except _Stop as stopped:
            if not stopped.lowered.constants:
                memory_known.remember(digest, stopped.lowered.source)
            return stopped.lowered
    raise RuntimeError("Inductor compiled a graph without generating a wrapper for it")


def _known(patches: dict[str, Any]) -> dict[str, Any]:
    """Those that this torch has."""
    return {key: value for key, value in patches.items() if hasattr(inductor_config(), key.split(".")[0])}


@contextlib.contextmanager
def _thawed(gm: fx.GraphModule) -> Iterator[None]:
    """Lowering freezes the symbols' run-time assertions; the compile that is under way still adds to them."""
    symbols: Any = getattr(gm, "shape_env", None)
    frozen = getattr(symbols, "runtime_asserts_frozen", None)
    try:
        yield
    finally:
        if frozen is not None:
            symbols.runtime_asserts_frozen = frozen


def donated_inputs(forward: fx.GraphModule, backward: fx.GraphModule, user_outputs: int) -> list[int]:
    """Indices of the backward's inputs that it may write to: saved tensors that alias nothing that outlives them.

    AOTAutograd decides this after partitioning, by the same function. `user_outputs` is the number of the forward's
    outputs that are not saved tensors.
    """
    import torch._functorch.config as config

    if not config.donated_buffer:
        return []
    from torch._functorch._aot_autograd.graph_compile import collect_fw_donated_buffer_idxs

    def values(nodes: Any) -> list[Any]:
        return [node.meta.get("val") if isinstance(node, fx.Node) else None for node in nodes]

    outputs: Any = _output(forward).args[0]
    saved = [n for n in outputs[user_outputs:] if isinstance(n, fx.Node)]
    saved = [n for n in saved if isinstance(n.meta.get("val"), torch.Tensor)]
    inputs = forward.graph.find_nodes(op="placeholder")
    gradients = _output(backward).args[0]
    indices = collect_fw_donated_buffer_idxs(
        values(inputs), values(outputs[:user_outputs]), values(gradients), values(saved)
    )
    position = {node.name: i for i, node in enumerate(backward.graph.find_nodes(op="placeholder"))}
    return [position[saved[i].name] for i in indices if saved[i].name in position]


def keeps_gradient_strides() -> bool:
    """Whether Inductor keeps the strides of a backward's outputs."""
    return bool(getattr(inductor_config(), "bw_outputs_user_visible", True))


def _output(gm: fx.GraphModule) -> fx.Node:
    node: fx.Node = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    return node


def lowered_from(compiled: Any) -> Lowered:
    """What Inductor generated for a graph that it has compiled (a `CompiledFxGraph`)."""
    constants = dict(getattr(compiled, "constants", None) or {})
    constants |= getattr(compiled, "torchbind_constants", None) or {}
    return Lowered(compiled.source_code, constants)


@contextlib.contextmanager
def compiled_graphs() -> Iterator[list[tuple[bool, Any]]]:
    """Collects (is backward, compiled graph) of every graph that Inductor compiles or loads inside the block."""
    import torch._inductor.compile_fx as module

    found: list[tuple[bool, Any]] = []
    original = module._compile_fx_inner

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        found.append((bool(kwargs.get("is_backward", False)), result))
        return result

    with mock.patch.object(module, "_compile_fx_inner", watched):
        yield found
