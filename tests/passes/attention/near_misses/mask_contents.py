"""Masks computed from positions that are causal, almost causal, or something else: any may be used, none mistaken.

Each is a function of (queries, keys) giving True where a key is seen; every one is applied in two ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from attention_near_misses.program import Inputs, Suite

suite = Suite("mask_contents")

Mask = Callable[[int, int], torch.Tensor]


def _ones(n: int, m: int) -> torch.Tensor:
    return torch.ones(n, m)


def _places(n: int, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(n)[:, None], torch.arange(m)[None, :]


def _by_places(rule: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Mask:
    return lambda n, m: rule(*_places(n, m))


def _flipped(row: int, column: int) -> Mask:
    """Causal but for one element."""

    def mask(n: int, m: int) -> torch.Tensor:
        i, j = _places(n, m)
        return (i >= j) ^ ((i == row) & (j == column))

    return mask


SQUARE: dict[str, Mask] = {
    "tril": lambda n, m: _ones(n, m).tril() != 0,
    "tril +1": lambda n, m: _ones(n, m).tril(1) != 0,
    "tril -1": lambda n, m: _ones(n, m).tril(-1) != 0,
    "triu": lambda n, m: _ones(n, m).triu() != 0,
    "triu +1": lambda n, m: _ones(n, m).triu(1) != 0,
    "not triu": lambda n, m: _ones(n, m).triu() == 0,
    "not triu +1": lambda n, m: _ones(n, m).triu(1) == 0,
    "not triu +2": lambda n, m: _ones(n, m).triu(2) == 0,
    "tril transposed": lambda n, m: _ones(m, n).tril().mT != 0,
    "tril flipped in rows": lambda n, m: _ones(n, m).tril().flip(0) != 0,
    "tril flipped in both": lambda n, m: _ones(n, m).tril().flip(0, 1) != 0,
    "tril rolled": lambda n, m: _ones(n, m).tril().roll(1, 0) != 0,
    "tril of tril": lambda n, m: _ones(n, m).tril().triu(-2) != 0,
    "tril minus eye": lambda n, m: (_ones(n, m).tril() - torch.eye(n, m)) != 0,
    "tril plus corner": lambda n, m: _ones(n, m).tril().index_fill(1, torch.tensor([m - 1]), 1.0) != 0,
    "tril of eye": lambda n, m: torch.eye(n, m).tril() != 0,
    "tril of arange": lambda n, m: torch.arange(n * m).view(n, m).tril() != 0,  # place (0, 0) holds 0
    "tril twice the value": lambda n, m: (2 * _ones(n, m)).tril() == 1,
    "tril of halves": lambda n, m: (0.5 * _ones(n, m)).tril().bool(),
    "tril of halves as int": lambda n, m: (0.5 * _ones(n, m)).tril().int().bool(),
    ">=": _by_places(lambda i, j: i >= j),
    ">": _by_places(lambda i, j: i > j),
    "<=": _by_places(lambda i, j: i <= j),
    "<": _by_places(lambda i, j: i < j),
    "==": _by_places(lambda i, j: i == j),
    "!=": _by_places(lambda i, j: i != j),
    "i + 1 >= j": _by_places(lambda i, j: i + 1 >= j),
    "i >= j + 1": _by_places(lambda i, j: i >= j + 1),
    "i - j > -1": _by_places(lambda i, j: i - j > -1),
    "i - j >= -1": _by_places(lambda i, j: i - j >= -1),
    "2 i >= j": _by_places(lambda i, j: 2 * i >= j),
    "i >= 2 j": _by_places(lambda i, j: i >= 2 * j),
    "2 i >= 2 j": _by_places(lambda i, j: 2 * i >= 2 * j),
    "i >= j without axes": lambda n, m: torch.arange(n) >= torch.arange(m),
    "i // 2 >= j // 2": _by_places(lambda i, j: i // 2 >= j // 2),
    "i % 2 >= j % 2": _by_places(lambda i, j: i % 2 >= j % 2),
    "i * i >= j * j": _by_places(lambda i, j: i * i >= j * j),
    "strided": _by_places(lambda i, j: (i >= j) & ((i - j) % 2 == 0)),
    "window of 3": _by_places(lambda i, j: (i >= j) & (i - j < 3)),
    "window of 3 or 4": _by_places(lambda i, j: (i >= j) & (i - j <= 3)),
    "window of all": _by_places(lambda i, j: (i >= j) & (i - j < 6)),
    "window of all but one": _by_places(lambda i, j: (i >= j) & (i - j < 5)),
    "window ahead": _by_places(lambda i, j: (j >= i) & (j - i < 3)),
    "window both ways": _by_places(lambda i, j: (i - j).abs() < 2),
    "window one sided wrongly": _by_places(lambda i, j: (i >= j) & (j - i < 2)),
    "window or causal": _by_places(lambda i, j: (i >= j) | (i - j < 2)),
    "causal or first key": _by_places(lambda i, j: (i >= j) | (j == 0)),
    "causal or last key": _by_places(lambda i, j: (i >= j) | (j == 5)),
    "prefix of 2": _by_places(lambda i, j: (i >= j) | (j < 2)),
    "prefix of 1": _by_places(lambda i, j: (i >= j) | (j < 1)),
    "causal and not diagonal": _by_places(lambda i, j: (i >= j) & (i != j)),
    "causal xor window": _by_places(lambda i, j: (i >= j) ^ (i - j > 3)),
    "documents": _by_places(lambda i, j: (i >= j) & (i // 3 == j // 3)),
    "documents both ways": _by_places(lambda i, j: i // 3 == j // 3),
    "float ramp": lambda n, m: torch.linspace(0, 1, n)[:, None] >= torch.linspace(0, 1, m),
    "reversed ramp": lambda n, m: torch.arange(n).flip(0)[:, None] >= torch.arange(m).flip(0),
    "from one": lambda n, m: torch.arange(1, n + 1)[:, None] >= torch.arange(m),
    "keys from one": lambda n, m: torch.arange(n)[:, None] >= torch.arange(1, m + 1),
    "both from one": lambda n, m: torch.arange(1, n + 1)[:, None] >= torch.arange(1, m + 1),
    "steps of two": lambda n, m: torch.arange(0, 2 * n, 2)[:, None] >= torch.arange(m),
    "cumsum": lambda n, m: _ones(n, m).cumsum(-1) <= _ones(n, m).cumsum(0),
    "cumsum both rows": lambda n, m: _ones(n, m).cumsum(0) <= _ones(n, m).cumsum(0),
    "all": lambda n, m: _ones(n, m) != 0,
    "none": lambda n, m: _ones(n, m) == 0,
    "last element": _flipped(5, 5),
    "first element": _flipped(0, 0),
    "a future element": _flipped(1, 4),
    "a past element": _flipped(4, 1),
    "the corner": _flipped(0, 5),
}

#: On five queries and seven keys, or the reverse: which corner the diagonal starts in is all the difference.
OBLONG: dict[str, Mask] = {
    "tril": lambda n, m: _ones(n, m).tril() != 0,
    "tril from the end": lambda n, m: _ones(n, m).tril(m - n) != 0,
    "tril one short of the end": lambda n, m: _ones(n, m).tril(m - n - 1) != 0,
    "slice of a larger one, first rows": lambda n, m: _ones(9, 9).tril()[:n, :m] != 0,
    "slice of a larger one, last rows": lambda n, m: _ones(9, 9).tril()[-n:, -m:] != 0,
    "slice, decode": lambda n, m: _ones(m, m).tril()[m - n : m, :m] != 0 if m > n else _ones(n, n).tril()[:, :m] != 0,
    "slice, last rows and first keys": lambda n, m: _ones(9, 9).tril()[-n:, :m] != 0,
    "slice, first rows and last keys": lambda n, m: _ones(9, 9).tril()[:n, -m:] != 0,
    "slice with a step": lambda n, m: _ones(18, 18).tril()[: 2 * n : 2, :m] != 0,
    ">=": _by_places(lambda i, j: i >= j),
    ">= with offset": lambda n, m: torch.arange(m - n, m)[:, None] >= torch.arange(m),
    ">= from the end": lambda n, m: (torch.arange(n) - n)[:, None] >= torch.arange(m) - m,
    "window from the end": lambda n, m: (d := (torch.arange(n) + m - n)[:, None] - torch.arange(m)).ge(0) & d.lt(3),
}


def _queries_keys(n: int, m: int) -> Callable[[Inputs], list[torch.Tensor]]:
    return lambda r: r.qkv(2, 3, n, 8, keys=m)


def _filled(mask: Mask, fill: float):
    def program(q, k, v):
        keep = mask(q.shape[-2], k.shape[-2])
        return (q @ k.mT * 8**-0.5).masked_fill(~keep, fill).softmax(-1) @ v

    return program


def _added(mask: Mask, fill: float):
    def program(q, k, v):
        keep = mask(q.shape[-2], k.shape[-2])
        bias = torch.zeros(keep.shape, dtype=q.dtype).masked_fill(keep.logical_not(), fill)
        return torch.softmax(q @ k.mT / math.sqrt(8) + bias, dim=-1) @ v

    return program


for _index, (_name, _mask) in enumerate(SQUARE.items()):
    # One spelling each in turn: what is proved must not depend on how the mask is applied afterwards.
    _make, _fill = ((_filled, -math.inf), (_added, -math.inf), (_filled, torch.finfo(torch.float32).min))[_index % 3]
    suite.equal(_queries_keys(6, 6), name=f"square, {_name}", why=f"mask '{_name}' on six queries and six keys")(
        _make(_mask, _fill)
    )
for _name, _mask in OBLONG.items():
    for _n, _m in ((5, 7), (7, 5), (1, 7)):
        if _m < _n and "from the end" in _name:
            continue
        _fill = -math.inf if _n == 5 else torch.finfo(torch.float32).min
        _why = f"mask '{_name}', {_n} queries, {_m} keys"
        suite.equal(_queries_keys(_n, _m), name=f"{_n} on {_m}, {_name}", why=_why)(_filled(_mask, _fill))
