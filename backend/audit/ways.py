"""What a function might do in another call, read from its bytecode: for one that did nothing in this one."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from optpass.backend.compat.audit import is_resume
from optpass.backend.compat.bytecode import ways_on

#: Instructions where a function may take one of several ways, and those that may run a tensor operation.
_WAYS = ("POP_JUMP", "JUMP_IF", "FOR_ITER", "MATCH_", "SEND")
_WORK = (
    "CALL", "BINARY_", "UNARY_NEGATIVE", "UNARY_INVERT", "COMPARE_", "STORE_SUBSCR", "CONTAINS_", "LOAD_ATTR",
    "FOR_ITER",
)  # fmt: skip


def may_compute(code: types.CodeType, *, asked: bool) -> bool:
    """Whether another call may take another way, and something but raising an error is done on any of them.

    To catch something is another way where something is done about it. Of a function that goes on behind a break, only
    what is left counts.

    Args:
        asked: the user asked to compile it, so that what it is given to call is taken to compute: if not now, later.
    """
    bytecode = dis.Bytecode(code)
    instructions = {i.offset: i for i in bytecode}
    start = 0
    if is_resume(code):
        jump = next((i for i in bytecode if i.opname.startswith("JUMP") and isinstance(i.argval, int)), None)
        start = jump.argval if jump is not None and jump.argval > jump.offset else 0
    left = _reached(instructions, [start])
    # What stands there: (start, end, target, ...), of each range of instructions that a handler is behind.
    guarded: Any = getattr(bytecode, "exception_entries", ())
    handlers = [entry.target for entry in guarded if any(entry.start <= at < entry.end for at in left)]
    caught = _reached(instructions, handlers) - left
    kinds = {a.offset for a, b in pairwise(bytecode) if b.opname == "CHECK_EXC_MATCH"}
    branches, works = _ways_and_work(instructions[at] for at in sorted(left))
    _, mends = _ways_and_work(instructions[at] for at in sorted(caught - kinds))
    calls = asked and _calls_what_it_is_given(instructions[at] for at in sorted(left))
    return (branches or mends or calls) and (works or mends)


def _calls_what_it_is_given(instructions: Iterable[dis.Instruction]) -> bool:
    """Whether it calls an argument, a captured variable or an attribute of those, such as a submodule."""
    given = False
    for before, i in pairwise(instructions):
        local = before.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
        given = given or (local and i.opname in ("LOAD_METHOD", "LOAD_ATTR"))
        given = given or (i.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and before.opname == "PUSH_NULL")
        given = given or (local and i.opname == "PUSH_NULL")  # since Python 3.13
        if given and i.opname.startswith("CALL"):
            return True
    return False


def _reached(instructions: dict[int, dis.Instruction], starts: Iterable[int]) -> set[int]:
    """Offsets of what is reached from there unless an error is raised."""
    ways, todo, seen = ways_on(instructions), list(starts), set[int]()
    while todo:
        at = todo.pop()
        if at not in seen and at in ways:
            seen.add(at)
            todo += ways[at]
    return seen


def _ways_and_work(instructions: Iterable[dis.Instruction]) -> tuple[bool, bool]:
    """Whether there are branches, and whether anything is done but on the way to an error."""
    branches = works = pending = False
    for i in instructions:
        if i.is_jump_target or i.opname.startswith(_WAYS):
            works, pending = works or pending, False
        branches = branches or i.opname.startswith(_WAYS)
        pending = i.opname not in ("RAISE_VARARGS", "RERAISE") and (pending or i.opname.startswith(_WORK))
    return branches, works or pending
