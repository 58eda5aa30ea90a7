"""How the mask of a site reaches the kernel: what is proved of it, and as which operand it is passed.

What must be done about rows without a single key is `empty`'s; the operand is written in `mask_operand`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch

from optpass.passes.attention.axes import Axis, atoms, flat
from optpass.passes.attention.find import zeros
from optpass.passes.attention.find.terms import Term
from optpass.passes.attention.masks import MaskFacts, Prover
from optpass.passes.attention.plans.empty import ALLOWED, Masked, is_quotient, no_key
from optpass.passes.attention.plans.frame import Frame, size_of
from optpass.passes.attention.plans.needless import needed
from optpass.passes.attention.problem import MaskKind
from optpass.passes.attention.program.ir import Value
from optpass.passes.attention.site import Bias, Blocked, Fill, Operand, Site


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
        before: see `needless.Needed`.
        zeroed: weights are set to zero where the fill hides scores.
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
    before: tuple[str, ...] | None = ()
    zeroed: bool = False


def plan_mask(site: Site, frame: Frame, prover: Prover, *, exact_rows: bool, training: bool) -> MaskPlan:
    """The plan; raises `Blocked` where rows without a key would come out otherwise than in the user's program."""
    scores = site.scores
    if site.sink is not None and not set(flat(site.sink.dims)) <= {*frame.batch, *frame.heads, *frame.rows}:
        raise Blocked("the appended column depends on the keys", site.output)
    fills = [(f, _prove(f.mask, frame, prover, keep_when=f.keep_when)) for f in scores.fills]
    terms = [Term(b, _prove(b.operand, frame, prover, keep_when=True)) for b in scores.biases]
    proofs = [p for _, p in fills] + [t.facts for t in terms] + [_binary(o, frame, prover) for o in site.binary]
    left = needed(fills, terms)
    site = replace(site, zeroed=_zeroed(site, left.idle))
    fills, terms = left.fills, left.terms
    facts = [p for _, p in fills] + [t.facts for t in terms]
    if any(v == math.inf for t in terms for v in t.extremes):
        raise Blocked("plus infinity is added to scores", site.output)
    if any(p.nan for p in facts):  # beside fills: what they hide has a gradient of 0, and NaN in a kernel
        raise Blocked("NaN is added to scores (0 times infinity?)", site.output)
    _in_range(site, terms)
    if not facts:
        return MaskPlan("none", proofs=proofs)
    hiding = [t for t in terms if t.hides or t.rounds_off(scores.added_in)]
    together = _together(site, frame, prover, [f for f, _ in fills], hiding)
    masked = Masked(
        site, fills, terms, hiding, together.row_never_empty, _near(site, fills), prover.constant, exact_rows, training
    )
    causal = all(t.hides for t in terms) and together.kind == "causal"
    if causal and not site.zeroed and masked.near is None:
        return MaskPlan("causal", facts=facts, proofs=proofs)
    _check_sums(masked)
    infinite = any(math.isinf(f.fill) for f, _ in fills) or any(t.hides and not t.facts.finite for t in terms)
    if training and infinite and not masked.never and any(f.product for f, _ in fills):
        raise Blocked("scores are masked by a product, and rows without a single key send NaN through it", site.output)
    empty, passes = masked.rows()
    proved = [*((f.mask, p) for f, p in fills), *((t.bias.operand, t.facts) for t in terms)]
    row_free = frozenset(o for o, p in proved if p.kind == "padding" and "q" in _asked(o, frame, True)[1])
    finite = all(t.facts.finite and abs(t.bias.coefficient) <= 1 and not t.bias.factors for t in terms)
    finite = finite and all(math.isfinite(f.fill) for f, _ in fills) and not masked.several
    kind: MaskKind = "bool" if empty in ("never", "zero") and not terms else "float"
    return MaskPlan(
        kind, [f for f, _ in fills], [t.bias for t in terms], empty, finite, facts, proofs, row_free,
        passes, masked.uneven, masked.near, _cancels(site, fills, terms), left.before, bool(site.zeroed),
    )  # fmt: skip


def _zeroed(site: Site, idle: Collection[Fill]) -> list[tuple[Value, bool]]:
    """Masks where weights are set to zero: each is one where scores were masked, of which those `idle` hide nothing."""
    found = []
    for mask, hides in site.zeroed:
        alike = [f for f in site.scores.fills if zeros.alike(f.mask.value, not f.keep_when, mask, hides)]
        if not alike:
            raise Blocked("weights are set to zero where their scores were not masked", site.output)
        found += [] if any(f in idle for f in alike) else [(mask, hides)]
    return found + _multiplied(site, idle)


def _multiplied(site: Site, idle: Collection[Fill]) -> list[tuple[Value, bool]]:
    """Of masks that weights are multiplied by, those that set any to zero: each is the one mask of the scores.

    Where scores are minus infinity in the end, their weights are 0 already, or NaN, which a product with 0 stays.
    """
    found, scores = [], site.scores
    for mask in site.products:
        alike = [f for f in scores.fills if zeros.alike(f.mask.value, not f.keep_when, mask, False)]
        infinite = all(f.fill == -math.inf for f in alike)
        if not alike or len(scores.fills) > 1 or scores.floor is not None or (scores.biases and not infinite):
            raise Blocked(zeros.MULTIPLIED, site.output)
        found += [] if infinite or any(f in idle for f in alike) else [(mask, False)]
    return found


def _check_sums(masked: Masked) -> None:
    """Whether kernels add up what the user's program does, and as finely."""
    site, terms = masked.site, masked.terms
    if site.alone and masked.exact_rows and not masked.never:
        raise Blocked(
            f"rows without a single key come out in a way of their own by this softmax{ALLOWED}", site.softmax
        )
    if any(abs(v) > site.scores.largest for t in terms for v in t.extremes if math.isfinite(v)):
        raise Blocked("masked scores are cast to a dtype where they become infinite", site.output)
    added_in = site.scores.added_in
    held = min((torch.finfo(dtype).max for dtype in added_in), default=math.inf)
    infinite = [t for t in terms if t.overflows(held)]
    if not site.sink_behind:  # what is infinite at the end is so in a kernel's operand too
        infinite = [t for t in infinite if t.size <= held]
    if infinite and masked.exact_rows and not masked.never:
        raise Blocked(f"masked scores become infinite where they are scaled{ALLOWED}", site.output)
    if site.sink is not None:  # such rows are not computed apart
        coarse = any(t.raises(added_in, masked.constant) for t in terms)
    else:
        coarse = any(t.coarse(added_in, no_key(site)) for t in terms)
    if masked.exact_rows and coarse:
        raise Blocked("a number is added beside which the scores that stay are rounded off", site.output)


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


def _in_range(site: Site, terms: list[Term]) -> None:
    """Exponentials that are divided by their sum must not be known to be infinite, or all of them 0."""
    scores = site.scores
    most = math.log(torch.finfo(scores.dtypes[-1]).max)
    added = 0.0 if scores.centred else max((v for t in terms for v in t.extremes), default=0.0)
    for number in (scores.offset, scores.offset + added):
        if is_quotient(site) and abs(number) >= most:
            raise Blocked(f"{number:g} is added to what exponentials are made of, beyond their range", site.softmax)


def _together(site: Site, frame: Frame, prover: Prover, fills: list[Fill], hiding: list[Term]) -> MaskFacts:
    """What all that hides keys leaves to be seen."""
    asked = [_asked(f.mask, frame, f.keep_when) for f in fills]
    asked += [_asked(t.bias.operand, frame, True) for t in hiding]
    if not asked:
        return MaskFacts("all", "", row_never_empty=True)
    return prover.prove_all(asked, _length(frame.rows, site.output), _length(frame.keys, site.output))


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
