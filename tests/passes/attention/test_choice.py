"""Which kernel a site gets in mode 'auto', where more than the gate's figures decides."""

from __future__ import annotations

import pytest
import torch

import optpass

pytestmark = pytest.mark.usefixtures("clean", "seeded")


def test_keys_are_not_copied_next_to_each_other_for_few_queries() -> None:
    """Of a cache and of new tokens: the copies would be larger than the scores."""

    def program(q: torch.Tensor, cached: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        weights = torch.cat([q @ cached.mT, q @ k.mT], -1).softmax(-1)
        return weights[..., :500] @ cached + weights[..., 500:] @ k

    call = torch.compile(program, backend="optpass", options={"inner": "eager", "strict": True, "attention": "auto"})
    with torch.no_grad():
        call(*(torch.randn(1, 2, length, 64) for length in (2, 500, 2)))
    (declined,) = optpass.report().declined("attention")
    assert declined.reason.startswith("putting its keys and values next to each other would move more")
