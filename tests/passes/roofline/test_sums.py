"""Which sums one library kernel makes together with a product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from optpass.passes.roofline.sums import Sums

aten = torch.ops.aten


def graph_of(program: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> fx.Graph:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(program)(*(torch.ones(shape) for shape in shapes)).graph


PROGRAMS: dict[str, tuple[Callable[..., torch.Tensor], bool]] = {
    "behind": (lambda a, b, c: a.sin() + torch.mm(b, c), True),
    "other way round": (lambda a, b, c: torch.add(torch.mm(b, c), a), True),
    "a row": (lambda a, b, c: a[0] + torch.mm(b, c), True),
    "two products": (lambda a, b, c: torch.mm(b, b) + torch.mm(b, c), True),
    "before": (lambda a, b, c: torch.mm(b, c) + a.sin(), False),
    "scaled": (lambda a, b, c: torch.add(a, torch.mm(b, c), alpha=2), False),
    "a column": (lambda a, b, c: a[:, :1] + torch.mm(b, c), False),
    "read twice": (lambda a, b, c: (p := torch.mm(b, c), a + p)[1] * p, False),
    "no product": (lambda a, b, c: a + b, False),
    "a number": (lambda a, b, c: torch.mm(b, c) + 1.0, False),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_sum_takes_a_product(name: str) -> None:
    program, expected = PROGRAMS[name]
    graph = graph_of(program, (4, 4), (4, 4), (4, 4))
    sums = Sums(graph, set(), on_cpu=True)
    assert any(sums.takes_a_product(node) for node in graph.nodes) is expected


def test_a_gpu_keeps_it_apart_where_what_reads_it_is_pointwise() -> None:
    graph = graph_of(lambda a, b, c: (a + torch.mm(b, c)).sin(), (4, 4), (4, 4), (4, 4))
    (add,) = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert Sums(graph, {"sin"}, on_cpu=True).takes_a_product(add)
    assert not Sums(graph, {"sin"}, on_cpu=False).takes_a_product(add)
    assert Sums(graph, set(), on_cpu=False).takes_a_product(add)
