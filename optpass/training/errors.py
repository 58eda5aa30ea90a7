"""The errors of training. Nothing here may import torch."""

from __future__ import annotations

from optpass.errors import OptPassError


class TrainError(OptPassError):
    """A run that cannot go on: the loss is not finite, or a step failed. What it reached is in its report."""

    exit_code = 3
