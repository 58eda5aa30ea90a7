"""Values of an ONNX graph as the analysis sees them: element type, sizes, and the numbers where they are few.

Here: `Value`, `Sequence`, ONNX element types as torch dtypes, meta tensors. Not here: how values are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from torch import fx

#: ONNX TensorProto.DataType -> torch dtype; text has none.
DTYPES: dict[int, torch.dtype] = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    4: torch.uint16,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    12: torch.uint32,
    13: torch.uint64,
    14: torch.complex64,
    15: torch.complex128,
    16: torch.bfloat16,
    17: torch.float8_e4m3fn,
    18: torch.float8_e4m3fnuz,
    19: torch.float8_e5m2,
    20: torch.float8_e5m2fnuz,
    24: torch.float8_e8m0fnu,
}
#: Types of less than a byte: elements per byte, and the dtype that stands for the packed bytes.
PACKED: dict[int, tuple[int, torch.dtype]] = {
    21: (2, torch.uint8),  # UINT4
    22: (2, torch.int8),  # INT4
    23: (2, torch.float4_e2m1fn_x2),  # FLOAT4E2M1
    25: (4, torch.uint8),  # UINT2
    26: (4, torch.int8),  # INT2
}
#: Types that a weight may have; indices and masks are not parameters.
PARAMETER_TYPES = frozenset({1, 2, 3, 10, 11, 16, 17, 18, 19, 20, 21, 22, 23, 25, 26})
FLOATING = frozenset({1, 10, 11, 16})
INT64, BOOL, FLOAT = 7, 9, 1

Size = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spec:
    """Element type (ONNX's number) and sizes of a tensor; None where an axis, or the rank, is not known."""

    elem: int
    shape: tuple[int | None, ...] | None

    @property
    def known(self) -> Size | None:
        """The sizes, if all are known."""
        if self.shape is None:
            return None
        sizes = [s for s in self.shape if s is not None]
        return tuple(sizes) if len(sizes) == len(self.shape) else None


@dataclass(slots=True, eq=False)
class Value:
    """A tensor of the graph.

    Attributes:
        elem: ONNX element type.
        shape: None where it is not known.
        node: FX node that makes it; None until something reads it.
        const: its numbers, where they are known and few.
        name: in the ONNX graph.
    """

    elem: int
    shape: Size | None
    node: fx.Node | None = None
    const: np.ndarray[Any, Any] | None = None
    name: str = ""

    @property
    def numel(self) -> int:
        """Number of elements; 0 where the sizes are not known."""
        return prod(self.shape) if self.shape is not None else 0


@dataclass(slots=True)
class Sequence:
    """A sequence value; `items` is None where its length is not known."""

    items: list[Item] | None = field(default_factory=list)


Item = Value | Sequence | None


@dataclass(frozen=True, slots=True)
class DtypeMap:
    """Element types to dtypes, floating ones replaced by `floating` if that is given."""

    floating: torch.dtype | None = None

    def dtype(self, elem: int) -> torch.dtype | None:
        """The dtype of one element, or of a byte of packed ones; None for text and unknown types."""
        if self.floating is not None and elem in FLOATING:
            return self.floating
        return PACKED[elem][1] if elem in PACKED else DTYPES.get(elem)

    def meta(self, elem: int, shape: Size) -> torch.Tensor | None:
        """A contiguous tensor on the meta device, packed types as the bytes they take; None if there can be none."""
        dtype = self.dtype(elem)
        if dtype is None:
            return None
        if elem in PACKED:
            per = PACKED[elem][0]
            shape = (*shape[:-1], -(-shape[-1] // per)) if shape else (1,)
        try:
            return torch.empty(shape, dtype=dtype, device="meta")
        except (RuntimeError, TypeError, OverflowError):  # sizes that no tensor can have
            return None


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes that the tensor's elements take in memory, repeated ones (stride 0) once."""
    kept = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0 or size == 0]
    return prod(kept) * tensor.element_size()


def attributes(pairs: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes with text decoded."""
    return {k: _text(v) for k, v in pairs.items()}


def _text(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, list) and value and isinstance(value[0], bytes):
        return [v.decode(errors="replace") for v in value]
    return value
