"""What makes each model the model it claims to be: masks that mask, attention equal to a float64 reference, positions
that do what their paper says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from optpass import models
from optpass.models import bert, dlrm, gpt, llama, t5, unet, vit


def evaluated(name: str, **settings: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    module, inputs = models.build(name, "tiny", **settings)
    return module.eval(), inputs


def assert_same_only(a: Tensor, b: Tensor, same: Tensor) -> None:
    """The rows of a and b [batch, seq, ...] agree where `same` [batch, seq] holds, and differ elsewhere."""
    torch.testing.assert_close(a[same], b[same], rtol=0, atol=1e-6)
    assert (a - b).abs().amax(-1)[~same].min() > 1e-6


def flipped(tokens: Tensor, where: Tensor) -> Tensor:
    """Other tokens where `where` holds (all vocabularies here are larger than 2)."""
    return torch.where(where, (tokens + 1) % 100, tokens)


@pytest.mark.parametrize("name", ["gpt", "llama"])
@torch.no_grad()
def test_the_future_does_not_reach_the_past(name: str) -> None:
    module, (tokens,) = evaluated(name)
    future = (torch.arange(tokens.size(1)) >= 9).expand_as(tokens)
    assert_same_only(module(tokens), module(flipped(tokens, future)), ~future)


@torch.no_grad()
def test_bert_does_not_look_at_padding() -> None:
    module, (ids, mask, types) = evaluated("bert")
    mask[:, 12:] = 0
    padding = mask == 0
    assert_same_only(module(ids, mask, types), module(flipped(ids, padding), mask, types), ~padding)
    changed = module(flipped(ids, ~padding), mask, types) - module(ids, mask, types)
    assert changed[:, :12].abs().amax() > 1e-4


@torch.no_grad()
def test_bert_tells_token_types_apart() -> None:
    module, (ids, mask, types) = evaluated("bert")
    assert not torch.allclose(module(ids, mask, types), module(ids, mask, 1 - types))


@torch.no_grad()
def test_t5_sees_the_source_but_not_its_padding_nor_the_future() -> None:
    module, (ids, mask, target) = evaluated("t5")
    mask[:, 12:] = 0
    padding = mask == 0
    base = module(ids, mask, target)
    torch.testing.assert_close(module(flipped(ids, padding), mask, target), base, rtol=0, atol=1e-6)
    assert not torch.allclose(module(flipped(ids, ~padding), mask, target), base, atol=1e-4)
    future = (torch.arange(target.size(1)) >= 5).expand_as(target)
    assert_same_only(base, module(ids, mask, flipped(target, future)), ~future)


@torch.no_grad()
def test_unet_uses_time_and_context() -> None:
    module, (latents, steps, context) = evaluated("unet")
    base = module(latents, steps, context)
    assert base.shape == latents.shape
    assert not torch.allclose(module(latents, steps + 400, context), base, atol=1e-4)
    assert not torch.allclose(module(latents, steps, -context), base, atol=1e-4)


@torch.no_grad()
def test_vit_sequence_is_197_tokens() -> None:
    assert vit.SIZES["base"].config.tokens == vit.SIZES["small"].config.tokens == 197
    module, _ = models.build("vit", "base", layers=1, width=12, heads=3)
    assert module.pos_embed.shape == (1, 197, 12)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """[batch, n, heads, head] each -> [batch, n, heads * head]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale).transpose(1, 2).flatten(2)


@torch.no_grad()
def test_gpt_attention_against_sdpa() -> None:
    layer = gpt.CausalSelfAttention(gpt.SIZES["tiny"].config).double().eval()
    x = torch.randn(2, 17, 33, dtype=torch.float64)
    q, k, v = layer.c_attn(x).unflatten(-1, (3, 3, 11)).unbind(2)
    mask = torch.ones(17, 17, dtype=torch.bool).tril()
    torch.testing.assert_close(layer(x), layer.c_proj(sdpa(q, k, v, mask, 11**-0.5)))


@torch.no_grad()
def test_bert_attention_against_sdpa() -> None:
    layer = bert.SelfAttention(bert.SIZES["tiny"].config).double().eval()
    x = torch.randn(2, 17, 33, dtype=torch.float64)
    keep = torch.arange(17) < 12
    mask = (~keep).double()[None, None, None, :] * torch.finfo(torch.float64).min
    q, k, v = (p(x).unflatten(-1, (3, 11)) for p in (layer.query, layer.key, layer.value))
    expected = layer.output(sdpa(q, k, v, keep.expand(17, 17), 11**-0.5))
    torch.testing.assert_close(layer(x, mask), expected)


@torch.no_grad()
def test_vit_attention_against_sdpa() -> None:
    layer = vit.Attention(vit.SIZES["tiny"].config).double().eval()
    x = torch.randn(2, 17, 33, dtype=torch.float64)
    q, k, v = layer.qkv(x).unflatten(-1, (3, 3, 11)).unbind(2)
    torch.testing.assert_close(layer(x), layer.proj(sdpa(q, k, v, None, 11**-0.5)))


@torch.no_grad()
def test_unet_cross_attention_against_sdpa() -> None:
    layer = unet.CrossAttention(15, 13, heads=3, dropout=0.0).double()
    x, context = torch.randn(2, 64, 15).double(), torch.randn(2, 7, 13).double()
    q = layer.to_q(x).unflatten(-1, (3, 5))
    k, v = layer.to_k(context).unflatten(-1, (3, 5)), layer.to_v(context).unflatten(-1, (3, 5))
    torch.testing.assert_close(layer(x, context), layer.to_out(sdpa(q, k, v, None, 5**-0.5)))


@torch.no_grad()
def test_llama_attention_against_grouped_sdpa() -> None:
    config = llama.SIZES["tiny"].config
    layer = llama.Attention(config).double()
    x = torch.randn(2, 17, 60, dtype=torch.float64)
    cos, sin = torch.ones(17, 10), torch.zeros(17, 10)  # turned by nothing
    q, k, v = layer.wq(x), layer.wk(x), layer.wv(x)
    q, k, v = q.unflatten(-1, (6, 10)), k.unflatten(-1, (2, 10)), v.unflatten(-1, (2, 10))
    k, v = k[:, :, torch.tensor([0, 0, 0, 1, 1, 1])], v[:, :, torch.tensor([0, 0, 0, 1, 1, 1])]
    mask = torch.full((17, 17), float("-inf"), dtype=torch.float64).triu(1)
    expected = layer.wo(sdpa(q, k, v, mask, 10**-0.5))
    # Rotary positions and softmax run in float32, whatever the dtype: hence its tolerance.
    torch.testing.assert_close(layer(x, cos, sin, mask), expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_t5_attention_against_unscaled_sdpa() -> None:
    layer = t5.Attention(t5.SIZES["tiny"].config).double().eval()
    x, source = torch.randn(2, 9, 35).double(), torch.randn(2, 17, 35).double()
    bias = torch.randn(1, 3, 9, 17).double()
    q, k, v = (p(s).unflatten(-1, (3, 11)) for p, s in ((layer.q, x), (layer.k, source), (layer.v, source)))
    torch.testing.assert_close(
        layer(x, source, bias), layer.o(sdpa(q, k, v, bias.expand(2, -1, -1, -1), 1.0)), rtol=1e-5, atol=1e-6
    )


def test_rotary_products_depend_on_the_distance_alone() -> None:
    cos, sin = llama.rotary_table(10, 64, theta=10000.0)
    q, k = torch.randn(10), torch.randn(10)

    def product(i: int, j: int) -> Tensor:
        turned = [llama.apply_rotary(x[None], cos[n : n + 1], sin[n : n + 1]) for x, n in ((q, i), (k, j))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(5, 3), product(50, 48), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(product(0, 0), q @ k)
    assert not torch.isclose(product(5, 3), product(5, 4), atol=1e-3)


def test_rms_norms_against_float64() -> None:
    x, weight = torch.randn(3, 60), torch.randn(60)
    wide = x.double()
    ours = llama.RMSNorm(60, eps=1e-5)
    theirs = t5.RMSNorm(t5.T5Config(width=60, norm_eps=1e-5))
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    for norm in (ours, theirs):
        nn.init.zeros_(norm.weight).data += weight
        torch.testing.assert_close(norm(x).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_buckets(bidirectional: bool) -> None:
    """Against the definition in the T5 code release, distance by distance, in Python's own float64."""
    bias = t5.RelativeBias(t5.T5Config(buckets=32, max_distance=128), bidirectional)
    sides = 16 if bidirectional else 32
    exact = sides // 2

    def by_definition(distance: int) -> int:
        side = sides if bidirectional and distance > 0 else 0
        n = abs(distance) if bidirectional else max(-distance, 0)
        if n < exact:
            return side + n
        far = exact + int(math.log(n / exact) / math.log(128 / exact) * (sides - exact))
        return side + min(far, sides - 1)

    # Powers of two times `exact` lie on a bucket's edge, where float32 may round either way: left out.
    distances = [d for d in range(-300, 301) if abs(d) not in (16, 32, 64, 128)]
    assert bias.bucket(torch.tensor(distances)).tolist() == [by_definition(d) for d in distances]


@torch.no_grad()
def test_dlrm_interacts_every_pair_once() -> None:
    config = dlrm.SIZES["tiny"].config
    module = dlrm.DLRM(config)
    dense, *sparse = (torch.randn(7, 9) for _ in range(4))
    out = module.interact(dense, sparse)
    vectors = [dense, *sparse]
    pairs = [(vectors[i] * vectors[j]).sum(-1) for i in range(4) for j in range(i)]
    assert config.pairs == len(pairs) == 6
    torch.testing.assert_close(out, torch.cat((dense, torch.stack(pairs, 1)), 1))


def test_tied_heads_share_one_parameter() -> None:
    for name, head, embedding in (
        ("gpt", "lm_head.weight", "wte.weight"),
        ("bert", "head.decoder.weight", "embeddings.word.weight"),
        ("t5", "lm_head.weight", "shared.weight"),
    ):
        module, _ = models.build(name, "tiny")
        assert module.get_parameter(head) is module.get_parameter(embedding)


def test_gpt_learns() -> None:
    """A few steps on one batch bring the loss well below that of guessing."""
    torch.manual_seed(0)
    module, inputs = models.build("gpt", "tiny", targets=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    first = models.loss(module(*inputs)).item()
    for _ in range(30):
        optimizer.zero_grad()
        models.loss(module(*inputs)).backward()
        optimizer.step()
    assert first == pytest.approx(math.log(131), abs=0.3)
    assert models.loss(module(*inputs)).item() < 0.8 * first
