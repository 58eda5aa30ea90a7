"""Dropout where no kernel of SDPA has it: by FlexAttention in two calls, and in blocks. What was dropped is read off.

Values that are one-hot make the result the weights themselves, with zeros where they were dropped: with these the same
attention in float64 must have the same result and the same gradients, whatever the numbers drawn.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_module_simplified, make_boxed_func
from torch import Tensor

import optpass
from optpass.passes.attention.write import flex

B, H, S, D = 2, 3, 48, 8
CAP = 20.0


def scores(q: Tensor, k: Tensor, mask: Tensor | None, cap: float) -> Tensor:
    found = q @ k.mT / math.sqrt(D)
    found = cap * torch.tanh(found / cap) if cap else found
    return found if mask is None else found.masked_fill(~mask, -math.inf)


def plain(gm: Any, _: Any) -> Any:
    return gm.forward


def traced(gm: Any, inputs: Any) -> Any:
    def compiler(graph: Any, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    return aot_module_simplified(gm, inputs, fw_compiler=compiler, bw_compiler=compiler)


def compiled(inner: Any, p: float, mask: Tensor | None = None, cap: float = 0.0) -> Any:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(scores(q, k, mask, cap).softmax(-1), p) @ v

    torch._dynamo.reset()
    optpass.reset_report()
    options = {"inner": inner, "strict": True, "attention": {"mode": "always", "dropout": "swap"}}
    return torch.compile(program, backend="optpass", fullgraph=True, options=options)


def one_hot(dtype: torch.dtype) -> list[Tensor]:
    """q, k, and values that make the result the weights."""
    q, k = (torch.randn(B, H, S, D, dtype=dtype) * 2 for _ in range(2))
    return [t.requires_grad_() for t in (q, k, torch.eye(S, dtype=dtype).repeat(B, H, 1, 1))]


MASKS = {"none": None, "causal": torch.ones(S, S, dtype=torch.bool).tril()}
WAYS = {"flex": (plain, CAP), "flex traced": (traced, CAP), "blocks": ("aot_eager", 0.0), "blocks cap": ("eager", CAP)}


@pytest.mark.slow
@pytest.mark.by_turns
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_kept_is_right(way: str, mask: str, dtype: torch.dtype) -> None:
    (inner, cap), p, seen = WAYS[way], 0.4, MASKS[mask]
    q, k, v = one_hot(dtype)
    weight = torch.randn(B, H, S, S, dtype=dtype)
    result = compiled(inner, p, seen, cap)(q, k, v)
    (result * weight).sum().backward()
    (site,) = optpass.report().sites("attention")
    assert ("FlexAttention" if "flex" in way else "attention in blocks") in site.after

    kept = result.detach() != 0
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    reference = (scores(wide[0], wide[1], seen, cap).softmax(-1) * kept / (1 - p)) @ wide[2]
    (reference * weight.double()).sum().backward()
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    pairs = [(result, reference), *((a.grad, b.grad) for a, b in zip((q, k, v), wide, strict=True))]
    for ours, exact in pairs:
        assert (ours.double() - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("way", ["flex", "blocks"])
def test_numbers_are_drawn_for_every_weight(way: str) -> None:
    """How many are kept, how that varies over queries, and that heads, queries and calls differ."""
    (inner, cap), p = WAYS[way], 0.25
    q, k, v = one_hot(torch.float32)
    call = compiled(inner, p, cap=cap)
    kept = torch.stack([call(q, k, v).detach() != 0 for _ in range(8)]).double()
    n = kept.numel()
    assert abs(kept.mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)
    rows = kept.reshape(-1, S)
    variance = S * p * (1 - p)
    assert abs(rows.sum(1).var() / variance - 1) < 5 * math.sqrt(2 / len(rows))
    assert abs(rows.sum(0).var() / (len(rows) * p * (1 - p)) - 1) < 5 * math.sqrt(2 / S)
    alike = (rows @ rows.T + (1 - rows) @ (1 - rows).T) / S
    alike.fill_diagonal_(0)
    assert alike.max() < 1.0  # no two rows of any call, head or batch are the same


@pytest.mark.parametrize("way", ["flex", "blocks"])
def test_the_generator_decides(way: str) -> None:
    q, k, v = one_hot(torch.float32)
    call, results = compiled(WAYS[way][0], 0.4, cap=WAYS[way][1]), []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        results.append(call(q, k, v).detach())
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


@pytest.mark.parametrize("way", ["flex", "blocks"])
def test_rows_of_which_nothing_is_kept(way: str) -> None:
    """Some of 2 keys at p = 0.9: zeros, and finite gradients; so where all that is kept is masked."""
    q, k, v = (torch.randn(4, 8, 2, D, requires_grad=True) for _ in range(3))
    seen = torch.tensor([[True, False], [True, True]])
    result = compiled(WAYS[way][0], 0.9, seen, WAYS[way][1])(q, k, v)
    result.sum().backward()
    assert (result == 0).all(-1).any() and result.isfinite().all()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_threads_may_change_before_the_backward(p: float) -> None:
    q, k, v = (torch.randn(2, 4, 300, D, requires_grad=True) for _ in range(3))
    call, threads = compiled("aot_eager", p), torch.get_num_threads()
    grads = []
    try:
        for behind in (1, 3):
            torch.manual_seed(5)
            torch.set_num_threads(2)
            result = call(q, k, v)
            torch.set_num_threads(behind)
            grads.append(torch.autograd.grad(result.square().sum(), (q, k, v)))
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_all_weights_dropped_stay_with_the_user() -> None:
    q, k, v = one_hot(torch.float32)
    assert not compiled(plain, 1.0, cap=CAP)(q, k, v).any()
    assert not optpass.report().sites("attention")


def test_the_trial_of_flex_is_not_the_programs_business() -> None:
    """Under autocast, and another default dtype, the numbers that are tried stay what they are."""
    for tried in (flex.available, flex.drops):
        expected = tried()
        tried.cache_clear()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert tried() is expected
        tried.cache_clear()
        torch.set_default_dtype(torch.float64)
        try:
            assert tried() is expected
        finally:
            torch.set_default_dtype(torch.float32)


class Dropping(torch.nn.Module):
    """Under dynamic shapes its dropout's `p` is an input of the graph."""

    def __init__(self, p: float, *, inplace: bool = False) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(p, inplace=inplace)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = self.dropout(scores(q, k, None, 0.0).softmax(-1)) @ v
        return found


@pytest.mark.slow
@pytest.mark.parametrize("word", ["keep", "swap"])
def test_a_rate_that_is_an_input_is_guarded(word: str) -> None:
    """That a rate is 0 is all that 'keep' needs to know; with 'swap' any rate is as good."""
    module, graphs = Dropping(0.0 if word == "keep" else 0.25), []
    torch._dynamo.reset()
    optpass.reset_report()
    options = {"inner": lambda gm, _: graphs.append(gm) or gm, "strict": True}
    options["attention"] = {"mode": "always", "dropout": word}
    call = torch.compile(module, backend="optpass", fullgraph=True, dynamic=True, options=options)
    operands = [torch.randn(B, H, S, D, requires_grad=True) for _ in range(3)]
    call(*operands)
    assert len(optpass.report().sites("attention")) == 1
    for rate in (0.5, 1.0, 0.0):
        module.dropout.p = rate
        torch.manual_seed(1)
        wanted = module(*operands)
        torch.manual_seed(1)
        assert word == "swap" or torch.allclose(call(*operands), wanted, atol=1e-5)
        if rate == 0.5:
            dropped = (call(*operands) - call(*operands)).abs().max()
            assert dropped > 1e-3
    assert all("dropout" in site.reason for site in optpass.report().declined("attention"))


@pytest.mark.parametrize("training", [False, True])
def test_dropout_in_place_that_drops_nothing_writes_nothing(training: bool) -> None:
    """One that drops in training is torch's own error: the softmax's backward reads what it wrote."""
    module = Dropping(0.0 if training else 0.5, inplace=True).train(training)
    torch._dynamo.reset()
    optpass.reset_report()
    options = {"inner": plain, "strict": True, "attention": "always"}
    operands = [torch.randn(B, H, S, D, requires_grad=training) for _ in range(3)]
    found = torch.compile(module, backend="optpass", fullgraph=True, options=options)(*operands)
    assert torch.allclose(found, module(*operands), atol=1e-5)
    assert len(optpass.report().sites("attention")) == 1


def one_head(weights: bool) -> tuple[torch.nn.MultiheadAttention, Any]:
    """A layer whose values are what it is given, and a program that runs it for its result, and for its weights too."""
    layer = torch.nn.MultiheadAttention(S, 1, dropout=0.4, batch_first=True)
    with torch.no_grad():
        layer.in_proj_weight[2 * S :] = torch.eye(S)
        layer.out_proj.weight.copy_(torch.eye(S))
    return layer, lambda q, k, v: layer(q, k, v)[: 1 + weights]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_layer_that_could_return_its_weights(dynamic: bool) -> None:
    """`need_weights` is what such a layer is called with if nothing is said; its dropout is a function's inside."""
    layer, program = one_head(weights=False)
    options = {"inner": "aot_eager", "strict": True, "attention": {"mode": "always", "dropout": "swap"}}
    q, k = (torch.randn(B, S, S) for _ in range(2))
    v = torch.eye(S).repeat(B, 1, 1).requires_grad_()
    torch._dynamo.reset()
    optpass.reset_report()
    (result,) = torch.compile(program, backend="optpass", dynamic=dynamic, options=options)(q, k, v)
    (site,) = optpass.report().sites("attention")
    assert "dropout" in site.after
    weight = torch.randn_like(result)
    (result * weight).sum().backward()

    kept = result.detach() != 0
    assert 0.5 < kept.double().mean() < 0.7
    projected = (x.double() @ layer.in_proj_weight[a * S : (a + 1) * S].double().mT for a, x in enumerate((q, k)))
    exact_v = v.detach().double().requires_grad_()
    reference = (next(projected) @ next(projected).mT / math.sqrt(S)).softmax(-1) * kept / 0.6 @ exact_v
    (reference * weight.double()).sum().backward()
    for ours, exact in ((result, reference), (v.grad, exact_v.grad)):
        assert (ours.double() - exact).norm() <= 1e-5 * exact.norm()


def test_weights_that_such_a_layer_returns_are_left() -> None:
    _, program = one_head(weights=True)
    options = {"inner": "eager", "strict": True, "attention": {"mode": "always", "dropout": "swap"}}
    torch._dynamo.reset()
    optpass.reset_report()
    _, weights = torch.compile(program, backend="optpass", options=options)(*[torch.randn(B, S, S)] * 3)
    assert not optpass.report().sites("attention")
    (declined,) = optpass.report().declined("attention")
    assert "used elsewhere" in declined.reason
    assert 0.5 < (weights != 0).double().mean() < 0.7
