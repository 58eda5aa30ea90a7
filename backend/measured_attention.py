"""Attention sites timed on request: random operands of their sizes, as the inner compiler has it and by the kernel.

The unfused way is compiled by plain Inductor on three-dimensional operands, which its own attention patterns do not
know; both ways are run in turns, and the least of each is kept. Sizes that are symbolic are those first seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optpass.backend.session import SESSIONS
from optpass.passes.attention.blocks.operator import attention_in_blocks
from optpass.passes.attention.problem import Problem

ROUNDS = 5


def measure_sites() -> None:
    """Write `measured_unfused_us`, `measured_fused_us` and `measured_gain` into the cost of every swapped site."""
    known: dict[tuple[Problem, str, torch.dtype | None], tuple[float, float]] = {}
    for session in SESSIONS.all():
        for site, problem, choice in session.products.get("attention") or ():
            if problem.score_ops or not _present(problem.device):
                continue  # a softcap's fused way is a template of Inductor's, not a call
            key = (problem, choice.kernel, choice.computed_in)
            if key not in known:
                known[key] = measure(*key)
            unfused, fused = known[key]
            site.cost |= {"measured_unfused_us": unfused, "measured_fused_us": fused, "measured_gain": unfused / fused}


def _present(device: str) -> bool:
    return device == "cpu" or (device == "cuda" and torch.cuda.is_available())


def measure(problem: Problem, kernel: str = "", computed_in: torch.dtype | None = None) -> tuple[float, float]:
    """Microseconds (unfused, fused) of one forward, with the backward where the problem trains.

    Args:
        kernel: 'blocks' for our own operator; SDPA is called for every other.
        computed_in: dtype that it is given the operands in; None for their own.
    """
    q, k, v = _operands(problem)
    mask = _mask(problem)
    groups = problem.heads // problem.kv_heads

    def unfused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (k, v))
        scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) * problem.head_dim**-0.5
        scores = scores.view(problem.batch, problem.heads, problem.queries, problem.keys)
        if problem.mask == "causal":
            rows, keys = (torch.arange(n, device=q.device) for n in (problem.queries, problem.keys))
            scores = scores.masked_fill(keys > rows[:, None], float("-inf"))
        elif mask is not None:
            scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, float("-inf"))
        weights = F.dropout(scores.softmax(-1, dtype=problem.score_dtype).to(v.dtype), problem.dropout)
        return torch.bmm(weights.flatten(0, 1), v.flatten(0, 1)).view(*q.shape[:-1], -1)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if kernel == "blocks":
            causal, scale, wide = problem.mask == "causal", problem.head_dim**-0.5, problem.keeps_wide
            return attention_in_blocks(q, k, v, mask, causal, scale, wide=wide)
        query, key, value, added = *(t.to(computed_in or t.dtype) for t in (q, k, v)), mask
        if added is not None and added.is_floating_point():
            added = added.to(computed_in or added.dtype)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=added, dropout_p=problem.dropout, is_causal=problem.mask == "causal",
            enable_gqa=groups > 1,
        ).to(q.dtype)  # fmt: skip

    ways = [_step(f, problem, (q, k, v)) for f in (torch.compile(unfused, backend="inductor"), fused)]
    best = [float("inf")] * len(ways)
    for way in ways:
        way()
    for _ in range(ROUNDS):
        for index, way in enumerate(ways):
            best[index] = min(best[index], _seconds(way, problem.device))
    return best[0] * 1e6, best[1] * 1e6


def _operands(problem: Problem) -> list[Tensor]:
    sizes = [(problem.heads, problem.queries, problem.head_dim), (problem.kv_heads, problem.keys, problem.head_dim)]
    sizes.append((problem.kv_heads, problem.keys, problem.value_dim))
    make: dict[str, Any] = {"dtype": problem.dtype, "device": problem.device, "requires_grad": problem.training}
    return [torch.randn(problem.batch, *size, **make) for size in sizes]


def _mask(problem: Problem) -> Tensor | None:
    """A mask operand of as many elements as the site's, for all that its contents do not matter."""
    if problem.mask in ("none", "causal"):
        return None
    rows = problem.queries if problem.mask_numel % (problem.queries * problem.keys) == 0 else 1
    leading = max(problem.mask_numel // (rows * problem.keys), 1)
    whole = problem.batch * problem.heads
    shape = (problem.batch, problem.heads) if leading == whole else (leading, 1) if leading == problem.batch else (1, 1)
    made = torch.ones(*shape, rows, problem.keys, dtype=torch.bool, device=problem.device)
    return made if problem.mask == "bool" else torch.zeros(made.shape, dtype=problem.dtype, device=problem.device)


def _step(function: Callable[..., Tensor], problem: Problem, operands: tuple[Tensor, ...]) -> Callable[[], Any]:
    def forward() -> Any:
        with torch.no_grad():
            return function(*operands)

    def both() -> Any:
        out = function(*operands)
        return torch.autograd.grad(out, operands, torch.ones_like(out))

    return both if problem.training else forward


def _seconds(call: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
