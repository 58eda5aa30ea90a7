"""From a Dynamo graph to a `Program`: each node is run once on fake tensors, and the ATen operations it makes are kept.

Nothing is executed on data. In-place operations become what they compute as long as the alias that was written to is
the one that is read afterwards; every other alias of written memory turns into an opaque leaf, so nothing downstream
can be misread. Operations that no attention is written with (convolutions, norms) stay opaque (`nodes`), and so do
linear layers that are none of its products (`reach`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from optpass.passes.attention.program import autocast, calls, gradients, nodes, part_values, part_writes, reach
from optpass.passes.attention.program.ir import Program, Value, map_values
from optpass.passes.attention.program.recorder import Recorder

log = logging.getLogger(__name__)


def lower(
    graph: fx.Graph, constant: Callable[[str], Any] | None = None, rates: bool = False, whole: bool = False
) -> Program:
    """The program of `graph`; what has nothing to do with a softmax is opaque in it.

    Args:
        graph: Dynamo-stage graph with `meta["example_value"]`.
        constant: the object behind a `get_attr` target; None where there is none to look at.
        rates: probabilities of dropout are needed as numbers; a symbolic one becomes a guard.
        whole: what has nothing to do with a softmax is looked into too.
    """
    return _Lowering(graph, constant or (lambda _target: None), rates).run(whole)


class _Lowering:
    """State of one lowering: which Python tensor stands for which Value, and what memory was written to."""

    def __init__(self, graph: fx.Graph, constant: Callable[[str], Any], rates: bool) -> None:
        self.graph, self.constant, self.rates = graph, constant, rates
        self.program = Program()
        self.known: dict[int, Value] = {}  #: id of a fake tensor -> its Value; `kept` keeps the ids from being reused
        self.kept: dict[int, list[torch.Tensor]] = {}  #: tensors by their storage
        self.home: dict[int, fx.Node] = {}  #: id of a fake tensor -> the first node that returns it
        self.versions: dict[int, int] = {}
        self.shaped: dict[fx.Node, Value] = {}  #: what nodes return since their tensor was given another shape in place
        self.node: fx.Node | None = None
        self.grad, self.recording, self.training = True, True, torch.is_grad_enabled()
        self.detached = gradients.Detached()
        self.mode = next((nodes.fake_mode(n) for n in graph.nodes if nodes.fake_mode(n) is not None), None)

    def run(self, whole: bool) -> Program:
        if self.mode is None:
            return self.program
        with contextlib.ExitStack() as stack:
            if self.mode.shape_env is not None:
                stack.enter_context(self.mode.shape_env.suppress_guards())
                stack.enter_context(self.mode.shape_env.ignore_fresh_unbacked_symbols())  # `nonzero` runs once more
            # Without the dispatcher in Python some operations have no symbolic shapes (`baddbmm`, `constant_pad_nd`);
            # with it, a product of matrices takes twice the time.
            symbolic = _dispatcher() if any(map(nodes.is_symbolic, self.graph.nodes)) else contextlib.nullcontext()
            beside = frozenset() if whole else reach.beside(self.graph)
            for context in (autocast.restored(), torch.no_grad(), symbolic, self.mode, Recorder(self)):
                stack.enter_context(context)
            for node in self.graph.nodes:
                self.node = node
                self.program.autocast[node] = autocast.state()  # inside of an operation it cannot be asked for
                returned = self._leaf_of(node, "opaque") if node in beside else self._lower(node)
                self.program.of_node[node] = returned
                if isinstance(returned, Value):
                    self.home.setdefault(id(returned.tensor), node)
            self.program.forget_written()
        return self.program

    # ---- one node ---------------------------------------------------------------------------------------------

    def _lower(self, node: fx.Node) -> Any:
        if node.op in ("placeholder", "get_attr"):
            return self._leaf_of(node, "input" if node.op == "placeholder" else "constant")
        if node.op == "output":
            return None
        name, method = nodes.function_name(node), nodes.method_name(node)
        if name == "_set_grad_enabled":
            self.grad = bool(node.args[0])
            return None
        higher = isinstance(node.target, torch._ops.HigherOrderOperator)
        closed = name in nodes.CLOSED and not reach.is_product(node)
        if closed:
            self.program.closed.add(node)
        if method in nodes.VIEWS | nodes.RESIZES:
            return self._shape(node, method)
        if closed or node.op == "call_module" or higher or method in nodes.RESHAPING or nodes.is_wrapped(node):
            return self._closed(node)
        try:
            args, kwargs = self._materialise((node.args, node.kwargs))
        except nodes.NoTensor:
            return self._closed(node)
        if name == "dropout":
            return self._dropout(node, args, kwargs)
        try:
            # Without it a dropout is a draw and a product on some devices.
            with _dispatcher() if nodes.calls_dropout(node) else contextlib.nullcontext():
                result = calls.map_tensors(nodes.run(node, args, kwargs), self._current)
        except Exception as error:  # noqa: BLE001  # whatever fails on fakes (data-dependent sizes ...) stays opaque
            log.debug("%s is not looked into: %s: %s", node.name, type(error).__name__, error)
            return self._closed(node)
        self.program.ran.add(node)
        return result

    def _closed(self, node: fx.Node) -> Any:
        """An opaque result; whatever the node may write to is no longer known."""
        from optpass.passes.effects import written

        for target in written(node)[0]:
            found = self.program.node_value(target)
            if found is not None:
                self._wrote(found.storage, None)
        bodies = [self.constant(str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
        if "softmax" in str(node.target) or any(nodes.softmax_inside(body) for body in bodies):
            self.program.softmaxes.add(node)
        return self._leaf_of(node, "opaque")

    def _shape(self, node: fx.Node, method: str) -> Any:
        """`m.unsqueeze_(1)`: from here on the node that returns `m` returns it in another shape, which is not followed.

        Dynamo's own fake tensor, which stands for a leaf, has the shape that it ends with; one made here has not.
        """
        old = self._returned(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if not isinstance(old, Value) or any(n.meta.get("example_value") is old.tensor for n in self.graph.nodes):
            return self._closed(node)
        args, kwargs = self._materialise((node.args, node.kwargs))
        self.recording = False
        tensor = nodes.reshaped(method, args, kwargs, node.meta["example_value"])
        self.recording = True
        self._wrote(old.storage, node)  # what is read in its old shape is not there any more
        value = self._new(tensor, leaf="opaque", learns=old.learns or node.meta["example_value"].requires_grad)
        for other in self.program.of_node:
            if self._returned(other) is old:
                self.shaped[other] = value
        return value

    def _returned(self, node: fx.Node) -> Any:
        return self.shaped.get(node, self.program.of_node.get(node))

    def _leaf_of(self, node: fx.Node, leaf: str) -> Any:
        real = self.constant(str(node.target)) if leaf == "constant" else None
        if not isinstance(real, torch.Tensor) or calls.is_fake(real):
            example = node.meta.get("example_value")
            return calls.map_tensors(example, lambda t: self._new(t, leaf="input" if leaf == "constant" else leaf))
        assert self.mode is not None
        return self._new(self.mode.from_tensor(real), leaf="constant", real=real)

    def _dropout(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """One operation whatever the device: its random numbers are what a rewrite may not touch."""
        given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
        p, training = calls.rate(given.get("p", 0.5), self.rates), given.get("training", given.get("train", True))
        x = self.known.get(id(given["input"]))
        drops = not isinstance(training, bool) or (training and p != 0)
        if x is None or (drops and (given.get("inplace") or training is not True)):
            return self._closed(node)
        self.program.ran.add(node)
        if not drops:  # nor writes
            return x
        self.recording = False
        result = torch.empty_like(given["input"])
        self.recording = True
        return self._new(result, op=torch.ops.aten.native_dropout.default, args=(x, p, True))

    # ---- values -----------------------------------------------------------------------------------------------

    def _new(self, tensor: torch.Tensor, **fields: Any) -> Value:
        storage = calls.storage_of(tensor)
        fields.setdefault("learns", tensor.requires_grad)
        value = Value(
            tensor, node=self.node, grad=self.grad, autocast=autocast.state(), storage=storage,
            version=self.versions.get(storage, 0), **fields,
        )  # fmt: skip
        self.known[id(tensor)] = value
        self.kept.setdefault(storage, []).append(tensor)
        self.program.values.append(value)
        if self.node is not None:
            self.program.by_node.setdefault(self.node, []).append(value)
            self.program.touches.setdefault(storage, set()).add(self.node)
        return value

    def _current(self, tensor: torch.Tensor) -> Value:
        """The Value that stands for `tensor` now."""
        value = self.known.get(id(tensor))
        if value is not None and value.version == self.versions.get(value.storage, 0):
            return value
        if value is None and not calls.is_fake(tensor) and calls.is_plain(tensor):  # `torch.tensor(0.5)` in user code
            return self._new(tensor, leaf="constant", real=tensor)
        home = self.home.get(id(tensor))
        # Never seen, or its memory was written to through another alias. Dynamo has recorded gradients; this does not.
        example = getattr(home or self.node, "meta", {}).get("example_value")
        learns = not isinstance(example, torch.Tensor) or example.requires_grad
        written = self._new(tensor, leaf="opaque", learns=learns)
        if home is not None:
            self.program.again[written] = home
        return written

    def reshaped(self, tensor: torch.Tensor) -> None:
        """Its Value keeps the shape that it has."""
        value = self.known.get(id(tensor))
        if value is not None and self.recording:
            self.recording = False
            value.tensor = tensor.detach()
            self.recording = True

    def record(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not self.recording:
            return
        filled = calls.positional(op, args, kwargs)
        arguments = calls.map_tensors(filled, self._current)
        targets = [a for a, s in zip(filled, op._schema.arguments, strict=True) if calls.is_written(s)]
        if targets:
            self._record_write(op, arguments, filled, targets, result)
            return
        number = calls.filled_with(op, filled)
        if number is not None and result.is_contiguous():  # reads the shape of its argument and nothing else
            full = [list(result.shape), number, result.dtype, torch.strided, result.device, False]
            self._new(result, op=torch.ops.aten.full.default, args=tuple(full))
            return
        op, arguments = self._filled(op, arguments)
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        for index, tensor in enumerate(outputs):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in {id(t) for t in calls.tensors(filled)}:
                value = self._new(tensor, op=op, args=arguments, index=index)
                self.detached.note(value, calls.tensors(filled))

    def _record_write(self, op: Any, arguments: Any, filled: Any, targets: list[Any], result: Any) -> None:
        first = targets[0]
        pure = len(targets) == 1 and filled and first is filled[0] and result is first
        functional = calls.functional_form(op) if pure and isinstance(first, torch.Tensor) else None
        for target in calls.tensors(targets):
            self._wrote(calls.storage_of(target), self.node)
        if functional is None:
            return
        form, args = self._filled(functional, arguments[: len(functional._schema.arguments)])
        value = self._new(first, op=form, args=args)
        for other in {id(t): t for t in self.kept[value.storage]}.values():
            if self.training and self.detached.apart(other, first, value, self.known):
                continue
            if other is not first and calls.same_place(other, first):  # by another name (`x.view_as(x)`, a second `to`)
                self.known[id(other)] = value
            elif other is not first and part_writes.same_elements(other, first):
                self._stands(self._new(other, op=torch.ops.aten.view.default, args=(value, list(other.shape))))
            if self.known.get(id(other)) is value:
                self._stands(value, other)
        self._written_in_part(op, arguments)

    def _filled(self, op: Any, arguments: Any) -> Any:
        if self.training and gradients.stops(op, arguments):
            return op, arguments
        with Recorder(self) if part_values.fills(op) else contextlib.nullcontext():  # entering takes its time
            return part_values.filled(op, arguments, self._current)

    def _written_in_part(self, op: Any, arguments: Any) -> None:
        """The whole of which a part was written to, as far as it is known what it has become."""
        part = part_writes.part_of(arguments[0])
        if part is None or self.known.get(id(part.whole.tensor)) is not part.whole:
            return
        whole, view = part.whole.tensor, arguments[0]
        if self.training and self.detached.apart(whole, view.tensor, view, self.known):
            return
        with Recorder(self):
            changes = part_values.changes(part, op, arguments, self._current)
        value = part.whole
        for left, (form, args) in zip(reversed(range(len(changes))), changes, strict=True):
            tensor = torch.empty_like(part.whole.tensor) if left else part.whole.tensor
            value = self._new(tensor, op=form, args=(value, *args))
            self._stands(value)

    def _stands(self, value: Value, tensor: torch.Tensor | None = None) -> None:
        """The node of a tensor that was written to returns `value` now."""
        place = id(value.tensor if tensor is None else tensor)
        if place in self.home:
            self.program.again.setdefault(value, self.home[place])

    def _wrote(self, storage: int, node: fx.Node | None) -> None:
        self.versions[storage] = self.versions.get(storage, 0) + 1
        writer = node or self.node
        if writer is not None:
            self.program.writes.setdefault(storage, []).append(writer)
            self.program.touches.setdefault(storage, set()).add(writer)

    def _materialise(self, item: Any) -> Any:
        """Arguments of a node with tensors (and SymInts) in place of nodes."""
        return fx.node.map_arg(item, self._argument)

    def _argument(self, node: fx.Node) -> Any:
        found = self._returned(node)
        if found is None and not isinstance(node.meta.get("example_value"), torch.Tensor):
            example = node.meta.get("example_value")
            if example is None and nodes.function_name(node) not in nodes.STATE:
                raise nodes.NoTensor
            return example
        return map_values(found, lambda v: v.tensor)


def _dispatcher() -> Any:
    """The dispatcher in Python, where torch has one."""
    return getattr(torch._C, "_EnablePythonDispatcher", contextlib.nullcontext)()
