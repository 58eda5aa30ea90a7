"""Which ops the inner compiler runs as one kernel, and the bytes that cross each kernel's boundary.

A model of TorchInductor's two decisions, on the partitioned ATen graph:

1. *Lowering* (here): a pointwise result is not stored but recomputed inside each consumer, unless it is an output,
   feeds a kernel that needs memory (matmul, convolution, attention, ...), or is used more than once and is expensive
   (`torch._inductor.ir.StorageBox.should_realize_on_reuse`, thresholds from `torch._inductor.config`).
2. *Scheduling* (`scheduling`): stored results whose loop nests fit are merged.

Sizes are what the kernels touch: of a slice the slice, of an expanded tensor what is stored.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import fx

from optpass.passes.roofline import views
from optpass.passes.roofline.extract import Extractor, Shape, tensors
from optpass.passes.roofline.index_map import IndexMap, contiguous
from optpass.passes.roofline.kernel import Kernel, Read, Storage, Value, loop_kernel, write_key
from optpass.passes.roofline.loops import pick_order
from optpass.passes.roofline.lowering import HEAVY, LoweredOp, Role, role_of
from optpass.passes.roofline.program import GroupInfo, OpInfo
from optpass.passes.roofline.scheduling import Merger, rules_for

#: Reads above which a reused pointwise value is stored (`config.realize_reads_threshold`), and above which any is
#: (`config.realize_acc_reads_threshold`).
REALIZE_READS = 4
REALIZE_ACCUMULATED_READS = 8
#: Ops in one pointwise expression above which a reused value is stored (`config.realize_opcount_threshold`).
REALIZE_OPS = 30


def kernels_of(extractor: Extractor, ops: dict[fx.Node, int], infos: list[OpInfo], on_cpu: bool) -> list[GroupInfo]:
    """The kernels of one graph after fusion, in execution order; `infos[i].group` is set for every op in one.

    Args:
        extractor: the graph with its sizes.
        ops: index into `infos` of each node that is an op.
        infos: all ops of the program so far.
        on_cpu: whether Inductor's C++ backend lowers it, rather than Triton.
    """
    lowering = Lowering(extractor, ops, infos, on_cpu)
    lowering.run()
    merger = Merger(lowering.kernels, lowering.size, lowering.writer, lowering.outputs, rules_for(on_cpu))
    return merger.run(infos, extractor.phase)


class Lowering:
    """Decides what is stored by which kernel. After `run`: `kernels`, `size`, `writer`, `outputs`."""

    def __init__(self, extractor: Extractor, ops: dict[fx.Node, int], infos: list[OpInfo], on_cpu: bool) -> None:
        self.x = extractor
        self.index = ops
        self.on_cpu = on_cpu
        self.values: dict[fx.Node, list[Value]] = {}
        self.size: dict[int, int] = {}  # buffer -> bytes
        self.kernels: list[Kernel] = []
        self.writer: dict[int, int] = {}  # buffer -> kernel
        self.outputs: set[int] = set()
        self.lowered = {n: role_of(n, extractor, infos[i]) for n, i in ops.items()}
        self._channels_last = on_cpu and any(op.name == "convolution" for op in self.lowered.values())

    def run(self) -> None:
        """Walk the graph once."""
        steps = {
            Role.GETITEM: self._getitem,
            Role.VIEW: self._view,
            Role.POINTWISE: self._pointwise,
            Role.REDUCTION: self._reduction,
            Role.EXTERN: self._extern,
        }
        for node in self.x.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.values[node] = [Value(self._given(shape)) for shape in self._shapes(node)]
            elif node.op == "output":
                for argument in node.all_input_nodes:
                    for value in self.values.get(argument, ()):
                        self.outputs.add(self._realize(value))
            elif node in self.lowered:
                op = self.lowered[node]
                step = steps.get(op.role)
                if step is None:
                    self.values[node] = [Value(Storage(s.shape, s.element_size())) for s in self._shapes(node)]
                else:
                    step(node, op)

    # ---- one op -----------------------------------------------------------------------------------------------

    def _getitem(self, node: fx.Node, op: LoweredOp) -> None:
        source, position = self.values.get(node.args[0], []), node.args[1]  # type: ignore[arg-type]
        self.values[node] = [source[position]] if isinstance(position, int) and position < len(source) else []

    def _view(self, node: fx.Node, op: LoweredOp) -> None:
        source = self.values.get(node.args[0], [])  # type: ignore[arg-type]
        arguments, _ = self.x.arguments(node)
        shapes = [s.shape for s in self._shapes(node)]
        if not source or not shapes:
            self.values[node] = []
        elif isinstance(self.x.values[node], tuple):
            parts = [functools.partial(_part, op.name, arguments[1:], i, shapes) for i in range(len(shapes))]
            self.values[node] = [source[0].through(part) for part in parts]
        else:
            self.values[node] = [source[0].through(functools.partial(_seen, op.name, arguments[1:], shapes[0]))]

    def _pointwise(self, node: fx.Node, op: LoweredOp) -> None:
        shapes = self._shapes(node)
        shape = shapes[0].shape
        reads: dict[tuple[int, IndexMap], Read] = {}
        members: list[int] = []
        heavy = op.name in HEAVY
        for argument in node.all_input_nodes:
            for value in self.values.get(argument, ()):
                for read in value.reads():
                    seen = _gathered(read.map, shape, op) if op.gathers and argument is node.args[0] else None
                    if seen is None:
                        seen = _broadcast(read.map, shape)
                    reads[read.buffer, seen] = Read(read.buffer, seen, read.itemsize)
                members.extend(value.storage.ops)
                heavy = heavy or (value.storage.heavy and value.storage.buffer is None)
        expression = tuple(dict.fromkeys((*members, self.index[node])))
        storage = Storage(shape, shapes[0].element_size(), tuple(reads.values()), expression, heavy)
        self.values[node] = [Value(storage) for _ in shapes]
        if op.mutates is not None:
            self.outputs.add(self._store(storage))
        elif op.stores or self._stored_on_reuse(node, storage):
            self._store(storage)

    def _stored_on_reuse(self, node: fx.Node, storage: Storage) -> bool:
        count = len(storage.reads)
        if count > REALIZE_ACCUMULATED_READS:
            return True
        if len(node.users) < 2 or not count:
            return False
        if count > 1 and any(u.op == "output" or self._is_extern(u) for u in node.users):
            return True
        return (self.on_cpu and storage.heavy) or count > REALIZE_READS or len(storage.ops) > REALIZE_OPS

    def _is_extern(self, node: fx.Node) -> bool:
        return node in self.lowered and self.lowered[node].role is Role.EXTERN

    def _reduction(self, node: fx.Node, op: LoweredOp) -> None:
        source = next((self.values[a] for a in node.all_input_nodes if self.values.get(a)), [])
        shape = tensors(self.x.values[node.all_input_nodes[0]])[0].shape
        reads: list[Read] = []
        members: list[int] = []
        for value in source[:1]:
            reads.extend(Read(r.buffer, _broadcast(r.map, shape), r.itemsize) for r in value.reads())
            members.extend(value.storage.ops)
        kept = [size for d, size in enumerate(shape) if d not in op.reduced]
        strides = contiguous(kept)
        kernel = self._add(loop_kernel([*members, self.index[node]], reads, shape, op.reduced, strides))
        self.values[node] = []
        for result in self._shapes(node):
            storage = Storage(result.shape, result.element_size(), strides=contiguous(result.shape))
            self._write(kernel, storage)
            self.values[node].append(Value(storage))

    def _extern(self, node: fx.Node, op: LoweredOp) -> None:
        reads: dict[tuple[int, tuple[object, ...]], int] = {}
        for argument in node.all_input_nodes:
            for value in self.values.get(argument, ()):
                for read in self._as_input(value, op).reads():
                    reads[read.buffer, read.map.key()] = min(read.bytes, self.size[read.buffer])
        shapes = self._shapes(node)
        if op.mutates is not None:
            self._scatter(node, op, reads, shapes[0])
            return
        shape = shapes[0].shape if shapes else ()
        kernel = self._add(Kernel([self.index[node]], reads, {}, Role.EXTERN, shape, (), shape))
        self.values[node] = []
        for result in shapes:
            storage = Storage(result.shape, result.element_size(), strides=self._extern_strides(result, op))
            self._write(kernel, storage)
            self.values[node].append(Value(storage))

    def _as_input(self, value: Value, op: LoweredOp) -> Value:
        """`value` in memory, in a layout that the library kernel takes."""
        wants = self._channels_last and op.name in ("convolution", "convolution_backward")
        rank = len(value.storage.shape)
        if wants and rank == 4 and not value.views:
            if value.storage.buffer is None:
                self._store(value.storage, channels_last(value.storage.shape))
            elif not _is_channels_last(value.storage):
                return Value(self._copied(value, channels_last(value.storage.shape)))
            return value
        self._realize(value)
        if any(read.map.opaque for read in value.reads()):
            return Value(self._copied(value, None))
        return value

    def _copied(self, value: Value, strides: tuple[int, ...] | None) -> Storage:
        """A copy kernel of what `value` shows."""
        reads = value.reads()
        shape = reads[0].map.shape
        storage = Storage(shape, value.storage.itemsize, tuple(reads))
        self._store(storage, strides or contiguous(shape))
        return storage

    def _extern_strides(self, result: Shape, op: LoweredOp) -> tuple[int, ...]:
        if self._channels_last and op.name.startswith("convolution") and result.dim() == 4:
            return channels_last(result.shape)
        return _without_ones(result.shape, result.strides) if result.strides else contiguous(result.shape)

    def _scatter(
        self, node: fx.Node, op: LoweredOp, reads: dict[tuple[int, tuple[object, ...]], int], out: Shape
    ) -> None:
        """A scatter writes into a copy of its first argument: one kernel makes the copy, another scatters into it."""
        first = self.values.get(node.all_input_nodes[0], []) if op.copies_first else []
        base = {r.buffer for v in first for r in v.reads()}
        copy = Storage(out.shape, out.element_size(), tuple(r for v in first for r in v.reads()))
        buffer = self._store(copy)
        rest = {key: size for key, size in reads.items() if key[0] not in base}
        moved = min(out.nbytes, max(rest.values(), default=out.nbytes))
        rest[buffer, ("scattered", buffer)] = 0  # what is added to is counted once, with the write
        kernel = self._add(Kernel([self.index[node]], rest, {}, Role.EXTERN, out.shape, (), out.shape))
        storage = Storage(out.shape, out.element_size(), strides=contiguous(out.shape))
        self._write(kernel, storage, moved)
        self.values[node] = [Value(storage)]

    # ---- buffers and kernels ----------------------------------------------------------------------------------

    def _shapes(self, node: fx.Node) -> list[Shape]:
        return tensors(self.x.values[node])

    def _given(self, shape: Shape) -> Storage:
        strides = _without_ones(shape.shape, shape.strides) if shape.strides else contiguous(shape.shape)
        buffer = self._buffer(shape.nbytes)
        return Storage(shape.shape, shape.element_size(), buffer=buffer, strides=strides)

    def _buffer(self, size: int) -> int:
        self.size[len(self.size)] = size
        return len(self.size) - 1

    def _add(self, kernel: Kernel) -> int:
        kernel.first = kernel.last = len(self.kernels)
        self.kernels.append(kernel)
        return kernel.first

    def _write(self, kernel: int, storage: Storage, moved: int | None = None) -> int:
        """Make the buffer of `storage`, written by `kernel`."""
        count = 1
        for size in storage.shape:
            count *= size
        storage.buffer = self._buffer(count * storage.itemsize)
        storage.reads, storage.ops, storage.heavy = (), (), False
        key = write_key(storage.shape, storage.strides)
        self.kernels[kernel].writes[storage.buffer] = (key, self.size[storage.buffer] if moved is None else moved)
        self.writer[storage.buffer] = kernel
        return storage.buffer

    def _realize(self, value: Value) -> int:
        """The buffer that `value` is a view of, stored now if it was not."""
        if value.storage.buffer is not None:
            return value.storage.buffer
        plain = contiguous(value.storage.shape) if value.views else None
        return self._store(value.storage, plain)

    def _store(self, storage: Storage, strides: tuple[int, ...] | None = None) -> int:
        """A pointwise kernel that stores `storage`; by default in the order in which it reads."""
        storage.strides = strides or _fill_strides(storage)
        rank = range(len(storage.shape))
        kernel = loop_kernel(storage.ops, storage.reads, storage.shape, frozenset(), storage.strides)
        kernel.shape = tuple(storage.shape[d] for d in rank)
        return self._write(self._add(kernel), storage)


def _part(name: str, args: Sequence[object], index: int, shapes: Sequence[Sequence[int]], map: IndexMap) -> IndexMap:
    return views.part(name, map, args, index, shapes)


def _seen(name: str, args: Sequence[object], shape: Sequence[int], map: IndexMap) -> IndexMap:
    return views.apply(name, map, args, shape)


def _broadcast(map: IndexMap, shape: Sequence[int]) -> IndexMap:
    """`map` over `shape`; what does not broadcast (padding, concatenation) is read as an opaque part of it."""
    fits = len(map.shape) <= len(shape) and all(
        a in (1, b) for a, b in zip(reversed(map.shape), reversed(shape), strict=False)
    )
    if fits:
        return map.broadcast(shape)
    if len(map.shape) == len(shape):
        return map
    return map.gathered((*(1 for _ in shape[1:]), map.elements()) if shape else ())


def _gathered(map: IndexMap, shape: tuple[int, ...], op: LoweredOp) -> IndexMap:
    """A gather: the trailing dimensions run through a row of the source, the others jump."""
    keyed = map.gathered(shape)
    rows = max(0, len(shape) - op.row_dims)
    tail = map.strides[len(map.strides) - op.row_dims :] if op.row_dims else ()
    return IndexMap(shape, (*(0 for _ in range(rows)), *tail), 0, keyed.opaque)


def _fill_strides(storage: Storage) -> tuple[int, ...]:
    """Dense strides in the order in which most reads run (`ir.ComputedBuffer.get_fill_order`)."""
    full = [r.map.strides for r in storage.reads if not r.map.opaque and r.map.shape == storage.shape]
    if not full:
        return contiguous(storage.shape)
    strides, step = [0] * len(storage.shape), 1
    for dim in reversed(pick_order(full, storage.shape)):
        strides[dim] = step if storage.shape[dim] != 1 else 0
        step *= storage.shape[dim]
    return tuple(strides)


def _without_ones(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    return tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))


def channels_last(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a 4-D tensor stored as N, H, W, C."""
    _, channels, height, width = shape
    return _without_ones(shape, (channels * height * width, 1, width * channels, channels))


def _is_channels_last(storage: Storage) -> bool:
    return storage.strides == channels_last(storage.shape)
