"""One ONNX node as its rule sees it: attributes decoded, inputs with sizes, and the means to emit ATen calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from optpass.passes.onnx_roofline.builder import Builder
from optpass.passes.onnx_roofline.value import Item, Sequence, Size, Spec, Value


class NotKnown(Exception):
    """A rule cannot tell the cost of this node; the message says why, for the notes."""


class ShapeNotKnown(NotKnown):
    """The sizes of an input are not known, because of an op before this one."""


@dataclass
class Call:
    """A node of op `op` of `domain` at opset `version`, its results `specs`; see `Builder` for `b`."""

    op: str
    domain: str
    version: int
    attrs: dict[str, Any]
    inputs: list[Item]
    specs: list[Spec | None]
    b: Builder

    def has(self, index: int) -> bool:
        """Whether the optional input is given."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute, or its default."""
        return self.attrs.get(name, default)

    def value(self, index: int) -> Value:
        """The tensor input `index`.

        Raises:
            NotKnown: it is not given, or no tensor.
        """
        item = self.inputs[index] if index < len(self.inputs) else None
        if isinstance(item, Sequence):
            raise NotKnown(f"input {index} is a sequence")
        if item is None:
            raise ShapeNotKnown("an input is missing, or nothing is known of it")
        return item

    def const(self, index: int) -> np.ndarray[Any, Any] | None:
        """The numbers of an input, where they are known."""
        item = self.inputs[index] if index < len(self.inputs) else None
        return item.const if isinstance(item, Value) else None

    def ints(self, index: int, attr: str) -> list[int] | None:
        """Ints that older opsets give as an attribute and newer ones as an input; None if neither is known."""
        numbers = self.const(index)
        if numbers is not None:
            return [int(n) for n in numbers.reshape(-1)]
        given = self.attrs.get(attr)
        if given is None:
            return None
        return [int(given)] if isinstance(given, int) else [int(n) for n in given]

    def shape(self, index: int) -> Size:
        """Sizes of an input.

        Raises:
            NotKnown: they are not known.
        """
        value = self.value(index)
        if value.shape is None:
            raise ShapeNotKnown("the shape of an input is not known")
        return value.shape

    def t(self, index: int) -> fx.Node:
        """Input `index` as a node.

        Raises:
            NotKnown: its sizes are not known, or it holds text.
        """
        value = self.value(index)
        self.shape(index)
        node = self.b.node_of(value)
        if node is None:
            raise NotKnown(f"an input has {_element(value.elem)}")
        return node

    def a(self, index: int) -> fx.Node | float | int | bool:
        """Input `index`: a plain number where it is a known scalar, as a compiler would inline it; else a node."""
        value = self.value(index)
        if value.const is not None and value.const.size == 1 and value.const.dtype.kind in "biuf":
            number: float | int | bool = value.const.reshape(-1)[0].item()
            return number
        return self.t(index)

    def all(self) -> list[fx.Node | float | int | bool]:
        """Every given input, at least one of them a node."""
        given = [i for i in range(len(self.inputs)) if self.has(i)]
        found = [self.a(i) for i in given]
        if given and not any(isinstance(x, fx.Node) for x in found):
            found[0] = self.t(given[0])
        return found

    def out(self, index: int = 0) -> torch.Tensor:
        """A meta tensor like output `index`.

        Raises:
            NotKnown: shape inference does not tell its sizes.
        """
        spec = self.specs[index] if index < len(self.specs) else None
        sizes = spec.known if spec is not None else None
        if spec is None or sizes is None:
            raise NotKnown("the shape of its result is not known")
        meta = self.b.dtypes.meta(spec.elem, sizes)
        if meta is None:
            raise NotKnown(f"its result has {_element(spec.elem)}")
        return meta

    def outs(self) -> tuple[torch.Tensor | None, ...]:
        """Meta tensors of all outputs; None for those left out."""
        return tuple(None if spec is None else self.out(i) for i, spec in enumerate(self.specs))

    def wants(self, index: int) -> bool:
        """Whether the node names output `index`."""
        return index < len(self.specs) and self.specs[index] is not None

    def emit(self, name: str, *args: Any, out: object = None, **kwargs: Any) -> fx.Node:
        """An ATen call; its result is like output 0 unless `out` says otherwise."""
        return self.b.emit(name, *args, out=self.out() if out is None else out, **kwargs)


def _element(elem: int) -> str:
    return {0: "an element type that is not known", 8: "text, which has no arithmetic"}.get(
        elem, "sizes that no tensor can have"
    )


#: Nodes of the outputs in order (None for one that is left out), or one node; raises `NotKnown`.
Result = fx.Node | Iterable[fx.Node | None]
Rule = Callable[[Call], Result]
