"""Attention in blocks: the operator against float64, its gradients, and where the gate takes it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import optpass
from optpass.backend.measured_attention import measure
from optpass.passes import processor
from optpass.passes.attention import gate
from optpass.passes.attention.blocks import products, regions, team
from optpass.passes.attention.blocks.operator import OPERATOR, attention_in_blocks
from optpass.passes.attention.blocks.team import share
from optpass.passes.attention.gate import Verdict
from optpass.passes.attention.problem import Problem

KINDS = ("none", "causal", "bool", "float")


def drawn(rng: random.Random, kind: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v of random sizes and layouts, and a mask that broadcasts in random dims."""
    batch, kv, groups, depth = rng.choice((1, 3)), rng.choice((1, 2)), rng.choice((1, 1, 3)), 8
    queries, keys, width = rng.choice((1, 5, 64, 77)), rng.choice((3, 64, 77)), rng.choice((8, 16))
    sizes = ((kv * groups, queries, depth), (kv, keys, depth), (kv, keys, width))
    layout = rng.choice((lambda *s: torch.randn(*s), lambda b, h, n, d: torch.randn(b, n, h, d).transpose(1, 2)))
    operands = [layout(batch, *size).to(dtype).requires_grad_() for size in sizes]
    if kind in ("none", "causal"):
        return operands, None
    shape = [rng.choice((1, n)) for n in (batch, kv * groups, queries, keys)][rng.choice((0, 0, 2)) :]
    if kind == "float":
        return operands, torch.randn(shape, dtype=torch.promote_types(dtype, torch.float32))
    mask = torch.rand(shape) > 0.4
    mask[..., 0] = True  # no row without a key
    return operands, mask


@pytest.fixture(params=["library", "onednn"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """What the operator is run in, with small blocks of drawn sizes; oneDNN's products are float32's."""
    used = products.LIBRARY if request.param == "library" else products.ONEDNN
    least, scores = random.choice((1, 16, 128)), random.choice((1 << 20, 1 << 12, 1 << 8, 1))
    used = replace(used, least_rows=least, scores=scores, one_head=used.one_head or random.random() < 0.5)
    used = replace(used, causal_rows=random.choice((256, 16, 5)))
    monkeypatch.setattr(regions, "products", lambda query, keys: used)
    monkeypatch.setattr(regions, "_ALIGNED_ROWS", random.choice((64, 4, 1)))
    monkeypatch.setattr(regions, "_SCALED_KEYS", random.choice((0, 8)))
    monkeypatch.setattr(regions, "_ROUNDED", random.choice((2, 8)))
    monkeypatch.setattr(products, "_SHORT", random.choice((1, 192)))
    return torch.float64 if used.writes else torch.float32


def written_out(
    operands: Sequence[Tensor], mask: Tensor | None, causal: bool, scale: float, cap: float = 0.0
) -> Tensor:
    """The scores are capped before they are masked."""
    q, k, v = operands
    groups = q.shape[1] // k.shape[1]
    scores = scale * q @ k.repeat_interleave(groups, 1).mT
    scores = cap * torch.tanh(scores) if cap else scores
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    elif mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ v.repeat_interleave(groups, 1)


@pytest.mark.parametrize("cap", [0.0, 2.0, -1.5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("repeat", range(4))
def test_values_and_gradients(kind: str, cap: float, repeat: int, dtype: torch.dtype) -> None:
    operands, mask = drawn(random.Random(random.getrandbits(32)), kind, dtype)
    scale = random.choice((0.3, 1.0))
    exact = [t.detach().double().requires_grad_() for t in operands]
    out = attention_in_blocks(*operands, mask, kind == "causal", scale, cap)
    wanted = written_out(exact, mask, kind == "causal", scale, cap)
    grad = torch.randn_like(out)
    found = (out, *torch.autograd.grad(out, operands, grad))
    for made, right in zip(found, (wanted, *torch.autograd.grad(wanted, exact, grad.double())), strict=True):
        error = (made.double() - right).abs().max() / right.abs().max().clamp(min=1)
        assert error <= (1e-12 if dtype == torch.float64 else 1e-5)


def test_onednn_is_given_no_matrix_with_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would multiply those a hundred times slower."""
    linear, given = products._linear, list[Tensor]()
    monkeypatch.setattr(products, "_linear", lambda x, weight: given.extend((x, weight)) or linear(x, weight))
    monkeypatch.setattr(regions, "products", lambda query, keys: products.ONEDNN)
    qkv = torch.randn(2, 300, 3 * 32, requires_grad=True)
    q, k, v = (t.view(2, 300, 4, 8).transpose(1, 2) for t in qkv.split(32, 2))
    for mask, causal in ((None, True), (None, False), (torch.randn(300, 300), False)):
        attention_in_blocks(q, k, v, mask, causal, 0.5).sum().backward()
    assert given and all(t.is_contiguous() or t.t().is_contiguous() for t in given)


def test_float32_goes_to_the_library_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never where oneDNN is switched off, nor for what it does not multiply."""
    monkeypatch.setattr(products, "slow_library", lambda: True)
    query = torch.randn(256, 8)
    assert products.products(query, 256) is products.ONEDNN
    assert products.products(query, 64) is products.LIBRARY  # many small calls
    assert products.products(query.double(), 256) is products.LIBRARY
    assert products.products(query[:, :0], 256) is products.LIBRARY
    with torch.backends.mkldnn.flags(enabled=False):
        assert products.products(query, 256) is products.LIBRARY
    monkeypatch.setattr(products, "slow_library", lambda: False)
    assert products.products(query, 256) is products.LIBRARY


@pytest.mark.parametrize(
    ("cpu", "vector", "slow", "named"),
    [
        (("AuthenticAMD", 26, 17), "AVX512", True, "AVX512 bfloat16"),  # Zen 5
        (("AuthenticAMD", 26, 36), "AVX512", False, "AVX512 256-bit bfloat16"),  # Zen 5 of notebooks
        (("AuthenticAMD", 25, 17), "AVX512", False, "AVX512 256-bit bfloat16"),  # Zen 4
        (("AuthenticAMD", 25, 1), "AVX2", False, "AVX2 bfloat16"),
        (("GenuineIntel", 6, 143), "AVX512", False, "AVX512 bfloat16"),
        (None, "AVX512", False, "AVX512 bfloat16"),
    ],
)
def test_where_the_library_is_slow(
    cpu: tuple[str, int, int] | None, vector: str, slow: bool, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AVX-512 on units of half its width is no faster than the AVX2 that MKL keeps to on AMD's processors."""
    monkeypatch.setattr(processor, "cpu_family", lambda: cpu)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vector)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)
    assert processor.instructions.__wrapped__() == named
    assert processor.slow_library.__wrapped__() is slow


@pytest.fixture(params=["AVX2", "AVX512 bfloat16"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the processor is said to multiply: without bfloat16, blocks are of float32."""
    monkeypatch.setattr(processor, "instructions", lambda: request.param)
    return str(request.param)


def test_half_precision_without_instructions_is_multiplied_in_float32(instructions: str) -> None:
    has = "bfloat16" in instructions
    assert processor.multiplied_in(torch.bfloat16) == (torch.bfloat16 if has else torch.float32)
    assert processor.multiplied_in(torch.float16) == torch.float32
    assert processor.multiplied_in(torch.float64) == torch.float64
    operands = [torch.randn(2, 2, 9, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    torch.library.opcheck(OPERATOR, (*operands, None, True, 0.5))


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_as_exact_as_eager(kind: str) -> None:
    torch.manual_seed(seed := random.randrange(2**30))
    q, k, v = (torch.randn(2, 4, 96, 32, dtype=torch.bfloat16) for _ in range(3))
    visible = torch.ones(96, 96, dtype=torch.bool).tril()
    mask = {"none": None, "causal": None, "bool": visible, "float": torch.randn(96, 96)}[kind]
    hidden = ~visible if kind in ("causal", "bool") else torch.zeros((), dtype=torch.bool)

    def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT * 32**-0.5).masked_fill(hidden, float("-inf"))
        return (scores + mask.to(q.dtype) if kind == "float" and mask is not None else scores).softmax(-1) @ v

    exact = written(q.double(), k.double(), v.double())
    errors = [
        float((out.double() - exact).square().mean().sqrt())
        for out in (attention_in_blocks(q, k, v, mask, kind == "causal", 32**-0.5), written(q, k, v))
    ]
    assert errors[0] <= 1.05 * errors[1], seed


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [128, 32])
@pytest.mark.parametrize("scale", [0.125, 0.2])
def test_gradients_are_as_exact_as_eager(
    scale: float, rows: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is rounded more often than in the written program; queries are scaled first only where that is exact."""
    torch.manual_seed(seed := random.randrange(2**30))
    used = replace(products.LIBRARY, scores=rows * 128, causal_rows=rows)
    monkeypatch.setattr(regions, "products", lambda query, keys: used)
    monkeypatch.setattr(regions, "_ALIGNED_ROWS", rows)
    operands = [torch.randn(2, 4, 128, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    grad = torch.randn(2, 4, 128, 16, dtype=torch.bfloat16)
    hidden = torch.ones(128, 128, dtype=torch.bool).triu(1) & causal

    def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * scale).masked_fill(hidden, float("-inf")).softmax(-1) @ v

    exact = [t.detach().double().requires_grad_() for t in operands]
    wanted = torch.autograd.grad(written(*exact), exact, grad.double())
    ours = torch.autograd.grad(attention_in_blocks(*operands, None, causal, scale), operands, grad)
    eager = torch.autograd.grad(written(*operands), operands, grad)
    for right, one, other in zip(wanted, ours, eager, strict=True):
        assert (one - right).norm() <= 1.02 * (other - right).norm(), seed


@pytest.mark.parametrize("used", [products.LIBRARY, products.ONEDNN], ids=["library", "onednn"])
def test_causal_blocks_are_alike(used: products.Products) -> None:
    """A few rows more than a block's do not make a block of their own: they are shared out."""
    for rows in (1, 63, 200, 260, 300, 384, 400, 640, 1500):
        blocks = -(-rows // used.causal_rows)
        found = regions._alike(rows, used.causal_rows)
        assert 0 <= found - rows / blocks < regions._ALIGNED_ROWS, rows
        assert found % regions._ALIGNED_ROWS == 0, rows


@pytest.mark.parametrize("heads", [1, 3])
def test_the_corner_beyond_the_diagonal(heads: int) -> None:
    """Whatever is there becomes minus infinity; everything else stays as it is, and NaN stays NaN."""
    scores = torch.randn(heads, 5, 9)
    scores[:, 0, 6], scores[:, 3, 8], scores[:, 4, 2], scores[:, 2, 5] = float("nan"), float("inf"), float("nan"), -0.0
    corner = scores[:, :, 4:]  # of rows 4 to 8
    wanted = scores.clone()
    wanted[:, :, 4:].masked_fill_(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    regions._hide(corner, regions._above(scores, 6))
    torch.testing.assert_close(scores, wanted, rtol=0, atol=0, equal_nan=True)


def test_what_is_hidden_does_not_matter() -> None:
    """Neither infinity nor NaN in keys of the future reaches a row."""
    q, k, v = (torch.randn(1, 1, 40, 8) for _ in range(3))
    wanted = attention_in_blocks(q, k, v, None, True, 1.0)
    k[:, :, 30:] = torch.tensor([float("inf"), float("nan")]).repeat(5)[:, None]
    torch.testing.assert_close(attention_in_blocks(q, k, v, None, True, 1.0)[:, :, :30], wanted[:, :, :30])


@pytest.mark.parametrize("causal", [False, True])
def test_the_operator_is_well_formed(causal: bool) -> None:
    operands = [torch.randn(2, 2, 9, 4, requires_grad=True) for _ in range(3)]
    torch.library.opcheck(OPERATOR, (*operands, None, causal, 0.5))
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    torch.library.opcheck(OPERATOR, (*operands, mask, False, 0.5))
    torch.library.opcheck(OPERATOR, (*operands, None, causal, 0.5, 2.0))


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * 0.25, -1) @ v


def compiled(inner: Any = "eager", mode: str = "auto") -> list[str]:
    """What the report says that bfloat16 attention of a million scores became."""
    torch._dynamo.reset()
    optpass.reset_report()
    q = torch.randn(1, 1, 1024, 16, dtype=torch.bfloat16)
    torch.compile(written, backend="optpass", options={"inner": inner, "attention": mode, "strict": True})(q, q, q)
    return [str(site.after) for site in optpass.report().sites("attention")]


def test_the_gate_takes_the_cheaper_one(monkeypatch: pytest.MonkeyPatch) -> None:
    microseconds = {"blocks": 5.0, "sdpa": 7.0}

    def decide(problem: Problem, target: str, *_: Any, **__: Any) -> Verdict:
        return Verdict(microseconds[target] < 10.0, microseconds[target], 10.0, "because", "a test")

    monkeypatch.setattr(gate, "decide", decide)
    assert compiled() == ["attention in blocks"]
    assert compiled(inner=lambda gm, inputs: gm) == ["SDPA cpu_flash"]  # a compiler that may not know the operator
    assert compiled(mode="always") == ["SDPA cpu_flash"]
    microseconds["sdpa"] = 4.0
    assert compiled() == ["SDPA cpu_flash"]
    microseconds |= {"sdpa": 11.0, "blocks": 12.0}
    assert compiled() == []
    microseconds["blocks"] = 9.0  # not by enough
    assert compiled() == []
    microseconds["blocks"] = 8.0
    assert compiled() == ["attention in blocks"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["auto", "always"])
def test_training_with_a_softcap(dtype: torch.dtype, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other kernel of a CPU has a backward there; float32 without one is left to flash attention."""
    fast = Verdict(True, 5.0, 10.0, "because", "a test")
    monkeypatch.setattr(gate, "decide", lambda *_, **__: fast)

    def capped(q: Tensor, k: Tensor, v: Tensor, cap: float) -> Tensor:
        scores = torch.tanh(q @ k.mT * 0.25 / cap) * cap
        return scores.masked_fill(torch.ones(1024, 1024).triu(1).bool(), float("-inf")).softmax(-1) @ v

    torch._dynamo.reset()
    optpass.reset_report()
    operands = [torch.randn(1, 2, 1024, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
    options = {"inner": "aot_eager", "attention": mode, "strict": True}
    out = torch.compile(capped, backend="optpass", options=options)(*operands, 3.0)
    assert [str(site.after) for site in optpass.report().sites("attention")] == ["attention in blocks, is_causal"]
    grad = torch.randn_like(out)
    ours = [out, *torch.autograd.grad(out, operands, grad)]
    wide = [t.detach().double().requires_grad_() for t in operands]
    exact, eager = (capped(*given, 3.0) for given in (wide, operands))
    truth = [exact, *torch.autograd.grad(exact, wide, grad.double())]
    theirs = [eager, *torch.autograd.grad(eager, operands, grad)]
    for a, b, c in zip(ours, truth, theirs, strict=True):
        assert (a - b).norm() <= 1.1 * (c - b).norm() + 1e-6 * b.norm()


def test_it_is_timed_on_request() -> None:
    problem = Problem("cpu", torch.bfloat16, 1, 2, 2, 16, 16, 8, 8, mask="causal", training=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, backend: function)
        assert all(figure > 0 for figure in measure(problem, "blocks"))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", [False, True])
def test_threads_that_share_the_heads_change_nothing(kind: str, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in training nor under `inference_mode`, and torch's own number of threads stays what it was."""
    dtype = torch.bfloat16 if half else torch.float64
    used = replace(products.LIBRARY, scores=64)
    monkeypatch.setattr(regions, "products", lambda query, keys: used)
    operands, mask = drawn(random.Random(random.getrandbits(32)), kind, dtype)
    made = []
    for number in (2, 1):
        monkeypatch.setattr(regions, "workers", lambda heads, scores, n=number: min(n, heads))
        out = attention_in_blocks(*operands, mask, kind == "causal", 0.3)
        with torch.inference_mode():
            assert torch.equal(out, attention_in_blocks(*operands, mask, kind == "causal", 0.3))
        made.append((out, *torch.autograd.grad(out, operands, torch.ones_like(out))))
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_workers_are_for_long_calls_of_many_heads() -> None:
    assert team.workers(2, 1 << 26) == 2
    assert team.workers(1, 1 << 30) == team.workers(8, 1 << 20) == 1


def test_each_item_is_worked_on_once_and_errors_arrive() -> None:
    seen: list[int] = []
    share(lambda worker, item: seen.append(item), range(100), 3)
    assert sorted(seen) == [*range(100)]
    with pytest.raises(ZeroDivisionError):
        share(lambda worker, item: seen.append(1 // item), range(3), 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_makes_threads_of_its_own() -> None:
    program = """
import os, torch
from optpass.passes.attention.blocks.team import share
torch.set_num_threads(2)
done = []
share(lambda worker, item: done.append(item), range(4), 2)
pid = os.fork()
if pid == 0:
    share(lambda worker, item: done.append(item), range(4), 2)
    os._exit(0 if len(done) == 8 else 1)
assert os.waitpid(pid, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
