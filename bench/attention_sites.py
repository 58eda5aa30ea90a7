"""How many attentions an eager run computes: an independent count, which knows nothing of any recogniser.

Values are followed through the ATen calls that PyTorch makes. A product of two values that were both computed (rather
than being a parameter) makes scores; scores keep being scores through every op but another product, a convolution, a
normalisation or a sum; a softmax of scores makes probabilities, which keep being probabilities in the same way; and a
product of probabilities with a computed value completes a site. A softmax over a single score is 1, and no site. Calls
that are fused already, such as `F.scaled_dot_product_attention`, are counted apart. What is done in between, of
whatever form, does not matter.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

#: Products by the positions of their two factors among the arguments.
PRODUCTS: Mapping[Any, tuple[int, int]] = {
    aten.mm: (0, 1), aten.bmm: (0, 1), aten.mv: (0, 1), aten.dot: (0, 1), aten.matmul: (0, 1),
    aten.baddbmm: (1, 2), aten.addmm: (1, 2), aten.addbmm: (1, 2), aten.addmv: (1, 2),
}  # fmt: skip
#: After these a value is no longer scores or probabilities: another quantity was made of them.
ENDS = frozenset(
    {
        aten.convolution, aten._convolution, aten.native_layer_norm, aten.native_batch_norm, aten.native_group_norm,
        aten._fused_rms_norm, aten.sum, aten.mean, aten.cumsum, aten.topk, aten.sort, aten.argmax, aten.embedding,
        aten.nll_loss_forward, aten.grid_sampler_2d, aten.multinomial, aten.argsort, aten.nonzero,
    }
)  # fmt: skip
#: Normalises scores to probabilities. `exp` is there for a softmax that is written out.
SOFTMAX = frozenset({aten._softmax, aten.softmax, aten._safe_softmax, aten.exp, aten.exp_})
#: The call that is fused attention, and ops that hold it.
_SDPA = F.scaled_dot_product_attention
FUSED_OPS = frozenset({"_native_multi_head_attention", "_transformer_encoder_layer_fwd"})
#: The longest chain of op names that is kept for a site.
MOST_STEPS = 40


@dataclass(frozen=True)
class AttentionSite:
    """One softmax between two products."""

    file: str
    line: int
    dim: int
    """Normalised dimension, from the end: -1 is the last."""
    before: tuple[str, ...]
    """ATen ops from the product of queries and keys to the softmax."""
    after: tuple[str, ...]
    """ATen ops from the softmax to the product with the values."""


@dataclass
class Sites:
    """What a run computed."""

    written: list[AttentionSite] = field(default_factory=list)
    """Written out, in order of the softmaxes; a line that runs twice is two."""
    fused: int = 0
    """Calls of fused attention."""

    @property
    def count(self) -> int:
        """Sites that are written out."""
        return len(self.written)


@contextmanager
def counted(parameters: Iterable[torch.Tensor]) -> Iterator[Sites]:
    """Counts while the block runs; `parameters` are the values that are given rather than computed."""
    sites = Sites()
    tracer = _Tracer(sites, parameters)
    with _patched(tracer), _Calls(tracer), tracer:
        yield sites
    sites.written = [one.site for one in tracer.softmaxes if one.complete]


@dataclass
class _Softmax:
    site: AttentionSite
    complete: bool = False


@dataclass(frozen=True)
class _Tag:
    """What a storage holds: the ops since the product (scores), or since which softmax (probabilities)."""

    steps: tuple[str, ...]
    softmax: int | None = None


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows values by their storages, so that views and in-place ops need no rules of their own.

    Storages of values that are followed are kept alive: an address that was freed could be given to another value.
    """

    def __init__(self, sites: Sites, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sites = sites
        self.given = {_key(p) for p in parameters}
        self.tags: dict[int, _Tag] = {}
        self.alive: list[torch.Tensor] = []
        self.softmaxes: list[_Softmax] = []
        self.paused = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.paused:
            self.see(func, args, out)
        return out

    def fused(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a call that is fused already; what it is made of is not looked at."""
        self.sites.fused += not self.paused
        self.paused += 1
        try:
            return call(*args, **kwargs)
        finally:
            self.paused -= 1

    def see(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Tag what a call made."""
        packet = func.overloadpacket
        if packet.__name__ in FUSED_OPS:
            self.sites.fused += 1
        if packet in PRODUCTS:
            self.mark(out, self.product(packet, args))
            return
        found = next((tag for t in _tensors(args) if (tag := self.tags.get(_key(t))) is not None), None)
        if found is None:
            if any(_key(t) in self.tags for t in _tensors(out)):  # a buffer that was written over
                self.mark(out, None)
            return
        if packet in ENDS:
            self.mark(out, None)
        elif packet in SOFTMAX and found.softmax is None:
            self.mark(out, self.softmax(args, found))
        else:
            self.mark(out, _Tag((*found.steps, packet.__name__)[-MOST_STEPS:], found.softmax))

    def product(self, packet: Any, args: tuple[Any, ...]) -> _Tag | None:
        """Scores if both factors were computed; probabilities times a computed value complete their site."""
        factors = [args[i] for i in PRODUCTS[packet]]
        if any(_key(f) in self.given for f in factors):
            return None
        probabilities = [tag for f in factors if (tag := self.tags.get(_key(f))) and tag.softmax is not None]
        for tag in probabilities:
            one = self.softmaxes[tag.softmax or 0]
            if not one.complete:
                one.complete = True
                one.site = _replaced(one.site, after=(*tag.steps, packet.__name__))
        return None if probabilities else _Tag((packet.__name__,))

    def softmax(self, args: tuple[Any, ...], scores: _Tag) -> _Tag | None:
        file, line = _place()
        x = args[0]
        dim = args[1] if len(args) > 1 and isinstance(args[1], int) else -1
        dim = dim - x.dim() if dim >= 0 else dim
        if x.shape[dim] == 1:
            return None
        self.softmaxes.append(_Softmax(AttentionSite(file, line, dim, scores.steps, ())))
        return _Tag((), len(self.softmaxes) - 1)

    def mark(self, out: Any, tag: _Tag | None) -> None:
        for tensor in _tensors(out):
            key = _key(tensor)
            if tag is None or not tensor.is_floating_point():
                self.tags.pop(key, None)
            elif key:
                self.tags[key] = tag
                self.alive.append(tensor)


class _Calls(TorchFunctionMode):
    """Counts calls that are fused already, and hides what they are made of from the tracer."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not _SDPA:
            return func(*args, **(kwargs or {}))
        return self.tracer.fused(func, *args, **(kwargs or {}))


@contextmanager
def _patched(tracer: _Tracer) -> Iterator[None]:
    """Catches the calls inside functions of torch, such as multi-head attention, which a function mode does not see."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return tracer.fused(_SDPA, *args, **kwargs)

    F.scaled_dot_product_attention = call
    try:
        yield
    finally:
        F.scaled_dot_product_attention = _SDPA


def chains(sites: Iterable[AttentionSite]) -> Counter[str]:
    """How often each chain of ops occurs, views left out."""
    return Counter(f"{_short(s.before)} -> softmax({s.dim}) -> {_short(s.after)}" for s in sites)


_VIEWS = frozenset(
    "view _unsafe_view reshape expand transpose permute t unsqueeze squeeze detach clone alias select contiguous "
    "as_strided unbind split".split()
)


def _short(steps: tuple[str, ...]) -> str:
    return " ".join(step for step in steps if step not in _VIEWS)


def _replaced(site: AttentionSite, after: tuple[str, ...]) -> AttentionSite:
    return AttentionSite(site.file, site.line, site.dim, site.before, after)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


def _key(tensor: Any) -> int:
    """The address of a tensor's storage; 0 where it has none."""
    return tensor.untyped_storage().data_ptr() if isinstance(tensor, torch.Tensor) else 0


def _place() -> tuple[str, int]:
    """The innermost line of the program that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and name != __file__:
            return name, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return "", 0
