"""What operators allocate inside the backward of an eager node, seen operator by operator while it runs.

For `backend.memory`; what an operator's own kernel allocates and releases is not seen, but may be told.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optpass.backend.compat.memory_backward import untraced
from optpass.backend.compat.memory_behind import Behind, bytes_of, key_of, plain, seen

#: See `Inside`.
Kernel = Callable[[Any, Any, Any, Any, int], int]

#: What puts a mode on the stack of this thread, and takes the innermost from it. `with` would note for all threads that
#: one is on, which nothing takes back where the node raises; the stack itself is autograd's to restore.
_PUSH = getattr(torch._C, "_push_on_torch_dispatch_stack", None)
_POP = getattr(torch._C, "_pop_torch_dispatch_stack", None)
_TOP = getattr(torch._C, "_len_torch_dispatch_stack", None)

#: Nodes that compute otherwise where a mode is on, in other bits even: torch takes their tensors for a subclass's then.
#: Found with the sample inputs of torch's own tests of 2.13, whose gradients and bytes were compared.
_OTHERWISE = re.compile(
    r"torch::|(BinaryCrossEntropy\w*|Clamp|Cummax|Cummin|Cumprod|Gather|Index|IndexPut|IndexSelect|Kthvalue"
    r"|MaskedFill(?=Backward1)|MaskedScatter|MaskedSelect|Max|Median|Min|Mode|Nanmedian|Prod|Sort|Take|Topk|Trace)Backward"
)


class Inside(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Storages that the operators of one node make, from `begin` to `end`, which its hooks call.

    Args:
        kernel: bytes that an operator's kernel allocates and releases, of its call, its result, and the bytes of all
            storages that are there.

    Attributes:
        most: bytes of those that were there at one time.
    """

    def __init__(self, kernel: Kernel = lambda *_: 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._kernel = kernel
        self.most = 0
        self._there: dict[int, Behind] = {}
        self._depth: int | None = None

    @staticmethod
    def can_watch(node: Any) -> bool:
        """Whether a node's backward is torch's own, and does the same while that is watched; one in Python may run
        anything, a compiled graph too."""
        python = isinstance(node, torch.autograd.function.BackwardCFunction)
        return not python and not _OTHERWISE.match(node.name()) and _can_push()

    def begin(self) -> None:
        self.most = 0
        _PUSH(self)  # type: ignore[misc]
        self._depth = _TOP()  # type: ignore[misc]

    def end(self) -> int | None:
        """Bytes that were there at most; None where it was not on, or others are on above it."""
        if self._depth is None or self._depth != _TOP():  # type: ignore[misc]
            return None
        self._depth = None
        _POP(None)  # type: ignore[misc]
        self._there.clear()
        return self.most

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        _note(self, func, args, kwargs or {}, result)
        return result

    def take(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operator has run."""
        self._there = {key: one for key, one in self._there.items() if one.is_there()}
        known = {key_of(tensor) for tensor in plain(torch.utils._pytree.tree_leaves((args, kwargs)))}
        for tensor in plain(torch.utils._pytree.tree_leaves(result)):
            key = key_of(tensor)
            if key not in known and key not in self._there:
                self._there[key] = Behind(bytes_of(tensor))
            if key in self._there:
                self._there[key].note(seen(tensor, held=torch.is_grad_enabled()))
        live = sum(one.bytes for one in self._there.values())
        self.most = max(self.most, live + self._kernel(func, args, kwargs, result, live))


@functools.cache
def _can_push() -> bool:
    """Whether this torch lets a mode be put on the stack, and taken from it, as it is done here."""
    mode = Inside()
    try:
        mode.begin()
        return mode.end() is not None
    except (TypeError, RuntimeError, AttributeError):
        return False


#: A loss may be differentiated inside of what Dynamo compiles.
_note = untraced(Inside.take)
