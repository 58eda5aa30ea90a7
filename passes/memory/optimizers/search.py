"""Which optimizer a program trains parameters with: the live `torch.optim.Optimizer` objects that hold them.

The search walks what the garbage collector tracks, so that nothing of the user's has to be wrapped. An optimizer that
is made after the first step is not found, and counts as none. One that trains wider copies of the parameters (masters
in float32 of weights in half precision) holds none of them, and is known by the shapes of what it holds.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from optpass.passes.memory.optimizers.optimizers import OptimizerCost, by_formula, cost
from optpass.passes.memory.optimizers.rehearsal import ParameterSize, rehearse, sizes_of
from optpass.passes.memory.workspace.workspace import Library
from optpass.passes.wrappers import plain_tensors

#: States per element that an optimizer in no table is taken to keep until it has made them: as Adam's.
_GUESSED_STATES = 2
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Found:
    """The optimizers that hold some of the parameters asked about.

    Attributes:
        costs: one per optimizer.
        state_bytes: of all of them together.
        step_bytes: most of any of them, as they step one after another.
        held: how many of the parameters asked about some optimizer holds.
        parameters: all that they hold, asked about or not.
        copies: those of them that are wider copies of what was asked about.
        optimizers: the objects.
        notes: what was assumed.
    """

    costs: tuple[OptimizerCost, ...]
    state_bytes: int
    step_bytes: int
    held: int
    notes: tuple[str, ...] = ()
    parameters: tuple[Tensor, ...] = ()
    copies: tuple[Tensor, ...] = ()
    optimizers: tuple[torch.optim.Optimizer, ...] = field(default=(), compare=False, repr=False)

    @property
    def name(self) -> str:
        """The optimizers' names, joined: 'muon + adamw'."""
        return " + ".join(dict.fromkeys(cost.name for cost in self.costs))


def find_optimizer(
    parameters: Iterable[Tensor], library: Library | None = None, idle: Collection[int] = ()
) -> Found | None:
    """The optimizers that hold any of `parameters`; None where there is none.

    Args:
        parameters: the real parameters of a graph, which are told apart by identity.
        library: as for `rehearse`.
        idle: identities of parameters that they hold and that get no gradient.
    """
    given = {id(p): p for p in parameters}
    asked = given.keys()
    live = _live() if asked else []
    holding = [o for o in live if any(id(p) in asked for p in _parameters(o))]
    held = {id(p) for o in holding for p in _parameters(o)}
    master, copies = _of_copies([p for p in given.values() if id(p) not in held], live)
    copies = tuple(p for p in copies if id(p) not in asked)
    holding += [] if master is None or master in holding else [master]
    if not holding:
        return None
    holding = sorted(_stepping(holding), key=_order)
    notes = [f"taken to train wider copies of {len(copies)} parameters"] if copies else []
    costs = tuple(cost_of(o, notes, library, {*idle, *_unused(o, asked, idle)}) for o in holding)
    everything = {id(p): p for o in holding for p in _parameters(o)}
    return Found(
        costs, sum(c.state_bytes for c in costs), max(c.step_bytes for c in costs), len(everything.keys() & asked),
        tuple(notes), tuple(everything.values()), copies, tuple(holding),
    )  # fmt: skip


def _unused(optimizer: torch.optim.Optimizer, asked: Collection[int], idle: Collection[int]) -> Iterator[int]:
    """Identities of those of its parameters, beside what is `asked` about, that nothing seems to use: it has made state
    for each that is asked about and not `idle`, not for them, and they have no gradient."""
    made, parameters = _with_state(optimizer), _parameters(optimizer)
    if made and all(id(p) in made for p in parameters if id(p) in asked and id(p) not in idle):
        for p in parameters:
            if id(p) not in asked and p.grad is None and id(p) not in made:
                yield id(p)


def _with_state(optimizer: torch.optim.Optimizer) -> set[int]:
    """Identities of the parameters that it has made state for: as a rule a dictionary each, in some a tensor."""
    made = ((p, state) for p, state in optimizer.state.items() if isinstance(p, Tensor))
    return {id(p) for p, state in made if isinstance(state, Tensor) or state}


def _stepping(holding: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Those that step themselves, without those that hand that on to another one, whose state is theirs, as
    accelerate's and Lightning's do."""
    return [o for o in holding if not any(inner in holding and inner.state is o.state for inner in _inside(o))]


def _inside(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    values = [value for value in vars(optimizer).values() if value is not optimizer]
    return [value for value in values if issubclass(type(value), torch.optim.Optimizer)]


def held_among(tensors: Iterable[Tensor]) -> set[int]:
    """The identities of those of `tensors` that a live optimizer holds."""
    asked = {id(t) for t in tensors}
    return {id(p) for o in _live() for p in _parameters(o)} & asked if asked else set()


def states_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """What the live optimizers keep that hold any of `parameters`."""
    asked = {id(p) for p in parameters}
    holding = [o for o in _live() if any(id(p) in asked for p in _parameters(o))] if asked else []
    return _kept(holding)


def trained_among(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Those of `parameters` that need a gradient, or that a live optimizer has made state for: a program may freeze
    them for a while, as the critic while the generator is trained."""
    if all(p.requires_grad for p in parameters):
        return list(parameters)
    made = {key for o in _live() for key in _with_state(o)}
    return [p for p in parameters if p.requires_grad or id(p) in made]


def everything_held() -> list[Tensor]:
    """What the live optimizers train, and what they keep of it."""
    live = _live()
    return [*(p for o in live for p in _parameters(o)), *_kept(live)]


def _kept(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    kept = (value for o in optimizers for state in o.state.values() for value in tree_leaves(state))
    return [value for value in kept if isinstance(value, Tensor)]


def _of_copies(
    parameters: Iterable[Tensor], live: Iterable[torch.optim.Optimizer]
) -> tuple[torch.optim.Optimizer | None, tuple[Tensor, ...]]:
    """The optimizer that trains wider copies of all `parameters` that are trained in half precision, and no other of
    `live` does; and the copies."""
    wanted = Counter(_place(p) for p in parameters if p.requires_grad and p.dtype in _HALF)
    found = [o for o in live if wanted and wanted <= Counter(_place(p) for p in _trained(_parameters(o)) if _wide(p))]
    if len(found) != 1:
        return None, ()
    return found[0], tuple(p for p in _trained(_parameters(found[0])) if _wide(p) and _place(p) in wanted)


def _place(parameter: Tensor) -> tuple[torch.Size, torch.device]:
    return parameter.shape, parameter.device


def _wide(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and parameter.dtype not in _HALF


def cost_of(
    optimizer: torch.optim.Optimizer, notes: list[str], library: Library | None = None, idle: Collection[int] = ()
) -> OptimizerCost:
    """What one optimizer needs, by its class and its parameter groups; what is assumed is added to `notes`.

    A class of `torch.optim`, or one that inherits its `step`, is rehearsed. Of any other the state that it has made is
    counted; where it has made none yet, two tensors per parameter are assumed. It makes none for `idle` parameters,
    which get no gradient; what it has made for them, and for others that are not trained any more, it keeps.
    """
    name = type(optimizer).__name__
    kind = _torch_base(type(optimizer))
    gpu = any(p.device.type != "cpu" for p in _parameters(optimizer))
    if kind is not None and not by_formula(kind.__name__):
        groups = [{**group, "params": sizes_of(_trained(group["params"], idle))} for group in optimizer.param_groups]
        try:
            state, step = rehearse(kind, groups, gpu=gpu, library=library)
            state += _made(optimizer, lambda p: not _is_stepped(p) or id(p) in idle)
            return OptimizerCost(name.lower(), state, step, f"rehearsed torch.optim.{kind.__name__}")
        except Exception as error:  # noqa: BLE001  # a class that cannot be rehearsed is counted another way
            notes.append(f"optimizer {name} could not be rehearsed: {' '.join(str(error).split())[:120]}")
    sizes = sizes_of(_trained(_parameters(optimizer), idle))
    if by_formula(name):
        return cost(name, sizes, gpu=gpu, settings=optimizer.param_groups[0])
    state, source = _made(optimizer), "the state that it has made"
    if not state:
        state, source = _GUESSED_STATES * sum(p.nbytes for p in sizes), "assumed"
        notes.append(f"optimizer {name} is in no table: {_GUESSED_STATES} tensors of state per parameter are assumed")
    return OptimizerCost(name.lower(), state, _guessed_step(sizes, gpu), source)


def _guessed_step(sizes: Sequence[ParameterSize], gpu: bool) -> int:
    """Twice the largest parameter, or on a GPU all of them once, as the Adam family needs."""
    each = [p.nbytes for p in sizes]
    return sum(each) if gpu else 2 * max(each, default=0)


def _live() -> list[torch.optim.Optimizer]:
    """All optimizers that the garbage collector tracks.

    An object refers to its class, so that the collector finds them in one walk of its own, in a third of the time that
    a loop over `gc.get_objects()` takes. What `gc.freeze` has hidden is not seen either way.
    """
    classes: dict[type, None] = {}
    more: list[type] = [torch.optim.Optimizer]
    while more:
        kind = more.pop()
        classes[kind] = None
        more += type.__subclasses__(kind)
    # `type`, not `isinstance`: that asks `__class__`, which objects of others may answer with side effects.
    return [o for o in gc.get_referrers(*classes) if type(o) in classes]


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    groups = getattr(optimizer, "param_groups", None) or []  # one that is being constructed has none yet
    return [p for group in groups for p in group.get("params", ()) if isinstance(p, Tensor)]


def _trained(parameters: Iterable[Tensor], idle: Collection[int] = ()) -> list[Tensor]:
    return [p for p in parameters if _is_stepped(p) and id(p) not in idle]


def _is_stepped(parameter: Tensor) -> bool:
    """Whether what an optimizer holds is given gradients: a copy that is kept by hand is, though it requires none; a
    parameter that requires none is frozen."""
    return parameter.requires_grad or not isinstance(parameter, nn.Parameter)


def _order(optimizer: torch.optim.Optimizer) -> tuple[str, int, int]:
    """The same in every process: by class, then by size, never by address."""
    return type(optimizer).__qualname__, len(_parameters(optimizer)), sum(p.numel() for p in _parameters(optimizer))


def _torch_base(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer] | None:
    """The class of `torch.optim` whose `step` an optimizer runs; None where it is its own."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "torch" and base is not torch.optim.Optimizer:
            return base
        if "step" in vars(base):
            return None
    return None


def _made(optimizer: torch.optim.Optimizer, only: Callable[[Tensor], bool] | None = None) -> int:
    """Bytes of the state that an optimizer has; `only`: of which parameters alone."""
    storages: dict[int, int] = {}
    for parameter, state in optimizer.state.items():
        if only is not None and not (isinstance(parameter, Tensor) and only(parameter)):
            continue
        for value in tree_leaves(state):
            if isinstance(value, Tensor) and (not isinstance(parameter, Tensor) or value.device == parameter.device):
                found = [part.untyped_storage() for part in plain_tensors(value)]
                storages.update((storage.data_ptr(), storage.nbytes()) for storage in found)
    return sum(storages.values())
