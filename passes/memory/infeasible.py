"""What to tell somebody whose budget no plan fits: the floor, the largest tensors there, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optpass.errors import BudgetInfeasibleError
from optpass.passes.memory.plan import Ledger, Tensor
from optpass.units import format_bytes

#: Tensors that the message names, and the part of the largest below which one is not worth it.
_NAMED, _WORTH_NAMING = 5, 0.01


@dataclass(frozen=True)
class Help:
    """Something that would lower the floor.

    Attributes:
        what: as the user would do it: "micro_batch = 4", "attention = 'always'".
        bytes: by how much, or to what smallest peak.
        peak: `bytes` is the smallest peak that it leads to, rather than what it frees.
    """

    what: str
    bytes: int
    peak: bool = False

    def __str__(self) -> str:
        size = format_bytes(self.bytes)
        return f"{self.what} (smallest peak {size})" if self.peak else f"{self.what} (frees {size})"


def explain_infeasible(
    budget: int, floor: int, ledger: Ledger, largest: Sequence[Tensor], helps: Sequence[Help] = (), where: str = "",
    accumulating: int = 0, likely: int = 0, not_seen: Sequence[str] = (),
) -> BudgetInfeasibleError:  # fmt: skip
    """The error for a budget below the floor; to be raised by the caller.

    Args:
        budget, floor: bytes.
        ledger: of the floor.
        largest: tensors that are live at the floor, largest first; tensors of repeated layers may repeat.
        helps: what would help, most useful first.
        accumulating: the floor where gradients of earlier micro-batches are there throughout; named if it is larger.
        likely: the floor where graphs that follow train all that the optimizer holds; named if it is larger.
        not_seen: what may make the floor larger, and had not run when it was named.
        where: what set the budget, e.g. "options: memory_budget"; the message begins with it.
    """
    said = f"{'no' if where else 'No'} plan of this training step fits {_exact(budget)}"
    said = f"{said}; the smallest peak of any plan is {_exact(floor)}"
    said += f", or {_exact(accumulating)} beside gradients of earlier micro-batches" if accumulating > floor else ""
    if likely > floor:
        said += f", and likely {_exact(likely)} where graphs that follow train what else the optimizer holds"
    said += f", named before {' and '.join(not_seen)} ran, which may need more" if not_seen else ""
    parts = [f"{where}: {said}" if where else said, "There it holds " + _held(ledger)]
    if largest:
        worth = [tensor for tensor in largest if tensor.bytes >= _WORTH_NAMING * largest[0].bytes]
        named = "; ".join(_named(tensor) for tensor in worth[:_NAMED])
        parts.append(f"The largest tensors there: {named}")
    return BudgetInfeasibleError(". ".join(parts), floor_bytes=floor, budget_bytes=budget, helps=map(str, helps))


def standard_helps(ledger: Ledger, *, trained_itemsize: int, optimizer: str, world_size: int = 8) -> list[Help]:
    """What can be known without planning again: a smaller optimizer state, and sharding.

    Args:
        ledger: of the floor.
        trained_itemsize: bytes per element of most parameters.
        optimizer: name of the optimizer.
        world_size: devices to speak of.
    """
    helps = []
    if ledger.optimizer and trained_itemsize > 2:
        half = ledger.optimizer * (trained_itemsize - 2) // trained_itemsize
        helps.append(Help(f"the state of {optimizer} in bfloat16", half))
    if ledger.optimizer:
        helps.append(Help("an 8-bit optimizer state (optimizer = 'adamw_8bit')",
                          max(ledger.optimizer - ledger.optimizer // max(trained_itemsize, 2), 0)))  # fmt: skip
    divided = ledger.parameters + ledger.gradients + ledger.optimizer
    if divided:
        helps.append(Help(f"sharding over {world_size} devices (FSDP)", divided - divided // world_size))
    return [help_ for help_ in helps if help_.bytes > 0]


def smaller_batch(batch: int | None, peak: int, fixed: int, budget: int) -> Help | None:
    """The largest micro-batch that would fit; None where there is none, or nobody knows what a batch is.

    Args:
        batch: samples of the micro-batch whose smallest peak is `peak`.
        fixed: the part of `peak` that does not depend on them; the rest nearly grows with them.
    """
    if batch is None or batch < 2:
        return None
    own = peak - fixed
    size = min(batch * (budget - fixed) // own if own > 0 else 0, batch - 1)
    return Help(f"micro-batch {size}, about", fixed + own * size // batch, peak=True) if size >= 1 else None


def elsewhere(size: int) -> Help:
    """Where `size` bytes are of models that the step does not train."""
    return Help("letting go of frozen models that this step does not need, or moving them to another device", size)


def attention_swapped(peak: int) -> Help:
    """Where attention that is left as it is written could run on a fused kernel: the smallest peak with that."""
    return Help("attention = 'always'", peak, peak=True)


def _exact(size: int) -> str:
    """`20 GiB (21474836480 bytes)`; a size below 1 KiB has no short form."""
    return f"{format_bytes(size)} ({size} bytes)" if size >= 1024 else f"{size} bytes"


def _held(ledger: Ledger) -> str:
    entries = [(name, getattr(ledger, name)) for name in ledger.__dataclass_fields__]
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in sorted(entries, key=lambda e: -e[1]) if size)


def _named(tensor: Tensor) -> str:
    place = f"{Path(tensor.file).name}:{tensor.line}" if tensor.file else ""
    at = ", ".join(part for part in (place, tensor.module or "") if part)
    what = f"{tensor.shape} of {tensor.op}" if tensor.op else f"{tensor.node} {tensor.shape}"
    return f"{format_bytes(tensor.bytes)} {what.strip()}" + (f" ({at})" if at else "")
