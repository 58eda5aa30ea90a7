"""What the eager part of a step needs between compiled graphs and the scalar that is differentiated: a loss.

Seen while a step runs, after which a plan can be made that counts it. What a node has saved was read before the
backward; where it could not be, only the sizes of what it returned are known, and a bound is made of them.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import Any

import torch

from optpass.backend.compat import memory_autograd as autograd
from optpass.backend.compat.memory_backward import Held
from optpass.backend.memory.eager.calls import begun_by, is_divergence
from optpass.backend.memory.eager.inside import PARTS, SAME_GRADIENT, VIEWS, is_cut, is_tensor, named, temporaries_of
from optpass.backend.memory.eager.timeline import AS_SEEN, Extent, Resize, Step, Timeline

#: Operators whose result, where it is one number, is in a storage as large as their input.
REDUCED_IN_PLACE = ("MseLoss", "SmoothL1Loss", "BinaryCrossEntropyBackward", "SoftMarginLoss")
#: Tensors as large as its input that an operator allocates and releases in the forward, beside its result.
FORWARD_TEMPORARIES = {"MseLoss": 1, "SmoothL1Loss": 1, "HuberLoss": 1, "Logsumexp": 1, "CrossEntropyWith": 2}
#: Operators that average, unless they say that they reduce otherwise: half precision in a float copy, on a CPU.
AVERAGED = ("MeanBackward", "HuberLoss", "CrossEntropyWith", *REDUCED_IN_PLACE)
MEAN, HALF_BYTES = 1, 2
#: Operators that copy what they are given where it is transposed, or a part with gaps, and views that transpose.
CONTIGUOUS, TRANSPOSED = ("SoftmaxBackward", "LayerNorm", "GroupNorm"), ("TBackward", "Transpose", "Permute", "Movedim")
#: What is not known.
NOTHING: Extent = ((0,), 0)
#: Of an index of classes.
INDEX_BYTES = 8
#: What a node saves of its own result.
OWN = ("_saved_result", "_saved_output", "_saved_out", "_saved_self_or_result")
#: Saved tensors as large as the tensor that is differentiated, where the node does not differentiate them too.
ALIKE = ("_saved_target", "_saved_other", "_saved_mask", "_saved_condition")


Given = Callable[[int, bool], torch.dtype | None]


@dataclass(frozen=True)
class EagerLoss:
    """What runs between the outputs of a compiled graph and the scalar that is differentiated, in bytes; at other
    sizes, what `timeline` says.

    Attributes:
        forward_bytes: most that it allocates at one time in the forward, beside the outputs.
        held_bytes: what is held from its forward to its backward.
        backward_bytes: most that it holds at one time in its backward, the gradients of the outputs included.
        leaves: parameters that it reads.
        kept_bytes: what its results hold that the caller keeps.
        reads_outputs: its backward reads outputs of the compiled graph.
        gone: where it does, bytes of each of the others that were released before.
        between: places of nodes that it is between.
        early_bytes: most that the operators allocate at one time that ran before a graph without gradients did, where
            they run once more on what that has returned.
        timeline: its operators.
    """

    forward_bytes: int = 0
    held_bytes: int = 0
    backward_bytes: int = 0
    leaves: tuple[torch.Tensor, ...] = field(default=(), compare=False, repr=False)
    reads_outputs: bool = False
    gone: tuple[int, ...] = ()
    kept_bytes: int = 0
    between: tuple[float, float] = field(default=(-inf, inf), compare=False, repr=False)
    early_bytes: int = field(default=0, compare=False, repr=False)
    timeline: Timeline | None = field(default=None, compare=False, repr=False)

    def at(self, sizes: Resize) -> EagerLoss:
        """In another call."""
        if self.timeline is None or sizes is AS_SEEN:
            return self
        line = self.timeline
        return replace(
            self,
            forward_bytes=_in_proportion(self.forward_bytes, line.forward(), line.forward(sizes)),
            held_bytes=_in_proportion(self.held_bytes, line.held(), line.held(sizes)),
            backward_bytes=_in_proportion(self.backward_bytes, line.backward(), line.backward(sizes)),
            gone=(),  # which are these is not known
        )

    def reading(self, other: EagerLoss) -> EagerLoss:
        """The same, reading what either of the two reads of the outputs."""
        reads = [loss for loss in (self, other) if loss.reads_outputs]
        gone = functools.reduce(operator.and_, [Counter(loss.gone) for loss in reads]) if reads else Counter[int]()
        return replace(self, reads_outputs=bool(reads), gone=tuple(sorted(gone.elements())))


def _in_proportion(found: int, seen: int, resized: int) -> int:
    return found * resized // seen if seen else resized


def loss_of(
    roots: Iterable[Any], ours: Callable[[Any], bool], given: Given = lambda *_: None,
    known: Mapping[int, Held] | None = None, kept: Iterable[Any] = (), run: Any = None,
    inside: Mapping[int, int] | None = None, let_go: Sequence[tuple[int, int]] = (),
    old: Sequence[tuple[int, int]] = (), cleared: Sequence[tuple[int, int]] = (), early: int = 0,
) -> EagerLoss:  # fmt: skip
    """The eager operators between nodes that `ours` is true of and the `roots` of a backward that is running.

    Args:
        given: dtype of a tensor of so many elements, an index or not, that the caller holds (a target), which is then
            taken to be the one that a node has saved, and counts elsewhere; None where there is none.
        known: what nodes held before the backward, by their order. What no node made and is still there is held by
            others, and counts elsewhere. Of a node that is missing it is guessed, with `given`.
        kept: nodes whose results somebody holds, who counts them elsewhere.
        run: of several compiled graphs, the node of which the loss is: what ran behind its forward and before that of
            the next one.
        inside: bytes that operators allocate and release in the forward, by the order of their nodes.
        let_go: of outputs that are released before the backward: the order of the next node, and bytes.
        old, cleared: the same of results and of gradients of earlier steps.
        early: place of the node that was next when a graph without gradients ran.
    """
    walk = _Walk(ours, given, known or {}, set(kept), run, inside or {}, let_go, old, cleared, early)
    for node in autograd.walk(roots, ours if run is None else lambda node: node is run):
        walk.add(node)
    return walk.measured()


@dataclass
class _Walk:
    """One eager part: nodes in the order in which they ran, and what is to be known of each."""

    ours: Callable[[Any], bool]
    given: Given
    known: Mapping[int, Held]
    kept: set[Any]
    run: Any
    inside: Mapping[int, int]
    let_go: Sequence[tuple[int, int]]
    old: Sequence[tuple[int, int]]
    cleared: Sequence[tuple[int, int]]
    early: int
    cast: set[int] = field(default_factory=set)
    nodes: list[Any] = field(default_factory=list)
    root: list[int] = field(default_factory=list)
    reads_outputs: bool = False
    leaves: list[torch.Tensor] = field(default_factory=list)
    compiled: list[int] = field(default_factory=list)

    def add(self, node: Any) -> None:
        if self.ours(node):
            self.compiled.append(autograd.order(node))
        elif autograd.leaf_of(node) is None:
            self.nodes.append(node)
            found = (autograd.leaf_of(n) for n, _ in node.next_functions if n is not None)
            self.leaves += [leaf for leaf in found if leaf is not None]

    def measured(self) -> EagerLoss:
        self.nodes.sort(key=lambda node: node._sequence_nr())
        self.place = {node: i for i, node in enumerate(self.nodes)}
        for i in range(len(self.nodes)):
            self.root.append(self._root(i))
        elsewhere = {self.root[self.place[node]] for node in self.kept if node in self.place}
        until, extra = self._saved()
        others: dict[Any, int] = {}
        steps = (self._step(i, i in elsewhere, extra[i], others) for i in range(len(self.nodes)))
        first, last = self.between()
        places = [i for i, node in enumerate(self.nodes) if first < autograd.order(node) < last]
        part = range(places[0], places[-1] + 1) if places else range(0)
        begin = autograd.order(self.nodes[part.start]) if part else inf
        there = [[one for one in earlier if one[0] > begin] for earlier in (self.old, self.cleared)]
        released = sorted([*self.let_go, *there[0], *there[1]])
        old, cleared = (tuple(((size,), 1) for _, size in one) for one in there)
        line = Timeline(tuple(self._without(released, steps, part)), until, part, old, cleared)
        early = range(part.start, next((i for i in part if autograd.order(self.nodes[i]) >= self.early), part.stop))
        return EagerLoss(
            line.forward(), line.held(), line.backward(), tuple(self.leaves), self.reads_outputs,
            between=(first, last), early_bytes=line.without_gradients(early), timeline=line,
        )  # fmt: skip

    def _without(self, rest: Sequence[tuple[int, int]], steps: Iterable[Step], part: range) -> Iterator[Step]:
        """`steps`, each of `part` with what of the `rest` is released between the one before and it."""
        for i, step in enumerate(steps):
            gone = [size for at, size in rest if i in part and at <= autograd.order(self.nodes[i])]
            rest = rest[len(gone) :]
            yield replace(step, let_go=tuple(((size,), 1) for size in gone)) if gone else step

    def between(self) -> tuple[float, float]:
        """Places of the compiled graph that the loss is of, and of the next one."""
        mine = -inf if self.run is None else autograd.order(self.run)
        return mine, min((place for place in self.compiled if place > mine), default=inf) if self.run else inf

    def _step(self, i: int, elsewhere: bool, held: list[Extent], others: dict[Any, int]) -> Step:
        node, goes = self.nodes[i], []
        made = tuple(autograd.output_extents(node))
        for n, place in node.next_functions:
            if n is not None and autograd.leaf_of(n) is None:
                extents = autograd.output_extents(n)
                key = self.place[n] if n in self.place else others.setdefault(n, -1 - len(others))
                goes.append((key, extents[place] if place < len(extents) else NOTHING))
        behind, read = self._behind(node), [k for n in (node, *begun_by(node)) for k in self._inputs(n)]
        return Step(
            made=() if elsewhere else behind, kept=behind if elsewhere else (), let_go=(), given=made,
            root=self.root[i], inputs=tuple(read), goes=tuple(goes), held=tuple(held),
            inside=self._inside_forward(node), passes=named(node, (*VIEWS, *SAME_GRADIENT)),
            temporaries=temporaries_of(node) + (i in self.cast),
        )  # fmt: skip

    def _behind(self, node: Any) -> tuple[Extent, ...]:
        """What is behind a result: where that is reduced in place, more than it shows."""
        made = tuple(autograd.output_extents(node))
        return (self._input(node),) if named(node, REDUCED_IN_PLACE) and all(not one[0] for one in made) else made

    def _inputs(self, node: Any) -> list[int]:
        """Places of the nodes whose results a node reads."""
        return [self.place[n] for n, _ in node.next_functions if n in self.place]

    def _root(self, i: int) -> int:
        """The node that made the storage of a result: another one where it is a view; -1 where no node here did."""
        node = self.nodes[i]
        if not named(node, (*VIEWS, *PARTS)):
            return i
        inputs = self._inputs(node)
        return self.root[inputs[0]] if inputs and inputs[0] < i else -1

    def _saved(self) -> tuple[dict[int, int], list[list[Extent]]]:
        """Nodes whose results are held for the backward, with the last node that holds each there, and what each node
        holds of others' making."""
        held: dict[int, int] = {}
        extra: list[list[Extent]] = [[] for _ in self.nodes]
        counted: set[int] = set()
        self.at = {autograd.order(node): i for i, node in enumerate(self.nodes)}
        for i, node in enumerate(self.nodes):
            known = self.known.get(autograd.order(node))
            again = known is not None and known.checkpoints
            names = [] if again else [n for n in autograd.saved_names(node) if is_tensor(node, n)]
            own = [n for n in names if n.startswith(OWN)]
            others = [n for n in names if not n.startswith(OWN)]
            if own:
                held[self.root[i]] = i
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
                like = self._input(node)
                dtype = self.given(prod(like[0]), named(node, ("NllLoss",)))
                extra[i] = [like] if dtype is None else []
                if named(node, ("MulBackward",)) and dtype is not None and not dtype.is_floating_point:
                    self.cast.add(i)  # is made a number of each element once more
        held.pop(-1, None)
        return held, extra

    def _held(self, i: int, known: Held, held: dict[int, int], counted: set[int]) -> list[Extent]:
        """Take in what a node holds; what it held alone, of several such nodes the first, as the backward comes to it
        last."""
        for place, compiled in known.results_of:
            k = self.at.get(place)
            if k is not None:
                held.setdefault(self.root[k], i)
            self.reads_outputs |= compiled or (k is not None and self._is_output(self.nodes[k]))
        if named(self.nodes[i], ("MulBackward",)) and not all(one.floating for one in known.outside):
            self.cast.add(i)  # is made a number of each element once more
        alone = {one.key: one.extent for one in known.outside if one.storage() is None and one.key not in counted}
        counted.update(alone)
        return list(alone.values())

    def _is_output(self, node: Any) -> bool:
        """Whether what a node returned is an output of a compiled graph, or a view of one."""
        return self.ours(node) or (node in self.place and self.root[self.place[node]] < 0)

    def _input(self, node: Any) -> Extent:
        """A tensor as large as the largest that a node differentiates; an index into that, as losses of classes have
        it, one for each row."""
        found = [one for n, k in node.next_functions if n is not None for one in autograd.output_extents(n)[k : k + 1]]
        shape, itemsize = max(found, key=lambda one: prod(one[0]) * one[1], default=NOTHING)
        if named(node, ("NllLoss",)) and shape:
            classes = min(1, len(shape) - 1)
            return (*shape[:classes], *shape[classes + 1 :]), INDEX_BYTES
        return shape, itemsize

    def _inside_forward(self, node: Any) -> tuple[Extent, ...]:
        number = next((n for name, n in FORWARD_TEMPORARIES.items() if name in node.name()), 0)
        before = node.next_functions[0][0] if node.next_functions else None
        if named(node, CONTIGUOUS) and before is not None and (named(before, TRANSPOSED) or is_cut(before)):
            number += 1
        number += is_divergence(node, self._saves_numbers, self._saves_its_own)
        told = self.inside.get(autograd.order(node), 0)
        return (*((self._input(node),) * number), *self._averaged(node), *((((told,), 1),) if told else ()))

    def _averaged(self, node: Any) -> tuple[Extent, ...]:
        shape, itemsize = self._input(node) if named(node, AVERAGED) else NOTHING
        mean = itemsize == HALF_BYTES and getattr(node, "_saved_reduction", MEAN) == MEAN and autograd.is_on_cpu(node)
        return ((shape, 2 * HALF_BYTES),) if mean else ()

    def _saves_numbers(self, node: Any) -> bool:
        known = self.known.get(autograd.order(node))
        return known is not None and any(one.floating for one in known.outside)

    def _saves_its_own(self, node: Any) -> bool:
        known = self.known.get(autograd.order(node))
        return known is not None and any(one.floating and one.storage() is None for one in known.outside)
