"""One scalar from any model's output."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

from optpass.errors import ConfigError
from optpass.models import loss


def test_mean_of_squares_summed_over_floating_tensors() -> None:
    a, b, whole = torch.randn(3, 5), torch.randn(7), torch.arange(4)
    expected = a.square().mean() + b.square().mean()
    for output in ((a, b), [a, whole, [b]], {"a": a, "b": {"c": (b, None)}}, OrderedDict(a=a, n=3, b=b)):
        torch.testing.assert_close(loss(output), expected)


def test_the_models_own_loss_wins() -> None:
    own = torch.tensor(2.5)
    assert loss(own) is own
    assert loss((torch.randn(3), own)) is own
    assert loss({"loss": own, "logits": torch.randn(3)}) is own


def test_several_scalars_are_added() -> None:
    assert loss((torch.tensor(1.0), torch.randn(3), {"auxiliary": torch.tensor(0.5)})).item() == 1.5


def test_low_precision_is_summed_in_float32() -> None:
    x = torch.randn(100_000).to(torch.bfloat16)
    out = loss(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), x.double().square().mean(), rtol=1e-5, atol=0)


def test_float64_stays_float64() -> None:
    assert loss(torch.randn(3, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("output", [None, (), torch.arange(3), {"n": 1}])
def test_nothing_to_train_on(output: object) -> None:
    with pytest.raises(ConfigError, match="no floating-point tensor"):
        loss(output)
