"""The eager nodes of a backward, watched while they run: which storages are there before and after each.

That says what gradients share their storage, are added up in place and wait, which no list of operators tells. What
operators of torch's make and release inside of a node is seen too; of other nodes it is a bound. Only weak references
are held.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optpass.backend.compat import memory_autograd as autograd
from optpass.backend.compat.memory_backward import Held, untraced
from optpass.backend.compat.memory_behind import Behind, bytes_of, key_of, plain, seen
from optpass.backend.compat.memory_inside import Inside
from optpass.backend.memory.eager.scratch import Scratch, forward_workspace, workspace
from optpass.backend.memory.probe import Described
from optpass.backend.memory.seen.stores import Stores

#: In place of the storage of a gradient that waits: it is others' too, or part of one; it is a sum.
SHARED, OWN = -1, -2


@dataclass
class _Seen:
    """A storage, or a sum, of which only the bytes are known, the numbers of the events between which it was there, and
    whether it counts elsewhere."""

    behind: Behind
    elsewhere: bool
    first: int
    last: int | None = None

    @property
    def bytes(self) -> int:
        return self.behind.bytes

    def was_in(self, stores: Stores) -> bool:
        """Whether it is one of a storage's, which may have been released."""
        return any(map(stores.had, self.behind.seen))


class Watch:
    """One backward, with those that it asks for.

    Args:
        elsewhere: storages that count elsewhere.
    """

    def __init__(self, elsewhere: Stores) -> None:
        self._elsewhere = elsewhere
        self._seen: dict[int, _Seen] = {}
        self._gone: list[_Seen] = []
        self._events: list[tuple[int, int]] = []  #: place of the node, and bytes inside it
        #: Storage of a gradient that waits, by the place of the node that it is for, and which of its results it is of.
        self._waiting: dict[tuple[int, int], int] = {}
        self._in_place: set[tuple[int, int]] = set()  #: slots whose gradient autograd adds up in place
        self._sums: dict[tuple[int, int], _Seen] = {}  #: what was added up in a slot, until its node is given it
        self._leaves: dict[int, weakref.ref[torch.Tensor]] = {}
        self._for_leaves: dict[int, int] = {}  #: places of leaves, by the storages of gradients that were made for them
        self._saved = Stores()  #: by nodes, in the forward
        self._asked: list[tuple[int, int, Described]] = []  #: event, bytes beside what it made, and an operator of it
        self._forward: dict[int, int] = {}
        self._handles: list[Any] = []

    def follow(self, nodes: Iterable[Any], held: Mapping[int, Held], temporaries: Callable[[Any], int]) -> None:
        """Watch those of `nodes` of which it is known what they hold.

        Args:
            temporaries: of a node inside of which nothing can be seen: tensors as large as a gradient that its backward
                allocates and releases.
        """
        for node in nodes:
            place = autograd.order(node)
            if place not in held or autograd.leaf_of(node) is not None:
                continue
            self._take_in_storages(storage for one in held[place].storages if (storage := one()) is not None)
            self._saved.keep((s._cdata, one) for one in held[place].storages if (s := one()) is not None)
            slots = [(self._place(n), index) for n, index in node.next_functions]
            scratch, again = Scratch(), held[place].recomputed if held[place].checkpoints else _nothing
            # What a checkpoint runs there is the user's own code.
            inside = Inside(scratch.of) if again is _nothing and Inside.can_watch(node) else None
            unknown = held[place].again.count(None)
            numbers = temporaries(node), unknown, sum(size or 0 for size in held[place].again)
            made: list[tuple[Any, int]] = []
            self._handles.append(node.register_prehook(untraced(self._before(place, inside, again, made))))
            self._handles.append(
                node.register_hook(untraced(self._after(place, slots, numbers, inside, scratch, again, made)))
            )

    def end(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forward(self) -> dict[int, int]:
        """Bytes that operators allocated and released inside themselves in the forward, by their places, as far as
        their backward tells."""
        for event, beside, call in self._asked:
            place, inside = self._events[event]
            self._events[event] = place, max(inside, beside + workspace(call))
            self._forward[place] = max(self._forward.get(place, 0), forward_workspace(call))
        self._asked.clear()
        return self._forward

    def peak(self, after: float, before: float, outputs: Stores) -> int | None:
        """Most bytes that were there while nodes ran whose places are between `after` and `before`; None where none
        was seen.

        Args:
            outputs: of the graph whose loss runs, which count elsewhere as long as it does: less once they have gone.
        """
        self._sweep()
        self.forward()
        changes = [0] * (len(self._events) + 1)
        for one in (*self._gone, *self._seen.values(), *self._sums.values()):
            if not one.elsewhere:
                changes[min(one.first, len(self._events))] += one.bytes
            if one.last is not None and (not one.elsewhere or one.was_in(outputs)):
                changes[one.last] -= one.bytes
        live, peak = 0, None
        for change, (place, inside) in zip(changes, self._events, strict=False):
            live += change
            if after < place < before:
                peak = max(peak or 0, live + inside)
        return peak

    def saved(self) -> Stores:
        """What nodes had saved in the forward, and is there and counts nowhere else."""
        found = Stores()
        alive = [s for s in self._saved.storages() if s._cdata in self._seen and not self._seen[s._cdata].elsewhere]
        found.keep((s._cdata, weakref.ref(s)) for s in alive)
        return found

    def among(self, stores: Stores) -> int:
        """Bytes of those storages of `stores` that were seen, and are there."""
        return sum(size for key, size in stores.alive().items() if key in self._seen and not self._seen[key].elsewhere)

    def gradients(self, leaves: Iterable[torch.Tensor]) -> int:
        """Bytes of those gradients of `leaves` that were made in this backward: of a leaf that is read twice, once."""
        found = 0
        for leaf in {id(leaf): leaf for leaf in leaves}.values():
            if leaf.grad is not None:
                summed = self._sums.get((-id(leaf), 0))
                found += self.among(Stores([leaf.grad])) or (summed.bytes if summed is not None else 0)
        return found

    # ---- while it runs ------------------------------------------------------------------------------------------

    def _place(self, node: Any) -> int:
        """Where gradients wait for a node; a negative number for a leaf, whose gradient is its own at once."""
        leaf = None if node is None else autograd.leaf_of(node)
        if leaf is not None:
            self._leaves[-id(leaf)] = weakref.ref(leaf)
            return -id(leaf)
        return -1 if node is None else autograd.order(node)

    def _before(
        self, place: int, inside: Inside | None, again: Callable[[], list[torch.Tensor]],
        made: list[tuple[Any, int]],
    ) -> Callable[[Sequence[Any]], None]:  # fmt: skip
        def hook(gradients: Sequence[Any]) -> None:
            self._sweep()
            made[:] = Stores(again()).sizes()
            # What is new here is a sum, which was there beside what it is of. Seen from here none is made in place.
            slots = [(place, index) for index in range(len(gradients))]
            apart = [g for slot, g in zip(slots, gradients, strict=True) if slot not in self._in_place]
            for slot in slots:
                self._waiting.pop(slot, None)
                if slot in self._sums:
                    done = self._sums.pop(slot)
                    done.last = len(self._events)
                    self._gone.append(done)
            new = self._take_in(plain(apart))
            self._take_in(plain(gradients))
            self._events.append((place, new if self._events else 0))
            if inside is not None:
                inside.begin()

        return hook

    def _after(
        self,
        place: int,
        slots: Sequence[tuple[int, int]],
        numbers: tuple[int, int, int],
        watched: Inside | None,
        scratch: Scratch,
        again: Callable[[], list[torch.Tensor]],
        recomputed: list[tuple[Any, int]],
    ) -> Callable[[Sequence[Any], Sequence[Any]], None]:
        def hook(made: Sequence[Any], given: Sequence[Any]) -> None:
            most = None if watched is None else watched.end()
            self._sweep()
            self._take_in(plain(again()), held=True)
            kept = {key_of(tensor) for tensor in plain(made)}
            mine = sum(map(bytes_of, plain(given)))
            let_go = sum(bytes_of(tensor) for tensor in plain(given) if key_of(tensor) not in kept)
            added = self._hand_on(slots, made)
            largest = max((bytes_of(t) for t in plain(made) if key_of(t) not in self._seen), default=0)
            new = self._take_in(plain(made))
            # One result is made after another, and what was allocated for it is released before the next.
            # What a checkpoint had made again for it is gone, too; if it was made while it ran, nobody has seen it.
            number, unseen = (numbers[0], 0) if recomputed else (numbers[0] + numbers[1], numbers[2])
            inside = number * max(mine, largest) if new else 0
            inside += unseen + sum(size for storage, size in recomputed if storage() is None)
            if most is not None:
                inside = max(0, most - new)
                self._asked.extend((len(self._events), beside - new, call) for beside, call in scratch.asked)
            scratch.asked.clear()
            self._events.append((place, max(inside, added - let_go)))

        return hook

    def _hand_on(self, slots: Sequence[tuple[int, int]], made: Sequence[Any]) -> int:
        """Gradients go to their slots; bytes of sums with those that wait there which are not made in place.

        Autograd adds to a gradient in place that nobody else holds, which it asks by the references.
        """
        added = 0
        for slot, gradient in zip(slots, made, strict=False):
            if not plain((gradient,)):
                continue
            waits = self._waiting.get(slot)
            if waits is None:
                # A view holds what it is a view of.
                whole = not gradient._is_view() and gradient.nbytes == bytes_of(gradient)
                if slot[0] in self._leaves:
                    self._for_leaves[key_of(gradient)] = slot[0]
                self._waiting[slot] = key_of(gradient) if whole else SHARED
                continue
            if self._is_alone(slot, waits) and not torch.is_grad_enabled():
                self._in_place.add(slot)
                if waits in self._seen:
                    continue
            else:
                added += gradient.nbytes
                self._waiting[slot] = OWN  # the sum is the slot's alone
            if slot not in self._sums and self._is_kept(slot):
                self._sums[slot] = _Seen(Behind(gradient.nbytes), False, len(self._events) + 1)
        return added

    def _is_kept(self, slot: tuple[int, int]) -> bool:
        """Whether a sum in a slot stays until its node runs; one that is added to a leaf's gradient does not."""
        if slot[0] >= 0:
            return True
        leaf = self._leaf(slot[0])
        return leaf is not None and leaf.grad is None

    def _leaf(self, place: int) -> torch.Tensor | None:
        return self._leaves.get(place, lambda: None)()

    def _is_alone(self, slot: tuple[int, int], key: int) -> bool:
        """Whether nobody but a slot holds the storage of the gradient that waits there."""
        known = self._seen.get(key)
        others = (key == one for other, one in self._waiting.items() if other != slot and one != OWN)
        return key != SHARED and not any(others) and (known is None or not known.elsewhere)

    def _take_in(self, tensors: Iterable[torch.Tensor], *, held: bool = False) -> int:
        """Note what is behind tensors of `plain` and has not been seen; its bytes. `held`: by others than tensors that
        are seen, as all is where the backward is to be differentiated."""
        new = 0
        for tensor in tensors:
            key = key_of(tensor)
            if key not in self._seen:
                self._seen[key] = _Seen(Behind(bytes_of(tensor)), self._elsewhere.has_key(key), len(self._events))
                new += self._seen[key].bytes
            self._seen[key].behind.note(seen(tensor, held=held or torch.is_grad_enabled()))
        return new

    def _take_in_storages(self, storages: Iterable[Any]) -> None:
        for storage in storages:
            known = self._seen.setdefault(
                storage._cdata,
                _Seen(Behind(storage.nbytes()), self._elsewhere.has(storage), len(self._events)),
            )
            known.behind.note(weakref.ref(storage))

    def _sweep(self) -> None:
        for key in [key for key, one in self._seen.items() if not one.behind.is_there()]:
            leaf = self._leaf(self._for_leaves.pop(key, 0))
            if leaf is not None and leaf.grad is not None and plain((leaf.grad,)) and key_of(leaf.grad) == key:
                self._seen[key].behind.note(seen(leaf.grad, held=False))  # another tensor of the same storage
                continue
            gone = self._seen.pop(key)
            gone.last = len(self._events)
            self._gone.append(gone)


def _nothing() -> list[torch.Tensor]:
    return []
