"""What the error of a budget below the floor says would help is true."""

from __future__ import annotations

import re

import pytest
import torch

import optpass


def _refused(steps, model, x, budget, **settings):
    with pytest.raises(optpass.BudgetInfeasibleError) as caught:
        steps.run(model, [x], budget, settings={"optimizer": "adamw", **settings}, measure=False)
    return caught.value


def test_the_micro_batch_that_fits(steps, programs):
    torch.manual_seed(0)
    model, x = programs.Stack(1, 32, 2), torch.randn(16, 32, 32)
    floor = _refused(steps, model, x, 1).floor_bytes
    budget = floor // 2
    said = _refused(steps, model, x, budget)
    (size,) = re.findall(r"What would help: micro-batch (\d+), about \(smallest peak", str(said))
    assert 1 <= int(size) < 16 and said.helps[0].startswith(f"micro-batch {size}")
    ran = steps.run(model, [x[: int(size)]], budget, settings={"optimizer": "adamw"})
    assert ran.peak <= budget
    _refused(steps, model, x[: int(size) + 2], budget)


def test_no_micro_batch_is_named_where_the_parameters_alone_do_not_fit(steps, programs):
    error = _refused(steps, programs.Stack(1, 32, 2), torch.randn(4, 32, 32), 1000)
    assert error.helps and not any("micro-batch" in one for one in error.helps)


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_attention_on_fused_kernels(steps, programs, mode):
    """Named with the floor that it really leads to; nothing of looking for that is reported."""
    torch.manual_seed(0)
    model, x = programs.Stack(1, 32, 2), torch.randn(1, 128, 32)
    optpass.reset_report()
    error = _refused(steps, model, x, 1000, attention=mode)
    report = optpass.report()
    assert len(report.graphs) == 1 and report.options["memory_budget"] == 1000
    fused = _refused(steps, model, x, 1000, attention="always")
    named = [one for one in error.helps if one.startswith("attention = 'always'")]
    assert bool(named) is (fused.floor_bytes < error.floor_bytes)
    assert not any("attention" in one for one in fused.helps)
    assert named or mode == "auto"
