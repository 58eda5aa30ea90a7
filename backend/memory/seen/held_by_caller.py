"""What callers hold while a backward runs, beside what runs of compiled graphs do: results of eager code, outputs and
targets, and what operators have saved for other backwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from optpass.backend.compat import memory_autograd as autograd
from optpass.backend.compat.memory_callers import tensors_of_callers
from optpass.backend.memory.eager.held import held_in
from optpass.backend.memory.seen.leaves import Leaf
from optpass.backend.memory.seen.parameters import parameters_of
from optpass.backend.memory.seen.run import Run
from optpass.backend.memory.seen.stores import Stores


def made_before(node: Any, made: Sequence[torch.Tensor], among: Stores) -> Stores:
    """Which of the storages `among` are of tensors that were `made` before a node of autograd."""
    older = Stores(t for t in made if autograd.order(t.grad_fn) < autograd.order(node))
    return Stores.behind(s for s in older.storages() if among.has(s))


def held_aside(
    running: autograd.RunningBackward, saved: Sequence[torch.Tensor], live: Sequence[Run], lent: Stores, old: Stores,
    step: Sequence[Leaf],
) -> Stores:  # fmt: skip
    """What operators hold for other backwards than that which is `running`, and counts nowhere else: another loss of
    the caller's waits for its own, or one is to be run again (`retain_graph`). Arguments as for `look.beside`."""
    aside = Stores(held_in([*running.roots, *autograd.nodes_behind(tensors_of_callers())]))
    of_runs = [stores for run in live for stores in (run.inputs, run.outputs, run.eager)]
    of_step = [stores for leaf in step for stores in (leaf.inputs, leaf.buffers, leaf.elsewhere)]
    for counted in (Stores([*saved, *parameters_of(step)]), lent, old, *of_runs, *of_step):
        aside.drop(counted)
    return aside


def kept_outputs(run: Run, node: Any) -> list[Any]:
    """Outputs of a run that the caller holds in its backward; what is handed back as it came is none."""
    there = [storage for storage in run.outputs.storages() if not run.inputs.has(storage)]
    return [s for s in there if node is None or autograd.held_elsewhere(node, s)]


def target_among(held: Sequence[torch.Tensor], inputs: Stores, elements: int, index: bool) -> torch.dtype | None:
    """Those of the tensors `held` of which a loss may read so many elements are inputs of the step; as an index, those
    of several micro-batches too. Which of them it reads cannot be told; the dtype of the first."""
    found = []
    for tensor in held:
        sizes = {tensor.numel(), tensor[0].numel()} if index and len(tensor.shape) > 1 else {tensor.numel()}
        if elements in sizes and (not index or tensor.dtype == torch.long):
            found.append(tensor)
    inputs.add(found)
    return found[0].dtype if found else None
