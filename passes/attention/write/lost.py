"""Rows that a kernel would compute otherwise than the user's program: computed as that program does, and nothing else.

`torch.ops.optpass.lost_rows`: where every key of a query carries a number like -1e9, its scores are rounded off beside
it, to steps of 64 or to nothing, and no kernel rounds as the program does. This operator computes such rows alone, with
the program's own steps in their dtypes, forward and backward, in place of what a kernel has made of them. Rows of that
kind are rare: where there are none it copies the kernel's result, and a flag that was brought to the host once for all
sites of one mask says so.

Which rows they are, and what the steps are, `rows` says; nothing is decided here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("optpass", "FRAGMENT")  # type: ignore[no-untyped-call, unused-ignore]
#: What it does hangs on whether there are such rows, which a captured CUDA graph could not ask.
_TAGS = tuple(
    tag
    for name in ("flexible_layout", "pt2_compliant_tag", "cudagraph_unsafe")
    if (tag := getattr(torch.Tag, name, None)) is not None
)
_OPERANDS = (
    "Tensor query, Tensor key, Tensor value, Tensor rows, Tensor some, Tensor[] terms, str steps, Tensor? mask, "
    "Tensor? seed, float scale, float dropout"
)
_LIBRARY.define(f"lost_rows(Tensor result, {_OPERANDS}) -> Tensor", tags=_TAGS)
_LIBRARY.define(f"lost_rows_backward(Tensor grad, {_OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", tags=_TAGS)
#: Scores that are held at once.
_AT_ONCE = 1 << 22


@functools.cache
def _parsed(steps: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(step.split()) for step in steps.split(";") if step)


@dataclass
class _Rows:
    """Some rows of one entry of the batch, of all heads or of one; scores in a dtype as wide as float32."""

    batch: int
    heads: slice
    at: Tensor  #: their places
    query: Tensor
    key: Tensor
    value: Tensor
    terms: list[Tensor]
    steps: tuple[tuple[str, ...], ...]

    def scores(self, scale: float) -> tuple[Tensor, list[Tensor | float]]:
        """What the softmax reads, and what the gradient is multiplied by on its way back to the product, in order."""
        score, terms = self._product(scale), iter(self.terms)
        passed: list[Tensor | float] = []
        for name, *words in self.steps:
            if name == "round":
                score = self._rounded(score, words[0])
            elif name == "times":
                passed.append(float(words[0]))
                score = score * float(words[0])
            elif name == "cap":
                score = torch.tanh(score)
                passed.append(1.0 - score.square())
            elif name == "add":
                score = score + next(terms).to(score.dtype) * float(words[0])
            elif name == "fill":
                keep = next(terms)
                passed.append(keep)
                score = score.where(keep, float(words[0]))
            elif name == "floor":
                number, tie = map(float, words)
                passed.append((score > number) + (score == number) * tie)
                score = score.clamp(min=number)
        return score, passed

    def _product(self, scale: float) -> Tensor:
        query, key = self.query, self.key
        for name, *words in self.steps:
            if name == "query":
                query = self._rounded(query * float(words[0]), words[1])
            elif name == "key":
                key = self._rounded(key * float(words[0]), words[1])
        return query @ key.mT * scale

    def factor(self) -> float:
        """What queries and keys are multiplied by before their product."""
        return math.prod(float(words[0]) for name, *words in self.steps if name in ("query", "key"))

    def _rounded(self, score: Tensor, dtype: str) -> Tensor:
        return score.to(getattr(torch, dtype)).to(self.query.dtype)

    def weights(self, score: Tensor, dropout: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor | None]:
        """The softmax, and what its weights are multiplied by."""
        dtype = next((words[0] for name, *words in self.steps if name == "logarithm"), None)
        if dtype is not None:
            total = self._rounded(score.logsumexp(-1, keepdim=True), dtype)
            weights = self._rounded(torch.exp(self._rounded(score - total, dtype)), dtype)
        else:
            weights = score.softmax(-1)
        factor = None
        if dropout:
            drawn = torch.rand(score.shape, generator=generator, device=score.device)
            factor = (drawn >= dropout).to(score.dtype) / (1.0 - dropout)
        return weights, factor

    def hidden(self) -> Tensor | None:
        """Keys whose weights are set to zero after the softmax."""
        name, *words = self.steps[-1]
        return ~self.terms[int(words[0])] if name == "hide" else None


def _chosen(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, terms: list[Tensor], steps: str
) -> Iterator[_Rows]:
    """The rows that are asked for, as many at once as keep the scores small."""
    batch, _, queries, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    rows = rows.expand(batch, rows.shape[1], queries, 1)[..., 0]
    kv_of = _shared(query, key)
    for b, h in rows.any(-1).nonzero().tolist():
        taken = slice(None) if rows.shape[1] == 1 else slice(h, h + 1)
        places = rows[b, h].nonzero()[:, 0]
        k, v = (t[b, kv_of[taken]].to(wide) for t in (key, value))
        for at in torch.split(places, max(1, _AT_ONCE // (k.shape[0] * k.shape[1]))):
            own = [_part(t, b, taken, at) for t in terms]
            yield _Rows(b, taken, at, query[b, taken][:, at].to(wide), k, v, own, _parsed(steps))


def _shared(query: Tensor, key: Tensor) -> Tensor:
    """Which head of keys and values each head of queries has."""
    return torch.arange(query.shape[1], device=query.device) // (query.shape[1] // key.shape[1])


def _part(term: Tensor, batch: int, heads: slice, at: Tensor) -> Tensor:
    """Of what broadcasts to the scores."""
    part = term[batch if term.shape[0] > 1 else 0]
    part = part[heads] if part.shape[0] > 1 else part
    return part[:, at] if part.shape[1] > 1 else part


def _add_to(total: Tensor, rows: _Rows, part: Tensor) -> None:
    """The other way round: what broadcast is summed."""
    into = total[rows.batch if total.shape[0] > 1 else 0]
    into = into[rows.heads] if into.shape[0] > 1 else into
    dims = [d for d, size in ((0, into.shape[0]), (1, into.shape[1]), (2, into.shape[2])) if size == 1]
    part = part.sum(dims, keepdim=True) if dims else part
    if into.shape[1] > 1:
        into[:, rows.at] += part
    else:
        into += part


def _generator(seed: Tensor | None, device: torch.device) -> torch.Generator | None:
    return None if seed is None else torch.Generator(device).manual_seed(int(seed))


def _forward(
    result: Tensor, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, some: Tensor, terms: list[Tensor],
    steps: str, mask: Tensor | None, seed: Tensor | None, scale: float, dropout: float,
) -> Tensor:  # fmt: skip
    out = result.clone()
    if not bool(some):
        return out
    generator = _generator(seed, query.device)
    for part in _chosen(query, key, value, rows, terms, steps):
        weights, factor = part.weights(part.scores(scale)[0], dropout, generator)
        weights = weights if factor is None else weights * factor
        hidden = part.hidden()
        weights = weights if hidden is None else weights.masked_fill(hidden, 0.0)
        out[part.batch, part.heads, part.at] = (weights @ part.value).to(out.dtype)
    return out


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, some: Tensor, terms: list[Tensor],
    steps: str, mask: Tensor | None, seed: Tensor | None, scale: float, dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if not bool(some):
        to_mask = query.new_zeros(()) if mask is None else torch.zeros_like(mask)
        return grad.clone(), torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value), to_mask
    wide = torch.promote_types(query.dtype, torch.float32)
    to_query = torch.zeros_like(query)
    to_mask = query.new_zeros(()) if mask is None else torch.zeros_like(mask, dtype=wide)  # with its strides
    to_key, to_value = (torch.zeros_like(t, dtype=wide) for t in (key, value))
    generator, kv_of = _generator(seed, query.device), _shared(query, key)
    for part in _chosen(query, key, value, rows, terms, steps):
        score, passed = part.scores(scale)
        weights, factor = part.weights(score, dropout, generator)
        hidden, asked = part.hidden(), grad[part.batch, part.heads][:, part.at].to(wide)
        flow, used = asked @ part.value.mT, weights
        if factor is not None:
            flow, used = flow * factor, used * factor
        if hidden is not None:
            flow, used = flow.masked_fill(hidden, 0.0), used.masked_fill(hidden, 0.0)
        flow = (flow - (weights * flow).sum(-1, keepdim=True)) * weights
        if mask is not None:
            _add_to(to_mask, part, flow)  # of the sum, before anything that was replaced in it
        flow = _passed(flow, passed) * (scale * part.factor())
        to_query[part.batch, part.heads, part.at] = (flow @ part.key).to(query.dtype)
        for total, own in ((to_key, flow.mT @ part.query), (to_value, used.mT @ asked)):
            total[part.batch].index_add_(0, kv_of[part.heads], own)
    to_mask = to_mask if mask is None else to_mask.to(mask.dtype)
    return grad.clone().masked_fill_(rows, 0.0), to_query, to_key.to(key.dtype), to_value.to(value.dtype), to_mask


def _passed(flow: Tensor, passed: list[Tensor | float]) -> Tensor:
    """What was replaced stops even NaN."""
    for by in reversed(passed):
        flow = (flow.where(by != 0, 0.0) if isinstance(by, Tensor) else flow) * by
    return flow


def _fake_forward(result: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(result)


def _fake_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, some: Tensor, terms: list[Tensor],
    steps: str, mask: Tensor | None, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    to_mask = query.new_empty(()) if mask is None else torch.empty_like(mask)
    to_result, to_query, to_key, to_value = (torch.empty_like(t) for t in (grad, query, key, value))
    return to_result, to_query, to_key, to_value, to_mask


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, query, key, value, rows, some, terms, steps, mask, seed, *rest = inputs
    ctx.options = steps, len(terms), rest
    ctx.save_for_backward(query, key, value, rows, some, mask, seed, *terms)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    steps, count, rest = ctx.options
    query, key, value, rows, some, mask, seed, *terms = ctx.saved_tensors
    found = torch.ops.optpass.lost_rows_backward(grad, query, key, value, rows, some, terms, steps, mask, seed, *rest)
    *others, to_mask = found
    return *others, None, None, [None] * count, None, None if mask is None else to_mask, None, None, None


_LIBRARY.impl("lost_rows", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("lost_rows_backward", _backward, "CompositeExplicitAutograd")
_LIBRARY.impl("lost_rows_backward", torch.library.fallthrough_kernel, "Autograd")  # what it is made of is recorded
torch.library.register_fake("optpass::lost_rows", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("optpass::lost_rows_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("optpass::lost_rows", _gradients, setup_context=_keep, lib=_LIBRARY)

#: `(result, query, key, value, rows, some, terms, steps, mask, seed, scale, dropout)`: `result` with `rows` computed.
#: some: whether any of `rows` is set, a boolean without dims on the host. result: [batch, heads, queries, width].
#: query: [batch, heads, queries, depth]; key, value: [batch, kv_heads, keys, ...]; rows: [.., .., queries or 1, 1].
#: terms: broadcast to the scores, one for each of the `steps` that takes one. These are separated by ';':
#: `query X DTYPE` and `key X DTYPE` (multiplied and rounded before the product), `round DTYPE`, `times X`, `cap 1` (the
#: tanh), `add X` (X times the next term), `fill X` (where the next term is False), `floor X TIE` (TIE: the share of the
#: gradient where a score is X), `logarithm DTYPE` (the softmax is `exp(x - logsumexp(x))`), at the end `hide N`
#: (weights become zero where term N is False).
#: mask: what the gradient of all that is added goes to, or None. seed: [1] int64, of the dropout, or None.
OPERATOR: Any = torch.ops.optpass.lost_rows.default
