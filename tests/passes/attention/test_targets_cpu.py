"""The rules of the kernels for CPUs: no rule is dead, for each there is a problem for which it alone refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from optpass.passes.attention.problem import Problem
from optpass.passes.attention.targets import conditions, kernels
from optpass.passes.attention.targets.conditions import Situation

PLAIN = Problem("cpu", torch.float32, batch=2, heads=8, kv_heads=8, queries=64, keys=64, head_dim=64, value_dim=64)


def at(**fields: Any) -> Situation:
    return Situation(replace(PLAIN, **fields))


def test_no_kernel_has_rules_that_are_not_asked_here() -> None:
    having = {name for name, kernel in kernels("cpu").items() if kernel.refuses or kernel.materialises}
    assert having == {"flex", "blocks"} and not any(kernels("cpu")[name].materialises for name in having)


def test_rules_of_attention_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "slow_library", lambda: False)
    for rule in kernels("cpu")["blocks"].refuses:
        assert rule.says(at(dropout=1.0)) != rule.says(at())
        assert not rule.says(at(score_ops=frozenset({"softcap"}))) and not rule.says(at(dropout=0.5))


def test_rules_of_flex_attention() -> None:
    alone = at(mask_symbolic=True), at(head_dim=16, keys=24), at(head_dim=16, keys_symbolic=True)
    refuses = kernels("cpu")["flex"].refuses
    assert [[bool(rule.says(one)) for rule in refuses] for one in alone] == torch.eye(len(refuses)).bool().tolist()
    taken = at(), at(keys=24), at(keys_symbolic=True), at(head_dim=16), at(head_dim=16, keys=9)
    assert not any(rule.says(one) for rule in refuses for one in taken)
