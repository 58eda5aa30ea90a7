"""How the mask of a site reaches the kernel, and what must be done about rows without a single key.

Kernels differ from what people write there: a row of minus infinities is zeros instead of NaN; beside -3e38 the
logarithm of a row's sum is lost, and with it the weights in the backward; a replaced score passes no gradient where an
added number does. Each case is told apart here, and written in `rewrite`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from optpass.passes.attention.axes import Axis, atoms, flat
from optpass.passes.attention.fills import NO_KEY
from optpass.passes.attention.frame import Frame, size_of
from optpass.passes.attention.ir import Value, same
from optpass.passes.attention.masks import MaskFacts, Prover
from optpass.passes.attention.operands import Constant
from optpass.passes.attention.problem import MaskKind
from optpass.passes.attention.site import Bias, Blocked, Fill, Operand, Site
from optpass.passes.attention.terms import ABSORBS, Term, of_products

#: What is added up to this changes the logarithm of a row's sum by less than it is rounded to.
_SMALL = 1e4
_ALLOWED = " (options={'attention': {'masked_rows': 'any'}} allows that)"


@dataclass
class MaskPlan:
    """How the mask reaches the kernel.

    Attributes:
        kind: see `problem.MaskKind`.
        fills, biases: what a mask operand is built from; empty for 'none' and 'causal'.
        empty_rows: what rows without a single key come out as: 'never' (there are none, or it does not matter), 'added'
            (large negative numbers are added: the weights that these leave, or NaN, and gradients flow on), 'uniform'
            (scores are replaced: uniform weights, no gradient to the scores), 'nan' (replaced by minus infinity: NaN),
            'large' (there are none, but all keys of a row may carry a number beside which kernels lose precision in the
            backward), 'zero' (weights are set to zero: what kernels do by themselves beside minus infinity),
            'zero or NaN' (so too, but NaN where minus infinity is added to all other keys of the row), 'exact'
            (computed apart, with the steps of the user's program: what it rounds off depends on the scores).
        finite: the mask operand has a finite number in every row.
        facts: what was proved of the masks that are left, for the words.
        proofs: all that was proved, for the guards.
        row_free: operands that are proved to be the same for all queries: one row of them is enough.
        passes: in rows 'added', the share of a score's gradient that flows on; less than 1 at a floor.
        uneven: in rows 'added', keys of one row are known to carry different numbers.
        near: of the numbers that replace masked scores the largest, where a score can be as low; None where none can.
        cancels: of what is added one may make up for another, beside which the scores were lost or replaced.
    """

    kind: MaskKind
    fills: list[Fill] = field(default_factory=list)
    biases: list[Bias] = field(default_factory=list)
    empty_rows: str = "never"
    finite: bool = False
    facts: list[MaskFacts] = field(default_factory=list)
    proofs: list[MaskFacts] = field(default_factory=list)
    row_free: frozenset[Operand] = frozenset()
    passes: float = 1.0
    uneven: bool = False
    near: float | None = None
    cancels: bool = False


def plan_mask(site: Site, frame: Frame, prover: Prover, *, exact_rows: bool, training: bool) -> MaskPlan:
    """The plan; raises `Blocked` where rows without a key would come out otherwise than in the user's program."""
    scores = site.scores
    if site.sink is not None and not set(flat(site.sink.dims)) <= {*frame.batch, *frame.heads, *frame.rows}:
        raise Blocked("the appended column depends on the keys", site.output)
    fills = [(f, _prove(f.mask, frame, prover, keep_when=f.keep_when)) for f in scores.fills]
    terms = [Term(b, _prove(b.operand, frame, prover, keep_when=True)) for b in scores.biases]
    proofs = [p for _, p in fills] + [t.facts for t in terms] + [_binary(o, frame, prover) for o in site.binary]
    fills = [(f, p) for f, p in fills if p.kind != "all"]
    terms = [t for t in terms if t.facts.kind != "all"]
    facts = [p for _, p in fills] + [t.facts for t in terms]
    for mask, hides in site.zeroed:
        if not any(same(f.mask.value, mask) and f.keep_when is not hides for f in scores.fills):
            raise Blocked("weights are set to zero where their scores were not masked", site.output)
    if any(v == math.inf for t in terms for v in t.extremes):
        raise Blocked("plus infinity is added to scores", site.output)
    _in_range(site, terms)
    if not facts:
        return MaskPlan("none", proofs=proofs)
    hiding = [t for t in terms if t.hides or t.rounds_off(scores.added_in)]
    together = _together(site, frame, prover, [f for f, _ in fills], hiding)
    near = _near(site, fills)
    if all(t.hides for t in terms) and together.kind == "causal" and not site.zeroed and near is None:
        return MaskPlan("causal", facts=facts, proofs=proofs)
    never = together.row_never_empty and all(t in hiding or t.spares(scores.added_in) for t in terms)
    if site.alone and exact_rows and not never:
        raise Blocked(
            f"rows without a single key come out in a way of their own by this softmax{_ALLOWED}", site.softmax
        )
    proved = [*((f.mask, p) for f, p in fills), *((t.bias.operand, t.facts) for t in terms)]
    row_free = frozenset(o for o, p in proved if p.kind == "padding" and "q" in _asked(o, frame, True)[1])
    if any(abs(v) > scores.largest for t in terms for v in t.extremes if math.isfinite(v)):
        raise Blocked("masked scores are cast to a dtype where they become infinite", site.output)
    column = site.sink is not None  # such rows are not computed apart
    if exact_rows and any(
        t.raises(scores.added_in, prover.constant) if column else t.coarse(scores.added_in, no_key(site)) for t in terms
    ):
        raise Blocked("a number is added beside which the scores that stay are rounded off", site.output)
    limit = min(_SMALL, -no_key(site))
    settled = together.row_never_empty and all(t in hiding or t.small(limit) for t in terms)
    empty = "never"
    large = [t for t in terms if not t.small(limit)]
    if near is not None:
        empty = "exact"
    elif site.zeroed and fills:
        empty = _zeroed(site, fills, large, prover.constant, training)
    elif site.numbers and exact_rows and not never and _nan_is_zero(site, fills, terms, large, training):
        empty = "zero"
    elif never:
        empty = "large" if training and not settled else "never"
        if empty == "large" and site.sink is not None:
            # The column takes part in every row: masks far below it do no harm, and rows cannot be shifted against it.
            if any(max(t.extremes, default=t.size) >= limit for t in terms):
                raise Blocked("large numbers are added to scores beside an appended column", site.output)
            empty = "never"
    elif exact_rows and site.sink is None:  # a sink is a key of every row
        empty = _empty_rows(site, fills, terms, training, limit)
    elif exact_rows and site.sink_behind:
        _check_behind(fills, terms)
    passes = _at_the_floor(site, terms) if training and empty == "added" and scores.floor else 1.0
    if empty in ("uniform", "added", "exact"):
        if _divides(site):
            raise Blocked(
                f"rows without a single key are not normalised by this spelling of softmax{_ALLOWED}", site.softmax
            )
        empty = "exact" if by_logarithm(site) else empty
    finite = all(t.facts.finite and abs(t.bias.coefficient) <= 1 and not t.bias.factors for t in terms)
    finite = finite and all(math.isfinite(f.fill) for f, _ in fills)
    several = sum(t.huge for t in terms) + any(math.isfinite(f.fill) for f, _ in fills) > 1
    kind: MaskKind = "bool" if empty in ("never", "zero") and not terms else "float"
    return MaskPlan(
        kind, [f for f, _ in fills], [t.bias for t in terms], empty, finite and not several, facts, proofs, row_free,
        passes, _uneven(site, terms), near, _cancels(site, fills, terms),
    )  # fmt: skip


def _near(site: Site, fills: list[tuple[Fill, MaskFacts]]) -> float | None:
    """See `MaskPlan.near`."""
    near = [f.fill for f, _ in fills if f.near]
    if near and (site.sink is not None or site.zeroed or site.numbers or site.scores.floor):
        reason = f"masked scores become {near[0]:g}, which a score can be as low as: it is not -inf"
        raise Blocked(reason, site.output)
    return max(near, default=None)


def _cancels(site: Site, fills: list[tuple[Fill, MaskFacts]], terms: list[Term]) -> bool:
    """See `MaskPlan.cancels`."""
    raising = any(max(t.extremes, default=t.size) > 0 and not t.spares(site.scores.added_in) for t in terms)
    return raising and len(fills) + len(terms) > 1


def _check_behind(fills: list[tuple[Fill, MaskFacts]], terms: list[Term]) -> None:
    """A row of minus infinities alone is NaN before its sink is there; beside finite numbers the sink takes it all."""
    infinite = any(not math.isfinite(f.fill) for f, _ in fills) or not all(t.facts.finite for t in terms)
    if infinite or sum(t.huge for t in terms) + bool(fills) > 1:
        raise Blocked(f"rows without a single key would be zeros, not NaN{_ALLOWED}")


def _at_the_floor(site: Site, terms: list[Term]) -> float:
    """The share of the gradient that rows without a key pass on where their sums meet the floor of the scores."""
    floor = site.scores.floor
    assert floor is not None
    hiding = {v for t in terms for v in t.extremes if t.drowns(no_key(site)) and v <= no_key(site)}
    if len(hiding) == 1 and all(t.extremes for t in terms) and torch.float16 not in site.scores.dtypes:
        (number,) = hiding  # beside the lowest number of a dtype with a wide range every score is lost
        return floor.tie if number == floor.number else 0.0 if number < floor.number else 1.0
    raise Blocked(f"rows without a single key would pass other gradients{_ALLOWED}", site.output)


def _divides(site: Site) -> bool:
    """`exp(x) / sum` without the maximum taken off: rows of large numbers are 0 / 0."""
    return _is_quotient(site) and not site.scores.centred


def _is_quotient(site: Site) -> bool:
    return site.softmax.name in ("div", "mul")


def _in_range(site: Site, terms: list[Term]) -> None:
    """Exponentials that are divided by their sum must not be known to be infinite, or all of them 0."""
    scores = site.scores
    most = math.log(torch.finfo(scores.dtypes[-1]).max)
    added = 0.0 if scores.centred else max((v for t in terms for v in t.extremes), default=0.0)
    for number in (scores.offset, scores.offset + added):
        if _is_quotient(site) and abs(number) >= most:
            raise Blocked(f"{number:g} is added to what exponentials are made of, beyond their range", site.softmax)


def by_logarithm(site: Site) -> bool:
    """`exp(x - logsumexp(x))`: beside large numbers the logarithm of what is added up is rounded off."""
    return site.softmax.name == "exp" and site.softmax.args[0].name == "sub"


def _together(site: Site, frame: Frame, prover: Prover, fills: list[Fill], hiding: list[Term]) -> MaskFacts:
    """What all that hides keys leaves to be seen."""
    asked = [_asked(f.mask, frame, f.keep_when) for f in fills]
    asked += [_asked(t.bias.operand, frame, True) for t in hiding]
    if not asked:
        return MaskFacts("all", "", row_never_empty=True)
    return prover.prove_all(asked, _length(frame.rows, site.output), _length(frame.keys, site.output))


def _zeroed(
    site: Site, fills: list[tuple[Fill, MaskFacts]], large: list[Term], constant: Constant, training: bool
) -> str:
    """Rows without a key are zeros in the user's program too, if one mask alone says which they are.

    Where something as low as the fill may be added to the other keys, these share the weights with those that are set
    to zero, and the rest does not add up to 1; or, beside minus infinity, is NaN, which can be said without gradients.
    """
    alone = len(fills) == 1 and not any(t.hides for t in large) and not (large and site.scores.floor)
    if not alone or site.sink is not None:
        raise Blocked("weights are set to zero after the softmax, and more than one mask is at work", site.output)
    ((fill, _),) = fills
    absorbs = fill.fill < ABSORBS
    if all((absorbs and of_products(t.bias.operand.value, constant)) or t.size < -fill.fill / 2 for t in large):
        return "exact" if training and large else "zero"
    if fill.fill == -math.inf and not training and not site.dropout:
        return "zero or NaN"
    raise Blocked("weights are set to zero after the softmax, and what is added may be a mask", site.output)


def rounded_in(site: Site) -> torch.dtype:
    """The dtype that its biases are added in where scores are lost beside the least numbers."""
    return max(site.scores.added_in or [torch.float32], key=lambda dtype: NO_KEY.get(dtype, NO_KEY[torch.float32]))


def _nan_is_zero(
    site: Site, fills: list[tuple[Fill, MaskFacts]], terms: list[Term], large: list[Term], training: bool
) -> bool:
    """Whether rows without a key are zeros because their weights are NaN before; False where they never are NaN."""
    infinite = any(f.fill == -math.inf for f, _ in fills)
    several = sum(t.huge for t in terms) + any(math.isfinite(f.fill) for f, _ in fills) > 1
    if not infinite and not several and all(t.facts.finite and not t.bias.factors for t in terms):
        return False
    if site.sink is not None and not site.sink_behind:
        return False
    # Replaced scores stop the NaN that flows back to them; numbers that were added after that do not.
    stopped = all(f.fill == -math.inf and not (training and f.late) for f, _ in fills) and not large
    if stopped and site.softmax.name == "_softmax" and not site.sink_behind and site.scores.floor is None:
        return True
    raise Blocked(f"rows without a single key become zeros, but not their gradients{_ALLOWED}", site.output)


def no_key(site: Site) -> float:
    """What counts as a row without a key at this site."""
    return NO_KEY.get(rounded_in(site), NO_KEY[torch.float32])


def _empty_rows(
    site: Site, fills: list[tuple[Fill, MaskFacts]], terms: list[Term], training: bool, limit: float
) -> str:
    """See `MaskPlan.empty_rows`."""
    if training and any(t.masked and t.bias.factors for t in terms):
        # A mask that a tensor scales: what flows to the tensor is rounded off as the user's sums are.
        raise Blocked(f"rows without a single key would pass other gradients{_ALLOWED}", site.output)
    settled = all(t.settled(site.scores.added_in) for t in terms)
    if not settled and (training or not _rounds_as_kernels(site, fills, terms)):
        return "exact"
    narrow = any(dtype not in (torch.float32, torch.float64) for dtype in site.scores.added_in)
    if training and _uneven(site, terms) and (narrow or site.scores.floor):  # sums are rounded off as the user's are
        return "exact"
    if not fills:
        return "added"
    numbers = {f.fill for f, _ in fills}
    # The lowest finite number absorbs what is added to it; -1e9 does not, and a row of it alone shows what was added.
    shows = any(f.late and math.isfinite(f.fill) and f.fill > ABSORBS for f, _ in fills)
    # float64 loses no score beside -1e9: one that is replaced by it differs from one that it is added to.
    kept = bool(terms) and any(math.isfinite(number) and number > no_key(site) for number in numbers)
    if len(numbers) > 1 or shows or kept:
        return "exact"
    if terms and training and not all(t.small(limit) for t in terms):
        return "exact" if site.scores.floor else "added"
    if terms and not training:
        return "added"
    return "uniform" if math.isfinite(min(numbers)) else "nan"


def _rounds_as_kernels(site: Site, fills: list[tuple[Fill, MaskFacts]], terms: list[Term]) -> bool:
    """All that is added is one mask, beside zeros and numbers that no sum changes, in the dtype that kernels add in.

    What is added beside it, however small, is rounded with it in the operand of a kernel, and with the score before. A
    mask of unknown size may make up for such a number.
    """
    wide = torch.promote_types(site.scores.product.dtype, torch.float32)
    rounding = [t for t in terms if not t.absorbs]
    scaled = any(t.bias.scaled for t in terms)
    alone = len(terms) == 1 or all(t.size < -ABSORBS for t in rounding)
    return (
        not fills
        and len(rounding) <= 1
        and alone
        and not scaled
        and all(dtype == wide for dtype in site.scores.added_in)
    )


def _uneven(site: Site, terms: list[Term]) -> bool:
    return _tells_keys_apart(site, terms) or any(t.uneven(no_key(site)) for t in terms)


def _tells_keys_apart(site: Site, terms: list[Term]) -> bool:
    """Whether keys of a row without a single one are known to carry different numbers.

    Of two numbers that drown scores, the keys with the lesser keep the weights; beside one, so do those with the least
    of anything that is not lost in the sum with it.
    """
    drowning = [t for t in terms if t.drowns(no_key(site))]
    if not drowning:
        return False
    rest = [abs(v) for t in terms if t not in drowning for v in t.extremes]
    least = min(abs(v) for t in drowning for v in t.extremes if abs(v) >= -no_key(site))
    unit = least * min(torch.finfo(dtype).eps for dtype in site.scores.added_in)
    return len(drowning) > 1 or max(rest, default=0.0) >= unit / 2


# ---- proofs -------------------------------------------------------------------------------------------------------


def _prove(operand: Operand, frame: Frame, prover: Prover, *, keep_when: bool) -> MaskFacts:
    value, names, keep = _asked(operand, frame, keep_when)
    return prover.prove(value, names, _length(frame.rows, value), _length(frame.keys, value), keep)


def _binary(operand: Operand, frame: Frame, prover: Prover) -> MaskFacts:
    """Proof that a factor of scores or exponentials is 0 or 1."""
    facts = _prove(operand, frame, prover, keep_when=True)
    if not facts.values or not set(facts.values) <= {0.0, 1.0}:
        raise Blocked("masked by a product with what is not proved to be 0 or 1", operand.value)
    return facts


def _length(axes: tuple[Axis, ...], like: Value) -> int | torch.SymInt:
    """The size of some axes as the prover takes it; a SymInt of the graph that `like` belongs to."""
    size = size_of(axes)
    if isinstance(size, int):
        return size
    made: torch.SymInt = like.tensor.fake_mode.shape_env.create_symintnode(size, hint=None)  # type: ignore[attr-defined]
    return made


def _asked(operand: Operand, frame: Frame, keep_when: bool) -> tuple[Value, list[str], bool]:
    """A mask, and along which axis of the scores each of its dims stands; a part of an axis is an axis of its own."""
    names = []
    for dim, group in enumerate(operand.dims):
        axes = atoms(group)
        whole = "q" if axes == frame.rows else "k" if axes == frame.keys else f"axes {[id(a) for a in axes]}"
        names.append(whole if axes else f"dim {dim}")
    return operand.value, names, keep_when
