"""Recompiles by what partials, weak references and attributes of classes hold: one scripted change each."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import pytest
import torch
from torch import nn

X = torch.randn(4)


def partial_keyword(compiled: Any) -> None:
    def run(x: Any, *, times: Any) -> Any:
        return x * times

    for times in (2, 3):
        compiled(functools.partial(run, times=times))(X)


def partial_positional(compiled: Any) -> None:
    def run(scale: Any, times: Any, x: Any) -> Any:
        return x * scale * times

    for times in (2, 3):
        compiled(functools.partial(functools.partial(run, 1.5), times))(X)


def partial_call(compiled: Any) -> None:
    def run(scale: Any, x: Any, times: Any) -> Any:
        return x * scale * times

    made = compiled(functools.partial(run, 1.5))
    made(X, 2)
    made(X, 3)


class Referred:
    def __init__(self, scale: float) -> None:
        self.scale = scale


def behind_a_weak_reference(compiled: Any) -> None:
    kept = [Referred(2.0), Referred(3.0)]
    run = compiled(lambda x, r: x * r().scale)
    for held in kept:
        run(X, weakref.ref(held))


class Defaults:
    mode = "train"


def hides_the_attribute_of_its_class(compiled: Any) -> None:
    held = Defaults()
    run = compiled(lambda x, c: x * (2 if c.mode == "train" else 3))
    run(X, held)
    held.mode = "eval"
    run(X, held)


class Scaled(nn.Module):
    scale = 2

    def forward(self, x: Any) -> Any:
        return x * self.scale


def module_hides_the_attribute_of_its_class(compiled: Any) -> None:
    module = Scaled()
    run = compiled(module)
    run(X)
    module.scale = 3
    run(X)


@pytest.mark.parametrize(
    ("script", "cause", "source", "before", "after"),
    [
        (partial_keyword, "int", "times", "2", "3"),
        (partial_positional, "int", "times", "2", "3"),
        (partial_call, "int", "times", "2", "3"),
        (behind_a_weak_reference, "float", "r().scale", "2.0", "3.0"),
        (hides_the_attribute_of_its_class, "str", "c.mode", "'train'", "'eval'"),
        (module_hides_the_attribute_of_its_class, "module attribute", "self.scale", "2", "3"),
    ],
)
def test_one_change(check: Any, script: Any, cause: str, source: str, before: str, after: str) -> None:
    check(script, cause, source, before, after)


def test_a_number_where_a_tensor_was_is_not_told_to_be_detached(compiled: Any, recompiles: Any) -> None:
    numpy = pytest.importorskip("numpy")
    run = compiled(lambda x, rate: x * rate)
    run(X, numpy.float64(0.1))
    run(X, 0.3)
    told = recompiles()
    assert all("detach" not in record.fix.text for record in told)
    if torch.__version__.startswith("2.13."):
        assert [record.source for record in told] == ["rate"] and "as one type" in told[0].fix.text
