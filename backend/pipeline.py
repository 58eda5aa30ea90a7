"""Running passes over one graph at one stage: order, timing, checking, undo on failure, records for the report."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from torch import fx

from optpass.backend import snapshot
from optpass.errors import OptPassError, PassError
from optpass.passes.contract import ContentGuard, Pass, PassContext, PassResult, Stage
from optpass.passes.order import missing_requirement
from optpass.reporting.model import PassRecord

log = logging.getLogger(__name__)

#: Where each stage keeps a node's fake value.
VALUE_KEY = {Stage.DYNAMO: "example_value", Stage.JOINT: "val", Stage.COMPILED: "val"}


def run_stage(
    stage: Stage,
    passes: Sequence[Pass],
    gm: fx.GraphModule,
    ctx: PassContext,
    products: dict[str, Any],
    guards: list[ContentGuard] | None = None,
) -> list[PassRecord]:
    """Run the passes of `stage` over `gm` in place, in the given order.

    Args:
        stage: which passes to run.
        passes: all passes of this compile, already ordered.
        gm: graph to analyse or transform.
        ctx: handed to each pass.
        products: what passes that succeeded on this graph so far found, by name; extended here.
        guards: contents that the changes rest on; extended here. Their nodes may be those of an earlier copy of the
            graph, of which names and targets still say what they are.

    Returns:
        One record per pass of the stage, failed and skipped ones included.

    Raises:
        PassError: a pass failed and `strict` is set.
    """
    records = []
    for item in passes:
        if item.stage is not stage:
            continue
        missing = missing_requirement(item, set(products))
        if missing is not None:
            records.append(PassRecord(name=item.name, stage=stage, error=f"not run: it requires {missing!r}"))
            continue
        record, product = run_pass(item, gm, ctx, guards)
        records.append(record)
        if record.error is None:
            products[item.name] = product
    return records


def run_pass(
    item: Pass, gm: fx.GraphModule, ctx: PassContext, guards: list[ContentGuard] | None = None
) -> tuple[PassRecord, Any]:
    """Run one pass, check what it left, and put the graph back if it failed. Returns the record and its product.

    What its changes rest on is added to `guards`.
    """
    key = VALUE_KEY[item.stage]
    start = time.perf_counter()
    before = snapshot.take(gm, key) if item.stage is not Stage.COMPILED else None
    record, product = PassRecord(name=item.name, stage=item.stage), None
    try:
        result = item.run(gm, ctx)
        _check_contract(item, result, ctx)
        if before is not None and result.changed:
            snapshot.check(gm, before, key)
            gm.recompile()
        elif before is not None and snapshot.modified(gm, before):
            raise PassError("changed the graph but says that it is unchanged")
        record.applied, record.declined, product = result.applied, result.declined, result.product
        if guards is not None:
            guards.extend(result.guards)
    except Exception as error:  # whatever a pass does, the user's run goes on with the old graph
        if before is not None:
            snapshot.restore(gm, before)
        record.error = _one_line(error)
        if ctx.options.strict:
            raise PassError(f"pass {item.name!r} failed on graph {ctx.graph_id}: {record.error}") from error
        log.warning("pass %s failed on graph %s and was undone: %s", item.name, ctx.graph_id, record.error)
        log.debug("pass %s", item.name, exc_info=True)
    record.seconds = time.perf_counter() - start
    log.info(
        "graph %s: %s applied %d, declined %d in %.1f ms",
        ctx.graph_id, item.name, len(record.applied), len(record.declined), 1e3 * record.seconds,
    )  # fmt: skip
    return record, product


def _check_contract(item: Pass, result: PassResult, ctx: PassContext) -> None:
    for site in (*result.applied, *result.declined):
        if not site.reason.strip():
            raise PassError(f"site at node {site.node!r} has no reason")
    if result.applied and not result.changed and item.stage is not Stage.COMPILED:
        raise PassError("reports applied sites but says that the graph is unchanged")
    for guard in result.guards:
        if not guard.reason.strip():
            raise PassError(f"guard on {guard.node.name!r} has no reason")
        if ctx.contents(guard.node) is None:
            raise PassError(f"guards {guard.node.name!r}, whose contents are not known")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, OptPassError) else f"{type(error).__name__}: {text}"
