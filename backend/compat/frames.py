"""What a function's code says of the variables that it reads."""

from __future__ import annotations

import dis
import weakref
from types import CodeType

_READS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
#: By identity: a code of Dynamo's may hold constants that have no hash, and then has none itself.
_known: dict[int, tuple[weakref.ref[CodeType], tuple[str, ...]]] = {}


def globals_read(code: CodeType) -> tuple[str, ...]:
    """Names of the globals (builtins among them) that `code` reads, without those of functions that it makes.

    `co_names` has the names of attributes too: `self.batch` would be taken for a global `batch`.
    """
    key = id(code)
    known = _known.get(key)
    if known is None or known[0]() is not code:
        names = tuple(dict.fromkeys(str(i.argval) for i in dis.get_instructions(code) if i.opname in _READS))
        known = _known[key] = weakref.ref(code, lambda _: _known.pop(key, None)), names
    return known[1]
