"""What a tensor held, to compare with later: a private copy, or, of a large one, its runs of equal elements.

Large masks are few runs: a causal one has two in a row. As runs they take a thousandth of the memory that a copy takes,
which on a GPU would be taken from the model for as long as the compiled graph lives.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

#: Bytes up to which a copy is kept.
COPY_BYTES = 1 << 20
#: Bytes of the largest tensor that is looked at. Of what has too many runs, copies are kept up to `COPIED_BYTES`.
MAX_BYTES, COPIED_BYTES = 1 << 32, 1 << 28
#: Bytes whose runs are found at once, and bytes for each byte of the runs at least.
PART_BYTES, SAVING = 1 << 26, 16

Runs = list[tuple[torch.Tensor, torch.Tensor]]


class Held:
    """The contents of a tensor as they were.

    Attributes:
        copy: of all of it; None where runs stand for it.
        shape, dtype, device, nbytes: of the tensor.
    """

    def __init__(self, tensor: torch.Tensor, copy: torch.Tensor | None, runs: Runs) -> None:
        self.copy, self._runs = copy, runs
        self.shape, self.dtype, self.device, self.nbytes = tensor.shape, tensor.dtype, tensor.device, tensor.nbytes

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Held | None:
        """What `tensor` holds now; None where keeping that would take too much memory, or looking at it does."""
        if tensor.nbytes <= COPY_BYTES:
            return cls(tensor, private_copy(tensor), [])
        try:
            runs = _compact(tensor) if tensor.nbytes <= MAX_BYTES else None
            if runs is not None:
                return cls(tensor, None, runs)
            return cls(tensor, private_copy(tensor), []) if tensor.nbytes <= COPIED_BYTES else None
        except torch.OutOfMemoryError:
            return None

    def same(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` holds the same, bit by bit, so that NaN equals itself and -0.0 is not 0.0.

        False, too, where there is no memory to find out.
        """
        if tensor.shape != self.shape or tensor.dtype != self.dtype or tensor.device != self.device:
            return False
        try:
            if self.copy is not None:
                with torch.no_grad():
                    return torch.equal(_bits(tensor.detach()), _bits(self.copy))
            pairs = zip(self._runs, _runs(tensor), strict=True)  # parts of equal sizes, for the tensors are
            return all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in pairs)
        except torch.OutOfMemoryError:  # not known
            return False


def private_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The contents of `tensor`, in memory of our own."""
    with torch.no_grad():
        return tensor.detach().clone(memory_format=torch.contiguous_format)


def _compact(tensor: torch.Tensor) -> Runs | None:
    """The runs of a tensor, part by part, or None where they take more than a part of its memory."""
    found: Runs = []
    left = tensor.nbytes // SAVING
    for values, lengths in _runs(tensor):
        left -= values.nbytes + lengths.nbytes
        if left < 0:
            return None
        found.append((values, lengths))
    return found


def _runs(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each part of a tensor, the bits of each run of equal elements, and how many elements it has."""
    with torch.no_grad():
        bits = _bits(tensor.detach())
        for part in torch.split(bits, PART_BYTES // bits.itemsize):
            values, lengths = torch.unique_consecutive(part, return_counts=True)
            yield values, lengths


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().view(-1)
    whole = flat.nbytes % 8 == 0 and (flat.storage_offset() * flat.itemsize) % 8 == 0
    return flat.view(torch.int64 if whole else torch.uint8)  # eight bytes at a time compare five times as fast
