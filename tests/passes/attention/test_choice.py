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


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_heads_that_are_mixed_before_the_softmax_are_no_queries(mode: str) -> None:
    """Their product with the mixing matrix would be attention of one query: all values copied for each of the rows."""

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bhij,gh->bgij", q @ k.mT / 8, mix).softmax(-1) @ v

    call = torch.compile(program, backend="optpass", options={"inner": "eager", "strict": True, "attention": mode})
    with torch.no_grad():
        call(*(torch.randn(1, 4, 256, 64) for _ in range(3)), torch.randn(4, 4))
    (declined,) = optpass.report().declined("attention")
    assert declined.reason.startswith("its product has no axis of queries")


def test_keys_are_not_padded_for_few_queries() -> None:
    """Values are narrower than keys, a kernel wants both alike, and a copy of them is more than two rows of scores."""

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT / 8).softmax(-1) @ v

    call = torch.compile(program, backend="optpass", options={"inner": "eager", "strict": True, "attention": "auto"})
    with torch.no_grad():
        call(torch.randn(1, 2, 2, 64), torch.randn(1, 2, 500, 64), torch.randn(1, 2, 500, 32))
    (declined,) = optpass.report().declined("attention")
    assert declined.reason.startswith("copying its keys and values would move more numbers")
