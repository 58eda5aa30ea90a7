"""From AOTAutograd's joint graph to the search's problem, and what is taken to happen between its two halves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from optpass.backend.compat import partition as parts
from optpass.backend.memory.budget import Budget
from optpass.backend.memory.partition.ready import Modules, saved_by
from optpass.backend.memory.probe import library_workspace
from optpass.backend.memory.replay.graph_values import hint, ints, laid_out_anew
from optpass.backend.memory.replay.tail import NO_TAIL, Tail
from optpass.passes.devices import DeviceSpec
from optpass.passes.memory import redraw
from optpass.passes.memory.plan import Ledger
from optpass.passes.memory.pricing import node_prices
from optpass.passes.memory.problem import Price, Problem, build
from optpass.passes.memory.tangents import behind_tangents, is_tangent

#: Of a class that a loss is given for each row.
INDEX_BYTES = 8
#: Bytes of a value that a loss computes with, at least.
_WIDE = torch.float32.itemsize

#: Of a number that is an operand, in double precision.
NUMBER_BYTES = 8
_SAVES_NUMBERS = frozenset({torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor})

#: Inductor's settings that need less memory than its default ones: tensors keep their layout around convolutions.
LEAN: dict[str, Any] = {"layout_optimization": False}


def numbers_kept(joint: fx.GraphModule) -> int:
    """Bytes that stay of a compile from its first call on: each number that the forward multiplies by is a tensor to
    autograd, which saves it while the graph is traced, in the host's memory whatever the device of the graph."""
    if not _on_cpu(joint):
        return 0
    nodes = list(joint.graph.nodes)
    backward = behind_tangents(nodes)
    kept = [
        n for n in nodes if n.target in _SAVES_NUMBERS and n not in backward and isinstance(n.args[1], (int, float))
    ]
    return NUMBER_BYTES * len(kept)


def problem_of(
    joint: fx.GraphModule, default: Modules, n_outputs: int, device: Callable[[], DeviceSpec], *, fused: bool,
    tail: Tail | None = None, follow: int = 0,
) -> Problem:  # fmt: skip
    """The search's problem.

    Args:
        joint: forward and backward together.
        default: its halves as the default partitioner has them, from which the baseline is taken.
        n_outputs: outputs of the forward that are not saved tensors.
        device: what times are predicted for.
        fused: the executor fuses, as Inductor does.
        tail: what happens between the halves; default: what the joint graph says.
        follow: bytes needed then on top of what is held, at least.
    """
    forward, backward = parts.outputs(joint, n_outputs)
    saved = saved_by(default)
    price = node_prices(joint.graph, device(), fused=fused, hint=hint, library=library_workspace)
    cost = lambda node: Price() if redraw.is_state(node) else price(node)  # noqa: E731  # it is in what runs from the state
    problem = build(
        joint.graph, *([n for n in part if isinstance(n, fx.Node)] for part in (forward, backward)),
        saved=saved, price=cost, hint=hint, granularity=1 if _on_cpu(joint) else 512,
    )  # fmt: skip
    tail = tail or tails_of(joint)[-1]
    tangents = sum(s.bytes for s in problem.storages if s.tangent)
    outputs = sum(problem.storages[s].bytes for s in problem.forward_outputs)
    problem.tail = max(tail.beside(tangents, outputs), follow - tangents)
    if anew := laid_out_anew(_tangents(joint)):
        problem.tail = max(problem.tail, tail.kept_bytes + anew)
    problem.outputs_held, problem.kept, problem.early = tail.holds_outputs, tail.kept_bytes, tail.early_bytes
    problem.saved_held = tail.retains
    problem.tangents_held = not parts.tangents_are_boxed()
    return problem


def assumed_of(joint: fx.GraphModule, budget: Budget) -> list[tuple[Tail, Ledger]]:
    """What happens between forward and backward, and what is there beside the statics: as seen, or from likely on;
    a loss reads targets, and other modules run that are compiled on their own."""
    if budget.tail is not None:
        return [(budget.tail, Ledger())]
    tails = (*tails_of(joint), *tails_of_one(joint))
    tails = (tails_of(joint)[-1], between_graphs(joint)) if budget.shared else tails
    tails = (run_again(joint),) if budget.again else tails
    plain = targets_of(joint)
    held = targets_of(joint, budget.around)
    more = held if tails[0].saved_bytes else 2 * held  # the difference between the two, too
    squares = () if budget.shared or budget.again else squares_of(joint)
    found = [(tails[0], more), *((tail, held) for tail in squares)] if held > plain else []
    found += [(tail, plain) for tail in tails]
    found = [*((tail, plain) for tail in taught(joint, budget)), *found]
    likely = [(tail, Ledger(inputs=size)) for tail, size in found]
    apart = budget.apart if budget.shared else None
    if apart is not None and apart.total:
        return [*((tail, more.plus(apart)) for tail, more in likely), *likely]
    if budget.held or budget.shared or budget.again:
        return likely
    released = [let_go(tail, more, joint, budget) for tail, more in likely]
    return released if budget.held is False else [*likely, *(one for one in released if one not in likely)]


def let_go(tail: Tail, more: Ledger, joint: fx.GraphModule, budget: Budget) -> tuple[Tail, Ledger]:
    """The same where the caller holds the loss alone: other outputs beside it, and what earlier graphs have handed on,
    are gone when the backward begins."""
    handed = sum(size for _, size in budget.handed)
    losses = sum(size_of(t) for t in _tangents(joint) if t.dim() == 0)
    if losses and tail != NO_TAIL:
        tail = replace(tail, holds_outputs=False, kept_bytes=losses)
    return replace(tail, early_bytes=handed), more.plus(Ledger(activations=-handed))


def behind(tail: Tail, backward: fx.GraphModule, budget: Budget) -> Tail:
    """What happens behind a plan's forward: what earlier graphs have handed on stays where its backward reads it."""
    if not tail.early_bytes or budget.tail is not None or budget.again:
        return tail
    handed = {f"primals_{1 + position}": size for position, size in budget.handed}
    read = sum(handed.get(str(n.target), 0) for n in backward.graph.find_nodes(op="placeholder"))
    return replace(tail, kept_bytes=tail.kept_bytes + read)


def tails_of(joint: fx.GraphModule) -> tuple[Tail, ...]:
    """What happens between the graphs; of several, the first of which a plan fits.

    A scalar output that trains all is a loss: the gradients of other outputs beside it are zeros that autograd makes.
    Without one the loss is outside of the graph, and nobody knows it yet. It is taken to need what cross entropy does:
    the logarithms of the probabilities from its forward, and two gradients of that size in its backward; or, where
    every output is shaped like an input, what a mean of squares does: four tensors of that size in its backward.
    Outputs in half precision are likely to be cast to float32 for it. Beside a scalar that does not train all, such as
    a router's, it may still be that nothing else does.
    """
    values = _tensors(joint)
    size = sum(map(size_of, values))
    if not size:
        return (NO_TAIL,)
    scalar, alone = len(values) < len(_tangents(joint)), Tail(True, 0, 0, size)
    if not loss_is_outside(joint):
        return (alone,)
    found = _of_loss(joint, values, size)
    return (*found, *_largest_alone(values), alone) if scalar else found


def _of_loss(joint: fx.GraphModule, values: list[torch.Tensor], size: int) -> tuple[Tail, ...]:
    """Of a loss outside of the graph that reads `values`, of `size` bytes together."""
    wide = sum(int(hint(t.numel())) * max(t.element_size(), _WIDE) for t in values)
    entropy = [Tail(True, size, size, 2 * size)]
    squares = [Tail(True, size, 0, 4 * size)]
    if wide > size:
        entropy.insert(0, Tail(True, 2 * wide, wide, 2 * wide))
        squares.insert(0, Tail(True, 2 * wide, wide, 4 * wide))
    return (*squares, entropy[-1]) if _like_inputs(joint, values) else tuple(entropy)


def squares_of(joint: fx.GraphModule) -> tuple[Tail, ...]:
    """What happens between the graphs where `F.mse_loss` or its like reads the outputs: the number that it returns is
    in a storage as large as they are. The caller holds them throughout, or the loss alone does."""
    size = sum(size_of(t) for t in _tangents(joint))
    wide = sum(int(hint(t.numel())) * _WIDE for t in _tangents(joint) if t.element_size() < _WIDE)
    return tuple(Tail(holds, size + wide, 0, size, kept_bytes=size, reads_outputs=not holds) for holds in (True, False))


def taught(joint: fx.GraphModule, budget: Budget) -> tuple[Tail, ...]:
    """What happens between the graphs where a loss outside reads what a teacher has returned: cross entropy, and a
    divergence from the teacher of logarithms of probabilities, which is there beside them in four forms and a product,
    and saves two of these."""
    values = _tensors(joint)
    apart = budget.shared or budget.again or not loss_is_outside(joint) or _like_inputs(joint, values)
    if apart or not budget.taught:
        return ()
    wide = sum(int(hint(t.numel())) * max(t.element_size(), _WIDE) for t in values)
    return (Tail(True, 6 * wide, 3 * wide, 2 * wide),)


def tails_of_one(joint: fx.GraphModule) -> tuple[Tail, ...]:
    """What happens between the graphs where a loss outside reads one of several outputs: cross entropy of the
    largest. Hidden states that are returned beside the scores are mostly for others than the loss."""
    values = _tangents(joint)
    return _largest_alone(values) if all(t.dim() > 0 for t in values) else ()  # else `tails_of` has it


def _largest_alone(values: list[torch.Tensor]) -> tuple[Tail, ...]:
    sizes = list(map(size_of, values))
    largest = max(sizes, default=0)
    return (Tail(True, largest, largest, 2 * largest),) if largest < sum(sizes) else ()


def loss_is_outside(joint: fx.GraphModule) -> bool:
    """Whether no output is a number that may be the loss.

    An auxiliary loss beside the outputs (a router's, a distance to codes) is none: it does not train what the graph
    has behind it.
    """
    return bool(_tensors(joint)) and not _scalars_train_all(joint)


def _scalars_train_all(joint: fx.GraphModule) -> bool:
    """Whether each gradient that the graph makes is made of that of an output which is a number, too."""
    found: dict[fx.Node, tuple[bool, bool]] = {}  #: whether a gradient of any output is behind it, and of a number
    for node in joint.graph.nodes:
        before = [found[n] for n in node.all_input_nodes]
        if node.op == "output":
            return all(scalar for behind, scalar in before if behind)
        value = node.meta.get("val")
        number = isinstance(value, torch.Tensor) and value.dim() == 0
        given = (True, number) if is_tangent(node) else (False, False)
        found[node] = any(b for b, _ in before) or given[0], any(s for _, s in before) or given[1]
    return False


def between_graphs(joint: fx.GraphModule) -> Tail:
    """What happens behind a graph that others follow, which count what they need themselves: they release its
    outputs, and its tangents come."""
    return Tail(False, 0, 0, sum(map(size_of, _tangents(joint))))


def run_again(joint: fx.GraphModule) -> Tail:
    """Of a graph that a checkpoint runs again."""
    return Tail.of_checkpoint(between_graphs(joint).backward_bytes)


def not_seen(joint: fx.GraphModule, budget: Budget) -> tuple[str, ...]:
    """What a floor that is named now was named before, and may be larger for, where a step was not seen yet."""
    if budget.settled or budget.tail is not None:
        return ()
    outside = loss_is_outside(joint) and not budget.again
    others = budget.shared or budget.again
    return (*(["the loss outside of the graph"] if outside else []), *(["other runs of the step"] if others else []))


def targets_of(joint: fx.GraphModule, around: Iterable[tuple[int, int]] = ()) -> int:
    """Bytes of what a loss outside of the graph reads beside the outputs: of what the caller holds, as many values as
    an output has, else what cross entropy reads, an index of a class for each row.

    Args:
        around: elements and bytes of tensors that the caller holds and the graph does not read.
    """
    if not loss_is_outside(joint):
        return 0
    values = _tensors(joint)
    held, found = dict(around), 0
    for t in values:
        found = max(found, held.get(int(hint(t.numel())), 0))
    if _like_inputs(joint, values):
        return found
    rows = sum(INDEX_BYTES * int(hint(t.numel())) // max(int(hint(t.shape[-1])), 1) for t in values)
    return max(found, rows)


def size_of(value: torch.Tensor) -> int:
    """Bytes of the elements of a tensor."""
    return int(hint(value.numel())) * value.element_size()


def _tangents(joint: fx.GraphModule) -> list[torch.Tensor]:
    found = [n.meta.get("val") for n in joint.graph.find_nodes(op="placeholder") if is_tangent(n)]
    return [value for value in found if isinstance(value, torch.Tensor)]


def _tensors(joint: fx.GraphModule) -> list[torch.Tensor]:
    """Those that are no numbers."""
    return [t for t in _tangents(joint) if t.dim() > 0]


def _like_inputs(joint: fx.GraphModule, outputs: Iterable[torch.Tensor]) -> bool:
    """Whether each output has the shape of a floating-point input."""
    given = [n.meta.get("val") for n in joint.graph.find_nodes(op="placeholder") if not is_tangent(n)]
    floating = [t for t in given if isinstance(t, torch.Tensor) and t.is_floating_point()]
    shapes = {tuple(ints(t.shape)) for t in floating}
    return all(tuple(ints(t.shape)) in shapes for t in outputs)


def lean_settings(joint: fx.GraphModule) -> tuple[bool, ...]:
    """In which order Inductor's leaner settings are tried, under which tensors keep their layout around convolutions.

    Without, Inductor lays tensors out anew for a convolution and holds both forms. On a CPU that gains no time worth
    having (2% at most was measured), since the library blocks its operands itself; elsewhere it does, so that there the
    leaner settings are for what fits with nothing else. Without convolutions they are no different.
    """
    convolution = torch.ops.aten.convolution.default
    if not joint.graph.find_nodes(op="call_function", target=convolution):
        return (False,)
    return (True,) if _on_cpu(joint) else (False, True)


def _on_cpu(joint: fx.GraphModule) -> bool:
    for node in joint.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return False
    return True
