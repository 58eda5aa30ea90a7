"""Which kernel computes a planned site, and whether that pays: the chooser of `targets` and the figures of `gate`.

What stands in both is data; here it is asked for one site of one graph, with the inner compiler that comes after.
"""

from __future__ import annotations

import dataclasses

from optpass.errors import ConfigError
from optpass.passes.attention import gate
from optpass.passes.attention.axes import flat
from optpass.passes.attention.plans.plan import Plan
from optpass.passes.attention.settings import AttentionConfig
from optpass.passes.attention.site import Blocked
from optpass.passes.attention.targets import Choice, arch_of, kernels, present, usable
from optpass.passes.attention.targets import choose as choose_kernel
from optpass.passes.attention.write import flex
from optpass.passes.contract import PassContext
from optpass.passes.devices import DeviceSpec

#: The kernel in blocks, and its target.
BLOCKS = "blocks"
CUDNN = "cudnn"
#: What it must be faster by than the inner compiler alone: measured on one thread, it shares small work less evenly.
BLOCKS_MARGIN = 1.15
#: Seen with torch 2.13: a query that holds NaN gets zeros, of a key that does some queries get numbers.
_SWALLOWS = "FlexAttention as Inductor compiles it for CPUs gives numbers where a query or key is NaN"
#: Inner compilers that run operators which they do not know.
_OWN_OPERATORS = ("inductor", "aot_eager", "eager")
#: Inner compilers that give us the joint graph, in which the backend sets right what cuDNN's backward gets wrong.
_JOINT = ("inductor", "aot_eager")


class Chooser:
    """Chooses for the sites of one graph.

    Args:
        regions: how many of them there are.
        again: a checkpoint runs the graph again in the backward.
    """

    def __init__(self, ctx: PassContext, config: AttentionConfig, regions: int, *, again: bool = False) -> None:
        self.ctx, self.config, self.regions, self.again = ctx, config, regions, again

    def choose(self, planned: Plan) -> Choice:
        """The kernel that computes the site; raises `Blocked` where none does."""
        choice = self._chosen(planned)
        if choice.computed_in is not None and self.ctx.stand_in and planned.problem.device != self._spec(planned).kind:
            choice = dataclasses.replace(choice, computed_in=None)  # as exact as it is on a CPU need it not be there
        return choice

    def _chosen(self, planned: Plan) -> Choice:
        mode = self.config.mode
        arch = arch_of(self._spec(planned)) if planned.problem.device == "cuda" else None
        available = self._available(planned.problem.device)
        if planned.problem.training and self.ctx.options.inner not in _JOINT:
            available -= {CUDNN}
        choice = choose_kernel(planned.problem, arch=arch, mode=mode, available=available, cudnn=_cudnn(arch))
        materialises = choice.target is None or choice.kernel == gate.MATH
        flex = choice.target == "flex" and planned.problem.device == "cpu"
        if (materialises or flex) and mode in ("auto", "always"):
            choice = self._blocks_rather(planned, choice)
        if choice.target == "flex" and flex and mode != "flex" and self.ctx.options.inner == "inductor":
            raise Blocked(_SWALLOWS, planned.site.output)
        if choice.target is None:
            raise Blocked(choice.reason, planned.site.output)
        return choice

    def price(self, planned: Plan, choice: Choice) -> tuple[Choice, dict[str, float]]:
        """The choice, or the cheaper one in blocks, and the figures behind it.

        Raises `Blocked` where neither would be faster, unless the user wants it always.
        """
        _check_copies(planned, auto=self.config.mode == "auto")
        verdict = self._verdict(planned, choice)
        other = self._in_blocks(planned) if self.config.mode == "auto" and choice.target != BLOCKS else None
        if isinstance(other, Choice):
            in_blocks = self._verdict(planned, other)
            if in_blocks.pays and not (verdict.pays and verdict.fused_us <= in_blocks.fused_us):
                choice, verdict = other, in_blocks
        cost = {"fused_us": verdict.fused_us, "unfused_us": verdict.unfused_us}
        if verdict.fused_us:
            cost["gain"] = verdict.unfused_us / verdict.fused_us
        if self.config.mode == "auto" and not verdict.pays:
            raise Blocked(verdict.reason, planned.site.output, cost)
        return choice, cost

    def _blocks_rather(self, planned: Plan, choice: Choice) -> Choice:
        """Our own operator where it computes the site, else `choice`, which says why not."""
        blocks = self._in_blocks(planned)
        if isinstance(blocks, Choice):
            return blocks
        if choice.target is not None:
            return choice
        others = [why for kernel, why in choice.rejected if kernel != BLOCKS]
        return dataclasses.replace(choice, reason="; ".join([*others, blocks]))

    def _spec(self, planned: Plan) -> DeviceSpec:
        try:
            return self.ctx.device()
        except ConfigError as error:
            raise Blocked(f"nothing is known of the device: {error}", planned.site.output) from None

    def _verdict(self, planned: Plan, choice: Choice) -> gate.Verdict:
        mask = planned.mask
        added = any(facts.buffers for facts in mask.proofs[len(planned.site.scores.fills) :])
        loaded = mask.kind == "bool" or added  # a causal fill from a buffer is computed where no kernel pays
        verdict = gate.decide(
            planned.problem, str(choice.target), choice.kernel, self._spec(planned),
            mask_form="loaded" if loaded else "computed", regions=self.regions, computed_in=choice.computed_in,
        )  # fmt: skip
        clearly = choice.target != BLOCKS or verdict.fused_us * BLOCKS_MARGIN <= verdict.unfused_us
        if clearly or not verdict.pays:
            return verdict
        return dataclasses.replace(verdict, pays=False, reason=f"it is not faster by enough: {verdict.reason}")

    def _in_blocks(self, planned: Plan) -> Choice | str:
        """Our own operator, where it computes the site: on a CPU, and not for a foreign compiler; else why not."""
        if planned.problem.device != "cpu":
            return "attention in blocks is for CPUs"
        if self.ctx.options.inner not in _OWN_OPERATORS:
            return "attention in blocks is not for compilers of others"
        if planned.mask.empty_rows in ("zero", "zero or NaN"):  # rows without a key are NaN in it
            return "attention in blocks gives NaN for a row without a key, not zeros"
        numbers = (planned.scale, *(cap.inner for cap in planned.site.scores.softcaps))
        if not all(isinstance(number, (int, float)) for number in numbers):
            return "attention in blocks takes no number that may change from call to call"
        choice = choose_kernel(planned.problem, arch="cpu", mode="auto", available=frozenset({BLOCKS}))
        refused = dict(choice.rejected).get(BLOCKS, choice.reason)
        return choice if choice.target == BLOCKS else refused

    def _available(self, device: str) -> frozenset[str]:
        """Kernels that can be used here: FlexAttention is one where its form is known and somebody will compile it."""
        inner, mode = self.ctx.options.inner, self.config.mode
        compiled = inner == "inductor" or callable(inner) or mode != "auto"
        unfused = callable(inner) or (mode == "flex" and inner != "inductor")
        if self.again and (callable(inner) or inner == "eager"):
            unfused = False  # its autograd function runs other operations the second time, which checkpoints refuse
        found = usable(device, compiled=compiled, unfused=unfused) - {BLOCKS}
        found -= frozenset() if flex.drops() else {"flex_dropout", "flex_unfused"}
        return frozenset(k for k in found if kernels(device)[k].target != "flex" or flex.available())


def _cudnn(arch: str | None) -> int | None:
    """The version of cuDNN that is here, for the architecture that is: SDPA's own order of kernels depends on it."""
    here, version = present("cuda")
    return version if arch is not None and arch == here else None


def _check_copies(planned: Plan, *, auto: bool) -> None:
    """Refuses a site whose keys and values would be copied to more numbers than the scores, which are not made.

    They are copied where they are put next to each other, padded, or lack an axis of the batch. Few queries make few
    scores, as where one token is generated beside a cache. Heads that are mixed before the softmax (talking heads) look
    like attention of one query to keys that are scores: a copy of all values for each of them, which nobody wants.
    """
    site, frame, problem = planned.site, planned.frame, planned.problem
    shared = {*frame.batch, *frame.kv_heads}
    products = [site.scores.key, *(part.key for part in site.scores.parts)]
    spread = [any(not shared <= set(flat(o.dims)) for o in operands) for operands in (products, [site.value])]
    if all(spread) and not frame.rows:
        reason = "its product has no axis of queries, and keys and values would both be copied along axes they lack"
        raise Blocked(reason, site.output)
    if not auto:
        return
    joined = (site.scores.joined, site.joined)
    widths = (problem.head_dim, problem.value_dim)
    copied = [any(why) for why in zip(joined, spread, planned.padding, strict=True)]
    if sum(w for w, c in zip(widths, copied, strict=True) if c) * problem.kv_heads > problem.queries * problem.heads:
        what = "putting its keys and values next to each other" if any(joined) else "copying its keys and values"
        raise Blocked(f"{what} would move more numbers than its scores are", site.output)
