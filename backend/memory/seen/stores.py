"""Storages, weakly: what is behind tensors, as long as it is there."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from optpass.passes.wrappers import PLAIN, plain_tensors


class Stores:
    """Weak references to the storages behind tensors, each once."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._found: dict[int, Any] = {}
        self.add(tensors)

    def __bool__(self) -> bool:
        """Whether any was taken in and not left out since."""
        return bool(self._found)

    @classmethod
    def behind(cls, storages: Iterable[Any]) -> Stores:
        """Those given."""
        found = cls()
        found.keep((storage._cdata, weakref.ref(storage)) for storage in storages)
        return found

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take in what is behind `tensors`."""
        found = self._found
        for tensor in tensors:
            for storage in storages_of(tensor):
                key = storage._cdata
                known = found.get(key)
                if known is None or known() is None:
                    found[key] = weakref.ref(storage)

    def update(self, other: Stores) -> None:
        """Take in those of `other`."""
        self.keep(other._found.items())

    def with_those_of(self, other: Stores | None) -> Stores:
        """Both."""
        found = Stores()
        for stores in (self, other):
            found.update(stores or Stores())
        return found

    def keep(self, references: Iterable[tuple[int, weakref.ref[Any]]]) -> None:
        """Take in storages by their keys and weak references."""
        for key, reference in references:
            if self._found.setdefault(key, reference)() is None:  # its place in memory was taken by another
                self._found[key] = reference

    def has(self, storage: Any) -> bool:
        """Whether a storage that is there is one of them."""
        return self.has_key(storage._cdata)

    def has_key(self, key: int) -> bool:
        """The same of one by its key."""
        reference = self._found.get(key)
        return reference is not None and reference() is not None

    def behind_any(self, tensor: torch.Tensor) -> bool:
        """Whether one of them is behind a tensor, or a part of it."""
        return any(map(self.has, storages_of(tensor)))

    def had(self, reference: weakref.ref[Any] | None) -> bool:
        """Whether a weak reference without a callback is to one of them, which may have been released."""
        return any(one is reference for one in self._found.values())

    def drop(self, other: Stores) -> None:
        """Leave out those of `other`."""
        for key, reference in other._found.items():
            if reference() is not None:  # else its place in memory may have been taken by one of these
                self._found.pop(key, None)

    def prune(self) -> None:
        """Leave out those that have been released."""
        self._found = {key: reference for key, reference in self._found.items() if reference() is not None}

    def alive(self) -> dict[int, int]:
        """Bytes of each that has not been released."""
        found = {}
        for key, reference in self._found.items():
            storage = reference()
            if storage is not None:
                found[key] = storage.nbytes()
        return found

    def bytes(self) -> int:
        """Of all that have not been released."""
        return sum(self.alive().values())

    def sizes(self) -> list[tuple[Any, int]]:
        """A weak reference to each that has not been released, with its bytes."""
        return [(self._found[key], size) for key, size in self.alive().items()]

    def storages(self) -> Iterator[Any]:
        """Those that have not been released."""
        for reference in self._found.values():
            storage = reference()
            if storage is not None:
                yield storage


def storages_of(tensor: torch.Tensor) -> Sequence[Any]:
    """What is behind a tensor, or behind the parts of a wrapper or a sparse one. This is asked of every tensor of every
    call."""
    if type(tensor) in PLAIN and tensor.layout is torch.strided:
        return (tensor.untyped_storage(),)
    return [part.untyped_storage() for part in plain_tensors(tensor) if part.layout == torch.strided]
