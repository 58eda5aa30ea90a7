"""The eager nodes of a backward, watched while they run: which storages are there before and after each.

That says what gradients share their storage, are added up in place and wait, which no list of operators tells. What an
operator allocates and releases inside itself is still a bound. Only weak references are held.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optpass.backend.compat import memory_autograd as autograd
from optpass.backend.compat.memory_backward import Held, untraced
from optpass.backend.memory.leaves import Stores


@dataclass
class _Seen:
    """A storage: its bytes, the numbers of the events between which it was there, and whether it counts elsewhere."""

    storage: weakref.ref[Any]
    bytes: int
    elsewhere: bool
    first: int
    last: int | None = None


class Watch:
    """One backward, with those that it asks for.

    Args:
        elsewhere: storages that count elsewhere.
    """

    def __init__(self, elsewhere: Stores) -> None:
        self._elsewhere = elsewhere
        self._seen: dict[int, _Seen] = {}
        self._gone: list[_Seen] = []
        self._events: list[tuple[int, int]] = []  #: place of the node, and bytes inside it
        self._waiting: set[tuple[int, int]] = set()
        self._handles: list[Any] = []

    def follow(self, nodes: Iterable[Any], held: Mapping[int, Held], temporaries: Callable[[Any], int]) -> None:
        """Watch those of `nodes` of which it is known what they hold.

        Args:
            temporaries: of a node: tensors as large as a gradient that its backward allocates and releases.
        """
        for node in nodes:
            place = autograd.order(node)
            if place not in held or autograd.leaf_of(node) is not None:
                continue
            self._take_in(storage for one in held[place].storages if (storage := one()) is not None)
            slots = [(id(n), index) for n, index in node.next_functions]
            self._handles.append(node.register_prehook(untraced(self._before(place))))
            self._handles.append(node.register_hook(untraced(self._after(place, slots, temporaries(node)))))

    def end(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def peak(self, after: float, before: float) -> int | None:
        """Most bytes that were there while nodes ran whose places are between `after` and `before`; None where none
        was seen."""
        self._sweep()
        changes = [0] * (len(self._events) + 1)
        for one in (*self._gone, *self._seen.values()):
            if not one.elsewhere:
                changes[one.first] += one.bytes
                if one.last is not None:
                    changes[one.last] -= one.bytes
        live, peak = 0, None
        for change, (place, inside) in zip(changes, self._events, strict=False):
            live += change
            if after < place < before:
                peak = max(peak or 0, live + inside)
        return peak

    def among(self, stores: Stores) -> int:
        """Bytes of those storages of `stores` that were seen, and are there."""
        return sum(size for key, size in stores.alive().items() if key in self._seen and not self._seen[key].elsewhere)

    # ---- while it runs ------------------------------------------------------------------------------------------

    def _before(self, place: int) -> Callable[[Sequence[Any]], None]:
        def hook(gradients: Sequence[Any]) -> None:
            self._sweep()
            # What is new here is a sum, which was there beside what it is of.
            self._events.append((place, self._take_in(_storages(gradients)) if self._events else 0))

        return hook

    def _after(
        self, place: int, slots: Sequence[tuple[int, int]], number: int
    ) -> Callable[[Sequence[Any], Sequence[Any]], None]:
        def hook(made: Sequence[Any], given: Sequence[Any]) -> None:
            self._sweep()
            mine = sum(storage.nbytes() for storage in _storages(given))
            added = 0  # what is added to a gradient that waits, out of place at worst
            for slot, gradient in zip(slots, made, strict=False):
                if isinstance(gradient, torch.Tensor):
                    added += gradient.nbytes if slot in self._waiting else 0
                    self._waiting.add(slot)
            results = _storages(made)
            largest = max((storage.nbytes() for storage in results if storage._cdata not in self._seen), default=0)
            # One result is made after another, and what was allocated for it is released before the next.
            inside = number * max(mine, largest) if self._take_in(results) else 0
            self._events.append((place, max(inside, added - mine)))

        return hook

    def _take_in(self, storages: Iterable[Any]) -> int:
        """Note what has not been seen; its bytes."""
        new = 0
        for storage in storages:
            key = storage._cdata
            if key not in self._seen:
                new += storage.nbytes()
                self._seen[key] = _Seen(
                    weakref.ref(storage), storage.nbytes(), self._elsewhere.has(storage), len(self._events)
                )
        return new

    def _sweep(self) -> None:
        for key in [key for key, one in self._seen.items() if one.storage() is None]:
            gone = self._seen.pop(key)
            gone.last = len(self._events)
            self._gone.append(gone)


def _storages(tensors: Iterable[Any]) -> list[Any]:
    found = [t for t in tensors if isinstance(t, torch.Tensor) and t.layout == torch.strided]
    return [t.untyped_storage() for t in found]
