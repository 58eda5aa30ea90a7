"""What one graph's step holds beside what the graph makes: parameters, buffers, inputs, gradients, optimizer state.

Read from the tensors that Dynamo hands over with a graph, and from the live optimizers that hold its parameters. What
earlier graphs of the same step hold is counted too, where a model is compiled in several.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from optpass.backend import compat
from optpass.backend.compat.data_parallel import bucket_bytes, not_gathered, shards_behind
from optpass.backend.compat.memory_autograd import is_checkpointed
from optpass.backend.compat.memory_calls import calls_compiled, calls_to_come, holds_result
from optpass.backend.memory.around_gpu import beside
from optpass.backend.memory.budget import ENGINE_BYTES, Budget
from optpass.backend.memory.eager.caller import held_in_call
from optpass.backend.memory.eager.held import held_upstream, only_handed_on
from optpass.backend.memory.elsewhere import frozen_models, said_of
from optpass.backend.memory.idle import idle_of, unread_of
from optpass.backend.memory.measure import storage_bytes
from optpass.backend.memory.optimizing import Optimizing
from optpass.backend.memory.replay.graph_values import ints, output_sizes
from optpass.backend.memory.seen.apart import STARTED
from optpass.backend.memory.seen.expected import NOTHING_KNOWN, Expected
from optpass.backend.memory.seen.share import Share
from optpass.backend.memory.seen.stores import Stores
from optpass.backend.memory.together.together import STEPS
from optpass.options import Options
from optpass.passes.devices import DeviceSpec
from optpass.passes.memory.budget import budget_bytes
from optpass.passes.memory.optimizers.search import held_among, states_of
from optpass.passes.memory.plan import Ledger

CALLED_AGAIN = "planned to leave room in the first step, since its caller may call it again before a backward"


@dataclass(frozen=True)
class StepTensors:
    """The tensors that a graph is given, by what they are.

    Attributes:
        parameters: with their positions among the inputs; only those that are trained can get gradients.
        buffers, inputs: everything else; with what the call was given that no graph reads.
        unread: that, weakly.
        unread_of_modules: those of `buffers`, weakly, that the graph does not read: other buffers and frozen parameters
            of modules that it reads some of.
        around: elements and bytes of other tensors that the caller holds, of those with as many as an output.
        held: what the function that calls the graph holds beside them, and beside an index for each row of an output.
        idle: parameters of modules that it reads others of, which have no gradient and which it does not read.
        shards, gathering: as `shards_behind` its parameters.
        taught: graphs without gradients have returned as much as it returns, as a teacher has.
        calls_others: the function that called the step names other compiled ones in calls before its backward.
        module_tensors: positions of those buffers that are inputs of the graph.
        elsewhere: frozen models that are there beside it, weakly.
        again: a checkpoint runs the graph again in the backward.
        to_come: calls of the graph that the function which calls it may make before it asks for a backward.
        positions: of those of `inputs` that the graph reads.
        held_by_caller: the function that called the step holds its outputs; None where that is not known.
    """

    parameters: tuple[tuple[int, torch.Tensor], ...]
    buffers: tuple[torch.Tensor, ...]
    inputs: tuple[torch.Tensor, ...]
    module_tensors: tuple[int, ...] = ()
    unread: Stores = field(default_factory=Stores)
    around: tuple[tuple[int, int], ...] = ()
    held: tuple[torch.Tensor, ...] = ()
    to_come: int = 0
    unread_of_modules: Stores = field(default_factory=Stores)
    elsewhere: Stores = field(default_factory=Stores)
    again: bool = False
    positions: tuple[int, ...] = ()
    held_by_caller: bool | None = True
    idle: tuple[torch.Tensor, ...] = ()
    shards: tuple[torch.Tensor, ...] = ()
    gathering: int = 0
    calls_others: bool = False
    taught: bool = False

    @classmethod
    def of(
        cls, gm: fx.GraphModule, values: Sequence[Any], call: Iterable[torch.Tensor] = (),
        around: Iterable[torch.Tensor] = (), modules: Iterable[nn.Module] = (),
    ) -> StepTensors:  # fmt: skip
        """Those of a Dynamo graph and the values it is compiled with; `call`: what the user's call was given; `around`:
        what its caller holds; `modules`: those that are called."""
        parameters: list[tuple[int, torch.Tensor]] = []
        buffers: list[torch.Tensor] = []
        inputs: list[torch.Tensor] = []
        lent: list[int] = []
        positions: list[int] = []
        nodes = gm.graph.find_nodes(op="placeholder")
        # Functions are given plain tensors to train, as by `functional_call`.
        leaves = [v for v in values if isinstance(v, torch.Tensor) and v.is_leaf and v.requires_grad]
        trained = held_among(v for v in leaves if not isinstance(v, nn.Parameter))
        for position, (node, value) in enumerate(zip(nodes, values, strict=False)):
            if isinstance(value, nn.Parameter) or id(value) in trained:
                parameters.append((position, value))
            elif isinstance(value, torch.Tensor):
                if compat.module_attribute(node) is None:
                    inputs.append(value)
                    positions.append(position)
                else:
                    buffers.append(value)
                    lent.append(position)
        held = [getattr(gm, str(n.target), None) for n in gm.graph.find_nodes(op="get_attr")]
        buffers += [value for value in held if isinstance(value, torch.Tensor)]
        beside = unread_of(modules, [*(p for _, p in parameters), *buffers, *inputs])
        still = [t for t in beside if not t.requires_grad]
        buffers += still
        unread = [t for t in call if not isinstance(t, nn.Parameter) and all(t is not p for _, p in parameters)]
        inputs += [t for t in unread if all(t is not other for other in (*inputs, *buffers))]
        read = Stores([*(p for _, p in parameters), *buffers, *inputs])
        read.update(STEPS.lent())  # counted as that
        plain = [t for t in around if not t.requires_grad and type(t) is torch.Tensor and t.layout == torch.strided]
        wanted, rows = output_sizes(gm)
        others = {(t.numel(), t.nbytes) for t in plain if t.numel() in wanted and not read.has(t.untyped_storage())}
        own = [p for _, p in parameters]
        training = torch.is_grad_enabled() and not is_checkpointed()
        returned = STEPS.lent()
        returned.drop(Stores([*own, *buffers, *inputs]))
        taught = training and any(size // width in wanted for size in returned.alive().values() for width in (2, 4))
        elsewhere = Stores(frozen_models([*own, *buffers, *inputs, *beside]) if training else ())
        elsewhere.drop(STEPS.lent())
        mine = held_in_call((t.device for t in (*own, *inputs)), own)
        mine = [t for t in mine if t.numel() not in wanted and not (t.dtype == torch.long and t.numel() in rows)]
        shards, gathering = shards_behind(own)
        return cls(
            tuple(parameters), tuple(buffers), tuple(inputs), tuple(lent), Stores(unread), tuple(sorted(others)),
            tuple(t for t in mine if t.layout == torch.strided and not read.has(t.untyped_storage())),
            calls_to_come() if training else 0, Stores(still), elsewhere, is_checkpointed(), tuple(positions),
            holds_result() if torch.is_grad_enabled() else True,
            tuple(t for t in beside if t.requires_grad and t.grad is None), tuple(shards), gathering,
            training and calls_compiled(), taught,
        )  # fmt: skip

    @property
    def trained(self) -> list[torch.Tensor]:
        """Parameters that need a gradient."""
        return [p for _, p in self.parameters if p.requires_grad]


def budget_of(
    options: Options, device: Callable[[], DeviceSpec], tensors: StepTensors, *, more_follow: bool, gradients: bool,
    share: Share | None = None, expected: Expected = NOTHING_KNOWN, ungraded: Collection[int] = (),
    alone: bool | None = None,
) -> Budget | None:  # fmt: skip
    """What the graph may use; None where no budget is asked for.

    Args:
        options: resolved options.
        device: finds the device's spec.
        tensors: the graph's.
        more_follow: the graph ends in a graph break.
        gradients: gradients of earlier micro-batches are there when the step begins.
        share: what the graph may use, where the step has been seen.
        expected: what is known of what is around it, where only that has been seen.
        ungraded: positions of parameters that its backward makes no gradient of.
        alone: what it does not train nothing does; by default where no graph follows.

    Raises:
        ConfigError: a budget or an optimizer that cannot be used as given.
    """
    if options.budget is None:
        return None
    total = budget_bytes(options, device())
    assert total is not None
    where = f"{options.where('memory_budget')}={options.memory_budget!r}"
    itemsize = max((p.element_size() for p in tensors.trained), default=4)
    if share is not None:
        return Budget(
            bytes=total, statics=share.statics, at_optimizer=share.at_optimizer, optimizer=share.optimizer,
            trained_itemsize=itemsize, tail=share.tail, follow=share.follow, where=where, state=share.state,
            whole=share.whole, settled=True, batch=_batch(tensors.inputs),
            notes=("planned for the step as it was seen",),
        )  # fmt: skip
    before = STEPS.waiting_parameters()
    saved, leaves = held_upstream(tensors.inputs)
    alone = not more_follow if alone is None else alone
    idle = [] if not alone else idle_of(tensors.idle, tensors.parameters, ungraded, [*before, *leaves])
    earlier = [*STEPS.earlier_parameters(), *expected.parameters]
    stepped = [*(p for _, p in tensors.parameters), *before, *tensors.shards, *earlier]
    optimizer = Optimizing.of(options, not_gathered(stepped), idle)
    everything = _distinct(
        [*(p for _, p in tensors.parameters), *before, *optimizer.parameters, *leaves, *tensors.idle, *tensors.shards,
         *earlier]
    )  # fmt: skip
    counted, apart_from = {id(p) for p in everything}, {id(p) for p in (*optimizer.copies, *idle)}
    trained = [p for p in everything if p.requires_grad and id(p) not in apart_from]
    # Backwards run in the reverse order: the gradients of graphs that come after this one are there, those of graphs
    # and eager code that came before it are not.
    settled = {id(p) for p in (*tensors.trained, *before, *leaves)}
    elsewhere = [p for p in trained if id(p) not in settled]
    outside, outputs = STEPS.held()
    known = {**outputs.alive(), **Stores(everything).alive()}
    eager = sum(size for key, size in Stores([*tensors.inputs, *saved]).alive().items() if key not in known)
    inputs = sum(size for key, size in Stores(tensors.inputs).alive().items() if key not in known)
    apart = _apart(tensors, everything)
    lying = tensors.elsewhere.with_those_of(expected.elsewhere)
    lying.drop(Stores(everything))
    to_come = tensors.to_come if expected.tail is None or expected.several else 0
    read = {id(p) for p in (*stepped, *leaves, *tensors.idle, *optimizer.copies)}
    more = expected.tail is None and any(p.requires_grad and id(p) not in read for p in optimizer.parameters)
    size = storage_bytes(trained)
    statics = Ledger(
        parameters=storage_bytes(everything),
        gradients=(size if gradients else storage_bytes(elsewhere)) + storage_bytes(_gradients_of(tensors.inputs)),
        optimizer=optimizer.state,
        buffers=storage_bytes(t for t in tensors.buffers if id(t) not in counted) + lying.bytes(),
        inputs=inputs + max(expected.beside, _bytes_of_held(tensors, known, saved, gradients)),
        activations=outside + eager - inputs,
        temporaries=tensors.gathering + _beside(device, tensors, everything, optimizer),
    )
    throughout = statics.total - statics.gradients - statics.activations
    at_optimizer = throughout + size + optimizer.stepping
    ahead = max((one.needed(throughout, everything) for one in STEPS.ahead(tensors.inputs)), default=0)
    return Budget(
        bytes=total,
        statics=statics,
        at_optimizer=at_optimizer,
        ahead=ahead + ENGINE_BYTES if ahead else 0,
        optimizer=optimizer.name,
        trained_itemsize=itemsize,
        shared=more_follow or more or expected.crowded or to_come > 0,
        followed=more_follow or more,
        to_come=to_come,
        again=tensors.again,
        to_accumulate=0 if gradients else size - storage_bytes(elsewhere),
        lenient=expected.crowded,
        tail=expected.tail,
        around=tensors.around,
        taught=tensors.taught,
        handed=only_handed_on(zip(tensors.positions, tensors.inputs, strict=False), outputs.alive()),
        held=tensors.held_by_caller,
        apart=apart,
        elsewhere=lying.bytes(),
        batch=_batch(tensors.inputs),
        where=where,
        notes=(*optimizer.notes, *expected.notes, *said_of(lying), *((CALLED_AGAIN,) if to_come else ())),
    )


def _beside(
    device: Callable[[], DeviceSpec], tensors: StepTensors, everything: Sequence[torch.Tensor], optimizer: Optimizing
) -> int:
    """What is allocated beside all tensors of the step: on a GPU its allocator knows."""
    held = [*everything, *tensors.buffers, *tensors.inputs]
    if all(t.device.type != "cuda" for t in held):
        return bucket_bytes()
    multiplies = any(t.dim() > 1 for t in everything)
    return beside(device(), held, multiplies, again=optimizer.state / max(1, storage_bytes(everything)))


def _batch(inputs: Sequence[torch.Tensor]) -> int | None:
    """The leading dimension of the largest input, if others have it too."""
    shaped = [t for t in inputs if t.dim()]
    if not shaped:
        return None
    (size,) = ints(max(shaped, key=lambda t: storage_bytes([t])).shape[:1])
    return size if all(ints(t.shape[:1]) in ([1], [size]) for t in shaped) else None


def _apart(tensors: StepTensors, counted: Sequence[torch.Tensor]) -> Ledger | None:
    """Where several modules of the program are compiled on their own: what those need that did not run yet, beside
    what is `counted`."""
    if not torch.is_grad_enabled():
        return None
    others = STARTED.waiting([p for _, p in tensors.parameters])
    STARTED.add(tensors.trained)
    beside = tensors.calls_others or any(leaf.partitioner.budget.apart is not None for leaf in STEPS.waiting())
    if not others and not beside:
        return None
    known = {id(p) for p in counted}
    size = storage_bytes([p for p in others if id(p) not in known])
    return Ledger(parameters=size, gradients=size)


def _gradients_of(inputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What earlier micro-batches have left at inputs that need a gradient."""
    return [t.grad for t in inputs if t.is_leaf and t.grad is not None]


def _bytes_of_held(tensors: StepTensors, known: Collection[int], saved: Iterable[torch.Tensor], again: bool) -> int:
    """Bytes of what the caller holds, of earlier runs too, or lent to graphs without gradients, that is not `known` by
    its storage nor otherwise counted."""
    gradients = [p.grad for _, p in tensors.parameters if p.grad is not None]
    held = Stores(tensors.held)
    held.update(STEPS.earlier_tensors())
    if again:
        held.update(STEPS.kept())
    lent = STEPS.lent()
    if lent.alive():
        lent.drop(Stores(states_of(tensors.trained)))
    held.update(lent)
    held.drop(Stores([*gradients, *tensors.inputs, *tensors.buffers, *saved]))
    return sum(size for key, size in held.alive().items() if key not in known)


def _distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(t): t for t in tensors}.values())


def has_gradients(tensors: StepTensors) -> bool:
    """Whether any parameter has a gradient already."""
    return any(p.grad is not None for p in tensors.trained)
