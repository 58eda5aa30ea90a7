"""What a function's code says of the variables that it reads."""

from __future__ import annotations

import dis
import functools
from types import CodeType

#: Codes that are remembered; a training script's own functions are few.
_REMEMBERED = 256
_READS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})


@functools.lru_cache(maxsize=_REMEMBERED)
def globals_read(code: CodeType) -> tuple[str, ...]:
    """Names of the globals (builtins among them) that `code` reads, without those of functions that it makes.

    `co_names` has the names of attributes too: `self.batch` would be taken for a global `batch`.
    """
    return tuple(dict.fromkeys(str(i.argval) for i in dis.get_instructions(code) if i.opname in _READS))
