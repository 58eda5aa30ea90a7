"""The parts of a replay on graphs and wrappers made by hand, whose bytes are counted by hand."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from optpass.backend import compat
from optpass.backend.compat import memory as inductor
from optpass.backend.memory.replay.alone import replay_graph
from optpass.backend.memory.replay.storages import Storages
from optpass.backend.memory.replay.tail import Tail
from optpass.backend.memory.replay.wrapper import Wrapper, fake_tensor

aten: Any = torch.ops.aten
CPU = torch.device("cpu")

WRAPPER = """
import torch
from torch._inductor.async_compile import AsyncCompile
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
async_compile = AsyncCompile()
kernel = async_compile.cpp_pybinding(['float*'], 'not C++')
async_compile.wait(globals())
del async_compile

class Runner:
    def call(self, args):
        kept, freed = args
        args.clear()
        buf0 = empty_strided_cpu((10, 10), (10, 1), torch.float32)
        kernel(freed, buf0)
        del freed
        buf1 = reinterpret_tensor(buf0, (100, ), (1, ), 0); del buf0  # reuse
        buf2 = torch.ops.aten.sort.default(buf1)
        buf3 = buf2[0]
        del buf2
        buf4 = empty_strided_cpu((50, ), (1, ), torch.float64)
        torch.mm(kept, kept, out=reinterpret_tensor(buf3, (10, 10), (10, 1), 0))
        return (buf3, buf1)

call = Runner().call
"""


def graph_of(build: Callable[[fx.Graph, list[fx.Node]], list[fx.Node]], *inputs: torch.Tensor) -> fx.GraphModule:
    """A graph of ATen operators with inputs like `inputs`; `build` adds nodes and gives the outputs."""
    graph, mode = fx.Graph(), compat.FakeTensorMode()
    nodes = [graph.placeholder(f"x{i}") for i in range(len(inputs))]
    for node, value in zip(nodes, inputs, strict=True):
        node.meta["val"] = mode.from_tensor(value)
    graph.output(tuple(build(graph, nodes)))
    return fx.GraphModule({}, graph)


def test_inputs_are_released_after_their_last_use_unless_static() -> None:
    def build(graph: fx.Graph, inputs: list[fx.Node]) -> list[fx.Node]:
        a = graph.call_function(aten.exp.default, (inputs[0],))
        b = graph.call_function(aten.exp.default, (a,))
        return [graph.call_function(aten.exp.default, (b,))]

    gm = graph_of(build, torch.empty(100))
    released, kept = replay_graph(gm), replay_graph(gm, static_inputs=[0])
    assert [m.live_bytes for m in released.timeline] == [400, 800, 800, 800, 400]
    assert [m.live_bytes for m in kept.timeline] == [0, 400, 800, 800, 400]
    assert (released.peak_bytes, released.end_bytes) == (800, 400)


def test_views_are_their_storage_and_several_results_are_several() -> None:
    def build(graph: fx.Graph, inputs: list[fx.Node]) -> list[fx.Node]:
        turned = graph.call_function(aten.t.default, (inputs[0],))
        pair = graph.call_function(aten.sort.default, (turned,))
        values = graph.call_function(operator.getitem, (pair, 0))
        row = graph.call_function(aten.select.int, (values, 0, 0))
        return [turned, graph.call_function(aten.add_.Tensor, (row, row))]

    replayed = replay_graph(graph_of(build, torch.empty(8, 16)), static_inputs=[0])
    row_of_workspace = 8 * 8
    assert replayed.peak_bytes == 512 + 1024 + row_of_workspace  # values, their order
    assert replayed.end_bytes == 512  # the row that is returned holds all values; the view of the input holds nothing


def test_a_wrapper_is_executed_without_its_kernels() -> None:
    mode, storages = compat.FakeTensorMode(), Storages()
    kept = fake_tensor(mode, (10, 10), (10, 1), torch.float32, CPU)
    storages.external(kept)
    args = [kept, fake_tensor(mode, (30,), (1,), torch.float32, CPU)]
    storages.add(args[1])
    outputs = Wrapper(inductor.Lowered(WRAPPER), mode).run(args, storages)
    live = {moment.label: moment.live_bytes for moment in storages.timeline}
    assert args == []
    assert live["kernel"] == 120 + 400
    assert live["aten.sort.default"] == 400 + 400 + 800 + 100 * 8  # the input has gone; values, order, a row inside
    assert live["aten.mm.out"] == 400 + 400 + 400
    assert storages.live == 800
    del outputs
    assert storages.live == 0


def test_a_tail_of_bytes() -> None:
    mode, storages = compat.FakeTensorMode(), Storages()
    outputs = [fake_tensor(mode, (100,), (1,), torch.float32, CPU)]
    storages.add(outputs[0])
    tail = Tail(holds_outputs=False, forward_bytes=50, saved_bytes=20, backward_bytes=700)
    held = tail.after_forward(outputs, storages)
    outputs.clear()
    tangents = [fake_tensor(mode, (100,), (1,), torch.float32, CPU)]
    tail.before_backward(tangents, held, storages)
    assert [moment.live_bytes for moment in storages.timeline] == [450, 720, 400]  # the outputs have gone
    tangents.clear()
    assert storages.live == 0


def test_cuda_blocks_are_rounded() -> None:
    storages, mode = Storages(), compat.FakeTensorMode()
    one = fake_tensor(mode, (1,), (1,), torch.float32, torch.device("cuda", 0))
    storages.add(one)
    assert storages.live == 512
