"""What is done with results outside of the graph: they are written to, and their gradients are differentiated.

The caller may write to what a graph returns, as to any tensor: a kernel keeps its result for the backward.

AOTAutograd does not see such writes where it returns a view: gradients were wrong without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optpass

pytestmark = pytest.mark.usefixtures("clean", "seeded")

B, H, S, D = 2, 3, 24, 8


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * D**-0.5


def heads(x: Tensor) -> Tensor:
    return x.view(B, S, H, D).transpose(1, 2)


def as_it_is(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return scores(heads(x), heads(y)).softmax(-1) @ heads(z)


def reshaped(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return as_it_is(x, y, z).transpose(1, 2).reshape(B, S, H * D)


def contiguous(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return as_it_is(x, y, z).transpose(1, 2).contiguous().view(B, S, H * D)


def by_einsum(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    q, k, v = (t.view(B, S, H, D) for t in (x, y, z))
    weights = torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v).reshape(B, S, H * D)


def dropped_nowhere(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.dropout(as_it_is(x, y, z), 0.5, False).flatten(2)


def capped(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.tanh(scores(heads(x), heads(y)) / 5).mul(5).softmax(-1) @ heads(z)


PROGRAMS = (as_it_is, reshaped, contiguous, by_einsum, dropped_nowhere, capped)


def gradients(call: Callable[..., Tensor], operands: list[Tensor]) -> tuple[Tensor, ...]:
    result = call(*operands)
    result += 1
    return torch.autograd.grad(result.sin().sum(), operands)


@pytest.mark.slow
@pytest.mark.parametrize(
    "inner", [lambda gm, _: gm, "aot_eager", "inductor"], ids=["callable", "aot_eager", "inductor"]
)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_what_a_graph_returns_may_be_written_to(program: Any, inner: str) -> None:
    chosen = (lambda gm, _: gm) if inner == "callable" else inner
    options = {"inner": chosen, "strict": True, "attention": "always", "disable_passes": ["roofline"]}
    call = torch.compile(program, backend="optpass", fullgraph=True, options=options)
    operands = [torch.randn(B, S, H * D, requires_grad=True) for _ in range(3)]
    ours = gradients(call, operands)
    assert len(optpass.report().sites("attention")) == 1
    exact = gradients(program, [t.detach().double().requires_grad_() for t in operands])
    for got, wanted in zip(ours, exact, strict=True):
        assert float((got - wanted).detach().abs().max()) <= 1e-5 * float(wanted.detach().abs().max())


def test_a_copy_of_a_part_has_the_strides_of_the_program(compiled: Any, kernels: Any) -> None:
    """v is narrower than q and k: a kernel's result is cut, and a copy of that has other strides."""

    def program(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        q = x.view(5, 2, 3, 8).permute(1, 2, 0, 3)
        weights = scores(q, y.transpose(1, 2)).softmax(-1)
        out = torch.bmm(weights.flatten(0, 1), v.reshape(6, 7, 3)).view(2, 3, 5, 3)
        return out.transpose(1, 2).reshape(2, 5, 9)

    operands = torch.randn(5, 2, 24), *(torch.randn(s, requires_grad=True) for s in ((2, 7, 3, 8), (2, 3, 7, 3)))
    result = compiled(program)(*operands)
    assert kernels.nodes("returned") and result.stride() == program(*operands).stride()


def test_results_that_stay_in_the_graph_are_not_copied(kernels: Any, compiled: Any) -> None:
    weight = torch.randn(H * D, H * D, requires_grad=True)
    operands = [torch.randn(B, S, H * D, requires_grad=True) for _ in range(3)]
    compiled(lambda *xs: reshaped(*xs) @ weight)(*operands)
    assert kernels.sdpa and not kernels.nodes("returned")


def causal(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    masked = scores(heads(x), heads(y)).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)
    return masked.softmax(-1) @ heads(z)


def grouped(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    k, v = (heads(t)[:, :1].expand(-1, H, -1, -1) for t in (y, z))
    return scores(heads(x), k).softmax(-1) @ v


def lowest(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Its first query has no key."""
    mask = torch.ones(S, S, dtype=torch.bool).tril(-1)
    masked = scores(heads(x), heads(y)) + torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    return masked.softmax(-1) @ heads(z)


def second(call: Callable[..., Tensor], operands: list[Tensor]) -> tuple[Tensor, ...]:
    first = torch.autograd.grad(call(*operands).sin().sum(), operands, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), operands)


def own_keys(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """The values are the keys, queries and a bias are made of them, and another operand is read beside."""
    k = heads(y)
    bias = (k * heads(z)).mean(-1)[:, :, None, :]
    return (scores(heads(x) + k, k) + bias).softmax(-1) @ k


@pytest.mark.parametrize("program", (as_it_is, causal, grouped, capped, lowest, own_keys), ids=lambda p: p.__name__)
def test_gradients_have_gradients_where_the_graph_is_run_as_it_is(program: Any) -> None:
    """torch's fused kernels have no second derivatives; with `inner="eager"` the program has them."""
    call = torch.compile(program, backend="optpass", options={"inner": "eager", "strict": True, "attention": "always"})
    operands = [torch.randn(B, S, H * D, requires_grad=True) for _ in range(3)]
    ours = second(call, operands)
    assert len(optpass.report().sites("attention")) == 1
    wide = [t.detach().double().requires_grad_() for t in operands]
    exact = second(program, wide)
    pairs = ((call, operands), (program, wide))
    once = [torch.autograd.grad(f(*given).sin().sum(), given, create_graph=True) for f, given in pairs]
    for got, wanted in zip((*ours, *once[0]), (*exact, *once[1]), strict=True):
        assert float((got - wanted).detach().abs().max()) <= 1e-5 * float(wanted.detach().abs().max())


class Biased(nn.Module):
    """Falcon's: what is added to the scores is scaled with them, by a number of the module or of the head dim."""

    def __init__(self, number: str) -> None:
        super().__init__()
        self.number, self.factor = number, 0.31

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        if self.number == "baddbmm":
            return torch.baddbmm(bias, q, k.mT, alpha=q.shape[-1] ** -0.5).softmax(-1) @ v
        number = self.factor if self.number == "attribute" else q.shape[-1] ** -0.5
        return ((q @ k.mT + bias) * number).softmax(-1) @ v


@pytest.mark.parametrize("number", ["attribute", "head dim", "baddbmm"])
def test_biased_scores_times_a_number_that_is_dynamic(number: str, compiled: Any, kernels: Any) -> None:
    module = Biased(number)
    call = compiled(module, dynamic=True)
    for batch, length in ((4, 6), (3, 9), (5, 7)):
        inputs = [torch.randn(batch, length, D) for _ in range(3)] + [torch.randn(batch, 1, length)]
        torch.testing.assert_close(call(*inputs), module(*inputs))
    assert len(kernels.sdpa) == 1  # one graph for all
    module.factor = 0.5
    torch.testing.assert_close(call(*inputs), module(*inputs))


def windows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Swin's masks beside a dynamic number of windows: what the result's batch is, no node says."""
    n, length = mask.shape[0], q.shape[-2]
    masked = (q @ k.mT).view(q.shape[0] // n, n, H, length, length) + mask[None, :, None]
    return masked.view(-1, H, length, length).softmax(-1) @ v


def test_a_flex_call_that_is_taken_back_leaves_nothing(compiled: Any) -> None:
    call = compiled(windows, dynamic=True, mode="flex")  # strict: a change that is not said is an error
    for batch, n, length in ((8, 4, 6), (6, 3, 9)):
        operands = [torch.randn(batch, H, length, D) for _ in range(3)]
        mask = torch.where(torch.rand(n, length, length) > 0.5, -100.0, 0.0)
        assert torch.allclose(call(*operands, mask), windows(*operands, mask), atol=1e-5)


@pytest.mark.slow
def test_flex_attention_reads_parts_of_one_projection(seeded: int) -> None:
    """Inductor's kernel for CPUs reads v from where its buffer begins, if that buffer is computed in the graph."""

    def attention(x: torch.Tensor, weight: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        query, key, value = (x @ weight).view(2, 9, 3, 2, 16).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", query * turn, key * turn) / 4
        scores = (5 * torch.tanh(scores / 5)).masked_fill(~torch.ones(9, 9).tril().bool(), float("-inf"))
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value).reshape(2, 9, 32)

    inputs = torch.randn(2, 9, 24), torch.randn(24, 96), torch.randn(9, 1, 16)
    with torch.no_grad():
        made = torch.compile(attention, backend="optpass", options={"attention": "flex"})(*inputs)
        assert "FlexAttention" in str(optpass.report().sites("attention")[0].after)
        torch.testing.assert_close(made, attention(*inputs))


def from_table(x: torch.Tensor, weight: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """A bias of relative positions, as T5 computes it: a view of what the graph gathers."""
    query, key, value = (x @ weight).view(2, -1, 3, 2, 32).permute(2, 0, 3, 1, 4).unbind(0)
    rows = torch.arange(x.shape[1])
    bias = table[rows[:, None] - rows[None, :] + 31].permute(2, 0, 1)
    return (query @ key.mT / 6 + bias).softmax(-1) @ value


def from_slice(x: torch.Tensor, weight: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """A bool mask that begins inside of a buffer of the graph."""
    query, key, value = (x @ weight).view(2, -1, 3, 2, 32).permute(2, 0, 3, 1, 4).unbind(0)
    near = x @ x.mT > -1
    kept = torch.cat([~near, near | torch.eye(x.shape[1], dtype=torch.bool)])[2:]
    return (query @ key.mT / 6).masked_fill(~kept[:, None], float("-inf")).softmax(-1) @ value


@pytest.mark.slow
@pytest.mark.by_turns
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("attention", (from_table, from_slice))
def test_flex_attention_is_given_masks_that_are_views(attention: Any, dynamic: bool) -> None:
    """Inductor's kernel for CPUs does not compile with a view of the graph, nor declare a mask's symbolic sizes."""
    call = torch.compile(attention, backend="optpass", dynamic=dynamic, options={"attention": "flex", "strict": True})
    with torch.no_grad():
        for length in (24, 17) if dynamic else (24,):
            inputs = torch.randn(2, length, 64), torch.randn(64, 192) / 8, torch.randn(63, 2)
            torch.testing.assert_close(call(*inputs), attention(*inputs))
    if dynamic:
        assert "mask operand of symbolic sizes" in str(optpass.report().declined("attention")[0].reason)
    else:
        assert "FlexAttention" in str(optpass.report().sites("attention")[0].after)


@pytest.mark.slow
def test_flex_attention_takes_views_of_inputs(seeded: int) -> None:
    def attention(packed: torch.Tensor) -> torch.Tensor:
        query, key, value = packed[:, 1:].view(2, -1, 3, 2, 32).permute(2, 0, 3, 1, 4).unbind(0)
        return torch.tanh(query @ key.mT / 20).mul(5).softmax(-1) @ value

    packed = torch.randn(2, 25, 192)
    call = torch.compile(attention, backend="optpass", options={"attention": "flex", "strict": True})
    with torch.no_grad():
        torch.testing.assert_close(call(packed), attention(packed))
    assert "FlexAttention" in str(optpass.report().sites("attention")[0].after)


@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
def test_flex_attention_is_not_used_where_it_reads_beyond_the_last_key(dynamic: bool) -> None:
    """Inductor's kernel for CPUs writes the scores of what is behind 8 or 24 keys over its running maxima."""

    def attention(query: Tensor, key: Tensor, value: Tensor, factor: Tensor) -> Tensor:
        return (query @ key.mT * factor).softmax(-1) @ value

    call = torch.compile(attention, backend="optpass", dynamic=dynamic, options={"attention": "flex"})
    with torch.no_grad():
        for length in (24, 40) if dynamic else (24,):
            operands = *(torch.randn(2, 3, length, 16) for _ in range(3)), torch.tensor(0.2)
            torch.testing.assert_close(call(*operands), attention(*operands))
    assert "beyond the last key" in str(optpass.report().declined("attention")[0].reason)


def test_not_a_number_stays_one(seeded: int) -> None:
    """FlexAttention as Inductor compiles it for CPUs makes zeros of a query that holds NaN, and numbers of its keys."""

    def capped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = torch.tanh(query @ key.mT / 20).mul(5).masked_fill(~torch.ones(40, 40).tril().bool(), -torch.inf)
        return scores.softmax(-1) @ value

    query, key, value = torch.randn(3, 2, 3, 40, 32)
    query[0, 1, 7, 3] = key[1, 2, 5, 0] = value[1, 0, 39, 1] = torch.nan
    call = torch.compile(capped, backend="optpass", options={"attention": "always", "strict": True})
    with torch.no_grad():
        torch.testing.assert_close(call(query, key, value), capped(query, key, value), equal_nan=True)
    assert len(optpass.report().sites("attention")) == 1
