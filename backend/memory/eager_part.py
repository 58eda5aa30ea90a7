"""What the eager part of a step needs between compiled graphs and the scalar that is differentiated: a loss.

Seen while a step runs, after which a plan can be made that counts it. What a node has saved was read before the
backward; where it could not be, only the sizes of what it returned are known, and a bound is made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from optpass.backend.compat import memory_autograd as autograd
from optpass.backend.compat.memory_backward import Held

#: Names of nodes whose result is another view of what they were given, and whose gradient is one too.
VIEWS = ("View", "Transpose", "Permute", "Unsqueeze", "Squeeze", "Alias", "TBackward", "Detach", "Movedim", "Unflatten")
#: Views whose gradient is as large as what the view is of, and new.
PARTS = ("Slice", "Select", "Split", "Unbind", "Narrow", "AsStrided", "Diagonal", "Expand", "Chunk", "Unfold")
#: Nodes that pass the gradient on as it is.
SAME_GRADIENT = ("AddBackward", "SumBackward")
#: Tensors as large as the gradient that a node's backward allocates and releases inside itself
#: (torch/csrc/autograd/FunctionsManual.cpp, derivatives.yaml); of one that is not known and saves tensors, `UNKNOWN`.
TEMPORARIES = {
    "PowBackward0": 2, "PowBackward1": 3, "SqrtBackward": 1, "RsqrtBackward": 2, "AbsBackward": 1, "VarBackward": 2,
    "StdBackward": 1, "NormBackward": 1, "ClampBackward": 1, "ClampMin": 1, "ClampMax": 1, "MaxBackward": 1,
    "MinBackward": 1, "TopkBackward": 1, "SortBackward": 1, "L1Loss": 1, "KlDiv": 1, "WhereBackward": 1,
    "BinaryCrossEntropyWithLogits": 0, "BinaryCrossEntropy": 1,
    "MulBackward": 0, "ExpBackward": 0, "LogBackward": 0, "SigmoidBackward": 0,
    "TanhBackward": 0, "ReluBackward": 0, "GeluBackward": 0, "SiluBackward": 0, "SoftplusBackward": 0,
    "SoftmaxBackward": 0, "MseLoss": 0, "NllLoss": 0, "SmoothL1Loss": 0, "HuberLoss": 0, "MmBackward": 0,
    "BmmBackward": 0, "AddmmBackward": 0, "MeanBackward": 0, "SumBackward": 0, "NativeDropout": 0, "LayerNorm": 0,
    "Embedding": 0, "Copy": 0, "Clone": 0, "IndexBackward": 0, "GatherBackward": 0,
}  # fmt: skip
#: The same of a quotient whose divisor needs a gradient, and of one whose divisor does not.
QUOTIENT, FRACTION = 3, 0
UNKNOWN = 2
#: Tensors as large as its input that an operator allocates and releases in the forward, beside its result.
FORWARD_TEMPORARIES = {"MseLoss": 1, "SmoothL1Loss": 1, "HuberLoss": 1}
#: Operators that copy what they are given where it is transposed, and views that transpose.
CONTIGUOUS, TRANSPOSED = ("SoftmaxBackward", "LayerNorm", "GroupNorm"), ("TBackward", "Transpose", "Permute", "Movedim")
#: Of an index of classes.
INDEX_BYTES = 8
#: What a node saves of its own result.
OWN = ("_saved_result", "_saved_output", "_saved_out", "_saved_self_or_result")
#: Saved tensors as large as the tensor that is differentiated, where the node does not differentiate them too.
ALIKE = ("_saved_target", "_saved_other", "_saved_mask", "_saved_condition")


Given = Callable[[int, bool], torch.dtype | None]


@dataclass(frozen=True)
class EagerLoss:
    """What runs between the outputs of a compiled graph and the scalar that is differentiated, in bytes.

    Attributes:
        forward_bytes: most that it allocates at one time in the forward, beside the outputs.
        held_bytes: what is held from its forward to its backward.
        backward_bytes: most that it holds at one time in its backward, the gradients of the outputs included.
        leaves: parameters that it reads.
        kept_bytes: what its result holds until the step ends, beside a number.
        reads_outputs: its backward reads outputs of the compiled graph.
    """

    forward_bytes: int = 0
    held_bytes: int = 0
    backward_bytes: int = 0
    leaves: tuple[torch.Tensor, ...] = ()
    reads_outputs: bool = False
    kept_bytes: int = 0


def loss_of(
    roots: Iterable[Any], ours: Callable[[Any], bool], given: Given = lambda *_: None,
    known: Mapping[int, Held] | None = None, kept: Iterable[Any] = (),
) -> EagerLoss:  # fmt: skip
    """The eager operators between nodes that `ours` is true of and the `roots` of a backward that is running.

    Args:
        given: dtype of a tensor of so many elements, an index or not, that the caller holds (a target), which is then
            taken to be the one that a node has saved, and counts elsewhere; None where there is none.
        known: what nodes held before the backward, by their order. What no node made and is still there is held by
            others, and counts elsewhere. Of a node that is missing it is guessed, with `given`.
        kept: nodes whose results somebody holds, who counts them elsewhere.
    """
    walk = _Walk(ours, given, known or {}, set(kept))
    for node in autograd.walk(roots, ours):
        walk.add(node)
    return walk.measured()


@dataclass
class _Walk:
    """Liveness of one eager part: nodes in the order in which they ran, then the other way round."""

    ours: Callable[[Any], bool]
    given: Given
    known: Mapping[int, Held]
    kept: set[Any]
    cast: set[int] = field(default_factory=set)
    nodes: list[Any] = field(default_factory=list)
    root: list[int] = field(default_factory=list)
    reads_outputs: bool = False
    leaves: list[torch.Tensor] = field(default_factory=list)

    def add(self, node: Any) -> None:
        leaf = autograd.leaf_of(node)
        if leaf is not None:
            self.leaves.append(leaf)
        elif not self.ours(node):
            self.nodes.append(node)

    def measured(self) -> EagerLoss:
        self.nodes.sort(key=lambda node: node._sequence_nr())
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.bytes = [sum(size for _, size in autograd.output_sizes(node)) for node in self.nodes]
        for i in range(len(self.nodes)):
            self.root.append(self._root(i))
        for i in {self.root[self.place[node]] for node in self.kept if node in self.place}:
            self.bytes[i] = 0 if i >= 0 else self.bytes[i]
        until, extra = self._saved()
        saved = set(until)
        held = sum(self.bytes[i] for i in saved) + sum(extra)
        return EagerLoss(
            self._forward(saved, extra), held, self._backward(until, extra), tuple(self.leaves), self.reads_outputs
        )

    def _inputs(self, node: Any) -> list[int]:
        """Places of the nodes whose results a node reads."""
        return [self.place[n] for n, _ in node.next_functions if n in self.place]

    def _root(self, i: int) -> int:
        """The node that made the storage of a result: another one where it is a view; -1 where no node here did."""
        node = self.nodes[i]
        if not _named(node, (*VIEWS, *PARTS)):
            return i
        inputs = self._inputs(node)
        return self.root[inputs[0]] if inputs and inputs[0] < i else -1

    def _saved(self) -> tuple[dict[int, int], list[int]]:
        """Nodes whose results are held for the backward, with the last node that holds each there, and bytes that each
        node holds of others' making."""
        held: dict[int, int] = {}
        extra = [0] * len(self.nodes)
        counted: set[int] = set()
        self.at = {autograd.order(node): i for i, node in enumerate(self.nodes)}
        for i, node in enumerate(self.nodes):
            names = [n for n in autograd.saved_names(node) if _is_tensor(node, n)]
            own = [n for n in names if n.startswith(OWN)]
            others = [n for n in names if not n.startswith(OWN)]
            if own:
                held[self.root[i]] = i
            known = self.known.get(autograd.order(node))
            if known is not None:
                extra[i] = self._held(i, known, held, counted)
                continue
            if not others:
                continue
            for k in self._inputs(node):
                held.setdefault(self.root[k], i)  # the backward comes to the first that holds it last
            self.reads_outputs |= any(self._is_output(n) for n, _ in node.next_functions if n is not None)
            given = sum(n is not None for n, _ in node.next_functions)
            alike = [n for n in others if n in ALIKE]
            if alike and len([n for n in others if n in (*ALIKE, "_saved_self")]) > given:
                elements, size = self._input(node)
                dtype = self.given(elements, _named(node, ("NllLoss",)))
                extra[i] = size if dtype is None else 0
                if _named(node, ("MulBackward",)) and dtype is not None and not dtype.is_floating_point:
                    self.cast.add(i)  # is made a number of each element once more
        held.pop(-1, None)
        return held, extra

    def _held(self, i: int, known: Held, held: dict[int, int], counted: set[int]) -> int:
        """Take in what a node holds; bytes of what it held alone, of several such nodes the first, as the backward
        comes to it last."""
        for place, compiled in known.results_of:
            k = self.at.get(place)
            if k is not None:
                held.setdefault(self.root[k], i)
            self.reads_outputs |= compiled or (k is not None and self._is_output(self.nodes[k]))
        if _named(self.nodes[i], ("MulBackward",)) and not all(one.floating for one in known.outside):
            self.cast.add(i)  # is made a number of each element once more
        alone = {one.key: one.bytes for one in known.outside if one.storage() is None and one.key not in counted}
        counted.update(alone)
        return sum(alone.values())

    def _is_output(self, node: Any) -> bool:
        """Whether what a node returned is an output of a compiled graph, or a view of one."""
        return self.ours(node) or (node in self.place and self.root[self.place[node]] < 0)

    def _input(self, node: Any) -> tuple[int, int]:
        """Elements and bytes of a tensor as large as the largest that a node differentiates; of an index into that,
        as losses of classes have it, one for each row."""
        found = [(*pair, n) for n, _ in node.next_functions if n is not None for pair in autograd.output_sizes(n)]
        elements, size, source = max(found, key=lambda item: item[1], default=(0, 0, None))
        if source is not None and _named(node, ("NllLoss",)):
            classes = autograd.classes_of(source)
            return elements // classes, INDEX_BYTES * (elements // classes)
        return elements, size

    def _forward(self, saved: set[int], extra: list[int]) -> int:
        last = list(range(len(self.nodes)))
        for i, node in enumerate(self.nodes):
            for k in self._inputs(node):
                if self.root[k] >= 0:
                    last[self.root[k]] = max(last[self.root[k]], i)
        live = peak = 0
        for i in range(len(self.nodes)):
            live += (self.bytes[i] if self.root[i] == i else 0) + extra[i]
            peak = max(peak, live + self._inside_forward(self.nodes[i]))
            live -= sum(self.bytes[k] for k in range(i + 1) if last[k] == i and self.root[k] == k and k not in saved)
        return peak

    def _inside_forward(self, node: Any) -> int:
        number = next((n for name, n in FORWARD_TEMPORARIES.items() if name in node.name()), 0)
        before = node.next_functions[0][0] if node.next_functions else None
        if _named(node, CONTIGUOUS) and before is not None and _named(before, TRANSPOSED):
            number += 1
        return number * self._input(node)[1] if number else 0

    def _backward(self, until: dict[int, int], extra: list[int]) -> int:
        """Gradients wait until their node runs; what is saved is released when the last node that holds it has run."""
        held = sum(self.bytes[k] for k in until) + sum(extra)
        waiting: dict[Any, int] = {}
        peak = held
        for i in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[i]
            mine = waiting.pop(node) if node in waiting else sum(size for _, size in autograd.output_sizes(node))
            before = sum(waiting.values())
            for n, place in node.next_functions:
                if n is not None and autograd.leaf_of(n) is None:
                    sizes = autograd.output_sizes(n)
                    waiting[n] = waiting.get(n, 0) + (sizes[place][1] if place < len(sizes) else 0)
            new = 0 if _named(node, (*VIEWS, *SAME_GRADIENT)) else sum(waiting.values()) - before
            inside = (self._temporaries(node) + (i in self.cast)) * max(mine, new) if new else 0
            peak = max(peak, held + before + mine + new + inside)
            held -= sum(self.bytes[k] for k, last in until.items() if last == i) + extra[i]
        return peak

    def _temporaries(self, node: Any) -> int:
        """See `TEMPORARIES`."""
        if _named(node, ("DivBackward",)):
            return QUOTIENT if len(node.next_functions) > 1 and node.next_functions[1][0] is not None else FRACTION
        known = next((number for name, number in TEMPORARIES.items() if name in node.name()), None)
        if known is not None:
            return known
        views = _named(node, (*VIEWS, *PARTS, *SAME_GRADIENT))
        return UNKNOWN if not views and any(_is_tensor(node, n) for n in autograd.saved_names(node)) else 0


def _named(node: Any, kinds: tuple[str, ...]) -> bool:
    return any(kind in node.name() for kind in kinds)


def _is_tensor(node: Any, name: str) -> bool:
    try:
        value = getattr(node, name)
    except RuntimeError:
        return True  # released
    return isinstance(value, torch.Tensor)
