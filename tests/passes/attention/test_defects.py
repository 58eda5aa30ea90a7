"""An error of ours in one attention costs that one, with its reason, and not those beside it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import optpass
from optpass.passes.attention import work
from optpass.passes.attention.find import core

pytestmark = pytest.mark.usefixtures("clean", "seeded")


def two(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return (q @ k.mT).softmax(-1) @ v, (q @ k.mT * 0.5).softmax(-1) @ w


def failing(whole: Any, when: Any) -> Any:
    """`whole`, but for the first site for which `when` holds."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            raise TypeError("this is\nours")
        return whole(*args, **kwargs)

    return call


def in_recognition(monkeypatch: pytest.MonkeyPatch) -> None:
    once = iter((True,))
    fails = failing(core._Weights._sites, lambda _self: next(once, False))
    monkeypatch.setattr(core._Weights, "_sites", fails)


def in_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    once = iter((True,))
    monkeypatch.setattr(work, "plan", failing(work.plan, lambda _site: next(once, False)))


def in_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    once = iter((True,))
    fails = failing(work.Rewrite.sdpa, lambda *_self: next(once, False))
    monkeypatch.setattr(work.Rewrite, "sdpa", fails)


@pytest.mark.parametrize("where", [in_recognition, in_planning, in_writing])
def test_it_costs_one_site(where: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    where(monkeypatch)
    inputs = [torch.randn(2, 3, 6, 8) for _ in range(4)]
    options = {"inner": "eager", "attention": "always"}
    with caplog.at_level(logging.WARNING, "optpass"):
        outputs = torch.compile(two, backend="optpass", options=options)(*inputs)
    for ours, eager in zip(outputs, two(*inputs), strict=True):
        torch.testing.assert_close(ours, eager)
    (declined,) = optpass.report().declined("attention")
    assert declined.reason == "an error in optpass: TypeError: this is ours"
    assert declined.file is not None and declined.file.endswith("test_defects.py")
    assert len(optpass.report().sites("attention")) == 1
    assert "is left as it is: an error in optpass" in caplog.text


def test_it_is_raised_where_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    in_recognition(monkeypatch)
    inputs = [torch.randn(2, 3, 6, 8) for _ in range(4)]
    options = {"inner": "eager", "attention": "always", "strict": True}
    with pytest.raises(Exception, match=r"PassError: pass 'attention' failed on graph .*: TypeError: this is ours"):
        torch.compile(two, backend="optpass", options=options)(*inputs)


def of_chosen(x: Tensor, chosen: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    y = x[chosen]
    return (q @ k.mT).softmax(-1) @ v, (y @ y.mT).softmax(-1) @ y


def test_a_size_that_data_tells_costs_one_site() -> None:
    options = {"inner": "aot_eager", "attention": "always", "strict": True}
    inputs = torch.randn(20, 16), torch.arange(20) < 13, *torch.randn(3, 2, 3, 6, 8)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        outputs = torch.compile(of_chosen, backend="optpass", options=options)(*inputs)
    for ours, eager in zip(outputs, of_chosen(*inputs), strict=True):
        torch.testing.assert_close(ours, eager)
    (declined,) = optpass.report().declined("attention")
    assert declined.reason.startswith("a size of it is known only when it runs")
    assert len(optpass.report().sites("attention")) == 1
