"""Finishing a lowering that `memory.lower` stopped, where Inductor is asked to compile the very same graph.

A plan that is accepted has been lowered once to be replayed; its kernels are compiled from that, instead of lowering
it again. Where anything differs (the graph, its inputs, a setting, what may be overwritten), Inductor compiles as
ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import fx

from optpass.backend.compat.memory_order import Improve, tightened

#: Settings that are hooks, and decide nothing once the graph is partitioned.
BEFORE = ("joint_custom_pre_pass", "joint_custom_post_pass", "custom_partitioner_fn")
#: What `_InProcessFxCompile.codegen_and_compile` does to a graph before it generates code, by its names there.
_DONE = ("view_to_reshape", "_recursive_record_original_output_strides", "_recursive_post_grad_passes")


@dataclass
class Work:
    """A lowering that has generated its code, and what it was made for.

    `settings` and `improve` are what it was lowered under beyond the settings of the compile; Inductor compiles under
    them too, where it has to lower the graph again: always where `graph` is None, as what it generates was remembered.
    """

    key: tuple[Any, ...]
    graph: Any = None
    gm: Any = None
    fake_mode: Any = None
    code: Any = None
    settings: dict[str, Any] = field(default_factory=dict)
    improve: Improve | None = None
    digest: str | None = None


#: In the place of a lowering: the graph is to run as it stands.
STANDING = Work(())


def key_of(
    gm: fx.GraphModule, example_inputs: Sequence[Any], is_backward: bool, checked: Sequence[int], donated: Sequence[int]
) -> tuple[Any, ...]:
    """Everything that decides what Inductor generates: equal keys, equal code."""
    nodes = []
    for node in gm.graph.nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: _Name(n.name))
        value = None if node.op == "placeholder" else node.meta.get("val")  # the inputs are compared as they come
        nodes.append((node.op, node.name, str(node.target), repr(arguments), _described(value)))
    output = gm.graph.find_nodes(op="output")[0]
    visible = tuple(output.meta.get("user_visible_output_idxs") or ())
    inputs = tuple(_described(value) for value in example_inputs)
    overwritten = tuple(donated) if is_backward else ()  # a forward may overwrite nothing
    return (tuple(nodes), visible, inputs, is_backward, tuple(checked), overwritten, _settings())


class _Name(str):
    """A node's name among arguments; unlike a string's, its repr has no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"%{self}"


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (str(tuple(value.shape)), str(value.stride()) if value.layout == torch.strided else "", str(value.dtype),
                str(value.device))  # fmt: skip
    if isinstance(value, (list, tuple)):
        return tuple(_described(item) for item in value)
    return str(value)


def _settings() -> tuple[tuple[str, str], ...]:
    """Inductor's settings that are plain values; other hooks are the same objects within one compile."""
    import torch._inductor.config as config

    plain = (bool, int, float, str, type(None), list, tuple, dict, set)
    settings = sorted(config.get_config_copy().items())
    return tuple((k, repr(v)) for k, v in settings if isinstance(v, plain) and k not in BEFORE)


@contextlib.contextmanager
def reusing(work: Work | None) -> Iterator[None]:
    """Inside, Inductor compiles the graph of `work` from it; None for no effect. A lowering is used once."""
    if work is None:
        yield
        return
    import torch._inductor.config as config
    from torch._inductor import compile_fx as module
    from torch._inductor.utils import get_donated_idxs

    lower = module.fx_codegen_and_compile
    left = [work] if hasattr(work.graph, "_compile_to_module_lines") else []

    def finish(gm: fx.GraphModule, example_inputs: Sequence[Any], inputs_to_check: Sequence[int], **kwargs: Any) -> Any:
        arguments = (bool(kwargs.get("is_backward")), inputs_to_check, get_donated_idxs() or ())
        if not left or kwargs.get("cpp_wrapper") or work.key != key_of(gm, example_inputs, *arguments):
            return lower(gm, example_inputs, inputs_to_check=inputs_to_check, **kwargs)
        left.clear()
        work.graph.graph_id = kwargs.get("graph_id")
        with _done(module, work):
            return lower(work.gm, example_inputs, inputs_to_check=inputs_to_check, **kwargs)

    with (
        config.patch(work.settings),  # type: ignore[attr-defined, unused-ignore]
        tightened(work.improve),
        mock.patch.object(module, "fx_codegen_and_compile", finish),
    ):
        yield


@contextlib.contextmanager
def _done(module: Any, work: Work) -> Iterator[None]:
    """Inside, the passes and the lowering of `work` are done: only what follows them is."""
    graph = work.graph
    graph.freeze_runtime_asserts = graph.run = _nothing
    graph.compile_to_module = lambda: graph._compile_to_module_lines(work.code)
    names: dict[str, Any] = dict.fromkeys((name for name in _DONE if hasattr(module, name)), _nothing)
    names["fake_tensor_prop"] = lambda *args, **kwargs: work.fake_mode
    names["GraphLowering"] = lambda *args, **kwargs: graph
    with mock.patch.multiple(module, **names):
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What was done when the graph was lowered."""
