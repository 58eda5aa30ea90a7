"""Which runs of compiled graphs make up one step: from one forward behind a backward to the next such forward."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from optpass.backend.compat.memory_autograd import held_by_more
from optpass.backend.compat.memory_callers import results_around_compile
from optpass.backend.compat.memory_clears import to_come
from optpass.backend.memory.seen.leaves import Leaf
from optpass.backend.memory.seen.stores import Stores
from optpass.backend.memory.versions import first_trained, version_of

#: Chains of runs that are remembered, to find which of them make up one step.
REMEMBERED = 64


@dataclass
class Chain:
    """Runs from the first forward after a backward, to the next such forward; `origin` is of the first graph."""

    origin: object
    leaves: Counter[Leaf] = field(default_factory=Counter)


class Chains:
    """The latest chains of this process."""

    def __init__(self) -> None:
        self._chains: deque[Chain] = deque(maxlen=REMEMBERED)
        self._returned, self._before = Stores(), Stores()
        self._versions: dict[int, int] = {}

    def begin(self, origin: object) -> None:
        """A chain begins with a graph that is called."""
        self._chains.append(Chain(origin))

    def count(self, leaf: Leaf) -> None:
        """A leaf has run."""
        if self._chains:
            self._chains[-1].leaves[leaf] += 1

    @property
    def waits(self) -> bool:
        """A chain has begun, and nothing has run in it."""
        return bool(self._chains) and not self._chains[-1].leaves

    def leaves(self) -> list[Leaf]:
        """What stands now for those that have run, the latest first."""
        return [leaf.latest() for chain in reversed(self._chains) for leaf in chain.leaves]

    def steps_of(self, origin: object) -> list[list[Leaf]]:
        """The leaves that ran since a chain last began with `origin`, the latest of each, and those that ran beside one
        of them before since it began so, as a critic does several times for each time that its generator is trained;
        then others that ran before, and so on."""
        found: list[list[Leaf]] = []
        part: dict[Leaf, None] = {}
        for chain in reversed(self._chains):
            part.update(dict.fromkeys(leaf.latest() for leaf in chain.leaves))
            if chain.origin is origin:
                of = next((step for step in found if any(leaf in step for leaf in part)), None)
                found += [list(part)] if of is None else []
                if of is not None:
                    of += [leaf for leaf in part if not any(leaf in step for step in found)]
                part = {}
        return found

    def step_with(self, origin: object) -> list[Leaf]:
        """The leaves of the last step that one of `origin` ran in."""
        begun = (c.origin for c in reversed(self._chains) if any(leaf.origin is origin for leaf in c.leaves))
        return next((step for one in begun for step in self.steps_of(one)), [])

    def earlier_parts(self) -> list[Leaf]:
        """Those of the step that is under way which have run backward and were trained, where it is a program's first:
        chains that began with graphs with which none had before."""
        begun = Counter(chain.origin for chain in self._chains)
        once = [[leaf.latest() for leaf in chain.leaves] for chain in self._chains if begun[chain.origin] == 1]
        stepped = [
            (part, asked)
            for part in once
            if (asked := [a for a in (leaf.asked for leaf in part) if a is not None and a.has_stepped()])
        ]
        now = to_come() if stepped else None
        return [
            leaf for part, asked in stepped if now is not None and any(a.is_before(now) for a in asked) for leaf in part
        ]

    def under_way(self) -> list[Leaf]:
        """Those of the step that is under way, as far as it is known."""
        if not self._chains:
            return []
        now = self._chains.pop()
        last = next(iter(self.steps_of(now.origin)), [])
        self._chains.append(now)
        return [*last, *now.leaves]

    def note_returned(self, outputs: Stores, inputs: Stores) -> None:
        """The backward of a run has begun, which had returned `outputs`, some of which may be what it was given."""
        self._returned.update(outputs)
        self._returned.drop(inputs)

    def returned(self) -> Stores:
        """Such outputs that are there, but for what graphs were given."""
        self._returned.prune()
        if self._returned:  # as a rule there are none, and what has run is a long list
            for leaf in self.leaves():
                self._returned.drop(leaf.inputs)
        return self._returned

    def returned_beside(self, args: Iterable[Any]) -> Stores:
        """The same, but for what a graph is given with `args`."""
        found = Stores()
        found.update(self.returned())
        if found:
            found.drop(Stores(a for a in args if isinstance(a, torch.Tensor)))
        return found

    def returned_in_step(self) -> Stores:
        """Those of the step that is under way: what the caller collects from step to step only grows."""
        found = Stores()
        found.update(self.returned())
        found.drop(self._before)
        return found

    def collected(self) -> Stores:
        """Those of this step that a caller keeps who is about to call again: its variables, which may be for what the
        call returns, do not count."""
        returned = self.returned_in_step()
        held = results_around_compile() if returned.bytes() else []
        return Stores.behind(s for s in returned.storages() if held_by_more(s, held))

    def note_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """A run of these begins: whether they have changed since the last one, or have no gradients any more."""
        trained = first_trained(parameters)
        if trained is None:
            return
        version = version_of(trained)
        if self._versions.setdefault(id(trained), version) != version or trained.grad is None:
            self._versions[id(trained)] = version
            self._returned.drop(self._before)  # what is two steps old is no loop's variable
            self._before = Stores()
            self._before.update(self._returned)

    def forget(self) -> None:
        """All of them."""
        self._chains.clear()

    def go_back(self) -> None:
        """The last one is not to begin."""
        if self._chains:
            self._chains.pop()
