"""One graph worked on: its attentions found, planned, priced and written one by one; what is said of each.

Connects the modules of this package; each decision is made in one of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from optpass.passes.attention import filing, words
from optpass.passes.attention.choice import BLOCKS, Chooser
from optpass.passes.attention.find.core import Found, find
from optpass.passes.attention.find.elements import multiply_matrices
from optpass.passes.attention.find.unseen import not_looked_into
from optpass.passes.attention.masks import MaskFacts, Prover
from optpass.passes.attention.plans.plan import Plan, plan
from optpass.passes.attention.program.ir import Value
from optpass.passes.attention.program.lower import lower
from optpass.passes.attention.settings import AttentionConfig
from optpass.passes.attention.site import Blocked, Site
from optpass.passes.attention.targets import Choice
from optpass.passes.attention.write import preference
from optpass.passes.attention.write.emit import Writer, returned_by
from optpass.passes.attention.write.folded import folded
from optpass.passes.attention.write.hints import Hints
from optpass.passes.attention.write.positions import compute_masks
from optpass.passes.attention.write.rewrite import Layout, Rewrite, place
from optpass.passes.attention.write.shared import share
from optpass.passes.attention.write.swap import (
    Attachment,
    check_grad_mode,
    check_private,
    live_values,
    private,
    root_values,
)
from optpass.passes.attention.write.sweep import free_of_scores, sweep
from optpass.passes.contract import ContentGuard, PassContext, PassResult

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Part:
    """A site, the kernel that computes it, and the figures behind that."""

    planned: Plan
    choice: Choice
    cost: dict[str, float]


class GraphWork:
    """One graph being worked on.

    Args:
        around: the operators that run it, for a graph inside of another.
    """

    def __init__(
        self, gm: fx.GraphModule, ctx: PassContext, config: AttentionConfig, result: PassResult,
        *, around: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.gm, self.ctx, self.config, self.result, self.around = gm, ctx, config, result, around
        swaps = config.dropout == "swap"
        self.program = lower(gm.graph, lambda target: getattr(gm, target, None), rates=swaps)
        multiply_matrices(self.program)
        self.roots = root_values(self.program, gm.graph)
        self.live = live_values(self.program, gm.graph)
        self.nodes = returned_by(self.program)
        self.hints = Hints(gm.graph)
        self.training = torch.is_grad_enabled() and any(_wants_grad(n) for n in gm.graph.nodes)
        self.prover = Prover(self._contents)
        self.done: list[Site] = []
        self.writers: list[Writer] = []
        self.guarded: set[ContentGuard] = set()

    def run(self) -> None:
        candidates = [
            f
            for f in find(self.program, self.prover.constant, self.prover.constant_now, self.roots)
            if f.product in self.live
        ]
        regions = sum(len(f.sites) for f in candidates)
        again = any("checkpoint" in name for name in self.around)
        self.chooser = Chooser(self.ctx, self.config, regions, again=again)
        self.private = private([f.sites for f in candidates], self.program, self.live, self.roots)
        for candidate in candidates:
            try:
                self._one(candidate)
            except Blocked as blocked:
                self._decline(candidate, blocked)
        for node, reason in not_looked_into(self.gm.graph):
            self._file_declined(node, node, reason)
        if self.done:
            free_of_scores(self.program, self.gm.graph, self.done, self.live, self._writer)
            sweep(self.program, self.gm.graph, self.done, self.live)
            share(self.gm.graph, self.program, self.writers)
            self.result.changed = True

    def _one(self, found: Found) -> None:
        """Where products that are added up cannot be one, the second of them is a bias."""
        if found.blocked is not None:
            raise found.blocked
        try:
            self._write([self._contained(site) for site in found.sites])
        except Blocked as blocked:
            joined = any(site.scores.parts for site in found.sites)
            if not joined or blocked.cost or found.product not in self._apart:
                raise
            self._write([self._contained(site) for site in self._apart[found.product].sites])

    @functools.cached_property
    def _apart(self) -> dict[Value, Found]:
        apart = find(self.program, self.prover.constant, self.prover.constant_now, join=False)
        return {found.product: found for found in apart if found.blocked is None}

    def _check(self, site: Site) -> None:
        check_private(site, self.program, self.live, self.roots, self.private)
        if self.training:
            check_grad_mode(site)
        if self.training and "cond" in self.around:
            reason = "it stands in a branch of torch.cond, and its gradients would have other strides than the other's"
            raise Blocked(reason, site.output)

    def _contained(self, site: Site) -> _Part:
        """`_decided`, of which an error of ours costs the one site."""
        try:
            return self._decided(site)
        except Blocked:
            raise
        except Exception as error:
            raise Blocked.of_error(error, site.output) from error

    def _decided(self, site: Site) -> _Part:
        """How one site is computed; raises `Blocked` where it is not."""
        self._check(site)
        planned = plan(
            site, prover=self.prover, exact_rows=self.config.masked_rows == "exact",
            training=self.training and site.output.grad, sizes=self.hints,
        )  # fmt: skip
        if math.isnan(site.dropout) and self.config.dropout == "swap":
            raise Blocked("the probability of its dropout is not known when compiling", site.dropout_value)
        if site.dropout and self.config.dropout == "keep":
            rate = " of an unknown rate" if math.isnan(site.dropout) else f" {site.dropout:g}"
            raise Blocked(
                f"dropout{rate} is active and the kernel draws other random numbers "
                "(options={'attention': {'dropout': 'swap'}} allows that)",
                site.dropout_value,
            )
        choice = self.chooser.choose(planned)
        try:
            choice, cost = self.chooser.price(planned, choice)
        except Blocked:
            self._compute_masks(planned)
            raise
        return _Part(planned.computed_in(choice.computed_in), choice, cost)

    def _write(self, parts: list[_Part]) -> None:
        """The calls of one product, and what they add up to, in its place."""
        output = parts[0].planned.site.output
        assert output.node is not None
        writer = self._writer(output.node, output)
        try:
            attachment = Attachment(parts[0].planned.site, self.program, self.live)
            total, layout = self._results(writer, parts)
            if len(parts) == 1 and attachment.is_copied(writer, total, layout):
                writer, total, layout = self._folded(parts[0], attachment, writer) or (writer, total, layout)
            attachment.put(writer, total, layout)
        except Blocked:
            writer.undo()
            raise
        except Exception as error:
            writer.undo()
            raise Blocked.of_error(error, output) from error
        for part in parts:
            self._file(part, output.node)

    def _results(self, writer: Writer, parts: list[_Part]) -> tuple[fx.Node, Layout]:
        """The calls, added up, in the dtype of the program's result; and what the dims of the sum run over."""
        output = parts[0].planned.site.output
        how = {"summed": len(parts) > 1, "twice": self.ctx.options.inner == "eager"}
        written = [Rewrite(writer, part.planned, **how) for part in parts]
        results = [self._call(r, writer, part.choice) for r, part in zip(written, parts, strict=True)]
        layout: Layout = written[0].out_dims
        if len(results) > 1:
            layout = tuple(parts[0].planned.site.out_dims)
            results = [place(writer, n, r.out_dims, layout) for n, r in zip(results, written, strict=True)]
        total = functools.reduce(functools.partial(writer.call, torch.add), results)
        return writer.to(total, output.dtype), layout

    def _folded(self, part: _Part, attachment: Attachment, before: Writer) -> tuple[Writer, fx.Node, Layout] | None:
        """The call written with heads among the batch in place of what `before` wrote, if its result is not copied."""
        planned, output = folded(part.planned, before), part.planned.site.output
        if planned is None or output.node is None:
            return None
        writer = self._writer(output.node, output)
        try:
            total, layout = self._results(writer, [dataclasses.replace(part, planned=planned)])
            if not attachment.is_copied(writer, total, layout):
                before.undo()
                return writer, total, layout
        except Blocked:
            pass
        writer.undo()
        return None

    def _file(self, part: _Part, node: fx.Node) -> None:
        """The record of a site that is written, and its guards."""
        planned, choice, site = part.planned, part.choice, part.planned.site
        self.done.append(site)
        self._guard(planned.mask.proofs)
        self._hold(site.scores.held, "a masked score becomes the number that is in it")
        record = filing.applied(node, planned, choice, part.cost)
        self.result.applied.append(record)
        self.result.product.append((record, planned.problem, choice))

    def _call(self, rewrite: Rewrite, writer: Writer, choice: Choice) -> fx.Node:
        if choice.target == "flex":
            return rewrite.flex(self._attach(writer))
        if choice.target == BLOCKS:
            return rewrite.in_blocks()
        by_itself = choice.by_default or not preference.available()
        return rewrite.sdpa(None if by_itself else choice.kernel)

    def _compute_masks(self, planned: Plan) -> None:
        """No kernel pays here; what is proved of the mask is of use all the same."""
        at = planned.site.scores.product.node
        masks = [self.nodes[f.mask.value] for f in planned.site.scores.fills if f.mask.value in self.nodes]
        if at is None or not masks:
            return
        writer = self._writer(min(masks), planned.site.output)
        try:
            computed = compute_masks(writer, planned, self.nodes)
        except Blocked:
            writer.undo()
            return
        for item in computed:
            self.result.changed = True
            self._guard([item.facts])
            self.result.applied.append(filing.mask(item.node, item.facts.words))

    def _attach(self, writer: Writer) -> Callable[[str, fx.GraphModule], fx.Node]:
        """Puts a graph on the module under a free name."""

        def attach(name: str, graph: fx.GraphModule) -> fx.Node:
            number = next(n for n in itertools.count() if not hasattr(self.gm, f"optpass_{name}_{n}"))
            setattr(self.gm, f"optpass_{name}_{number}", graph)
            return writer.attribute(f"optpass_{name}_{number}", graph)

        return attach

    def _writer(self, at: fx.Node, like: Value) -> Writer:
        self.writers.append(Writer(self.gm.graph, self.program, at, like, self.nodes, self.hints))
        return self.writers[-1]

    def _guard(self, proofs: Sequence[MaskFacts]) -> None:
        """The rewrite holds while buffers hold what was proved from them."""
        for facts in proofs:
            self._hold(facts.buffers, f"the mask is {facts.words}")

    def _hold(self, buffers: Sequence[Value], words: str) -> None:
        for buffer in buffers:
            guard = ContentGuard(buffer.node, words) if buffer.node is not None else None
            if guard is not None and guard not in self.guarded:
                self.guarded.add(guard)
                self.result.guards.append(guard)

    def _decline(self, found: Found, blocked: Blocked) -> None:
        if blocked.defect is not None:
            if self.ctx.options.strict:
                raise blocked.defect
            log.warning("an attention of graph %s is left as it is: %s", self.ctx.graph_id, blocked.reason)
            log.debug("attention", exc_info=blocked.defect)
        node = (blocked.value.node if blocked.value is not None else None) or found.product.node
        assert node is not None and found.product.node is not None
        before = words.before(found.sites[0]) if found.sites else ""
        self._file_declined(node, found.product.node, blocked.reason, before, blocked.cost)

    def _file_declined(
        self, node: fx.Node, product: fx.Node, reason: str, before: str = "", cost: dict[str, float] | None = None
    ) -> None:
        self.result.declined.append(filing.declined(node, product, reason, before, cost))

    def _contents(self, value: Value) -> torch.Tensor | None:
        if value.leaf != "input" or value.node is None or value.version:
            return None
        return self.ctx.contents(value.node)


def _wants_grad(node: fx.Node) -> bool:
    value: Any = node.meta.get("example_value")
    return node.op in ("placeholder", "get_attr") and isinstance(value, torch.Tensor) and value.requires_grad
