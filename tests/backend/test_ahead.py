"""Capturing a model ahead of its run leaves the process as it was, and tells what went wrong."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import fx, nn

from optpass.backend.ahead import capture_model
from optpass.errors import ConfigError, TraceError


@pytest.mark.parametrize("freeze", [False, True])
def test_what_the_program_froze_stays_frozen(freeze: bool) -> None:
    if freeze:
        gc.freeze()
    before = gc.get_freeze_count() > 0
    try:
        assert capture_model(torch.relu, [torch.ones(3)], train=False).items
        assert (gc.get_freeze_count() > 0) is before
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_a_deliberate_error_while_a_graph_is_prepared_comes_out_as_it_is() -> None:
    def prepare(gm: fx.GraphModule) -> None:
        raise ConfigError("no pass is called 'x'")

    with pytest.raises(ConfigError, match=r"^no pass is called 'x'$"):
        capture_model(nn.Linear(3, 3), (torch.randn(2, 3),), train=False, prepare=prepare)


def test_another_error_while_a_graph_is_prepared_is_told_with_its_own_words() -> None:
    def prepare(gm: fx.GraphModule) -> None:
        raise KeyError("what was missing")

    with pytest.raises(TraceError, match="could not be traced: KeyError: 'what was missing'"):
        capture_model(nn.Linear(3, 3), (torch.randn(2, 3),), train=False, prepare=prepare)
