"""What has nothing to do with a softmax is not looked into; what has, is, however far from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from optpass.passes.attention.program.lower import lower


def ran(function: Callable[..., Any], *args: torch.Tensor) -> set[str]:
    """The names of what was looked into of `function`, as Dynamo writes it down."""
    found: list[set[str]] = []

    def backend(gm: Any, _examples: Sequence[Any]) -> Any:
        found.append({str(getattr(node.target, "__name__", node.target)) for node in lower(gm.graph).ran})
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*args)
    assert len(found) == 1
    return found[0]


def attend(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q, k, v = F.linear(x, w).chunk(3, -1)
    return (q @ k.mT).softmax(-1) @ v


def norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 5, 8)


@pytest.fixture
def w() -> torch.Tensor:
    return torch.randn(24, 8)


def test_a_norm_in_front_of_a_projection_is_left_alone(x: torch.Tensor, w: torch.Tensor) -> None:
    """It has no part in the scores, although all of it goes into them."""
    found = ran(lambda x, w: attend(norm(x), w), x, w)
    assert {"matmul", "softmax", "chunk"} <= found
    assert not found & {"rsqrt", "square", "mean"}


def test_what_is_done_to_queries_is_looked_into(x: torch.Tensor, w: torch.Tensor) -> None:
    found = ran(lambda x, w: (norm(F.linear(x, w)) @ F.linear(x, w).mT).softmax(-1) @ x, x, w)
    assert {"rsqrt", "square", "mean"} <= found


def test_all_readers_of_scores_are_looked_into(x: torch.Tensor) -> None:
    """Another than the softmax may see what becomes of them."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = x @ x.mT
        return scores.softmax(-1) @ x, scores.cos()

    assert "cos" in ran(function, x)


def test_what_is_done_to_a_mask_is_looked_into(x: torch.Tensor) -> None:
    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT).masked_fill(mask.logical_not(), float("-inf")).softmax(-1) @ x

    assert "logical_not" in ran(function, x, torch.ones(5, 5).tril().bool())


def test_weights_that_an_activation_is_taken_of_are_followed(x: torch.Tensor) -> None:
    """What comes out is another kind of weights: the product with them is named as one that is not swapped."""
    assert "tan" in ran(lambda x: F.relu((x @ x.mT).softmax(-1)).tan() @ x, x)


@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: x.__setitem__(0, 0.0)], ids=["add_", "setitem"])
def test_where_memory_is_written_to_all_is_looked_into(x: torch.Tensor, w: torch.Tensor, write: Any) -> None:
    """Who is given what does not tell then who sees it."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.cos()
        write(y)
        return attend(norm(y), w)

    assert {"cos", "rsqrt"} <= ran(function, x, w)


def test_under_vmap_all_is_looked_into(x: torch.Tensor, w: torch.Tensor) -> None:
    assert {"rsqrt", "square"} <= ran(lambda x, w: torch.vmap(lambda row: attend(norm(row), w))(x), x, w)


def test_nothing_is_where_there_is_no_softmax(x: torch.Tensor) -> None:
    assert not ran(lambda x: norm(x).expand(3, -1, -1, -1), x)
