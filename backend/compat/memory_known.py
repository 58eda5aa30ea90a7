"""What Inductor generated for graphs that were lowered before in this process, for those who only read it.

One graph is planned again and again: beside other gradients, with another budget, with what its caller turned out to
do between its halves; and a model is made of equal blocks. What Inductor generates for a plan is the same each time.
Here it is remembered as text, without the lowering that it came from; who compiles the plan lowers it once more, unless
it was lowered to be compiled next.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from optpass.backend.compat.memory_reuse import BEFORE, Work

#: Graphs that are remembered, the last ones.
MOST = 64
_PLAIN = (bool, int, float, complex, str, type(None), list, tuple, dict, set, torch.dtype, torch.device)
#: What an argument's `repr` says in full.
_ARGUMENTS = (bool, int, float, complex, str, type(None), fx.Node, torch.dtype, torch.device, torch.layout,
              torch.memory_format)  # fmt: skip

_SOURCES: OrderedDict[str, str] = OrderedDict()
_WORKS: dict[str, Work] = {}  #: lowerings of graphs that are about to be compiled


def digest_of(
    key: tuple[Any, ...], gm: fx.GraphModule, example_inputs: Sequence[Any], improve: Callable[..., Any] | None
) -> str | None:
    """Equal for graphs for which Inductor generates the same text at any time; None where that cannot be said.

    It cannot of sizes that are symbols (what is generated depends on what they were when they were first seen), of
    constants and graphs that the graph holds, of functions that are no operators, and under the user's own passes.

    Args:
        key: of the graph (`memory_reuse.key_of`), under the settings that it is lowered with.
        gm, example_inputs, improve: as for `memory.lower`.
    """
    if not all(map(_is_plain, gm.graph.nodes)) or _has_passes():
        return None
    offsets = []
    for value in example_inputs:
        if not isinstance(value, torch.Tensor) or value._has_symbolic_sizes_strides or value.layout != torch.strided:
            return None
        offsets.append((value.storage_offset(), value.is_conj(), value.is_neg()))
    ordered = improve and f"{improve.__module__}.{improve.__qualname__}"
    return hashlib.sha256(repr((key, offsets, ordered, _process())).encode()).hexdigest()


def known(digest: str | None) -> str | None:
    """The text that was generated for it."""
    if digest is None or digest not in _SOURCES:
        return None
    _SOURCES.move_to_end(digest)
    return _SOURCES[digest]


def keep(works: Iterable[Work]) -> None:
    """Keep lowerings that were made before their graphs are compiled, in the place of those kept until now."""
    _WORKS.clear()
    _WORKS.update((work.digest, work) for work in works if work.digest is not None and work.graph is not None)


def kept(digest: str | None) -> Work | None:
    """The lowering that was kept, for one compile."""
    return None if digest is None else _WORKS.pop(digest, None)


def remember(digest: str | None, source: str) -> None:
    """Remember the text; the one asked for least lately is forgotten."""
    if digest is None:
        return
    _SOURCES[digest] = source
    while len(_SOURCES) > MOST:
        _SOURCES.popitem(last=False)


def forget() -> None:
    """Forget all of it."""
    _SOURCES.clear()
    _WORKS.clear()


def _is_plain(node: fx.Node) -> bool:
    """Whether a node says all that there is to it: an input, an operator, or the choice of one of its results."""
    if node.op == "call_function":
        operator = isinstance(node.target, torch._ops.OpOverload) or node.target is getitem
        values = torch.utils._pytree.tree_leaves([node.args, node.kwargs, node.meta.get("val")])
        return operator and all(
            not value._has_symbolic_sizes_strides if isinstance(value, torch.Tensor) else isinstance(value, _ARGUMENTS)
            for value in values
        )
    return node.op in ("placeholder", "output")


def _has_passes() -> bool:
    import torch._inductor.config as config

    settings = config.get_config_copy().items()
    return any(not isinstance(value, _PLAIN) and name not in BEFORE for name, value in settings)


def _process() -> tuple[Any, ...]:
    """Switches of torch that Inductor asks beside its own settings."""
    matmul = torch.backends.cuda.matmul
    return (
        torch.are_deterministic_algorithms_enabled(),
        getattr(torch.utils.deterministic, "fill_uninitialized_memory", None),
        torch.get_float32_matmul_precision(),
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.mkldnn.enabled,
        torch.get_num_threads(),
    )
