"""Which storages play the same part in repeated layers: equal operators, sizes and surroundings."""

from __future__ import annotations

from collections import defaultdict

from optpass.passes.memory.problem import Problem

#: How far around a storage its surroundings are compared, in operations.
ROUNDS = 4


def classes_of(problem: Problem) -> list[int]:
    """The class of each storage: an index, equal for storages with equal surroundings.

    Colour refinement (Weisfeiler and Leman) over the graph of operations, a few rounds: layers of a stack are equal
    but for the first and the last few operations next to what is not repeated.
    """
    colour = [
        hash((str(s.node.target) if s.node.op == "call_function" else s.node.op, s.bytes)) for s in problem.storages
    ]
    readers: dict[int, list[int]] = defaultdict(list)
    for operation in problem.operations:
        for s in operation.inputs:
            readers[s].append(operation.index)
    names = [str(o.node.target) for o in problem.operations]
    for _ in range(ROUNDS):
        of_operation = [
            hash((names[o.index], o.backward, tuple(colour[s] for s in o.inputs), tuple(colour[s] for s in o.outputs)))
            for o in problem.operations
        ]
        colour = [
            hash(
                (
                    colour[s.index],
                    of_operation[s.producer] if s.producer >= 0 else 0,
                    tuple(sorted(of_operation[r] for r in readers[s.index])),
                )
            )
            for s in problem.storages
        ]
    index: dict[int, int] = {}
    return [index.setdefault(c, len(index)) for c in colour]
