"""What the report is told of attentions and masks: the records, with the place of each in the user's source."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from optpass.passes.attention import words
from optpass.passes.attention.plans.plan import Plan
from optpass.passes.attention.targets import Choice
from optpass.passes.source import locate
from optpass.reporting.model import Site as Record


def applied(node: fx.Node, planned: Plan, choice: Choice, cost: Mapping[str, float]) -> Record:
    """An attention that runs on a kernel now; `node` gave the program its result."""
    source = locate(node)
    return Record(
        kind="attention", file=source.file, line=source.line, module=source.module, node=node.name,
        reason=choice.reason, before=words.before(planned.site, planned.mask.facts),
        after=words.after(planned, choice), cost=words.figures(planned, choice.materialises) | dict(cost),
    )  # fmt: skip


def mask(node: fx.Node, proved: str) -> Record:
    """A mask that is computed now, from what was proved of it."""
    source = locate(node)
    return Record(
        kind="attention mask", file=source.file, line=source.line, module=source.module, node=node.name,
        reason="proved to be what positions say; reading it for each score costs more",
        before="a mask read from a buffer", after=f"computed from positions ({proved})",
    )  # fmt: skip


def declined(
    node: fx.Node, product: fx.Node, reason: str, before: str, cost: Mapping[str, float] | None
) -> Record:  # fmt: skip
    """An attention that is left as it is, and the node that says why; `product` is its second product."""
    source, blocked = locate(product), locate(node)
    elsewhere = (blocked.file, blocked.line) != (source.file, source.line)
    return Record(
        kind="attention", file=source.file, line=source.line, module=source.module, node=node.name,
        node_file=blocked.file if elsewhere else None, node_line=blocked.line if elsewhere else None,
        reason=reason, before=before, cost=dict(cost or {}),
    )  # fmt: skip
