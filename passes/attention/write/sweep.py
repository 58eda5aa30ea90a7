"""After the calls are written: nodes that only made what is replaced go, and so do uses of a score's shape alone.

Decides what is dead; what is live was found before anything was written (`swap.live_values`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from optpass.passes.attention.program.ir import Program, Value, flat_values
from optpass.passes.attention.site import Blocked, Site
from optpass.passes.attention.write.emit import Writer


def free_of_scores(
    program: Program,
    graph: fx.Graph,
    sites: list[Site],
    live: set[Value],
    writer_at: Callable[[fx.Node, Value], Writer],
) -> None:
    """Write nodes that only read the shape of scores or weights (`ones_like(scores)`) without them."""
    below = _downstream({v.node for s in sites for v in s.values if v.node is not None})
    for node in [n for n in graph.nodes if n in program.ran and n.users]:
        value = program.node_value(node)
        if value is None or value.name != "full" or value not in live or below.isdisjoint(node.all_input_nodes):
            continue
        writer = writer_at(node, value)
        try:
            node.replace_all_uses_with(writer.anew(value))
        except Blocked:
            writer.undo()


def sweep(program: Program, graph: fx.Graph, sites: list[Site], live: set[Value]) -> int:
    """Erase the nodes that only made what is replaced now; returns how many.

    A node goes if everything that uses it goes. One that writes to memory goes only together with every node that
    touches that memory, so that no write is lost that somebody still sees.
    """
    order = {n: i for i, n in enumerate(graph.nodes)}
    owned = {v.storage for v in program.values if v.leaf}
    inside = {v.node for s in sites for v in (*s.values, s.output) if v.node is not None}
    gone = {n for n in _upstream(inside) if n in order and _erasable(n, program)}
    # What looked at them and made nothing that lives: the `scores[:1]` of a `zeros_like(scores[:1])`.
    gone |= {n for n in order if _erasable(n, program) and not any(v in live for v in program.by_node.get(n, ()))}
    # What wrote to a result that was replaced writes to the replacement now.
    moved = {
        v.storage for s in sites if s.output.node is not None for v in flat_values(program.of_node.get(s.output.node))
    }
    changed = True
    while changed:
        changed = False
        for node in sorted(gone, key=order.__getitem__, reverse=True):  # users first: one that stays keeps what it uses
            storages = {v.storage for v in program.by_node.get(node, ())} | program.written_by(node)
            tied = {t for s in storages - moved if s in program.writes for t in program.touches.get(s, ())}
            lost = any(u not in gone for u in node.users) or not tied <= gone
            if lost or any(s in owned and node in program.writes.get(s, ()) for s in storages):
                gone.discard(node)
                changed = True
    for node in sorted(gone, key=order.__getitem__, reverse=True):
        graph.erase_node(node)
    return len(gone)


def _upstream(nodes: set[fx.Node]) -> set[fx.Node]:
    """`nodes` and all that they are computed from."""
    found, todo = set(nodes), list(nodes)
    while todo:
        for source in todo.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                todo.append(source)
    return found


def _downstream(nodes: set[fx.Node]) -> set[fx.Node]:
    """`nodes` and all that is computed from them."""
    found, todo = set(nodes), list(nodes)
    while todo:
        for user in todo.pop().users:
            if user not in found:
                found.add(user)
                todo.append(user)
    return found


def _erasable(node: fx.Node, program: Program) -> bool:
    """Computes tensors that were looked into, and nothing else: it sets no state, as `_enter_autocast` does."""
    if node.op not in ("call_function", "call_method"):
        return False
    return node in program.ran and bool(program.by_node.get(node) or flat_values(program.of_node.get(node)))
