"""Capturing a model ahead of its run leaves the process as it was."""

from __future__ import annotations

import gc

import pytest
import torch

from optpass.backend.ahead import capture_model


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
