"""Writing nodes into a Dynamo graph: values, sizes and layouts of a `Program` as FX nodes, with their fake tensors.

Knows nothing of attention. What cannot be written (an opaque value, memory that was written to, another autocast or
grad mode than where the nodes go) raises `Blocked`; nothing is changed before everything could be written, because the
nodes stand unused until the caller puts them to use.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from types import MethodDescriptorType
from typing import Any

import sympy
import torch
from torch import fx

from optpass.passes.attention.axes import Axis, Dims, atoms, expression, flat, resolve
from optpass.passes.attention.find.operands import PRODUCTS
from optpass.passes.attention.program import nodes
from optpass.passes.attention.program.ir import Program, Value
from optpass.passes.attention.site import Blocked
from optpass.passes.attention.write import uncast
from optpass.passes.attention.write.hints import Hints, held


class Writer:
    """Writes nodes before `at`.

    Args:
        graph: the Dynamo graph.
        program: what it was lowered to.
        at: node before which everything is written.
        like: value whose grad mode and autocast state hold there.
        nodes: which node returns a value; from `returned_by`.
        hints: numbers for sizes that may be symbolic, and who holds them.
    """

    def __init__(
        self,
        graph: fx.Graph,
        program: Program,
        at: fx.Node,
        like: Value,
        nodes: dict[Value, fx.Node],
        hints: Hints,
    ) -> None:
        self.hints = hints
        self.graph, self.program, self.at, self.like = graph, program, at, like
        self.written: dict[Value, fx.Node] = {}
        self.added: list[fx.Node] = []
        self._nodes = nodes
        self._calls: dict[tuple[Any, ...], fx.Node] = {}
        self._sizes: dict[Any, Any] = {}

    # ---- nodes ------------------------------------------------------------------------------------------------

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A new node, with the fake tensor that it returns."""
        with self.graph.inserting_before(self.at):
            if isinstance(target, MethodDescriptorType):  # as Dynamo writes it: AOTAutograd's cache takes no other
                node = self.graph.call_method(target.__name__, args, kwargs)
            else:
                node = self.graph.call_function(target, args, kwargs)
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in self.at.meta:
                node.meta[key] = self.at.meta[key]
        self.added.append(node)  # also where the next fails
        node.meta["example_value"] = self._run(node)
        return node

    def once(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        """`call`, or the node that the same call of this writer made."""
        if (target, *args) not in self._calls:
            self._calls[target, *args] = self.call(target, *args)
        return self._calls[target, *args]

    def attribute(self, name: str, value: Any) -> fx.Node:
        """A `get_attr` node for an attribute of the owning module."""
        with self.graph.inserting_before(self.at):
            node = self.graph.get_attr(name)
        node.meta["example_value"] = value
        self.added.append(node)
        return node

    def _run(self, node: fx.Node) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
        return self.evaluate(node, args, kwargs)

    def evaluate(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """What the node returns for these fake arguments; no guard is added.

        Gradients are recorded where the program records them: SDPA's kernels, which lay out their results in ways of
        their own, are chosen by that too. Operators that trace a graph of their own would record it as well.
        """
        mode = getattr(self.like.tensor, "fake_mode", None)
        with contextlib.ExitStack() as stack:
            if mode is not None and mode.shape_env is not None:
                stack.enter_context(mode.shape_env.suppress_guards())
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
            # Without the dispatcher in Python some operations (`pad`) take symbolic sizes for what they are now.
            symbolic = getattr(torch._C, "_EnablePythonDispatcher", contextlib.nullcontext)()
            traces = isinstance(node.target, torch._ops.HigherOrderOperator)
            recording = torch.set_grad_enabled(torch.is_grad_enabled() and self.like.grad and not traces)
            for context in (mode or contextlib.nullcontext(), recording, symbolic):
                stack.enter_context(context)
            return nodes.run(node, args, kwargs)

    def undo(self) -> None:
        """Erase everything that was written."""
        for node in reversed(self.added):
            self.graph.erase_node(node)
            if node.op == "get_attr" and isinstance(node.meta["example_value"], fx.GraphModule):
                delattr(self.graph.owning_module, str(node.target))  # put there for this call alone
        self.added.clear()

    def to(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`node` in `dtype`."""
        return node if tensor_of(node).dtype == dtype else self.call(torch.Tensor.to, node, dtype)

    def scalar(self, item: Any, dtype: torch.dtype) -> Any:
        """A number as a tensor without dims, for `where`, which makes two numbers a tensor of the default dtype."""
        if isinstance(item, fx.Node):
            return item
        return self.call(torch.full, (), item, dtype=dtype, device=self.like.tensor.device)

    # ---- values -----------------------------------------------------------------------------------------------

    def value(self, value: Value) -> fx.Node:
        """A node that returns `value`: the one that does already, or the operations that make it, written again."""
        node = self.written.get(value) or self._nodes.get(value)
        if node is not None:
            if node is not self.written.get(value):
                self._check_unwritten(value)
            return node
        return self.anew(value)

    def anew(self, value: Value) -> fx.Node:
        """The operations that make `value`, written again even where a node returns it."""
        if value.leaf or value.op is None:
            raise Blocked("part of it is inside an operation that is not looked into", value)
        if torch.Tag.nondeterministic_seeded in value.op.tags:
            raise Blocked("it draws random numbers, which cannot be drawn again", value)
        if value.autocast != self.like.autocast:
            raise Blocked("it is computed under another autocast state than the rest of the attention", value)
        if value.grad != self.like.grad and value.dtype.is_floating_point:
            raise Blocked("part of it is computed under no_grad, the rest is not", value)
        pairs = [(a, self._argument(v)) for a, v in zip(value.op._schema.arguments, value.args, strict=False)]
        keywords = {a.name: v for a, v in pairs if a.kwarg_only and v is not None}

        def call() -> fx.Node:
            return self.call(value.op, *(v for a, v in pairs if not a.kwarg_only), **keywords)

        device = value.tensor.device.type
        narrowed = value.name in PRODUCTS and uncast.narrows(self, device, value.dtype)
        node = uncast.without(self, device, call) if narrowed else call()
        if isinstance(node.meta["example_value"], (tuple, list)):
            node = self.call(operator.getitem, node, value.index)
        self.written[value] = node
        return node

    def _check_unwritten(self, value: Value) -> None:
        if len(self.program.writes.get(value.storage, ())) != value.version:
            raise Blocked("its memory is modified in place after it was made", value)

    def _argument(self, item: Any) -> Any:
        if isinstance(item, Value):
            return self.value(item)
        if isinstance(item, (tuple, list)):
            return type(item)(self._argument(i) for i in item)
        return self.size(item) if isinstance(item, torch.SymInt) else item

    # ---- sizes ------------------------------------------------------------------------------------------------

    def size(self, size: Any) -> Any:
        """An int, or a node that returns the size."""
        size = expression(size)
        if isinstance(size, int):
            return size
        if size not in self._sizes:
            self._sizes[size] = self._size(size)
        return self._sizes[size]

    def _size(self, size: Any) -> Any:
        node = self.hints.holder(size, self.at)
        if node is not None:
            return node
        if held(size) in self.hints.dims:
            return self.call(torch.ops.aten.sym_size.int, *self.hints.dims[held(size)])
        power = isinstance(size, sympy.Pow) and size.exp.is_Integer and size.exp > 1
        if isinstance(size, (sympy.Mul, sympy.Add)) or power:
            parts = [self.size(a) for a in ([size.base] * int(size.exp) if power else size.args)]
            result = parts[0]
            for part in parts[1:]:
                result = self.call(operator.add if isinstance(size, sympy.Add) else operator.mul, result, part)
            return result
        if type(size).__name__ == "FloorDiv":
            return self.call(operator.floordiv, self.size(size.args[0]), self.size(size.args[1]))
        raise Blocked(f"a size ({size}) that no node of the graph holds")

    def number(self, number: Any) -> Any:
        """A float, or a node that returns what a SymFloat stands for."""
        return number if isinstance(number, (int, float)) else self._number(number.node.expr)

    def _number(self, expr: Any) -> Any:
        if expr.is_Number:
            return float(expr)
        node = self.hints.number(expr, self.at)
        if node is not None:
            return node
        if expr.is_Pow and expr.exp.is_Number:
            return self.call(operator.pow, self._number(expr.base), float(expr.exp))
        if expr.is_Mul or expr.is_Add:
            parts = [self._number(a) for a in expr.args]
            result = parts[0]
            for part in parts[1:]:
                result = self.call(operator.mul if expr.is_Mul else operator.add, result, part)
            return result
        kind = type(expr).__name__
        if kind in ("FloatTrueDiv", "IntTrueDiv"):
            return self.call(operator.truediv, self._number(expr.args[0]), self._number(expr.args[1]))
        if kind == "ToFloat":
            return self._number(expr.args[0])
        return self.size(expr)

    # ---- layout -----------------------------------------------------------------------------------------------

    def arrange(self, node: fx.Node, dims: Dims, target: Sequence[Sequence[Axis]], *, fill: bool = True) -> fx.Node:
        """`node`, whose dims run over `dims`, with one dim per entry of `target`, which names the axes it runs over.

        Axes that `node` lacks are broadcast: to their size where `fill` is set or their dim has other axes too, else
        the dim stays 1. Only views where the strides allow it; `reshape` copies where they do not.
        """
        dims, wanted = resolve(dims), tuple(atoms(t) for t in target)
        if dims == wanted:
            return node
        have = flat(dims)
        kept = [tuple(a for a in group if a in have) for group in wanted]
        if len({a for g in kept for a in g}) != len(have):
            raise Blocked("it has an axis that the kernel has no place for")
        full = [group if fill or keep else () for group, keep in zip(wanted, kept, strict=True)]
        split = tuple((a,) for a in have)
        if dims != split:
            node = self.reshape(node, [a.size for a in have])
        order = [have.index(a) for group in kept for a in group]
        if order != list(range(len(order))):
            node = self.call(torch.permute, node, tuple(order))
        return self._group(node, [a for g in kept for a in g], full)

    def _group(self, node: fx.Node, have: list[Axis], full: list[tuple[Axis, ...]]) -> fx.Node:
        """Broadcast the missing axes of each group and merge the group into one dim."""
        shape = [a.size for group in full for a in group]
        if len(shape) != len(have):
            present = [a.size if a in have else 1 for group in full for a in group]
            node = self.call(torch.Tensor.expand, self.reshape(node, present), *(self.size(s) for s in shape))
        if all(len(group) == 1 for group in full):
            return node
        return self.reshape(node, [self._times([a.size for a in group]) for group in full])

    def _times(self, sizes: Sequence[Any]) -> Any:
        total: Any = 1
        for size in sizes:
            total = expression(sympy.sympify(total) * sympy.sympify(size))
        return total

    def product(self, sizes: Sequence[Any]) -> Any:
        """The product of sizes: an int or a node."""
        return self.size(self._times(sizes))

    def reshape(self, node: fx.Node, shape: Sequence[Any]) -> fx.Node:
        """A view where one exists."""
        return self.call(torch.reshape, node, tuple(self.size(s) for s in shape))


def tensor_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor that a node returns."""
    value = node.meta["example_value"]
    assert isinstance(value, torch.Tensor)
    return value


def returned_by(program: Program) -> dict[Value, fx.Node]:
    """The first node that returns each value by itself."""
    found: dict[Value, fx.Node] = {}
    for node, returned in program.of_node.items():
        if isinstance(returned, Value):
            found.setdefault(returned, node)
    return {**program.again, **found}
