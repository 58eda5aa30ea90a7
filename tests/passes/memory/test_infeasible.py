"""What the error says where no plan fits."""

from __future__ import annotations

import pytest

from optpass.errors import BudgetInfeasibleError
from optpass.passes.memory.infeasible import Help, explain_infeasible, standard_helps
from optpass.passes.memory.plan import Ledger, Tensor

G = 2**30
LEDGER = Ledger(parameters=4 * G, gradients=4 * G, optimizer=8 * G, activations=G)


def test_the_message_has_floor_tensors_and_helps() -> None:
    tensors = [
        Tensor("softmax", 2 * G, "aten._softmax.default", "f32[8, 128, 128]", "/home/me/model.py", 41, "layers.7.attn"),
        Tensor("parameter wte.weight", G, shape="float32[50257, 768]"),
        Tensor("tangents_1", 4, "", "f32[]"),
    ]
    helps = [Help("micro-batch 4", 12 * G, peak=True), Help("sharding", 3 * G)]
    error = explain_infeasible(10 * G, 17 * G, LEDGER, tensors, helps, "options: memory_budget='10GiB'")
    assert isinstance(error, BudgetInfeasibleError) and (error.floor_bytes, error.budget_bytes) == (17 * G, 10 * G)
    said = str(error)
    assert said.startswith(
        "options: memory_budget='10GiB': no plan of this training step fits 10 GiB (10737418240 bytes)"
    )
    assert "the smallest peak of any plan is 17 GiB (18253611008 bytes)" in said
    assert "There it holds optimizer 8 GiB, parameters 4 GiB, gradients 4 GiB, activations 1 GiB" in said
    assert "2 GiB f32[8, 128, 128] of aten._softmax.default (model.py:41, layers.7.attn)" in said
    assert "1 GiB parameter wte.weight float32[50257, 768]" in said
    assert "tangents" not in said  # four bytes are nobody's problem
    assert "What would help: micro-batch 4 (smallest peak 12 GiB); sharding (frees 3 GiB)" in said


@pytest.mark.parametrize("where", ["gpt.toml: [training]: memory_budget='1MB'", "command line: memory_budget=5"])
def test_what_set_the_budget_is_named_as_it_is_written(where: str) -> None:
    """A file's name began with a capital."""
    said = str(explain_infeasible(5, 17 * G, LEDGER, [], where=where))
    assert said.startswith(f"{where}: no plan of this training step fits 5 bytes; ")
    assert str(explain_infeasible(5, 17 * G, LEDGER, [])).startswith("No plan of this training step fits 5 bytes; ")


def test_the_message_says_what_was_not_seen() -> None:
    error = explain_infeasible(5, 17 * G, LEDGER, [], accumulating=18 * G, not_seen=["the loss outside of the graph"])
    assert error.floor_bytes == 17 * G
    assert (
        "the smallest peak of any plan is 17 GiB (18253611008 bytes), or 18 GiB (19327352832 bytes) beside gradients "
        "of earlier micro-batches, named before the loss outside of the graph ran, which may need more. There it"
        in str(error)
    )
    plain = str(explain_infeasible(5, 17 * G, LEDGER, [], accumulating=17 * G))
    assert "is 17 GiB (18253611008 bytes). There it" in plain


@pytest.mark.parametrize(("width", "halved"), [(4, True), (2, False)])
def test_standard_helps(width: int, halved: bool) -> None:
    helps = standard_helps(LEDGER, trained_itemsize=width, optimizer="adamw", world_size=8)
    assert any("bfloat16" in h.what and h.bytes == 4 * G for h in helps) is halved
    assert any("8 devices" in h.what and h.bytes == 14 * G for h in helps)
    assert standard_helps(Ledger(activations=G), trained_itemsize=4, optimizer="none") == []
