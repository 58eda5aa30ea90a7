"""The optimizer of a step, as a budget counts it: named by the option, or found by the parameters that it holds."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from optpass.backend.memory.budget import ENGINE_BYTES
from optpass.backend.memory.probe import library_workspace
from optpass.backend.memory.versions import FUSED_STEPS
from optpass.options import Options
from optpass.passes.memory.optimizers import optimizers
from optpass.passes.memory.optimizers.rehearsal import sizes_of
from optpass.passes.memory.optimizers.search import find_optimizer, trained_among


@dataclass(frozen=True)
class Optimizing:
    """What the optimizer of some parameters needs.

    Attributes:
        name: for messages.
        state, step: bytes that it keeps, and those that it allocates while it steps.
        parameters: all that the optimizers found hold.
        notes: what was assumed.
        copies: those of them that are wider copies of others: the optimizer alone reads their gradients.
    """

    name: str
    state: int
    step: int
    parameters: tuple[torch.Tensor, ...]
    notes: tuple[str, ...]
    copies: tuple[torch.Tensor, ...] = ()

    @property
    def stepping(self) -> int:
        """Bytes that are there in its step alone: what it allocates, gradients of copies, and what no rehearsal tells:
        the loss, which its caller holds, each number that an operator is given, as a tensor, twice, and the numbers
        that were made constants when the step's graphs were traced: they are nobody's, and stay."""
        scalars = 2 * ENGINE_BYTES if self.state or self.step or self.copies else 0
        return self.step + sum(p.nbytes for p in self.copies) + scalars

    @classmethod
    def of(cls, options: Options, parameters: Sequence[torch.Tensor], idle: Iterable[torch.Tensor] = ()) -> Optimizing:
        """That of `parameters`, as far as they are trained. One that is named trains all that a live optimizer holds
        beside them, but for `idle` ones, which get no gradient. Steps of those that were found are counted from now on
        where their versions do not tell.

        Raises:
            ConfigError: the option names none that is known.
        """
        ids, trained = {id(p) for p in idle}, trained_among(parameters)
        found = find_optimizer(trained, library_workspace, ids)
        FUSED_STEPS.follow(() if found is None else found.optimizers)
        held, copies = ((), ()) if found is None else (found.parameters, found.copies)
        if options.optimizer is not None:
            name = optimizers.check(options) or "none"
            stepped = held if copies else (*held, *trained)  # in one order, whichever graph asks
            everything = list({id(p): p for p in trained_among(stepped) if id(p) not in ids}.values())
            gpu = any(p.device.type != "cpu" for p in everything)
            cost = optimizers.cost(
                name, sizes_of(everything), gpu=gpu, where=options.where("optimizer"), library=library_workspace
            )
            return cls(name, cost.state_bytes, cost.step_bytes, held, (), copies)
        if found is None:
            said = "no optimizer was found that holds the parameters: none is counted; name it with `optimizer`"
            if gc.get_freeze_count():
                said += "; objects that `gc.freeze` hides could not be searched"
            return cls("none", 0, 0, (), (said,))
        notes = (f"optimizer found: {found.name}", *found.notes)
        return cls(found.name, found.state_bytes, found.step_bytes, held, notes, copies)
