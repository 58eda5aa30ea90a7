"""Source breaks: Dynamo's reports folded into one record each, with what follows from what, and what it costs.

Dynamo reports one break up to five times: in the function, in the function that it inlines, in what it makes to go on,
in each retrace. Reports of one kind at one expression are one break. What followed from a break (the frame given up
because it stands in a loop, a context manager that cannot be left) is a record of its own that names its cause.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from optpass.backend.audit import message, places
from optpass.backend.audit.events import FrameEvent, Place, RawBreak
from optpass.backend.audit.halves import Half, lost_us
from optpass.backend.compat import audit as dynamo
from optpass.reporting.audit.model import Break, BreakCost

#: Not a place in the source but a function compiled too often: the silent eager ledger has it.
NOT_BREAKS = frozenset({"Dynamo recompile limit exceeded", "Dynamo cache limit exceeded"})

#: What Dynamo says of an object that it does not know, because what made it broke; in torch 2.13, and in others.
_OF_UNKNOWN = frozenset({"missing tp_iter", "Missing tp_iter", "missing tp_iternext", "Missing tp_iternext"})
_ITERATES_UNKNOWN = re.compile(r"method `__(?:iter|next)__` of class|implements '__(?:iter|next)__' in C")

Key = tuple[str, int, int | None, str]
#: How grave an effect is, for the order of the report.
_GRAVITY = {"error": 3, "frame eager": 2, "rest eager": 1, "split": 0}


@dataclass
class _Entry:
    """One source break as it is gathered."""

    place: Place
    said: message.Said
    raw: RawBreak
    cause: Key | None
    occurrences: int = 0
    boundary_bytes: float | None = None
    compile_s: float | None = None
    guards: dict[int, float] = field(default_factory=dict)
    before: Half | None = None
    after: Half | None = None
    lost_us: float | None = None


@dataclass(frozen=True)
class _Resumed:
    """A function that Dynamo made, and the break that it goes on behind."""

    code: object
    key: Key


class BreakCollector:
    """Folds breaks as frames end."""

    def __init__(self, where: places.Places) -> None:
        self._where = where
        self._lock = threading.Lock()
        self._entries: dict[Key, _Entry] = {}
        self._behind: dict[int, _Resumed] = {}
        self._eager: dict[str, Key] = {}
        self._lines: dict[tuple[str, int], Key] = {}

    def on_frame(self, event: FrameEvent) -> None:
        """File the breaks of a frame, and what compiling it cost the break that it goes on behind."""
        with self._lock:
            behind = self._behind.get(id(event.code)) if event.code is not None else None
            if behind is not None:
                self._charge(behind.key, event)
            first: Key | None = None
            for raw in event.breaks:
                key = self._file(raw, event, first, behind)
                first = first or key
            if first is not None:
                self._settle(first, event)

    def price(self) -> None:
        """Predict what fusion is lost at each break whose two graphs are known; each is priced once."""
        with self._lock:
            waiting = [entry for entry in self._entries.values() if entry.before and entry.after]
        for entry in waiting:
            before, after = entry.before, entry.after
            if before is not None and after is not None:
                lost = lost_us(before, after)
                with self._lock:
                    entry.lost_us, entry.before, entry.after = lost, None, None

    def records(self, rank: int = 0) -> list[Break]:
        """The breaks, the gravest first, each behind its cause where it has one."""
        ids = dynamo.gb_ids()
        with self._lock:
            order = sorted(self._entries, key=self._weight)
            index = {key: position for position, key in enumerate(order)}
            return [self._record(self._entries[key], index, ids, rank) for key in order]

    # ---- folding ----------------------------------------------------------------------------------------------

    def _file(self, raw: RawBreak, event: FrameEvent, first: Key | None, behind: _Resumed | None) -> Key | None:
        """File one report; gives the key of the break that it is about, None if it is about no place."""
        place = self._where.innermost(raw.stack) or _start(event)
        if place is None or (not raw.stack and self._where.owner(place.file) != "user"):
            return None  # a library's generator, called by eager code: nobody asked for it to be compiled
        cause: Key | None = None
        root: Key | None = None
        for said in message.parse(raw.message, raw.kind):
            if said.kind in NOT_BREAKS:
                continue
            key = self._known(place, said.kind)
            if key not in self._entries:
                follows = cause or (first if first != key else None) or self._follows(key, place, raw, behind)
                self._entries[key] = _Entry(place, said, raw, follows)
                user = self._where.last_of_user(raw.stack, raw.above) or place
                self._lines.setdefault((user.file, user.line), key)
            entry = self._entries[key]
            entry.occurrences += 1
            if _GRAVITY.get(raw.effect, 0) > _GRAVITY.get(entry.raw.effect, 0):
                entry.raw = raw
            root = root or key
            cause = cause or key
        return root

    def _known(self, place: Place, kind: str) -> Key:
        """The key of the same break filed before, also by a report that knew no column."""
        key = (place.file, place.line, place.column, kind)
        if place.column is None:
            return next((k for k in self._entries if (k[0], k[1], k[3]) == (place.file, place.line, kind)), key)
        return key

    def _follows(self, key: Key, place: Place, raw: RawBreak, behind: _Resumed | None) -> Key | None:
        """The break that this one follows from, beyond its own frame."""
        # A frame of its own that would have been inlined, had its caller not broken.
        if not raw.stack or self._where.owner(raw.stack[0].file) != "user":
            return self._above(raw, frames=not raw.stack)
        if self._where.owner(place.file) == "user" and (same := self._same_expression(place)) is not None:
            return same
        if behind is None or behind.key == key:
            return None
        # What the broken expression made is entered or iterated: had Dynamo traced the one, it would know the other.
        takes = raw.enters or key[3] in _OF_UNKNOWN or _ITERATES_UNKNOWN.search(raw.message) is not None
        parents = (p for p in reversed(self._entries[behind.key].raw.stack) if p.file == place.file)
        parent = next(parents, self._entries[behind.key].place)
        return behind.key if takes and _encloses(place, parent) else None

    def _above(self, raw: RawBreak, *, frames: bool) -> Key | None:
        """The break for which the callers run eager: of their frame as such, or on the line where they stand."""
        for caller in raw.above:
            if frames and (found := self._eager.get(_frame_name(caller))) is not None:
                return found
            if (found := self._lines.get((caller.file, caller.line))) is not None:
                return found
        return None

    def _same_expression(self, place: Place) -> Key | None:
        """A break filed before at the very same expression, under another name."""
        if place.column is None or place.end_column is None:
            return None
        span = (place.column, place.end_column, _last(place))
        for key, entry in self._entries.items():
            known = entry.place
            if key[:2] == (place.file, place.line) and span == (known.column, known.end_column, _last(known)):
                return key
        return None

    def _settle(self, first: Key, event: FrameEvent) -> None:
        """What the frame's end tells of the break that ended it."""
        entry = self._entries[first]
        if event.graphs and event.compiled:
            entry.boundary_bytes = event.graphs[-1].output_bytes
            entry.before = entry.before or event.graphs[-1].half  # the first compile's: later ones have symbols
        elif event.compiled:
            entry.boundary_bytes = 0.0
        for code in event.resumes:
            self._behind[id(code)] = _Resumed(code, first)
        if not event.compiled and event.origin is not None:
            name = _frame_name(Place(event.origin.co_filename, 0, _qualified(event)))
            self._eager.setdefault(name, first)

    def _charge(self, key: Key, event: FrameEvent) -> None:
        entry = self._entries[key]
        entry.compile_s = (entry.compile_s or 0.0) + event.seconds
        if event.guard_us is not None:
            entry.guards[id(event.code)] = float(event.guard_us)
        if event.graphs:
            entry.after = entry.after or event.graphs[-1].half

    # ---- records ----------------------------------------------------------------------------------------------

    def _weight(self, key: Key) -> tuple[object, ...]:
        entry = self._entries[key]
        grave = _GRAVITY.get(entry.raw.effect, 0)
        return (
            entry.cause is not None, -grave, -(entry.compile_s or 0.0), -(entry.boundary_bytes or 0.0),
            -entry.occurrences, key[0], key[1], key[2] or 0, key[3],
        )  # fmt: skip

    def _record(self, entry: _Entry, index: dict[Key, int], ids: dict[str, str], rank: int) -> Break:
        place, owner = entry.place, self._where.owner(entry.place.file)
        user = None if owner == "user" else self._where.last_of_user(entry.raw.stack, entry.raw.above)
        column, end_line, end_column = _columns(place)
        user_column, user_end_line, user_end_column = _columns(user) if user else (None, None, None)
        return Break(
            file=place.file,
            line=place.line,
            column=column,
            end_line=end_line,
            end_column=end_column,
            function=place.function,
            module=entry.raw.module,
            gb_type=entry.said.kind,
            gb_id=ids.get(entry.said.kind),
            reason=entry.said.reason,
            owner=owner,
            user_file=user.file if user else None,
            user_line=user.line if user else None,
            user_column=user_column,
            user_end_line=user_end_line,
            user_end_column=user_end_column,
            occurrences=entry.occurrences,
            caused_by=index[entry.cause] if entry.cause is not None else None,
            hints=list(entry.said.hints),
            context=entry.said.context,
            effect=entry.raw.effect,
            cost=BreakCost(
                boundary_bytes=entry.boundary_bytes,
                fusion_lost_us=entry.lost_us,
                compile_s=entry.compile_s,
                guard_us=sum(entry.guards.values()) if entry.guards else None,
            ),
            rank=rank,
        )


def _columns(place: Place) -> tuple[int | None, int | None, int | None]:
    """First column, last line and the column behind the end, as records count them."""
    end_line = place.end_line or (place.line if place.end_column is not None else None)
    column = places.column(place.file, place.line, place.column)
    return column, end_line, places.column(place.file, end_line or place.line, place.end_column)


def _start(event: FrameEvent) -> Place | None:
    """The first line of a frame that Dynamo gave up on as such."""
    if event.origin is None:
        return None
    return Place(event.origin.co_filename, event.origin.co_firstlineno, _qualified(event))


def _qualified(event: FrameEvent) -> str:
    return getattr(event.origin, "co_qualname", "") if event.origin is not None else ""


def _frame_name(place: Place) -> str:
    return f"{place.file}:{place.function}"


def _last(place: Place) -> int:
    """Its last line; Dynamo tells none where it is the first."""
    return place.end_line or place.line


def _encloses(outer: Place, inner: Place) -> bool:
    """Whether an expression or statement has another one inside, and more than that."""
    if outer.file != inner.file or None in (outer.column, outer.end_column, inner.column, inner.end_column):
        return False
    begins = (outer.line, outer.column or 0) <= (inner.line, inner.column or 0)
    ends = (_last(outer), outer.end_column or 0) >= (_last(inner), inner.end_column or 0)
    return begins and ends


def only_roots(breaks: Sequence[Break]) -> list[Break]:
    """Breaks that follow from no other."""
    return [record for record in breaks if record.caused_by is None]
