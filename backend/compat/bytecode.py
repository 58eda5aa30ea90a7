"""Where the instructions of a function lead, for those who ask what it may do later on."""

from __future__ import annotations

import dis
from collections.abc import Mapping
from itertools import pairwise

_JUMPS = frozenset(dis.hasjrel + dis.hasjabs)


def ways_on(instructions: Mapping[int, dis.Instruction]) -> dict[int, tuple[int, ...]]:
    """Offsets that each instruction may go on at, unless an error is raised.

    Args:
        instructions: of one function, by their offsets, in order.
    """
    following = dict(pairwise(instructions))
    found: dict[int, tuple[int, ...]] = {}
    for at, instruction in instructions.items():
        name, target, ways = instruction.opname, instruction.argval, list[int]()
        if not name.startswith(("RETURN_", "RAISE_", "RERAISE")):
            if instruction.opcode in _JUMPS and isinstance(target, int):
                ways.append(target)
            if at in following and not (name.startswith("JUMP_") and not name.startswith("JUMP_IF")):
                ways.append(following[at])
        found[at] = tuple(ways)
    return found
