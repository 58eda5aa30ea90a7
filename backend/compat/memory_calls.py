"""How often a function calls a compiled one again before it asks for a backward, and what it holds of a result, read
from its bytecode. For `backend.memory`: in the first step nothing else says so.
"""

from __future__ import annotations

import dis
import sys
import types
from typing import Any

from optpass.backend.compat.bytecode import ways_on
from optpass.backend.compat.memory_callers import value_of, variables_by_name
from optpass.backend.compat.memory_modules import is_compiled

#: Calls that a loop is taken to make: what each holds then decides.
LOOP = 8
#: What may stand between the name of what is called and the call, beside the arguments.
_ON_THE_WAY = ("LOAD_ATTR", "LOAD_METHOD", "PUSH_NULL", "PRECALL", "KW_NAMES")
#: Names of what ends the part of a step in which forwards run.
_BACKWARD = frozenset({"backward", "grad"})
#: Functions that are asked, from the innermost on: the next where one returns without a backward, as a helper that
#: normalizes what a network gives.
_CALLERS = 3

#: By what a loss is asked for, where it comes with other results, `.loss`, `["loss"]`, `[0]`; and its backward at once.
_LOSS = ("loss", 0, "backward")
#: Instructions that take an item.
_ITEM = ("BINARY_SUBSCR", "BINARY_OP")

_Key = tuple[str, ...]


def calls_to_come() -> int:
    """How often the function in whose call a graph is being compiled may call the same thing, by the same name, before
    it comes to a backward; `LOOP` times in a loop. What it calls itself is not looked into: 0 where that, and not it or
    who called it, asks for the backward, and where it cannot be told.
    """
    frame: Any = sys._getframe()
    asked = calls = 0
    while frame is not None and asked < _CALLERS:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in ("torch", "optpass"):
            asked += 1
            found, returns, comes = _from_call(frame.f_code, frame.f_lasti)
            calls = calls or found
            if comes or not returns:
                return calls if comes else 0
        frame = frame.f_back
    return 0


def calls_compiled() -> bool:
    """Whether the function in whose call a graph is being compiled, or who called it, names a compiled module or
    function in a call that it makes behind this one and before it asks for a backward: it is given the result, or runs
    beside it."""
    frame: Any = sys._getframe()
    asked = 0
    while frame is not None and asked < _CALLERS:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in ("torch", "optpass"):
            asked += 1
            listed = list(dis.get_instructions(frame.f_code))
            to_come = [i for i in listed if i.offset > frame.f_lasti]
            end = next((i.offset for i in to_come if i.opname.startswith("LOAD_") and i.argval in _BACKWARD), None)
            if end is not None:
                calls = [i.offset for i in to_come if i.opname.startswith("CALL") and i.offset < end]
                named = {names for at in calls if (names := _called(listed, at)) is not None}
                variables = variables_by_name(frame) if named else {}
                return any(is_compiled(value_of(names, variables, frame.f_globals)) for names in named)
        frame = frame.f_back
    return False


def holds_result() -> bool | None:
    """Whether the function that called what is being compiled holds more of what that gives than its loss until it asks
    for a backward; None where another function asks, or where it cannot be told.
    """
    frame: Any = sys._getframe()
    called = None
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name == "torch._dynamo.eval_frame":
            called = None  # it is called from further out
        elif called is None and name.partition(".")[0] not in ("torch", "optpass"):
            called = frame
        frame = frame.f_back
    if called is None or not _from_call(called.f_code, called.f_lasti)[2]:
        return None
    return _holds(called.f_code, called.f_lasti)


def _holds(code: types.CodeType, last: int) -> bool | None:
    """Whether a variable holds what the call gives that is running; None where another function is given it."""
    behind = [i for i in dis.get_instructions(code) if i.offset > last and i.opname not in ("CACHE", "NOP")]
    first, second = (*behind, None, None)[:2]
    if first is None:
        return None
    if first.opname.startswith(("STORE_", "UNPACK_")):
        return None if any(i.opname.startswith("DELETE_") for i in behind) else True
    if first.opname == "POP_TOP" or (first.opname in ("LOAD_ATTR", "LOAD_METHOD") and first.argval in _LOSS):
        return False
    taken = first.opname.startswith("LOAD_") and first.argval in _LOSS and second is not None
    return False if taken and second is not None and second.opname in _ITEM else None


def _from_call(code: types.CodeType, last: int) -> tuple[int, bool, bool]:
    """How many calls of the same can follow the one that is running before any backward, whether the function may end
    before any, and whether it may come to one."""
    instructions = {i.offset: i for i in dis.get_instructions(code)}
    listed, ways = list(instructions.values()), ways_on(instructions)
    call = max((offset for offset in instructions if offset <= last), default=0)  # its cache is behind it
    wanted = _called(listed, call)
    todo, seen, found, ends, comes = [*ways.get(call, ())], set[int](), 0, False, False
    while todo:
        at = todo.pop()
        if at in seen or at not in instructions:
            continue
        seen.add(at)
        name, target = instructions[at].opname, instructions[at].argval
        if name.startswith("LOAD_") and isinstance(target, str) and target in _BACKWARD:
            comes = True
            continue
        if wanted is not None and name.startswith("CALL") and _called(listed, at) == wanted:
            found += LOOP if at == call else 1
        ends |= name.startswith("RETURN_")
        todo += ways[at]
    return min(found, LOOP), ends, comes


def _called(instructions: list[dis.Instruction], at: int) -> _Key | None:
    """The names by which a call finds what it calls: ('self', 'encoder'); None where it is no name.

    They begin in the source where the call begins, its arguments behind that.
    """
    index = next((k for k, i in enumerate(instructions) if i.offset == at), None)
    if index is None or not instructions[index].opname.startswith("CALL"):
        return None
    start, names = _start(instructions[index]), list[str]()
    if start is None:
        return None
    for i in reversed(instructions[:index]):
        if _start(i) != start:
            continue
        value = i.argval[0] if isinstance(i.argval, tuple) and i.argval else i.argval
        if i.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.append(str(value))
        elif i.opname.startswith("LOAD_") and isinstance(value, str):
            return (value, *reversed(names))
        elif i.opname not in _ON_THE_WAY:
            return None
    return None


def _start(instruction: dis.Instruction) -> tuple[int, int] | None:
    """Line and column at which its part of the source begins."""
    where = instruction.positions
    if where is None or where.lineno is None or where.col_offset is None:
        return None
    return where.lineno, where.col_offset
