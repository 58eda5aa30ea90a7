"""Masks in buffers and parameters: contents that nobody promised, and that change between calls."""

from __future__ import annotations

import math

import torch
from attention_near_misses.program import Inputs, Suite, attend
from torch import nn

suite = Suite("buffers")


def _length(n: int, m: int | None = None):
    return lambda r: r.qkv(2, 3, n, 8, keys=m)


class Masked(nn.Module):
    """nanoGPT's way: a registered mask, sliced to the present size."""

    def __init__(self, keep: torch.Tensor | None = None, fill: float = -math.inf) -> None:
        super().__init__()
        self.register_buffer("keep", torch.ones(8, 8).tril() if keep is None else keep)
        self.fill = fill

    def forward(self, q, k, v):
        keep = self.keep[: q.shape[-2], : k.shape[-2]]
        return attend(q, k, v, lambda s: s.masked_fill(keep == 0, self.fill))


SIX = _length(6)


def _with(name: str, why: str, keep: torch.Tensor, fill: float = -math.inf, inputs=SIX, **more) -> None:
    def make() -> nn.Module:
        return Masked(keep.clone(), fill)

    suite.equal(inputs, name=name, why=why, make=make, **more)(Masked)


def _flip(row: int, column: int) -> torch.Tensor:
    keep = torch.ones(8, 8).tril()
    keep[row, column] = 1 - keep[row, column]
    return keep


_with("tril", "a causal buffer", torch.ones(8, 8).tril())
_with("tril, full size", "a causal buffer, all of it", torch.ones(8, 8).tril(), inputs=_length(8))
_with("tril of bools", "a causal buffer of bools", torch.ones(8, 8, dtype=torch.bool).tril())
_with("tril of ints", "a causal buffer of integers", torch.ones(8, 8, dtype=torch.long).tril())
_with("tril of twos", "a causal buffer of twos", 2 * torch.ones(8, 8).tril())
_with("one past element flipped", "causal but for one key of the past", _flip(4, 2))
_with("one future element flipped", "causal but for one key of the future", _flip(2, 4))
_with("the first element flipped", "the first row is empty", _flip(0, 0), torch.finfo(torch.float32).min)
_with("an element outside flipped", "causal as far as it is used", _flip(7, 1))
_with("last used element flipped", "causal but for the last element in use", _flip(5, 5))
_with("a NaN in it", "NaN == 0 is False: that key is seen",
      torch.ones(8, 8).tril().index_put((torch.tensor(1), torch.tensor(4)), torch.tensor(math.nan)))  # fmt: skip
_with("minus zero", "-0.0 == 0: hidden", torch.ones(8, 8).tril() - torch.ones(8, 8).triu(1) * 0.0)
_with("tiny", "1e-40 is not 0: seen", torch.ones(8, 8).tril() + 1e-40)
_with("triu", "the wrong half", torch.ones(8, 8).triu())
_with("tril -1", "the diagonal is hidden, the first row empty", torch.ones(8, 8).tril(-1),
      torch.finfo(torch.float32).min)  # fmt: skip
_with("tril +1", "one key of the future", torch.ones(8, 8).tril(1))
_with("ones", "nothing is hidden", torch.ones(8, 8))
_with("zeros", "everything is hidden", torch.zeros(8, 8), torch.finfo(torch.float32).min)
_with("random", "any mask", (torch.rand(8, 8) < 0.6).float().fill_diagonal_(1))
_with("window", "a causal window of three", torch.ones(8, 8).tril().triu(-2))
_with("oblong", "five queries on seven keys", torch.ones(8, 8).tril(), inputs=_length(5, 7))
_with("decode", "one query on seven keys: it sees the first alone", torch.ones(8, 8).tril(), inputs=_length(1, 7))
_with("fill of 0", "a causal buffer, hidden scores 0", torch.ones(8, 8).tril(), 0.0)
_with("growing", "the length changes between calls", torch.ones(8, 8).tril(), inputs=_length(5),
      then=(_length(8), _length(3)), dynamic=True)  # fmt: skip
_with("growing oblong", "the lengths change between calls", torch.ones(8, 8).tril(), inputs=_length(5),
      then=(_length(5, 8), _length(8, 3)))  # fmt: skip


def _set_element(module: nn.Module) -> None:
    module.keep[1, 4] = 1


def _replaced(module: nn.Module) -> None:
    module.keep = torch.ones(8, 8)


def _opened(module: nn.Module) -> None:
    module.keep.fill_(1)


def _reloaded(module: nn.Module) -> None:
    module.load_state_dict({"keep": torch.ones(8, 8).tril(2)})


def _data_replaced(module: nn.Module) -> None:
    module.keep.data = torch.ones(8, 8).tril(1)


def _fill_changed(module: nn.Module) -> None:
    module.fill = 0.0


def _undone(module: nn.Module) -> None:
    module.keep.copy_(torch.ones(8, 8) - module.keep if module.keep[0, 1] else torch.ones(8, 8))


for _change in (_set_element, _replaced, _opened, _reloaded, _data_replaced, _fill_changed, _undone):
    _with(f"then {_change.__name__.strip('_')}", "a causal buffer that is changed between calls",
          torch.ones(8, 8).tril(), then=(_length(6), _length(6)), between=_change)  # fmt: skip


class Sliced(nn.Module):
    """A causal buffer of eight, sliced by a rule."""

    def __init__(self, rule) -> None:
        super().__init__()
        self.register_buffer("keep", torch.ones(1, 1, 8, 8, dtype=torch.bool).tril())
        self.rule = rule

    def forward(self, q, k, v):
        keep = self.rule(self.keep, q.shape[-2], k.shape[-2])
        return attend(q, k, v, lambda s: torch.where(keep, s, torch.finfo(s.dtype).min))


SLICES = {
    "from the start": lambda b, n, m: b[:, :, :n, :m],
    "GPT-2's": lambda b, n, m: b[:, :, m - n : m, :m],
    "from the end": lambda b, n, m: b[:, :, -n:, -m:],
    "last rows, first keys": lambda b, n, m: b[:, :, -n:, :m],
    "first rows, last keys": lambda b, n, m: b[:, :, :n, -m:],
    "moved by one": lambda b, n, m: b[:, :, 1 : n + 1, :m],
    "keys moved by one": lambda b, n, m: b[:, :, :n, 1 : m + 1],
    "both moved by one": lambda b, n, m: b[:, :, 1 : n + 1, 1 : m + 1],
    "transposed": lambda b, n, m: b.mT[:, :, :n, :m],
    "flipped": lambda b, n, m: b.flip(-1)[:, :, :n, :m],
    "every second": lambda b, n, m: b[:, :, ::2, ::2].repeat(1, 1, 2, 2)[:, :, :n, :m],
    "by index": lambda b, n, m: b[:, :, torch.arange(n).flip(0)][..., :m],
    "expanded row": lambda b, n, m: b[:, :, 3:4, :m].expand(1, 1, n, m),
    "one row": lambda b, n, m: b[:, :, n - 1 : n, :m],
    "column": lambda b, n, m: b[:, :, :n, :1],
}

for _name, _rule in SLICES.items():
    for _n, _m in ((6, 6), (3, 7)):
        suite.equal(
            _length(_n, _m), name=f"{_name}, {_n} on {_m}", why=f"a causal buffer, sliced {_name}",
            make=lambda rule=_rule: Sliced(rule),
        )(Sliced)  # fmt: skip


@suite.equal(_length(6), then=(_length(6), _length(6)))
class WrittenInForward(nn.Module):
    """The buffer is changed in forward: every call sees another mask."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keep", torch.ones(6, 6).tril())

    def forward(self, q, k, v):
        out = attend(q, k, v, lambda s: s.masked_fill(self.keep == 0, -math.inf))
        with torch.no_grad():
            self.keep.copy_(self.keep.roll(1, 0))
            self.keep[:, 0] = 1
        return out


@suite.equal(_length(6), then=(_length(6), _length(6)))
class CountedInForward(nn.Module):
    """A counter decides how far the mask reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, q, k, v):
        i, j = torch.arange(6)[:, None], torch.arange(6)[None, :]
        keep = i + self.count >= j
        with torch.no_grad():
            self.count += 1
        return attend(q, k, v, lambda s: s.masked_fill(~keep, -math.inf))


@suite.equal(_length(6))
class LearnedMask(nn.Module):
    """A parameter that starts as a causal bias and gets its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((6, 6), -30.0).triu(1))

    def forward(self, q, k, v):
        return attend(q, k, v, lambda s: s + self.bias)


@suite.equal(_length(6), then=(_length(6),), between=lambda m: setattr(m, "window", 5))
class WindowAttribute(nn.Module):
    """The window is an attribute, and changes."""

    def __init__(self) -> None:
        super().__init__()
        self.window = 2

    def forward(self, q, k, v):
        distance = torch.arange(6)[:, None] - torch.arange(6)
        return attend(q, k, v, lambda s: s.masked_fill((distance < 0) | (distance >= self.window), -math.inf))


def _positions(r: Inputs) -> list[torch.Tensor]:
    return [*r.qkv(), r.permutation(6)]


@suite.equal(_positions)
def positions_given(q, k, v, positions):
    """Causal by positions that are an input: not in order."""
    keep = positions[:, None] >= positions[None, :]
    return attend(q, k, v, lambda s: s.masked_fill(~keep, -math.inf))


@suite.equal(lambda r: [*r.qkv(), torch.arange(6)], then=(lambda r: [*r.qkv(), torch.arange(6).flip(0)],))
def positions_given_in_order_first(q, k, v, positions):
    """Causal by positions that are an input: in order at the first call."""
    keep = torch.arange(6)[:, None] >= positions[None, :]
    return attend(q, k, v, lambda s: s.masked_fill(~keep, torch.finfo(s.dtype).min))


@suite.equal(lambda r: [*r.qkv(), torch.ones(6, 6)], then=(lambda r: [*r.qkv(), r.bools(6, 6).float()],))
def tril_of_an_input(q, k, v, m):
    """tril of an input that is all ones at the first call."""
    return attend(q, k, v, lambda s: s.masked_fill(m.tril() == 0, -math.inf))


@suite.equal(lambda r: [*r.qkv(), torch.ones(6, 6).tril()], then=(lambda r: [*r.qkv(), torch.ones(6, 6).tril(1)],))
def causal_input(q, k, v, m):
    """A mask given as an input: causal at the first call."""
    return attend(q, k, v, lambda s: s.masked_fill(m == 0, -math.inf))


@suite.equal(lambda r: [*r.qkv(), 0], then=(lambda r: [*r.qkv(), 1], lambda r: [*r.qkv(), -1]))
def diagonal_given(q, k, v, diagonal):
    """The diagonal is an integer argument."""
    keep = torch.ones(6, 6, dtype=torch.bool).tril(diagonal)
    return attend(q, k, v, lambda s: s.masked_fill(~keep, torch.finfo(s.dtype).min))


@suite.equal(lambda r: [*r.qkv(), 0.5], then=(lambda r: [*r.qkv(), 0.25], lambda r: [*r.qkv(), -1.0]))
def scale_given(q, k, v, scale):
    """The scale is a float argument."""
    return (q @ k.mT * scale).softmax(-1) @ v


@suite.equal(lambda r: [*r.qkv(), True], then=(lambda r: [*r.qkv(), False],))
def causal_given(q, k, v, is_causal):
    """Causal or not is an argument."""
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    return attend(q, k, v, lambda s: s.masked_fill(hidden, -math.inf) if is_causal else s)
