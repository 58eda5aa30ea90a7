"""What a masked score becomes: fills that are minus infinity, fills that nearly are, and fills that are not.

Rows without any key tell them apart: -inf gives NaN, finfo.min the uniform average, and kernels give 0.
"""

from __future__ import annotations

import math

import torch
from attention_near_misses.program import Inputs, Suite, in_dtype
from torch import nn

suite = Suite("fills")

LOWEST = torch.finfo(torch.float32).min
NOT_MINUS_INFINITY = {
    "0": 0.0, "1": 1.0, "1e9": 1e9, "-1": -1.0, "-5": -5.0, "-50": -50.0, "inf": math.inf, "nan": math.nan
}  # fmt: skip
NEAR_MINUS_INFINITY = {"-inf": -math.inf, "finfo.min": LOWEST, "-1e9": -1e9, "-1e4": -1e4}


def rows(full: str, batch_row: bool = False):
    """Inputs with a mask over (batch, 1, queries, keys): True is kept."""

    def draw(r: Inputs) -> list[torch.Tensor]:
        keep = r.bools(2, 1, 6, 6, full=full)
        if batch_row:  # one sequence of the batch is padding alone
            keep[1] = False
        return [*r.qkv(), keep]

    return draw


def padding(r: Inputs) -> list[torch.Tensor]:
    """A key padding mask of three lengths; the last sequence is empty."""
    lengths = torch.tensor([6, 3, 0])
    return [*r.qkv(3, 2, 6, 8), (torch.arange(6) < lengths[:, None])[:, None, None]]


def _masked_fill(fill: float):
    return lambda q, k, v, keep: (q @ k.mT * 8**-0.5).masked_fill(~keep, fill).softmax(-1) @ v


def _where(fill: float):
    return lambda q, k, v, keep: torch.where(keep, q @ k.mT * 8**-0.5, fill).softmax(-1) @ v


def _added(fill: float):
    def program(q, k, v, keep):
        bias = torch.zeros(keep.shape, dtype=q.dtype).masked_fill(~keep, fill)
        return (q @ k.mT * 8**-0.5 + bias).softmax(-1) @ v

    return program


def _weighed(fill: float):
    """The idiom of older models: (1 - mask) * fill."""
    return lambda q, k, v, keep: (q @ k.mT * 8**-0.5 + (1.0 - keep.to(q.dtype)) * fill).softmax(-1) @ v


IDIOMS = {"masked_fill": _masked_fill, "where": _where, "added": _added, "weighed": _weighed}
ROWS = {"a key in every row": rows("none"), "one empty row": rows("one"), "all empty": rows("all"), "padding": padding}

for _fill_name, _fill in NOT_MINUS_INFINITY.items():
    for _idiom in ("masked_fill", "where", "added"):
        if _idiom == "added" and not math.isfinite(_fill):
            continue
        _why = f"{_idiom} with {_fill_name}, which does not hide a key"
        suite.equal(rows("one"), name=f"{_fill_name}, {_idiom}", why=_why)(IDIOMS[_idiom](_fill))
for _fill_name, _fill in NEAR_MINUS_INFINITY.items():
    for _idiom, _make in IDIOMS.items():
        if _idiom == "weighed" and _fill_name == "-inf":
            continue  # 0 * -inf is NaN everywhere: below, once
        for _rows, _inputs in ROWS.items():
            if _rows == "a key in every row" and _idiom in ("where", "added"):
                continue
            _why = f"{_idiom} with {_fill_name}, {_rows}"
            _allow = 2e-3 if _fill_name == "-1e4" else 0.0  # scores of 1e4 have rounding errors of 1e-3 themselves
            suite.equal(_inputs, name=f"{_fill_name}, {_idiom}, {_rows}", why=_why, allow=_allow)(_make(_fill))
suite.equal(rows("none"), name="0 * -inf", why="(1 - mask) * -inf is NaN wherever the mask is 1")(_weighed(-math.inf))


@suite.equal(rows("one"))
def tensor_fill(q, k, v, keep):
    """The fill is a 0-d tensor of finfo.min, as GPT-2 had it."""
    lowest = torch.full([], torch.finfo(q.dtype).min, dtype=q.dtype)
    return torch.where(keep, q @ k.mT * 8**-0.5, lowest).softmax(-1) @ v


@suite.equal(lambda r: [*rows("one")(r), r.randn(1, grad=False).squeeze(0)])
def tensor_fill_input(q, k, v, keep, fill):
    """The fill is a 0-d input, of any value."""
    return torch.where(keep, q @ k.mT * 8**-0.5, fill).softmax(-1) @ v


@suite.equal(lambda r: [*rows("one")(r), r.randn(1).squeeze(0)] if not r.grad else [*rows("one")(r), r.randn()])
def learned_fill(q, k, v, keep, fill):
    """The fill is a 0-d input that needs its gradient."""
    return torch.where(keep, q @ k.mT * 8**-0.5, fill).softmax(-1) @ v


@suite.equal(lambda r: [*rows("one")(r), r.randn(6, 6)])
def fill_is_another_score(q, k, v, keep, other):
    """Hidden places take other scores."""
    return torch.where(keep, q @ k.mT * 8**-0.5, other).softmax(-1) @ v


@suite.equal(rows("one"))
def fill_is_row_minimum(q, k, v, keep):
    """Hidden places take the least score of the row."""
    s = q @ k.mT * 8**-0.5
    return torch.where(keep, s, s.amin(-1, keepdim=True)).softmax(-1) @ v


@suite.equal(rows("one"), allow=2e-3)
def scores_as_low_as_the_fill(q, k, v, keep):
    """Scores of 1e4: of some rows all are below what replaces the others."""
    return (q @ k.mT * 5e3).masked_fill(~keep, -1e4).softmax(-1) @ v


@suite.equal(lambda r: [*rows("one")(r), r.randn(2, 1, 1, 6)], allow=2e-3)
def raised_after_the_fill(q, k, v, keep, bias):
    """What replaces a score is brought back to its size by what is added to it."""
    return ((q @ k.mT).masked_fill(~keep, -1e4) + bias.abs() * 5e3).softmax(-1) @ v


@suite.equal(rows("one"))
def fill_minus_score(q, k, v, keep):
    """Hidden places take the negative score."""
    s = q @ k.mT * 8**-0.5
    return torch.where(keep, s, -s).softmax(-1) @ v


@suite.equal(rows("one"))
def filled_before_scale(q, k, v, keep):
    """Filled with -20, then divided by 8: a fill of -2.5."""
    return ((q @ k.mT).masked_fill(~keep, -20.0) / 8).softmax(-1) @ v


@suite.equal(rows("one"))
def lowest_then_scaled_up(q, k, v, keep):
    """finfo.min times 3 is -inf: a row without keys is NaN."""
    return ((q @ k.mT).masked_fill(~keep, torch.finfo(q.dtype).min) * 3).softmax(-1) @ v


@suite.equal(rows("one"))
def lowest_then_more_lowest(q, k, v, keep):
    """finfo.min filled and finfo.min added: -inf where both."""
    lowest = torch.finfo(q.dtype).min
    s = (q @ k.mT).masked_fill(~keep, lowest) + (~keep).to(q.dtype) * lowest
    return s.softmax(-1) @ v


@suite.equal(rows("one"))
def minus_infinity_then_bias(q, k, v, keep):
    """-inf, then a finite term on top, which changes nothing there."""
    return ((q @ k.mT).masked_fill(~keep, -math.inf) + 3.0).softmax(-1) @ v


@suite.equal(rows("one"))
def minus_infinity_negated(q, k, v, keep):
    """-inf, then the sign is turned: hidden keys get everything, NaN."""
    return (-(q @ k.mT).masked_fill(~keep, -math.inf)).softmax(-1) @ v


@suite.equal(rows("one"))
def minus_infinity_capped(q, k, v, keep):
    """-inf through tanh is -1: the softcap comes after the mask."""
    return ((q @ k.mT).masked_fill(~keep, -math.inf) / 5).tanh().mul(5).softmax(-1) @ v


@suite.equal(rows("one"))
def minus_infinity_clamped(q, k, v, keep):
    """-inf, then clamped from below."""
    return (q @ k.mT).masked_fill(~keep, -math.inf).clamp(min=-10.0).softmax(-1) @ v


@suite.equal(rows("one"))
def nan_to_num_after_softmax(q, k, v, keep):
    """-inf and NaN made 0 after the softmax: a row without keys is 0, as in a kernel."""
    return (q @ k.mT).masked_fill(~keep, -math.inf).softmax(-1).nan_to_num(0.0) @ v


@suite.equal(rows("one"))
def nan_to_num_one(q, k, v, keep):
    """NaN made 1 instead."""
    return (q @ k.mT).masked_fill(~keep, -math.inf).softmax(-1).nan_to_num(1.0) @ v


@suite.equal(rows("one"))
def nan_to_num_before_softmax(q, k, v, keep):
    """nan_to_num on scores turns -inf into finfo.min: a row without keys is the average."""
    return (q @ k.mT).masked_fill(~keep, -math.inf).nan_to_num().softmax(-1) @ v


@suite.equal(rows("one"))
def output_rows_zeroed(q, k, v, keep):
    """Rows without keys are set to 0 in the output."""
    out = (q @ k.mT).masked_fill(~keep, -math.inf).softmax(-1) @ v
    return out.masked_fill(~keep.any(-1, keepdim=True), 0.0)


@suite.equal(rows("one"))
def two_fills(q, k, v, keep):
    """One mask with -inf, another with 0, in this order."""
    return (q @ k.mT).masked_fill(~keep, -math.inf).masked_fill(~keep.mT, 0.0).softmax(-1) @ v


@suite.equal(rows("one"))
def zero_fill_then_minus_infinity(q, k, v, keep):
    """One mask with 0, another with -inf, in this order."""
    return (q @ k.mT).masked_fill(~keep.mT, 0.0).masked_fill(~keep, -math.inf).softmax(-1) @ v


@suite.equal(padding)
class LowestOfFloat32(nn.Module):
    """torch.finfo(torch.float32).min whatever the dtype of the scores."""

    def forward(self, q, k, v, keep):
        bias = (1.0 - keep.float()) * torch.finfo(torch.float32).min
        return (q @ k.mT * 8**-0.5 + bias.to(q.dtype)).softmax(-1) @ v


@suite.equal(padding)
def huggingface_extended_mask(q, k, v, keep):
    """(1 - mask) * finfo.min plus scores, the softmax in float32."""
    bias = (1.0 - keep.to(q.dtype)) * torch.finfo(q.dtype).min
    return (q @ k.mT * 8**-0.5 + bias).softmax(-1, dtype=torch.float32).to(q.dtype) @ v


@suite.equal(padding)
def added_in_float32(q, k, v, keep):
    """The bias is added in float32, where it does not overflow."""
    bias = (1.0 - keep.float()) * torch.finfo(torch.float32).min
    return ((q @ k.mT).float() * 8**-0.5 + bias).softmax(-1).to(q.dtype) @ v


@suite.equal(padding)
def twice_lowest(q, k, v, keep):
    """Causal and padding masks both finfo.min, added: their sum overflows to -inf in some rows."""
    lowest = torch.finfo(q.dtype).min
    causal = torch.full((6, 6), lowest, dtype=q.dtype).triu(1)
    return (q @ k.mT * 8**-0.5 + (causal + (1.0 - keep.to(q.dtype)) * lowest)).softmax(-1) @ v


@suite.equal(lambda r: [*rows("one")(r), r.bools(2, 1, 1, 6)])
def minus_infinity_beside_large(q, k, v, keep, other):
    """One mask fills -inf and has an empty row (NaN), another adds -1e9."""
    s = (q @ k.mT * 8**-0.5).masked_fill(~keep, -math.inf)
    return (s + (1.0 - other.to(q.dtype)) * -1e9).softmax(-1) @ v


@suite.equal(lambda r: [*rows("none")(r), r.bools(2, 1, 1, 6)])
def large_on_all_beside_lowest(q, k, v, keep, other):
    """finfo.min is added to some keys and -1e9 to all: uniform over the others, not over all."""
    s = q @ k.mT * 8**-0.5 + torch.where(keep, 0.0, torch.finfo(q.dtype).min)
    return (s + torch.where(other & False, 0.0, -1e9)).softmax(-1) @ v


@suite.equal(rows("one"))
def logsumexp_absorbs(q, k, v, keep):
    """exp(s - logsumexp(s)) where -1e9 is added to a whole row: log(6) is lost, and the row sums to six."""
    s = q @ k.mT * 8**-0.5 + torch.where(keep, 0.0, -1e9)
    return (s - s.logsumexp(-1, keepdim=True)).exp() @ v


@suite.equal(rows("one"))
def log_softmax_does_not_absorb(q, k, v, keep):
    """exp(log_softmax(s)) of the same: the average."""
    s = q @ k.mT * 8**-0.5 + torch.where(keep, 0.0, -1e9)
    return s.log_softmax(-1).exp() @ v


@suite.equal(rows("one"))
def logsumexp_behind_the_maximum(q, k, v, keep):
    """The maximum of each row is taken off first: nothing is lost, and the row is the average."""
    s = (q @ k.mT * 8**-0.5).masked_fill(~keep, torch.finfo(q.dtype).min)
    s = s - s.amax(-1, keepdim=True)
    return (s - s.logsumexp(-1, keepdim=True)).exp() @ v


@suite.equal(rows("one"))
def logsumexp_behind_the_maximum_of_all(q, k, v, keep):
    """Of all rows: the one without a key is as low as before, and every weight of it is 1."""
    s = (q @ k.mT * 8**-0.5).masked_fill(~keep, torch.finfo(q.dtype).min)
    s = s - s.max()
    return (s - s.logsumexp(-1, keepdim=True)).exp() @ v


@suite.equal(rows("one"))
def logsumexp_behind_the_maximum_of_a_head(q, k, v, keep):
    """Of the rows of a head: the same."""
    s = (q @ k.mT * 8**-0.5).masked_fill(~keep, torch.finfo(q.dtype).min)
    s = s - s.amax((-1, -2), keepdim=True)
    return (s - s.logsumexp(-1, keepdim=True)).exp() @ v


@suite.equal(rows("one"))
def logsumexp_behind_the_lowest_maximum(q, k, v, keep):
    """Of all rows, and none has a key: averages."""
    s = (q @ k.mT * 8**-0.5).masked_fill(~(keep & False), torch.finfo(q.dtype).min)
    s = s - s.max()
    return (s - s.logsumexp(-1, keepdim=True)).exp() @ v


@suite.equal(rows("one"))
def infinite_on_the_way(q, k, v, keep):
    """finfo.min is added, overflows where the sum is scaled, and stays minus infinity where it is scaled back."""
    s = q @ k.mT * 8**-0.5 + torch.where(keep, 0.0, torch.finfo(q.dtype).min)
    return (s * 1.5 * 0.5).softmax(-1) @ v


@suite.equal(lambda r: [*rows("one")(r), r.randn(1, 3, 1, 1)])
def infinite_before_the_sink(q, k, v, keep, sink):
    """The same beside a sink that is written behind the product: NaN in a row without a key, not 0."""
    s = (q @ k.mT * 8**-0.5 + torch.where(keep, 0.0, torch.finfo(q.dtype).min)) * 1.5
    return s.softmax(-1) @ v * torch.sigmoid(s.logsumexp(-1, keepdim=True) - sink[:, :1])


@suite.equal(rows("one"))
def sum_of_exp_absorbs_nothing(q, k, v, keep):
    """exp over its sum, without the maximum: 0 / 0 where everything is hidden, though finfo.min is finite."""
    e = (q @ k.mT * 8**-0.5).masked_fill(~keep, torch.finfo(q.dtype).min).exp()
    return e / e.sum(-1, keepdim=True) @ v


_HALVES = ("LowestOfFloat32", "huggingface_extended_mask", "added_in_float32", "twice_lowest", "tensor_fill")
_named = [p for p in suite if p.name.split("/")[1] in _HALVES]
_BOTH = ("-1e9, added, padding", "-1e4, added, padding", "-inf, where, one empty row")
_filled = [p for p in suite if p.name.split("/")[1] in _BOTH]
suite.programs += in_dtype(_named + _filled, torch.bfloat16) + in_dtype(_named, torch.float16)


def _topped(name: str, low, then) -> None:
    def program(q, k, v, keep, other):
        s = low(q @ k.mT * 8**-0.5, keep)
        return then(s - s.amax(-1, keepdim=True), other).softmax(-1) @ v

    why = "a row without a key is near 0 once its maximum is taken off"
    suite.decline(lambda r: [*rows("one")(r), r.randn(6, 6)], name=f"maximum taken off {name}", why=why)(program)


_topped("fills, then a bias", lambda s, keep: s.masked_fill(~keep, LOWEST), lambda s, other: s + other)
_topped("numbers, then a bias", lambda s, keep: s + torch.where(keep, 0.0, -1e9), lambda s, other: s + other)
_topped(
    "fills, then another", lambda s, keep: s.masked_fill(~keep, -math.inf), lambda s, other: s.where(other > 0, -1e9)
)


@suite.decline(lambda r: [*r.qkv(), r.bools(6, 6)], dtype=torch.float64)
def filled_with_what_was_taken_off(q, k, v, keep):
    """1e9 is taken off all scores, and masked ones become -1e9: they are as high as the others."""
    return (q @ k.mT - 1e9).masked_fill(~keep, -1e9).softmax(-1) @ v


@suite.decline(lambda r: [*r.qkv(), r.bools(6, 6)])
def filled_above_what_was_taken_off(q, k, v, keep):
    """2e4 is taken off all scores, and masked ones become -1e4: these alone have weights."""
    return (q @ k.mT - 2e4).masked_fill(~keep, -1e4).softmax(-1) @ v


@suite.equal(lambda r: [*r.qkv(), r.bools(6, 6)])
def filled_far_below_what_was_taken_off(q, k, v, keep):
    """5 is taken off, which makes no difference."""
    return (q @ k.mT - 5.0).masked_fill(~keep, -1e9).softmax(-1) @ v
