"""What exceptions of others say, what is behind them, and tensors that are too large."""

from __future__ import annotations

import pytest
import torch

from optpass.errors import ConfigError, deliberate, first_line, sizes_of, told


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Wrapper(Exception):
    """As Dynamo's: what it is about is no cause."""

    def __init__(self, inner: Exception) -> None:
        super().__init__("backend='x' raised:")
        self.inner_exception = inner


def test_an_exception_that_cannot_be_written_is_told_as_python_does() -> None:
    assert told(Mute()) == first_line(Mute()) == "<exception str() failed>"
    assert told(ValueError("a\nb")) == "a\nb" and first_line(ValueError(" \n a \nb")) == "a"
    assert first_line(ValueError()) == "no message"


def test_the_deliberate_error_behind_others() -> None:
    meant = ConfigError("x")
    outer = ValueError("outer")
    outer.__cause__ = Wrapper(meant)
    assert deliberate(outer) is meant and deliberate(meant) is meant
    assert deliberate(ValueError()) is None and deliberate(None) is None


@pytest.mark.parametrize(
    ("size", "why"), [(10**18, "Storage size calculation overflowed"), (10**30, "a size is more than 64 bits")]
)
def test_tensors_that_cannot_be_are_one_line(size: int, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^batch=9: tensors of these sizes cannot be made: {why}") as caught, \
            sizes_of("batch=9"):  # fmt: skip
        torch.empty(size, 17, device="meta")
    assert "\n" not in str(caught.value)
