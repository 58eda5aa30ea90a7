"""What a cache entry was compiled for, where its guards do not keep it: noted at each compile, read at a recompile.

Almost every note is thrown away unread, so that little is done for it: texts are made when somebody asks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from optpass.backend.audit.containers import keys_of
from optpass.backend.audit.guards import Scope, plain
from optpass.backend.audit.sources_text import sources_in
from optpass.backend.audit.values import describe
from optpass.backend.compat import audit_guards as dynamo

#: Beside the values that an entry was made for: the thread that made it.
THREAD = "<thread>"
_MOST = 200  #: places that are looked at for dicts
_DEEPEST = 3  #: steps from an argument

#: One step of a path: (attribute or key, is it an attribute).
_Step = tuple[Any, bool]


class Remembered(Mapping[str, str]):
    """Texts of values by Dynamo's expression of the place, and of the keys of dicts by `containers.keys_of`.

    Args:
        values: texts that are known by now.
        keys: dicts by their path, with their keys, or the text of keys that must not be held.
    """

    def __init__(self, values: dict[str, str], keys: list[tuple[tuple[_Step, ...], tuple[Any, ...] | str]]) -> None:
        self._values, self._keys = values, keys

    def _all(self) -> dict[str, str]:
        for path, keys in self._keys:
            self._values[keys_of(_text(path))] = keys if isinstance(keys, str) else describe(list(keys))
        self._keys = []
        return self._values

    def __getitem__(self, name: str) -> str:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


def remember(manager: Any, call: dynamo.CompileCall) -> Remembered:
    """Values of the places that a new entry's guards put conditions on, and keys of dicts: guards keep neither."""
    found = {THREAD: this_thread()}
    # Whether two places hold one object needs no value.
    parts = [text for part in dynamo.conditions(manager) if " is " not in (text := plain(part))]
    if parts:
        scope = Scope({"L": call.local, "G": call.namespace})
        for source in dict.fromkeys(source for part in parts for source in sources_in(part)):
            try:
                found[source] = describe(scope.evaluate(source))
            except Exception:  # noqa: BLE001  # Dynamo's own helpers are not known here: the condition is told instead
                continue
    return Remembered(found, _dicts_in(call.local))


def this_thread() -> str:
    """Names the running thread."""
    return str(threading.get_ident())


def _dicts_in(local: Mapping[str, Any]) -> list[tuple[tuple[_Step, ...], tuple[Any, ...] | str]]:
    """Dicts that a frame was called with, near its arguments. Nothing of the user's is held but keys that are plain."""
    places: list[tuple[int, Any, bool, Any, int]] = [(-1, name, False, value, 0) for name, value in local.items()]
    found: list[tuple[tuple[_Step, ...], tuple[Any, ...] | str]] = []
    for index, (_, _, _, value, depth) in enumerate(places):
        kind = type(value)
        inside: Any
        attributes = False
        if kind is dict:
            inside = tuple(value.items())  # at once: another thread may change the dict
            keys = tuple(key for key, _ in inside)
            simple = all(type(key) in (str, int) for key in keys)
            found.append((_path(places, index), keys if simple else describe(list(keys))))
            inside = inside if simple else [item for item in inside if type(item[0]) in (str, int)]
        elif kind is list or kind is tuple:
            inside = enumerate(value)
        elif kind.__module__ == "builtins" or isinstance(value, torch.Tensor):
            continue
        else:
            inside, attributes = tuple(getattr(value, "__dict__", {}).items()), True
        if depth < _DEEPEST:
            more = [(index, step, attributes, item, depth + 1) for step, item in inside]
            if len(places) + len(more) <= _MOST:
                places += more
    return found


def _path(places: list[tuple[int, Any, bool, Any, int]], index: int) -> tuple[_Step, ...]:
    steps: list[_Step] = []
    while index >= 0:
        index, step, attribute, _, _ = places[index]
        steps.append((step, attribute))
    return tuple(reversed(steps))


def _text(path: tuple[_Step, ...]) -> str:
    """As Dynamo names it: `L['self'].config['sizes']`."""
    return "L" + "".join(f".{step}" if attribute else f"[{step!r}]" for step, attribute in path)
