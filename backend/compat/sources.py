"""Where Dynamo says that an input of its graph comes from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

try:
    from torch._dynamo.source import NNModuleSource as _NNModuleSource

    KNOWS_MODULES = True
except ImportError:  # no tensor is then known to be a module's; `self_test` says so
    KNOWS_MODULES = False

#: How a source names what a module holds: `L['self']._modules['h']._buffers['bias']`.
_ROOT = re.compile(r"^[LG]\['[^']*'\]")
_HELD = re.compile(r"\._(?:modules|buffers|parameters)\['([^']+)'\]")
_WRAPPER = re.compile(r"(^|\.)_orig_mod(?=\.|$)")
_ARGUMENT = re.compile(r"^L\['args'\]\[(\d+)\]$")
_SAID = "optpass_module_attribute"


def module_attribute(node: fx.Node) -> str | None:
    """Path of the module's tensor that a placeholder is, e.g. 'h.0.attn.bias'; None where it is no module's.

    A placeholder without a source that this torch gives (or reached through anything else) is no module's.
    """
    if _SAID in node.meta:
        return str(node.meta[_SAID])
    source: Any = getattr(node, "_dynamo_source", None) if KNOWS_MODULES else None
    part = source
    while part is not None and not isinstance(part, _NNModuleSource):
        part = getattr(part, "base", None)
    if source is None or part is None:
        return None
    path = _HELD.sub(r".\1", _ROOT.sub("", _name_of(source)))
    return _WRAPPER.sub(r"\1", path).strip(".") or str(node.name)


def say_module_attributes(gm: fx.GraphModule, placeholders: Sequence[fx.Node]) -> None:
    """`gm` was traced from a function of `*args` that runs another graph: those of its inputs are the same modules'
    tensors as the `placeholders` of that graph, which are given in the order of the arguments."""
    for node in gm.graph.find_nodes(op="placeholder"):
        found = _ARGUMENT.match(_name_of(getattr(node, "_dynamo_source", None)))
        name = module_attribute(placeholders[int(found[1])]) if found else None
        if name is not None:
            node.meta[_SAID] = name


def _name_of(source: Any) -> str:
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)  # a method in older releases


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether `tensor` stands for others in a functorch transform."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with memory that `tensor` stands for, inside all functorch transforms; `tensor` outside of them."""
    while is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
