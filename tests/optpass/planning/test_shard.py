"""Sharded state: divided by the world size, with the largest layer gathered."""

from __future__ import annotations

import pytest
from torch import nn

from optpass.errors import ConfigError
from optpass.passes.memory.optimizers.optimizers import OptimizerCost
from optpass.planning.shard import Shard, divided, gathered, layers
from optpass.planning.step import state_of


@pytest.mark.parametrize("text", ["fsdp", "fsdp:0", "fsdp:-1", "fsdp:x", "ddp:8", "8", ""])
def test_what_is_no_shard(text: str) -> None:
    with pytest.raises(ConfigError, match="write fsdp:N"):
        Shard.parse(text)


def test_layers_are_members_of_lists_and_children() -> None:
    model = nn.Module()
    model.embed = nn.Embedding(10, 4)
    model.stack = nn.Module()
    model.stack.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(3)])
    model.head = nn.Linear(4, 10, bias=False)
    model.head.weight = model.embed.weight
    model.scale = nn.Parameter(nn.Linear(1, 1).weight.detach())
    assert list(layers(model)) == ["", "embed", "stack.blocks.0", "stack.blocks.1", "stack.blocks.2"]
    largest = gathered(model, 1)
    assert largest.layer == "stack.blocks.0" and largest.parameters == largest.gradients == 4 * (40 + 36)
    model.stack.blocks.requires_grad_(False)
    assert gathered(model, 1).layer == "embed"  # gradients count too
    assert gathered(lambda x: x, 1).bytes == 0


def test_state_is_divided_rounding_up() -> None:
    state = state_of(nn.Linear(10, 10), (), OptimizerCost("adamw", 801, 90), unit=1)
    share = divided(state, Shard.parse(" fsdp:8 "))
    assert (share.parameters, share.gradients, share.optimizer.state_bytes) == (55, 55, 101)
    assert share.inputs == state.inputs and share.buffers == state.buffers
