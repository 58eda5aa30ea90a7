"""One call of an operator, with its arguments by name: what the formulas of workspaces read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optpass.passes.memory.unbacked import value_of


@dataclass(frozen=True)
class Call:
    """An operator with its arguments and results; tensors may be fake.

    Attributes:
        name: the operator's without its overload, such as 'mm' or 'mkldnn._linear_pointwise' (aten has no prefix).
        overload: the overload, such as 'Tensor'.
        target: the operator.
        args: arguments by their names in the schema; those left to their defaults are missing.
        out: what it returns.
    """

    name: str
    overload: str
    target: Any
    args: dict[str, Any]
    out: Any

    @classmethod
    def of(cls, target: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Call | None:
        """The call, or None where `target` is no operator (a `getitem`, a higher-order operator)."""
        if not isinstance(target, torch._ops.OpOverload):
            return None
        namespace, _, name = target.overloadpacket._qualified_op_name.partition("::")
        name = name if namespace == "aten" else f"{namespace}.{name}"
        names = [argument.name for argument in target._schema.arguments]
        return cls(name, target._overloadname, target, dict(zip(names, args, strict=False)) | kwargs, out)

    def get(self, name: str, default: Any = None) -> Any:
        """The argument `name`, or `default` where the call leaves it out."""
        return self.args.get(name, default)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor that is the argument `name`."""
        value = self.args[name]
        assert isinstance(value, torch.Tensor), name
        return value

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors among the arguments, those in lists too, with the arguments' names."""
        for name, value in self.args.items():
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, torch.Tensor):
                    yield name, item

    @property
    def nbytes(self) -> int:
        """Bytes of its operands and of what it returns, each counted by itself."""
        returned = self.out if isinstance(self.out, (list, tuple)) else (self.out,)
        tensors = (*(tensor for _, tensor in self.tensors()), *(t for t in returned if isinstance(t, torch.Tensor)))
        return sum(map(nbytes, tensors))

    def result(self) -> torch.Tensor | None:
        """The first tensor that it returns."""
        for value in self.out if isinstance(self.out, (list, tuple)) else (self.out,):
            if isinstance(value, torch.Tensor):
                return value
        return None


def elements(tensor: torch.Tensor) -> int:
    """Number of elements; where it depends on symbols, of the sizes that were seen."""
    return number(tensor.numel())


def number(value: Any) -> int:
    """An int for a size, with the value that a symbol had when it was traced."""
    return int(value_of(value))


def nbytes(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """Bytes of the elements of `tensor`, as `dtype` where one is given."""
    return elements(tensor) * (dtype or tensor.dtype).itemsize


def sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape, symbols replaced."""
    return tuple(number(size) for size in tensor.shape)


def strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides, symbols replaced."""
    return tuple(number(stride) for stride in tensor.stride())


def copied(tensor: Any, memory_format: torch.memory_format = torch.contiguous_format) -> int:
    """Bytes of `tensor.contiguous()`, and of the block that it goes through: 0 where it is contiguous, or no tensor."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_contiguous(memory_format=memory_format):
        return 0
    return nbytes(tensor) + transposing(tensor)


def transposing(tensor: torch.Tensor) -> int:
    """Bytes of the block through which a transposed matrix is copied to a contiguous one of its dtype
    (`copy_same_type_transpose_`, aten/src/ATen/native/Copy.cpp)."""
    if tensor.dim() != 2 or tensor.is_contiguous() or strides(tensor) != (1, sizes(tensor)[0]):
        return 0
    least, side = 60 * 60, 120 if tensor.dtype == torch.uint8 else 60
    return side * side * tensor.element_size() if elements(tensor) >= least else 0


def common_dtype(values: Sequence[Any]) -> torch.dtype:
    """The dtype that a TensorIterator computes in: scalars and 0-dim tensors count only by a higher category."""
    found: torch.dtype | None = None
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            found = value.dtype if found is None else torch.promote_types(found, value.dtype)
    for value in values:
        dtype = value.dtype if isinstance(value, torch.Tensor) else _of_scalar(value)
        if dtype is not None and (found is None or _category(dtype) > _category(found)):
            found = dtype if found is None else torch.promote_types(found, dtype)
    return found or torch.get_default_dtype()


def _of_scalar(value: Any) -> torch.dtype | None:
    if isinstance(value, (bool, torch.SymBool)):
        return torch.bool
    if isinstance(value, (int, torch.SymInt)):
        return torch.long
    if isinstance(value, (float, torch.SymFloat)):
        return torch.get_default_dtype()
    return torch.complex64 if isinstance(value, complex) else None


def _category(dtype: torch.dtype) -> int:
    if dtype.is_complex:
        return 3
    return 2 if dtype.is_floating_point else int(dtype != torch.bool)
