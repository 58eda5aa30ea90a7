"""What `optpass plan` says ahead is what a compile plans, where no pass and no loss outside makes a difference."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import optpass
from optpass import BudgetInfeasibleError
from optpass.backend.device import actual

pytestmark = pytest.mark.usefixtures("clean", "drawn")


class Patches(nn.Module):
    """Large patches of an image: the gradient of their kernel is made last of all, beside everybody else's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 96, 16, 16)
        self.head = nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 10))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(image).flatten(2).mT).square().mean()


def test_what_only_the_library_allocates_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "optpass.api.present_device", lambda *_: actual(torch.device("cpu"))
    )  # measuring takes a minute
    model, image = Patches(), torch.randn(2, 3, 224, 224)
    planned = optpass.plan(model, image, options={"inner": "aot_eager"})
    gc.collect()
    options = {"inner": "aot_eager", "memory_budget": 10**10}
    torch.compile(model, backend="optpass", options=options)(image).backward()
    (site,) = optpass.report().declined("memory budget")  # nothing is computed again
    assert planned.predicted_peak_bytes == pytest.approx(site.cost["predicted_peak_bytes"], abs=64)
    assert planned.floor_bytes == pytest.approx(site.cost["floor_bytes"], abs=64)
    with pytest.raises(BudgetInfeasibleError):
        optpass.plan(model, image, memory_budget=planned.floor_bytes - 1, options={"inner": "aot_eager"})
