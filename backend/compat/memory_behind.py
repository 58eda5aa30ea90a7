"""What is behind tensors, found without a Python object for their storage.

Such an object holds the storage as long as it is there, and autograd adds up in place only what nobody else holds: a
backward whose storages are looked at needs more than one that is left alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

#: Of a tensor; equal to the `_cdata` of its storage.
_KEY = getattr(torch._C, "_storage_id", None)


@dataclass(slots=True)
class Behind:
    """A storage, as it is seen through tensors.

    Attributes:
        bytes: of the storage.
        seen: weak references to the tensors that it was seen behind, or to the storage itself: it is there as long as
            one of them is.
    """

    bytes: int
    seen: list[weakref.ref[Any]] = field(default_factory=list)

    def note(self, reference: weakref.ref[Any]) -> None:
        """It is behind this tensor, too."""
        if all(one is not reference for one in self.seen):
            self.seen.append(reference)

    def is_there(self) -> bool:
        return any(one() is not None for one in self.seen)


def plain(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among `values` that have one storage."""
    return [v for v in values if isinstance(v, torch.Tensor) and v.layout == torch.strided and _key(v) is not None]


def key_of(tensor: torch.Tensor) -> int:
    """What tells the storage of a tensor of `plain` from all others that are there."""
    found = _key(tensor)
    assert found is not None
    return found


def seen(tensor: torch.Tensor, *, held: bool) -> weakref.ref[Any]:
    """What tells that the storage of a tensor is there: the tensor; where the storage is to be `held` by others than
    tensors that are seen, itself."""
    return weakref.ref(tensor.untyped_storage() if held or _KEY is None else tensor)


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's storage; of a tensor that is all of it, as far as that tells, without asking it."""
    whole = not tensor._is_view() and not tensor.storage_offset() and tensor.is_contiguous()
    return tensor.nbytes if _KEY is not None and whole else tensor.untyped_storage().nbytes()


def _key(tensor: torch.Tensor) -> int | None:
    try:
        found: int = tensor.untyped_storage()._cdata if _KEY is None else _KEY(tensor)
    except (RuntimeError, NotImplementedError):  # a subclass may have none
        return None
    return found
