"""Which ops the inner compiler runs as one kernel, and the bytes that cross each kernel's boundary.

A model of TorchInductor's two decisions, on the partitioned ATen graph:

1. *Lowering*: a pointwise result is not stored but recomputed inside each consumer, unless it is an output, feeds a
   kernel that needs memory (matmul, convolution, attention, ...), or is used more than once and is expensive
   (`torch._inductor.ir.StorageBox.should_realize_on_reuse`, thresholds from `torch._inductor.config`).
2. *Scheduling*: stored results whose loop nests fit are merged, the pair that saves most memory traffic first, as
   long as no dependency cycle arises (`torch._inductor.scheduler.Scheduler.fuse_nodes`).

Sizes are what the kernels touch: of a slice the slice, of an expanded tensor what is stored.
"""

from __future__ import annotations

from torch import fx

from optpass.passes.roofline.extract import Extractor, Shape, tensors
from optpass.passes.roofline.kernel import Kernel, Lazy, Read, merged
from optpass.passes.roofline.lowering import LoweredOp, Role, role_of
from optpass.passes.roofline.program import GroupInfo, OpInfo
from optpass.passes.roofline.scheduling import Merger

#: Reads above which a reused pointwise value is stored (`config.realize_reads_threshold`), and above which any is
#: (`config.realize_acc_reads_threshold`).
REALIZE_READS = 4
REALIZE_ACCUMULATED_READS = 8
#: Ops in one pointwise expression above which a reused value is stored (`config.realize_opcount_threshold`).
REALIZE_OPS = 30
#: Ops that Inductor's CPU backend stores when their result is reused.
HEAVY = ("exp", "sigmoid")


class FusionModel:
    """Kernels of one graph. `on_cpu` selects the CPU backend's reuse rule."""

    def __init__(self, extractor: Extractor, ops: dict[fx.Node, int], infos: list[OpInfo], on_cpu: bool) -> None:
        self.x = extractor
        self.index = ops
        self.infos = infos
        self.on_cpu = on_cpu
        self.values: dict[fx.Node, Lazy | list[Lazy]] = {}
        self.size: dict[int, int] = {}  # buffer -> bytes
        self.kernels: list[Kernel] = []
        self.writer: dict[int, int] = {}  # buffer -> kernel
        self.readers: dict[int, list[int]] = {}
        self.outputs: set[int] = set()
        self.lowered = {n: role_of(n, extractor, infos[ops[n]]) for n in extractor.graph.nodes if n in ops}

    # ---- lowering ---------------------------------------------------------------------------------------------

    def lower(self) -> None:
        """Walk the graph and decide what is stored by which kernel."""
        for node in self.x.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.values[node] = self._stored(tensors(self.x.values[node]))
            elif node.op == "output":
                for argument in node.all_input_nodes:
                    for lazy in self._each(argument):
                        self.outputs.add(self._realize(lazy, argument))
            elif node in self.lowered:
                self._lower_node(node, self.lowered[node])

    def _lower_node(self, node: fx.Node, op: LoweredOp) -> None:
        if op.role is Role.NOTHING:
            self.values[node] = Lazy([], [])
        elif op.role is Role.GETITEM:
            self._getitem(node)
        elif op.role is Role.VIEW:
            self._view(node, op)
        elif op.role is Role.POINTWISE:
            self._pointwise(node, op)
        elif op.role is Role.REDUCTION:
            self._reduction(node, op)
        else:
            self._extern(node, op)

    def _getitem(self, node: fx.Node) -> None:
        source = self.values[node.args[0]]  # type: ignore[index]
        position = node.args[1]
        if isinstance(source, list) and isinstance(position, int) and position < len(source):
            self.values[node] = source[position]
        else:
            self.values[node] = source if not isinstance(source, list) else Lazy([], [])

    def _view(self, node: fx.Node, op: LoweredOp) -> None:
        source = self._first(node)
        shape = next(iter(tensors(self.x.values[node])), None)
        parts = tensors(self.x.values[node])
        if len(parts) > 1:  # split, unbind: several views of one value
            self.values[node] = [self._through(source, op, part) for part in parts]
        else:
            self.values[node] = self._through(source, op, shape)

    def _through(self, source: Lazy, op: LoweredOp, shape: Shape | None) -> Lazy:
        limit = shape.nbytes if shape is not None and op.narrows else None
        order = (op.order,) if op.order is not None else ()
        reads = [Read(r.buffer, r.bytes if limit is None else min(r.bytes, limit), (*r.order, *order)) for r in source.reads]
        rank = shape.numel() if shape is not None else source.rank
        return Lazy(reads, source.ops, source.heavy, rank, source.view_of)

    def _pointwise(self, node: fx.Node, op: LoweredOp) -> None:
        out = tensors(self.x.values[node])
        reads: list[Read] = []
        members: list[int] = []
        heavy = op.name in HEAVY
        touched = out[0].numel() if out else 0
        for argument in node.all_input_nodes:
            for lazy in self._each(argument):
                gathered = op.gathers and argument is node.args[0]
                for read in lazy.reads:
                    limit = touched * self._itemsize(argument) if gathered else read.bytes
                    reads.append(Read(read.buffer, min(read.bytes, limit), read.order))
                members.extend(lazy.ops)
                heavy = heavy or lazy.heavy
        lazy = Lazy(merged(reads), [*dict.fromkeys((*members, self.index[node]))], heavy, touched)
        self.values[node] = lazy
        if op.mutates is not None:
            self._store(lazy, node, Role.POINTWISE, touched, 1, into=op.mutates)
        elif op.stores or self._stored_on_reuse(node, lazy):
            self._realize(lazy, node)

    def _stored_on_reuse(self, node: fx.Node, lazy: Lazy) -> bool:
        if len(lazy.reads) > REALIZE_ACCUMULATED_READS:
            return True
        users = len(node.users)
        if users < 2 or not lazy.reads:
            return False
        if any(u.op == "output" for u in node.users) and len(lazy.reads) > 1:
            return True
        if any(u in self.lowered and self.lowered[u].role is Role.EXTERN for u in node.users) and len(lazy.reads) > 1:
            return True
        return (self.on_cpu and lazy.heavy) or len(lazy.reads) > REALIZE_READS or len(lazy.ops) > REALIZE_OPS

    def _reduction(self, node: fx.Node, op: LoweredOp) -> None:
        reads, members = self._gather_inputs(node)
        out = tensors(self.x.values[node])
        inner = max(1, op.reduced)
        lazies = []
        kernel = self._add_kernel([*members, self.index[node]], reads, Role.REDUCTION, max(1, op.elements // inner), inner)
        self.kernels[kernel].last = op.innermost
        for shape in out:
            lazies.append(self._write(kernel, shape.nbytes, shape.numel()))
        self.values[node] = lazies if isinstance(self.x.values[node], tuple) else lazies[0]

    def _extern(self, node: fx.Node, op: LoweredOp) -> None:
        reads: list[Read] = []
        for argument in node.all_input_nodes:
            for lazy in self._each(argument):
                self._realize(lazy, argument)
                limit = sum(t.nbytes for t in tensors(self.x.values[argument]))
                if op.gathers and argument is node.args[0]:
                    limit = min(limit, sum(t.nbytes for t in tensors(self.x.values[node])))
                reads.extend(Read(r.buffer, min(r.bytes, limit), r.order) for r in lazy.reads)
        out = tensors(self.x.values[node])
        elements = out[0].numel() if out else 0
        if op.mutates is not None:
            self._scatter(node, op, reads)
            return
        kernel = self._add_kernel([self.index[node]], merged(reads), Role.EXTERN, elements, 1)
        lazies = [self._write(kernel, t.nbytes, t.numel()) for t in out]
        self.values[node] = lazies if isinstance(self.x.values[node], (tuple, list)) else (lazies or [Lazy([], [])])[0]

    def _scatter(self, node: fx.Node, op: LoweredOp, reads: list[Read]) -> None:
        """A scatter writes into a copy of its first argument: one kernel makes the copy, another scatters."""
        out = tensors(self.x.values[node])[0]
        base = self._first(node)
        copy = Lazy(list(base.reads), [], False, out.numel())
        buffer = self._store(copy, node, Role.POINTWISE, out.numel(), 1)
        rest = [r for r in reads if r.buffer not in {b.buffer for b in base.reads}]
        moved = sum(r.bytes for r in rest[:1]) or out.nbytes
        kernel = self._add_kernel([self.index[node]], [*rest, Read(buffer, min(moved, out.nbytes))], Role.EXTERN, out.numel(), 1)
        self.values[node] = self._write(kernel, min(moved, out.nbytes), out.numel())
        self.kernels[kernel].writes = {self.values[node].reads[0].buffer: min(moved, out.nbytes)}  # type: ignore[union-attr]

    # ---- buffers and kernels ----------------------------------------------------------------------------------

    def _stored(self, shapes: list[Shape]) -> Lazy | list[Lazy]:
        made = [self._buffer(s.nbytes, s.numel()) for s in shapes]
        return made[0] if len(made) == 1 else made

    def _buffer(self, size: int, numel: int) -> Lazy:
        number = len(self.size)
        self.size[number] = size
        return Lazy([Read(number, size)], [], False, numel, view_of=number)

    def _add_kernel(self, ops: list[int], reads: list[Read], role: Role, outer: int, inner: int) -> int:
        number = len(self.kernels)
        self.kernels.append(Kernel([*dict.fromkeys(ops)], reads, {}, role, outer, inner, position=number, first=number))
        return number

    def _write(self, kernel: int, size: int, numel: int) -> Lazy:
        lazy = self._buffer(size, numel)
        buffer = lazy.reads[0].buffer
        self.kernels[kernel].writes[buffer] = size
        self.writer[buffer] = kernel
        return lazy

    def _realize(self, lazy: Lazy, node: fx.Node) -> int:
        """Store a value, unless it is a view of something stored. Returns the buffer."""
        if lazy.view_of is not None:
            return lazy.view_of
        shapes = tensors(self.x.values[node])
        numel = lazy.rank or (shapes[0].numel() if shapes else 0)
        return self._store(lazy, node, Role.POINTWISE, numel, 1)

    def _store(self, lazy: Lazy, node: fx.Node, role: Role, outer: int, inner: int, into: int | None = None) -> int:
        shapes = tensors(self.x.values[node])
        itemsize = shapes[0].element_size() if shapes else 4
        kernel = self._add_kernel(lazy.ops, list(lazy.reads), role, outer, inner)
        made = self._write(kernel, outer * itemsize, outer)
        buffer = made.reads[0].buffer
        lazy.reads, lazy.ops, lazy.heavy, lazy.view_of = [Read(buffer, outer * itemsize)], [], False, buffer
        if into is not None:
            self.outputs.add(buffer)
        return buffer

    def _gather_inputs(self, node: fx.Node) -> tuple[list[Read], list[int]]:
        reads: list[Read] = []
        members: list[int] = []
        for argument in node.all_input_nodes:
            for lazy in self._each(argument):
                reads.extend(lazy.reads)
                members.extend(lazy.ops)
        return merged(reads), members

    def _each(self, node: fx.Node) -> list[Lazy]:
        value = self.values.get(node)
        if value is None:
            return []
        return value if isinstance(value, list) else [value]

    def _first(self, node: fx.Node) -> Lazy:
        for argument in node.all_input_nodes:
            found = self._each(argument)
            if found:
                return found[0]
        return Lazy([], [])

    def _itemsize(self, node: fx.Node) -> int:
        shapes = tensors(self.x.values[node])
        return shapes[0].element_size() if shapes else 4


def kernels_of(extractor: Extractor, ops: dict[fx.Node, int], infos: list[OpInfo], on_cpu: bool) -> list[GroupInfo]:
    """The kernels of one graph after fusion, in execution order; `infos[i].group` is set for every op in one.

    Args:
        extractor: the graph with its sizes.
        ops: index into `infos` of each node that is an op.
        infos: all ops of the program so far.
        on_cpu: whether the CPU backend lowers it.
    """
    model = FusionModel(extractor, ops, infos, on_cpu)
    model.lower()
    return Merger(model.kernels, model.size, model.writer, model.outputs, infos, extractor.phase).run()
