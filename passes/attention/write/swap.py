"""Putting the call in the place of what the user wrote: where it attaches, what it makes dead, what must not change.

Works on one site at a time and leaves the graph as it was where it cannot finish one.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from optpass.passes.attention.axes import Dims, below, known_equal, same_sizes
from optpass.passes.attention.program.calls import storage_of
from optpass.passes.attention.program.ir import Program, Value, ancestors, flat_values
from optpass.passes.attention.site import Blocked, Site
from optpass.passes.attention.strides import same_strides
from optpass.passes.attention.write import returned
from optpass.passes.attention.write.emit import Writer, tensor_of
from optpass.passes.attention.write.rewrite import Layout, place

#: How many nodes after the call are followed to see that other strides do no harm.
_FOLLOW = 16
#: Calls whose results torch's kernels keep; FlexAttention's is the first of several.
_KEEPING = (F.scaled_dot_product_attention, operator.getitem)
#: What copies where the strides ask for it.
_COPIES = ("reshape", "flatten", "contiguous")


def live_values(program: Program, graph: fx.Graph) -> set[Value]:
    """Values that something observable depends on: outputs, writes, and whatever an opaque node is given."""
    return set(ancestors(*root_values(program, graph)))


def root_values(program: Program, graph: fx.Graph) -> set[Value]:
    """Values that are observed themselves."""
    roots: set[Value] = set()
    owned = {v.storage for v in program.values if v.leaf}
    for node in graph.nodes:
        made = program.by_node.get(node, [])
        opaque = node.op in ("call_function", "call_method", "call_module") and node not in program.ran
        if node.op == "output" or (opaque and not _is_size(node)):
            given = [v for source in node.all_input_nodes for v in flat_values(program.of_node.get(source))]
            roots.update(given)
            # A node's tensor may have been written to since: what it holds then is what is seen.
            roots.update(v for g in given if g.storage in program.writes for v in program.stored(g.storage))
        roots.update(v for v in made if v.version and v.storage in owned)
    return roots


def _is_size(node: fx.Node) -> bool:
    """Reads a size or another property: needs the shape of its argument, not its contents."""
    return isinstance(node.meta.get("example_value"), (int, torch.SymInt, torch.Size, torch.dtype, torch.device))


def private(found: Sequence[Sequence[Site]], program: Program, live: set[Value], roots: set[Value]) -> set[Value]:
    """What is inside products that share their scores with nothing but each other."""
    left = [list(sites) for sites in found if sites]
    while True:
        inside = {v for sites in left for site in sites for v in (*site.values, site.output)}
        kept = [sites for sites in left if all(_is_private(site, program, live, roots, inside) for site in sites)]
        if len(kept) == len(left):
            return inside
        left = kept


def _is_private(site: Site, program: Program, live: set[Value], roots: set[Value], others: set[Value]) -> bool:
    try:
        check_private(site, program, live, roots, others)
    except Blocked:
        return False
    return True


def check_private(
    site: Site, program: Program, live: set[Value], roots: set[Value], others: Collection[Value] = ()
) -> None:
    """Blocks a site of which something is used elsewhere: scores or weights would have to be made all the same.

    `others`: what is inside sites that are replaced too; they may have scores in common with this one.
    """
    inside = {*site.values, site.output}
    for value in site.values:
        if value in roots:
            raise Blocked(f"{_what(site, value)} are used elsewhere: they {_where(value, program)}", value)
        for user in program.users(value):
            shared = user in others and value in site.scores.values
            if user in live and user not in inside and not shared:
                reader = program.reader(user)
                raise Blocked(f"{_what(site, value)} are used elsewhere too, by {reader.name}", reader)


def check_grad_mode(site: Site) -> None:
    """Blocks a site of which a part passes gradients and another does not."""
    for value in (*site.values, *site.scores.values):
        if value in site.scores.shifts:  # taken off a row: no gradient comes of it
            continue
        if value.grad != site.output.grad and value.tensor.is_floating_point():
            raise Blocked("part of it is computed under no_grad, the rest is not", value)


def _what(site: Site, value: Value) -> str:
    return "the scores" if value in site.scores.values else "the attention weights"


def _where(value: Value, program: Program) -> str:
    """What becomes of a value that is observed itself."""
    users = list(value.node.users) if value.node is not None else []
    users += [u for user in users if program.of_node.get(user) is value for u in user.users]
    if any(user.op == "output" for user in users):
        return "leave the graph"
    opaque = next((user.name for user in users if user not in program.ran and not _is_size(user)), None)
    return f"go to {opaque}, which is not looked into" if opaque else "leave the graph or go to an opaque op"


def _is_kept(final: fx.Node) -> bool:
    """Whether it is memory that a kernel fills and keeps for the backward; our own operators keep no result."""
    if not final.meta["example_value"].requires_grad:
        return False
    while final.target not in _KEEPING:
        source = final.args[0] if final.args else None
        if not isinstance(source, fx.Node) or not isinstance(made := source.meta.get("example_value"), torch.Tensor):
            return False
        if storage_of(made) != storage_of(final.meta["example_value"]):
            return False
        final = source
    return True


class Attachment:
    """Where the result of the call goes: the node that the user's result comes out of, and its layout there."""

    def __init__(self, site: Site, program: Program, live: set[Value]) -> None:
        self.site, self.program = site, program
        assert site.output.node is not None
        self.node = site.output.node
        first = [program.stored(storage)[:1] for storage in program.written_by(self.node)]
        if any(not made or made[0].node is not self.node for made in first):
            # Memory of its own that it fills on the way (a mask) is nobody else's.
            raise Blocked("the operation that makes the result also writes to memory (`out=`)", site.output)
        self.value, self.dims = self._follow(live)

    @property
    def direct(self) -> bool:
        """The node returns just the result, in some layout."""
        return self.program.of_node.get(self.node) is self.value

    def _follow(self, live: set[Value]) -> tuple[Value, Dims]:
        """Down the layout operations that the node itself does after the product."""
        value, dims = self.site.output, self.site.out_dims
        while self.program.of_node.get(self.node) is not value:
            users = [u for u in self.program.users(value) if u in live]
            if len(users) != 1 or users[0].node is not self.node:
                break
            step = below(value, users[0], dims)
            if step is None:
                break
            value, dims = users[0], step
        return value, dims

    def is_copied(self, writer: Writer, result: fx.Node, layout: Layout) -> bool:
        """Whether `put` would copy `result` for nothing but its strides."""
        if not self.direct or self.program.writes.get(self.value.storage):
            return False
        final = self._shaped(writer, place(writer, result, layout, self.dims), self.value)
        return not _harmless(self.node, tensor_of(final), writer)

    def put(self, writer: Writer, result: fx.Node, layout: Layout) -> None:
        """Replace the uses of the user's node by `result`, whose dims run over `layout`."""
        if self.direct:
            final = place(writer, result, layout, self.dims)
            final = self._strided(writer, self.node, self._shaped(writer, final, self.value))
            if _is_kept(final) and self._leaves_the_graph():  # the caller may write to what it gets
                final = self._strided(writer, self.node, writer.call(returned.OPERATOR, final))
            self.node.replace_all_uses_with(final)
            return
        final = place(writer, result, layout, self.site.out_dims)
        writer.written[self.site.output] = self._shaped(writer, final, self.site.output)
        self._replace_returned(writer)

    def _replace_returned(self, writer: Writer) -> None:
        """The node does more than attention (`multi_head_attention_forward`): write the rest of it again."""
        replaced: list[tuple[fx.Node, fx.Node]] = []
        whole = self.program.of_node.get(self.node)
        if isinstance(whole, Value):
            replaced.append((self.node, writer.value(whole)))
        else:
            for user in list(self.node.users):
                part = self.program.of_node.get(user)
                if not isinstance(part, Value) or part.node is not self.node:
                    raise Blocked(f"{self.node.name} is used as a whole", self.site.output)
                if user.users:
                    replaced.append((user, writer.value(part)))
        for old, new in replaced:
            old.replace_all_uses_with(self._strided(writer, old, new))

    def _leaves_the_graph(self) -> bool:
        """Whether the caller may be given the result's own memory: in other strides, a copy may be none."""
        todo, memory = [self.node], {self.value.storage}
        for node in todo:
            for user in node.users:
                if user.op == "output":
                    return True
                made = {v.storage for v in flat_values(self.program.of_node.get(user))}
                if str(user.target).rpartition(".")[2] in _COPIES:
                    memory |= made
                if made & memory and user not in todo:
                    todo.append(user)
        return False

    def _shaped(self, writer: Writer, final: fx.Node, value: Value) -> fx.Node:
        """`final`, its sizes written as those of `value`: that they are the same may be what a guard says."""
        have = final.meta["example_value"]
        if have.dtype == value.dtype and len(have.shape) == value.dim:
            if same_sizes(have.shape, value.tensor.shape):
                return final
            if all(map(known_equal, have.shape, value.tensor.shape)):
                final = writer.call(torch.Tensor.expand, final, *(writer.size(s) for s in value.tensor.shape))
                if same_sizes(final.meta["example_value"].shape, value.tensor.shape):
                    return final
        ours, theirs = (" x ".join(map(str, shape)) for shape in (have.shape, value.tensor.shape))
        raise Blocked(f"its result would be {ours}, of which nothing says that it is {theirs}", value)

    def _strided(self, writer: Writer, old: fx.Node, new: fx.Node) -> fx.Node:
        """`new`, copied to the strides of `old` where a `view` or the caller downstream could tell the difference."""
        value = self.program.of_node[old]
        if isinstance(value, Value) and self.program.writes.get(value.storage):
            # The kernel keeps its result for the backward; what is written to must be another tensor.
            new = writer.call(torch.clone, new, memory_format=torch.preserve_format)
        if isinstance(value, Value) and not _harmless(old, new.meta["example_value"], writer):
            new = _dense(writer, new, value.tensor)
            if not same_strides(new.meta["example_value"], value.tensor):
                raise Blocked("the result has strides that a copy does not give back", value)
        return new


def _dense(writer: Writer, node: fx.Node, like: torch.Tensor) -> fx.Node:
    """`node` copied to the dim order in memory of `like`."""
    strides = [writer.hints(s) for s in like.stride()]
    order = sorted(range(like.dim()), key=lambda d: (-strides[d], d))
    if order == list(range(like.dim())):
        return writer.call(torch.clone, node, memory_format=torch.contiguous_format)
    copied = writer.call(torch.Tensor.contiguous, writer.call(torch.permute, node, tuple(order)))
    return writer.call(torch.permute, copied, tuple(order.index(d) for d in range(like.dim())))


def _harmless(old: fx.Node, new: torch.Tensor, writer: Writer) -> bool:
    """Whether everything downstream comes out with the strides that it has now, although this tensor has others."""
    changed: dict[fx.Node, Any] = {}
    if same_strides(new, old.meta["example_value"]):
        return True
    changed[old] = new
    todo = sorted(old.users)
    for _ in range(_FOLLOW):
        if not todo:
            return True
        node = todo.pop(0)
        if node.op not in ("call_function", "call_method") or _writes(node):
            return False
        example = node.meta.get("example_value")
        if not isinstance(example, torch.Tensor):
            return False
        result = _evaluate(node, changed, writer)
        if result is None or not same_sizes(result.shape, example.shape):
            return False
        if not same_strides(result, example):
            changed[node] = result
            todo = sorted({*todo, *node.users})
    return False


def _writes(node: fx.Node) -> bool:
    from optpass.passes.effects import written

    targets, _ = written(node)
    return bool(targets)


def _evaluate(node: fx.Node, changed: dict[fx.Node, Any], writer: Writer) -> torch.Tensor | None:
    """The node's fake result with `changed` in place of what its arguments are now; None if it does not run."""

    def argument(item: fx.Node) -> Any:
        return changed.get(item, item.meta.get("example_value"))

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), argument)
    try:
        result = writer.evaluate(node, args, kwargs)
    except Exception:  # noqa: BLE001  # a `view` that needs the old strides raises what it likes
        return None
    return result if isinstance(result, torch.Tensor) else None
