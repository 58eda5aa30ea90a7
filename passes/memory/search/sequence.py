"""The order in which the backward runs its operations: neighbours that do not need each other change places where that
takes less memory.

Autograd's order makes the gradient of a product's input before that of its weight, so that the input is held while the
other is made. What may have an effect stays where it is. Nothing here depends on a plan.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from optpass.passes.memory.problem import Operation

#: Passes over the backward, at most.
PASSES = 20


def tightened(
    operations: Sequence[Operation], anchors: Sequence[int], sizes: Sequence[int], lasting: Collection[int]
) -> list[int]:
    """`anchors`, operations of the backward in their order, in one that needs no more memory.

    Args:
        sizes: bytes of each storage.
        lasting: storages that are not released.
    """
    order = list(anchors)
    readers: dict[int, int] = {}  # operations of the backward that read a storage and have not run yet
    for index in order:
        for s in operations[index].inputs:
            readers[s] = readers.get(s, 0) + 1
    for _ in range(PASSES):
        if not _pass(operations, order, sizes, lasting, dict(readers)):
            break
    return order


def _pass(
    operations: Sequence[Operation], order: list[int], sizes: Sequence[int], lasting: Collection[int],
    left: dict[int, int],
) -> bool:  # fmt: skip
    """One pass from front to back; whether anything changed."""
    changed = False
    for i in range(len(order) - 1):
        first, second = operations[order[i]], operations[order[i + 1]]
        if _may_change(first, second) and _peak(second, first, sizes, lasting, left) < _peak(
            first, second, sizes, lasting, left
        ):
            order[i], order[i + 1] = order[i + 1], order[i]
            changed = True
        for s in operations[order[i]].inputs:
            left[s] -= 1
    return changed


def _may_change(first: Operation, second: Operation) -> bool:
    """Whether two neighbours may change places."""
    if first.kept_why or second.kept_why or first.fusing.inlined or second.fusing.inlined:
        return False
    return not set(first.outputs).intersection(second.inputs)


def _peak(
    first: Operation, second: Operation, sizes: Sequence[int], lasting: Collection[int], left: dict[int, int]
) -> int:
    """Bytes more than before at the worse of two operations that run one after the other."""
    own = sum(sizes[s] for s in first.outputs)
    freed = sum(sizes[s] for s in first.inputs if left[s] == 1 and s not in lasting)
    then = own - freed + sum(sizes[s] for s in second.outputs) + second.workspace
    return int(max(own + first.workspace, then))
