"""From a Dynamo graph to a `Program`: each node is run once on fake tensors, and the ATen operations it makes are kept.

Nothing is executed on data. In-place operations become what they compute as long as the alias that was written to is
the one that is read afterwards; every other alias of written memory turns into an opaque leaf, so nothing downstream
can be misread. Operations that no attention is written with (convolutions, norms, linear layers) stay opaque.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from optpass.passes.attention import autocast, calls
from optpass.passes.attention.ir import Program, Value, map_values
from optpass.passes.attention.unseen import softmax_inside

log = logging.getLogger(__name__)

#: Functions whose inside is never part of an attention: their result is a leaf, which keeps lowering cheap.
_CLOSED = frozenset(
    "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d layer_norm rms_norm group_norm "
    "batch_norm instance_norm embedding embedding_bag cross_entropy gelu silu relu mish elu leaky_relu "
    "scaled_dot_product_attention interpolate max_pool2d avg_pool2d adaptive_avg_pool2d".split()
)
#: Nodes that set state instead of computing: they are run, so that what follows sees the state.
_STATE = frozenset(
    "_enter_autocast _exit_autocast _set_grad_enabled _vmap_increment_nesting _vmap_decrement_nesting "
    "_add_batch_dim _remove_batch_dim _functorch_wrap lazy_load_decompositions".split()
)
#: Methods that change a tensor's shape in place: running them would change the fake tensor that Dynamo keeps.
_RESHAPING = frozenset(
    "t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ resize_ resize_as_ as_strided_ set_ detach_ data "
    "requires_grad_ retain_grad".split()
)


def lower(graph: fx.Graph, constant: Callable[[str], Any] | None = None, rates: bool = False) -> Program:
    """The program of `graph`.

    Args:
        graph: Dynamo-stage graph with `meta["example_value"]`.
        constant: the object behind a `get_attr` target; None where there is none to look at.
        rates: probabilities of dropout are needed as numbers; a symbolic one becomes a guard.
    """
    return _Lowering(graph, constant or (lambda _target: None), rates).run()


class _Lowering:
    """State of one lowering: which Python tensor stands for which Value, and what memory was written to."""

    def __init__(self, graph: fx.Graph, constant: Callable[[str], Any], rates: bool) -> None:
        self.graph, self.constant, self.rates = graph, constant, rates
        self.program = Program()
        self.known: dict[int, Value] = {}  #: id of a fake tensor -> its Value; `kept` keeps the ids from being reused
        self.kept: dict[int, list[torch.Tensor]] = {}  #: tensors by their storage
        self.home: dict[int, fx.Node] = {}  #: id of a fake tensor -> the first node that returns it
        self.versions: dict[int, int] = {}
        self.node: fx.Node | None = None
        self.grad, self.recording = True, True
        self.mode = next((_fake_mode(n) for n in graph.nodes if _fake_mode(n) is not None), None)

    def run(self) -> Program:
        if self.mode is None:
            return self.program
        shape_env = self.mode.shape_env
        quiet = shape_env.suppress_guards() if shape_env is not None else contextlib.nullcontext()
        with contextlib.ExitStack() as stack:
            # Without the dispatcher in Python some operations have no symbolic shapes (`baddbmm`, `constant_pad_nd`).
            symbolic = getattr(torch._C, "_EnablePythonDispatcher", contextlib.nullcontext)()
            for context in (quiet, autocast.restored(), torch.no_grad(), symbolic, self.mode, _Recorder(self)):
                stack.enter_context(context)
            for node in self.graph.nodes:
                self.node = node
                self.program.autocast[node] = autocast.state()  # inside of an operation it cannot be asked for
                self.program.of_node[node] = returned = self._lower(node)
                if isinstance(returned, Value):
                    self.home.setdefault(id(returned.tensor), node)
            self._forget_written()
        return self.program

    def _forget_written(self) -> None:
        """A constant of the graph that the graph writes to holds something else at the next call."""
        for value in self.program.values:
            kept = value.real is not None and value.node is not None and value.node.op == "get_attr"
            if kept and value.storage in self.program.writes:
                value.real, value.leaf = None, "opaque"

    # ---- one node ---------------------------------------------------------------------------------------------

    def _lower(self, node: fx.Node) -> Any:
        if node.op in ("placeholder", "get_attr"):
            return self._leaf_of(node, "input" if node.op == "placeholder" else "constant")
        if node.op == "output":
            return None
        name = _function_name(node)
        if name == "_set_grad_enabled":
            self.grad = bool(node.args[0])
            return None
        higher = isinstance(node.target, torch._ops.HigherOrderOperator)
        closed = name in _CLOSED and not (name == "linear" and self._of_made_weight(node))
        if closed:
            self.program.closed.add(node)
        if closed or node.op == "call_module" or higher or str(node.target) in _RESHAPING:
            return self._closed(node)
        try:
            args, kwargs = self._materialise((node.args, node.kwargs))
        except _NoTensor:
            return self._closed(node)
        if name == "dropout":
            return self._dropout(node, args, kwargs)
        try:
            result = self._values_of(self._call(node, args, kwargs))
        except Exception as error:  # noqa: BLE001  # whatever fails on fakes (data-dependent sizes ...) stays opaque
            log.debug("%s is not looked into: %s: %s", node.name, type(error).__name__, error)
            return self._closed(node)
        self.program.ran.add(node)
        return result

    def _of_made_weight(self, node: fx.Node) -> bool:
        """Whether a linear layer's weight is computed: `F.linear(q, k)` is q kᵀ."""
        weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
        found = self.program.node_value(weight)
        return found is not None and found.op is not None

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _closed(self, node: fx.Node) -> Any:
        """An opaque result; whatever the node may write to is no longer known."""
        from optpass.passes.effects import written

        for target in written(node)[0]:
            found = self.program.node_value(target)
            if found is not None:
                self._wrote(found.storage, None)
        bodies = [self.constant(str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
        if "softmax" in str(node.target) or any(softmax_inside(body) for body in bodies):
            self.program.softmaxes.add(node)
        return self._leaf_of(node, "opaque")

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
        if x is None or given.get("inplace") or not isinstance(training, bool):
            return self._closed(node)
        self.program.ran.add(node)
        if not training or p == 0:
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
        """Called before an operation gives `tensor` another shape in place: its Value keeps the one that it has."""
        value = self.known.get(id(tensor))
        if value is not None and self.recording:
            self.recording = False
            value.tensor = tensor.detach()
            self.recording = True

    def record(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Called for every ATen operation, after it ran."""
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
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        for index, tensor in enumerate(outputs):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in {id(t) for t in calls.tensors(filled)}:
                self._new(tensor, op=op, args=arguments, index=index)

    def _record_write(self, op: Any, arguments: Any, filled: Any, targets: list[Any], result: Any) -> None:
        first = targets[0]
        pure = len(targets) == 1 and filled and first is filled[0] and result is first
        functional = calls.functional_form(op) if pure and isinstance(first, torch.Tensor) else None
        for target in calls.tensors(targets):
            self._wrote(calls.storage_of(target), self.node)
        if functional is None:
            return
        value = self._new(first, op=functional, args=arguments[: len(functional._schema.arguments)])
        for other in self.kept[value.storage]:
            if other is not first and calls.same_place(other, first):  # by another name (`x.view_as(x)`, a second `to`)
                self.known[id(other)] = value
            if self.known.get(id(other)) is value and id(other) in self.home:
                self.program.again.setdefault(value, self.home[id(other)])

    def _wrote(self, storage: int, node: fx.Node | None) -> None:
        self.versions[storage] = self.versions.get(storage, 0) + 1
        writer = node or self.node
        if writer is not None:
            self.program.writes.setdefault(storage, []).append(writer)
            self.program.touches.setdefault(storage, set()).add(writer)

    # ---- between nodes and tensors ----------------------------------------------------------------------------

    def _materialise(self, item: Any) -> Any:
        """Arguments of a node with tensors (and SymInts) in place of nodes."""
        return fx.node.map_arg(item, self._argument)

    def _argument(self, node: fx.Node) -> Any:
        found = self.program.of_node.get(node)
        if found is None and not isinstance(node.meta.get("example_value"), torch.Tensor):
            example = node.meta.get("example_value")
            if example is None and _function_name(node) not in _STATE:
                raise _NoTensor
            return example
        return map_values(found, lambda v: v.tensor)

    def _values_of(self, result: Any) -> Any:
        return calls.map_tensors(result, self._current)


class _NoTensor(Exception):
    """An argument of a node is nothing that can be run on fake tensors."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Tells the lowering every ATen operation that a node makes."""

    def __init__(self, lowering: _Lowering) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.lowering = lowering

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.rpartition("::")[2] in _RESHAPING:
            self.lowering.reshaped(args[0])
        result = func(*args, **(kwargs or {}))
        self.lowering.record(func, args, kwargs or {}, result)
        return result


def _function_name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)) if node.op == "call_function" else ""


def _fake_mode(node: fx.Node) -> Any:
    return getattr(node.meta.get("example_value"), "fake_mode", None)
