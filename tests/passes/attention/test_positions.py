"""Masks read from buffers where no kernel pays: computed from positions, unless reading takes less time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from optpass.passes.attention import gate
from optpass.passes.attention.gate import Verdict


class Causal(nn.Module):
    mask: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(96, 96).tril().to(dtype))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[-2]
        scores = (q @ k.mT * 0.25).masked_fill(self.mask[:length, :length] == 0, float("-inf"))
        return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize(
    ("dtype", "computed"),
    [(torch.bool, True), (torch.uint8, True), (torch.int64, True), (torch.float32, False), (torch.bfloat16, False)],
)
def test_floats_are_read_on_a_cpu(dtype: torch.dtype, computed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "decide", lambda *_, **__: Verdict(False, 10.0, 5.0, "because", "a test"))
    seen: list[Any] = []

    def inner(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        seen.extend(node.target for node in gm.graph.nodes)
        return gm

    torch._dynamo.reset()
    model, operands = Causal(dtype), torch.randn(3, 1, 2, 80, 16)
    out = torch.compile(model, backend="optpass", options={"inner": inner, "strict": True})(*operands)
    assert (torch.arange in seen) is computed
    torch.testing.assert_close(out, model(*operands))
