"""What is proved of a mask, as data; and the naming of a proposition over queries and keys.

`prove` finds the propositions; nothing here looks at a Value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from optpass.passes.attention.masks.elements import Elements
from optpass.passes.attention.masks.integers import Atom, Int, Lin, axes_of, coefficient, of_atom, terms_of, without
from optpass.passes.attention.masks.pieces import Expr, Where
from optpass.passes.attention.masks.predicates import Bool, Pred
from optpass.passes.attention.program.ir import Value

#: all: keeps everything. none: keeps nothing. causal: exactly key <= query, both counted from 0. causal_offset: key <=
#: query + offset. lookback: key >= query - left. window: both of the last, within `left` before and `right` after the
#: query. prefix: keys up to or from a place that is the same everywhere. padding: depends on the key, maybe on batch
#: and head, not on the query. queries: depends on the query, not on the key. document: an id of the query equals that
#: of the key. block: both fall into the same block. prefix_causal: causal, and a prefix is seen by all. compound: a
#: conjunction of several such parts. general: anything else.
Kind = Literal[
    "all", "none", "causal", "causal_offset", "lookback", "window", "prefix", "padding", "queries", "document", "block",
    "prefix_causal", "compound", "general",
]  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One conjunct of what a mask keeps.

    Attributes:
        kind: see `Kind`.
        predicate: the proposition, over axes 'q' and 'k' and whatever other dims the caller named.
        words: for the report.
        offset: of 'causal_offset'; an int or a form over sizes (`Elements.sizes.symint` makes a SymInt of it).
        left, right: of 'lookback' and 'window': keys before and after the query that it sees at most.
    """

    kind: Kind
    predicate: Bool
    words: str
    offset: Int | None = None
    left: Int | None = None
    right: Int | None = None


@dataclass(frozen=True)
class MaskFacts:
    """What is proved of a mask over scores.

    Attributes:
        kind, words, offset, left, right: of the whole, as in `Part`.
        predicate: True where a score is kept; None where the mask does more than keep or fill.
        parts: conjuncts of the predicate.
        fill: for an additive mask that is 0 where kept: the one number that it is elsewhere, as its dtype holds it.
        values: all numbers that an additive mask can be, where they are known; () otherwise and for bool masks.
        bound: no element of an additive mask is larger than this, whatever its sign; None where that is not known.
        finite: no element can be infinite or NaN; True for bool masks.
        nan: some element is NaN.
        row_never_empty: for every query (of every batch and head) some key is kept.
        buffers: the Values whose contents at compile time the proof rests on.
    """

    kind: Kind
    words: str
    predicate: Bool | None = None
    parts: tuple[Part, ...] = ()
    fill: float | None = None
    values: tuple[float, ...] = ()
    bound: float | None = None
    finite: bool = True
    nan: bool = False
    row_never_empty: bool = False
    buffers: tuple[Value, ...] = ()
    offset: Int | None = None
    left: Int | None = None
    right: Int | None = None


def name_whole(parts: Sequence[Part], predicate: Bool) -> MaskFacts:
    """Facts about a conjunction, as far as its parts say them."""
    if predicate is True:
        return MaskFacts("all", "keeps everything", True)
    if predicate is False:
        return MaskFacts("none", "keeps nothing", False)
    kinds = {part.kind for part in parts}
    if len(parts) == 1:
        one = parts[0]
        found = MaskFacts(one.kind, one.words, offset=one.offset, left=one.left, right=one.right)
    elif kinds in ({"causal", "lookback"}, {"causal_offset", "lookback"}) and len(parts) == 2:
        before, after = sorted(parts, key=lambda part: part.kind, reverse=True)
        right = after.offset or 0
        assert before.left is not None
        found = MaskFacts("window", _window(before.left, right), left=before.left, right=right)
    else:
        found = MaskFacts("compound", " and ".join(part.words for part in parts))
    return replace(found, predicate=predicate, parts=tuple(parts))


def _window(left: Int, right: Int) -> str:
    if right == 0:
        return f"causal sliding window of {left + 1 if isinstance(left, int) else 'a size known at run time'}"
    if left == right and isinstance(left, int):
        return f"sliding window of {left} to both sides"
    return "sliding window"


class Namer:
    """Names the conjuncts of masks over one pair of axes.

    Attributes:
        engine: where their expressions were made.
        queries, keys: lengths of the axes.
    """

    def __init__(self, engine: Elements, queries: Int, keys: Int) -> None:
        self.engine, self.queries, self.keys = engine, queries, keys

    def part(self, p: Pred) -> Part:
        """What one conjunct says."""
        return (
            (self._linear(p) if p.op == "ge" else None)
            or (self._same(p) if p.op == "eq" else None)
            or (self._prefix_causal(p) if p.op == "or" else None)
            or self._by_axes(p)
        )

    def _linear(self, p: Pred) -> Part | None:
        """A bound between query and key."""
        form = p.form
        factors = coefficient(form, "q"), coefficient(form, "k")
        rest = without(form, [a for a, _ in terms_of(form) if a.kind == "axis" and a.args[0] in ("q", "k")])
        if any(atom.kind != "size" for atom, _ in terms_of(rest)):
            return None
        if factors == (1, -1):
            if rest == 0:
                return Part("causal", p, "causal: key <= query", offset=0)
            if self.engine.sizes.equal(rest, self.keys - self.queries):
                return Part("causal_offset", p, "causal from the last key: key <= query + keys - queries", offset=rest)
            by: Int | str = rest if isinstance(rest, int) else "an offset known at run time"
            words = f"key <= query - {-by}" if isinstance(by, int) and by < 0 else f"key <= query + {by}"
            return Part("causal_offset", p, words, offset=rest)
        if factors == (-1, 1):
            by = rest if isinstance(rest, int) else "a size known at run time"
            words = f"key >= query + {-by}" if isinstance(by, int) and by < 0 else f"key >= query - {by}"
            return Part("lookback", p, words, left=rest)
        if factors[0] == 0 and abs(factors[1]) == 1:
            by = rest if factors[1] < 0 else -rest
            place = by if isinstance(by, int) else "a place known at run time"
            return Part("prefix", p, f"key {'<=' if factors[1] < 0 else '>='} {place}")
        return None

    def _same(self, p: Pred) -> Part | None:
        """f(query) = f(key), with the same f."""
        form = p.form
        query = self.engine.atoms.axis("q", self.queries)
        key = self.engine.atoms.axis("k", self.keys)
        if isinstance(query, int) or isinstance(key, int) or not {"q", "k"} <= axes_of(form):
            return None
        swapped: Expr = self.engine.replace(form, {"q": key, "k": query})
        if swapped != -form:
            return None
        sides = [of_atom(atom) * factor for atom, factor in terms_of(form)]
        if any({"q", "k"} <= axes_of(side) for side in sides):
            return None
        return Part("document", p, "same document") if _from_data(form) else Part("block", p, "same block")

    def _prefix_causal(self, p: Pred) -> Part | None:
        kinds = [self.part(part).kind for part in p.parts]
        if len(kinds) != 2 or "causal" not in kinds or not {"prefix", "padding"} & set(kinds):
            return None
        return Part("prefix_causal", p, "causal, with a prefix that all see")

    def _by_axes(self, p: Pred) -> Part:
        if "q" not in p.axes:
            return Part("padding", p, "padding over keys" if "k" in p.axes else "per batch or head")
        if "k" not in p.axes:
            return Part("queries", p, "padding over queries")
        return Part("general", p, "a mask of query and key")


def _from_data(item: object) -> bool:
    """True where an expression, or a part of one, is an element of a tensor."""
    if isinstance(item, Value):
        return True
    parts: Iterable[object] = ()
    if isinstance(item, Lin):
        parts = [atom for atom, _ in item.terms]
    elif isinstance(item, (Atom, Pred)):
        parts = item.args
    elif isinstance(item, Where):
        parts = (item.pred, item.yes, item.no)
    elif isinstance(item, tuple):
        parts = item
    return any(_from_data(part) for part in parts)
