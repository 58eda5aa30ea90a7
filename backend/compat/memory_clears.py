"""What a function of the program clears gradients of before it asks for a backward, read from its bytecode. For
`backend.memory`: the first step begins without gradients, and does not show it.
"""

from __future__ import annotations

import dis
import sys
import types
from dataclasses import dataclass
from typing import Any

from optpass.backend.compat.memory_callers import Place, value_of, variables_by_name

#: Instructions that name what is taken.
_NAMES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_FAST")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")


@dataclass(frozen=True)
class ToCome:
    """What a function is still to do.

    Attributes:
        place: where it is.
        asked: whose `zero_grad` it asks for, by whatever longer names, and where in the code; None for what cannot be
            told. Not those behind the last backward, and none where it says that gradients are to be kept as zeros.
        backwards: where it names what asks for a backward.
    """

    place: Place
    asked: tuple[tuple[int, Any], ...]
    backwards: tuple[int, ...]


def to_come() -> ToCome | None:
    """Of the innermost of the functions that are running which is to ask for a backward; None where none is."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in ("torch", "optpass"):
            instructions = [i for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti]
            backwards = tuple(i.offset for i in instructions if "backward" in _name(i))
            if backwards:
                asked = tuple(_asked(frame, instructions, backwards[-1])) if not _keeps_zeros(frame.f_code) else ()
                return ToCome(Place.of(frame), asked, backwards)
        frame = frame.f_back
    return None


def _keeps_zeros(code: types.CodeType) -> bool:
    said = code.co_consts
    return any(value is False for value in said) and any("set_to_none" in str(value) for value in said)


def _name(instruction: dis.Instruction) -> str:
    return str(instruction.argval) if instruction.opname.startswith(_NAMES) else ""


def _asked(frame: Any, instructions: list[dis.Instruction], end: int) -> list[tuple[int, Any]]:
    places = [at for at, i in enumerate(instructions) if "zero_grad" in _name(i) and i.offset < end]
    variables = variables_by_name(frame) if places else {}
    return [(instructions[at].offset, _owner(frame, variables, instructions, at)) for at in places]


def _owner(frame: Any, variables: dict[str, Any], instructions: list[dis.Instruction], at: int) -> Any:
    """Whose attribute is loaded there; None where that is not found without running anything."""
    first = at
    while first > 0 and instructions[first].opname in _ATTRIBUTES:
        first -= 1
    if first == at or not _name(instructions[first]):
        return None
    return value_of([_name(i) for i in instructions[first:at]], variables, frame.f_globals)
