"""From a Dynamo graph to its ATen graphs without running or compiling it: AOTAutograd under fake tensors.

Used where the inner compiler did not show its graphs (a cache hit, `inner="eager"`, a callable) and ahead of time.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from optpass.backend import compat, snapshot
from optpass.errors import TraceError
from optpass.passes.contract import AtenGraph

#: Joint graphs above this many nodes are split by the linear partitioner. Min-cut, which Inductor uses, took 1.7 s on
#: 8,800 nodes and 4.3 s on 21,800 (Llama 8B and 70B, 2 cores), a tenth of tracing them; beyond this it is unmeasured.
MIN_CUT_NODES = 40_000


#: Called with a joint graph, its inputs, the partitioner and what AOTAutograd tells that: brings the graph into another
#: form, in place, and gives the two halves.
Ready = Callable[
    [fx.GraphModule, Any, Callable[..., tuple[fx.GraphModule, fx.GraphModule]], dict[str, Any]],
    tuple[fx.GraphModule, fx.GraphModule],
]


@dataclass
class Source:
    """A Dynamo graph and the state it was captured in, enough to trace it again.

    Attributes:
        graph: copy of the graph after our passes.
        attributes: what its `get_attr` and `call_module` nodes name, by target, every tensor fake.
        inputs: fake tensors and symbols, one per placeholder.
        grad: whether grad mode was on; `inference` whether inference mode was; `autocast` what was cast to what.
    """

    graph: fx.Graph
    attributes: dict[str, Any]
    inputs: list[Any]
    grad: bool
    inference: bool
    autocast: dict[str, torch.dtype]

    @classmethod
    def of(cls, gm: fx.GraphModule) -> Source:
        """The source of `gm`, in the present grad and autocast state."""
        inputs = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
        return cls(
            graph=snapshot.copy_graph(gm.graph),
            attributes=_fake_attributes(gm, compat.detect_fake_mode(inputs)),
            inputs=inputs,
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast={d: torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)},
        )

    def trace(self, *, as_inductor: bool = True) -> tuple[AtenGraph, ...]:
        """The ATen graphs: forward, and backward if anything needs a gradient; `as_inductor` as for `trace`."""
        gm = fx.GraphModule(self.attributes, self.graph)
        with contextlib.ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(device, dtype))
            fake = compat.detect_fake_mode(self.inputs)
            if fake is not None and fake.shape_env is not None:
                stack.enter_context(fake.shape_env.suppress_guards())  # the compiled code's guards are long settled
            return trace(gm, self.inputs, as_inductor=as_inductor)


def _fake_attributes(gm: fx.GraphModule, fake: compat.FakeTensorMode | None) -> dict[str, Any]:
    """Stand-ins for what the graph takes from its module, so that nothing keeps the user's tensors alive."""
    fake = fake or compat.fake_mode_for_planning()
    found: dict[str, Any] = {}
    for node in gm.graph.nodes:
        target = str(node.target)
        if node.op not in ("get_attr", "call_module") or target in found:
            continue
        value: Any = gm
        for part in target.split("."):
            value = getattr(value, part)
        if isinstance(value, torch.Tensor) and not isinstance(value, compat.FakeTensor):
            value = fake.from_tensor(value)
        elif isinstance(value, nn.Module) and any(True for _ in itertools.chain(value.parameters(), value.buffers())):
            with compat.FakeCopyMode(fake):
                value = copy.deepcopy(value)
        found[target] = value
    return found


@dataclass(frozen=True)
class Live:
    """What a partitioner was called with, and what it gave.

    Attributes:
        module: the joint graph.
        halves: forward and backward.
        given: what AOTAutograd told it.
    """

    module: fx.GraphModule
    halves: tuple[fx.GraphModule, fx.GraphModule]
    given: dict[str, Any]


@dataclass(frozen=True)
class Joint:
    """A joint graph as the partitioner worked on it, after its own clean-up.

    Attributes:
        graph: forward and backward together; `meta["val"]` on its nodes.
        forward_outputs: how many of its outputs, the first ones, the forward returns.
        saved: names of the nodes that the default partitioner keeps for the backward.
        live: what a compile would go on from, where the graph was brought into another form.
    """

    graph: fx.Graph
    forward_outputs: int
    saved: frozenset[str]
    live: Live | None = None

    def outputs(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """The nodes that the forward returns, and those that the backward returns; what is no node is left out."""
        listed = list(next(n for n in reversed(self.graph.nodes) if n.op == "output").args[0])
        parts = listed[: self.forward_outputs], listed[self.forward_outputs :]
        forward, backward = ([n for n in part if isinstance(n, fx.Node)] for part in parts)
        return forward, backward


def trace(
    gm: fx.GraphModule,
    inputs: list[Any],
    on_linear: Callable[[], None] | None = None,
    on_joint: Callable[[Joint], None] | None = None,
    *,
    as_inductor: bool = True,
    ready: Ready | None = None,
) -> tuple[AtenGraph, ...]:
    """Trace `gm` with Inductor's decompositions and partition it as Inductor would. Nothing is compiled.

    Args:
        gm: a Dynamo graph.
        inputs: fake (or real) tensors and symbols for its placeholders.
        on_linear: called if the joint graph is so large that the linear partitioner splits it (`MIN_CUT_NODES`).
        on_joint: called with the joint graph and what the partitioner keeps of it.
        as_inductor: use Inductor's decompositions and joint-graph passes; 'aot_eager' has neither.
        ready: splits joint graphs, and brings them into the form that `on_joint` is given.
    """
    graphs: list[AtenGraph] = []

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        if as_inductor:
            _joint_passes(joint)
        small = len(joint.graph.nodes) <= MIN_CUT_NODES
        if not small and on_linear is not None:
            on_linear()
        split: Callable[..., Any] = compat.min_cut_partition if small else compat.default_partition
        if ready is None:
            forward, backward = split(joint, joint_inputs, **kwargs)
        else:
            forward, backward = ready(joint, joint_inputs, split, kwargs)
        graphs.append(AtenGraph("forward", forward.graph))
        graphs.append(AtenGraph("backward", backward.graph))
        if on_joint is not None:
            given = (str(n.name) for n in backward.graph.nodes if n.op == "placeholder")
            saved = frozenset(name for name in given if not name.startswith("tangents"))
            live = None if ready is None else Live(joint, (forward, backward), kwargs)
            on_joint(Joint(snapshot.copy_graph(joint.graph), kwargs["num_fwd_outputs"], saved, live))
        return forward, backward

    def inference(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        if as_inductor:
            _joint_passes(graph)
        graphs.append(AtenGraph("forward", graph.graph))
        return _never_called

    def nothing(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        return _never_called

    if len(inputs) != sum(n.op == "placeholder" for n in gm.graph.nodes) or any(v is None for v in inputs):
        raise TraceError("the captured graph has inputs without fake values")
    fake = compat.detect_fake_mode(inputs) or compat.fake_mode_for_planning()
    with compat.aot_for_analysis(fake):
        compat.aot_autograd(
            fw_compiler=nothing,
            bw_compiler=nothing,
            inference_compiler=inference,
            partition_fn=partition,
            decompositions=compat.inductor_decompositions() if as_inductor else {},
            keep_inference_input_mutations=True,
        )(gm, inputs)
    return tuple(graphs)


def _joint_passes(gm: fx.GraphModule) -> None:
    """Inductor's joint-graph passes, so that what is analysed is what it would lower; ours have none to add here."""
    passes = compat.joint_graph_passes()
    if passes is not None:
        passes(gm)


def _never_called(*_: Any) -> Any:
    raise AssertionError("a graph traced for analysis is never run")
