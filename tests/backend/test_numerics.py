"""Results and gradients through the backend, against float64 and eager, for every kind of inner compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optpass.backend.reporting import build_report

INNERS = ["eager", "aot_eager", "aot_eager_decomp_partition"]


class Block(nn.Module):
    """Attention by hand, with a view round trip in it, and a feed-forward part."""

    def __init__(self, width: int = 12, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        k = k.transpose(-1, -2).transpose(-1, -2)
        weights = torch.softmax(q @ k.transpose(-1, -2) / (width / self.heads) ** 0.5, dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(x)


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="optpass", options={"inner": "eager", "strict": True, **options})


def applied(kind: str = "redundant") -> int:
    return sum(len(p.applied) for g in build_report().graphs for p in g.passes if p.name == kind)


@pytest.mark.parametrize("inner", INNERS)
def test_training_is_as_exact_as_eager(inner: str, harness: Any, fresh: torch.Generator) -> None:
    model = Block()
    inputs = [torch.randn(2, 5, 12, generator=fresh).requires_grad_()]
    candidate = harness.run(model, inputs, compiled(model, inner=inner))
    harness.assert_no_less_exact(harness.in_double(model, inputs), candidate, harness.run(model, inputs))
    assert applied() == 1


@pytest.mark.slow
def test_training_under_inductor(harness: Any, fresh: torch.Generator) -> None:
    model = Block()
    inputs = [torch.randn(2, 5, 12, generator=fresh).requires_grad_()]
    candidate = harness.run(model, inputs, torch.compile(model, backend="optpass", options={"strict": True}))
    harness.assert_no_less_exact(harness.in_double(model, inputs), candidate, harness.run(model, inputs), slack=4.0)
    graph = build_report().graphs[0]
    assert graph.training and graph.inner == "inductor" and graph.cache in ("hit", "miss")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("inner", [*INNERS[:2], "inductor"])
def test_inference(inner: str, mode: Callable[[], Any], harness: Any, fresh: torch.Generator) -> None:
    model = Block().eval()
    x = torch.randn(2, 5, 12, generator=fresh)
    with mode():
        candidate = harness.run(model, [x], compiled(model, inner=inner))
        eager, reference = harness.run(model, [x]), harness.in_double(model, [x])
    harness.assert_no_less_exact(reference, candidate, eager, slack=4.0)
    assert not build_report().graphs[0].training


def test_a_callable_sees_the_graph_after_our_passes(fresh: torch.Generator) -> None:
    seen: list[torch.fx.GraphModule] = []

    def inner(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        assert isinstance(inputs, list)
        seen.append(gm)
        return gm.forward

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).transpose(0, 1) * 2

    x = torch.randn(3, 4, generator=fresh)
    torch.testing.assert_close(compiled(f, inner=inner)(x), f(x), rtol=0, atol=0)
    assert [n.target for n in seen[0].graph.nodes if n.op == "call_method"] == []
    assert build_report().graphs[0].inner.startswith("callable ")


def test_a_callable_that_returns_no_callable_is_named() -> None:
    with pytest.raises(
        Exception, match=r"inner='callable .*returned NoneType; an inner compiler must return a callable"
    ):
        compiled(lambda x: x + 1, inner=lambda gm, inputs: None)(torch.ones(2))


@pytest.mark.parametrize("inner", INNERS[:2])
@pytest.mark.parametrize("outside", [True, False])
def test_autocast(inner: str, outside: bool, harness: Any, fresh: torch.Generator) -> None:
    model = Block()

    def inside(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
            return y.t().t() if y.dim() == 2 else y

    step = compiled(model if outside else inside, inner=inner)
    inputs = [torch.randn(2, 5, 12, generator=fresh).requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16, enabled=outside):
        candidate = harness.run(model, inputs, step)
    with torch.autocast("cpu", torch.bfloat16):
        eager = harness.run(model, inputs)
    harness.assert_no_less_exact(harness.in_double(model, inputs), candidate, eager, slack=4.0)
    assert applied() == 1


@pytest.mark.parametrize("inner", INNERS[:2])
def test_graph_breaks(inner: str, harness: Any, fresh: torch.Generator) -> None:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    both = nn.ModuleList([first, second])

    def f(x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(first(x))
        torch._dynamo.graph_break()
        return second(x).t().t() * 1.0

    inputs = [torch.randn(4, 6, generator=fresh).requires_grad_()]
    candidate = harness.run(both, inputs, compiled(f, inner=inner))
    eager = harness.run(both, inputs, f)
    assert len(build_report().graphs) == 2
    for name, grad in eager.grads.items():
        torch.testing.assert_close(candidate.grads[name], grad)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(f, backend="optpass", fullgraph=True, options={"inner": inner})(inputs[0])


def test_batch_norm_updates_its_buffers(harness: Any, fresh: torch.Generator) -> None:
    theirs = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
    ours = copy.deepcopy(theirs)
    inputs = [torch.randn(2, 2, 6, 6, generator=fresh)]
    a, b = harness.run(theirs, inputs), harness.run(ours, inputs, compiled(ours, inner="aot_eager"))
    torch.testing.assert_close(a.outputs, b.outputs)
    torch.testing.assert_close(a.grads, b.grads)
    for (name, x), (_, y) in zip(theirs.named_buffers(), ours.named_buffers(), strict=True):
        torch.testing.assert_close(x, y, msg=name)
    assert int(ours[1].num_batches_tracked) == 1


@pytest.mark.parametrize("inner", INNERS[:2])
def test_an_input_changed_in_place(inner: str, fresh: torch.Generator) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x.t().t()
        x.add_(y)
        return z * 2

    a, b = torch.randn(3, 3, generator=fresh), torch.randn(3, 3, generator=fresh)
    mine, theirs = a.clone(), a.clone()
    assert torch.equal(compiled(f, inner=inner)(mine, b), f(theirs, b))
    assert torch.equal(mine, theirs)
    (site,) = build_report().graphs[0].passes[0].declined
    assert "modified in place by" in site.reason


@pytest.mark.parametrize("inner", INNERS[:2])
def test_outputs_that_alias(inner: str, fresh: torch.Generator) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 1
        return x.t().t(), x.view(-1), y.t().t(), y

    x = torch.randn(3, 4, generator=fresh)
    theirs, mine = f(x), compiled(f, inner=inner)(x)
    for a, b in zip(theirs, mine, strict=True):
        assert torch.equal(a, b)
        assert (a is x) == (b is x)
    for i in range(4):
        for j in range(4):
            same = theirs[i].untyped_storage().data_ptr() == theirs[j].untyped_storage().data_ptr()
            assert same == (mine[i].untyped_storage().data_ptr() == mine[j].untyped_storage().data_ptr())
            assert (theirs[i] is theirs[j]) == (mine[i] is mine[j])
    mine[0].mul_(3)
    assert torch.equal(mine[1], x.view(-1))


@pytest.mark.parametrize("inner", INNERS[:2])
def test_shapes_of_output(inner: str) -> None:
    def f(x: torch.Tensor) -> dict[str, Any]:
        return {"a": x + 1, "b": (x * 2, [x - 1, 7, None]), "n": x.shape[0]}

    x = torch.ones(3)
    mine, theirs = compiled(f, inner=inner)(x), f(x)
    assert torch.equal(mine["a"], theirs["a"]) and torch.equal(mine["b"][1][0], theirs["b"][1][0])
    assert mine["n"] == 3 and mine["b"][1][1:] == [7, None]
    assert compiled(lambda x: 5, inner=inner)(x) == 5
    assert compiled(lambda x: None, inner=inner)(x) is None
    assert compiled(lambda x: x, inner=inner)(x) is x


def test_shared_parameters(harness: Any, fresh: torch.Generator) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(tokens))

    model = Tied()
    inputs = [torch.randint(0, 11, (2, 4), generator=fresh)]
    candidate = harness.run(model, inputs, compiled(model, inner="aot_eager"))
    harness.assert_no_less_exact(harness.in_double(model, inputs), candidate, harness.run(model, inputs))


def test_autograd_function(fresh: torch.Generator) -> None:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return -grad

    def f(x: torch.Tensor) -> torch.Tensor:
        return (Reverse.apply(x).t().t() * x).sum()

    for inner in INNERS[:2]:
        x = torch.randn(3, 4, generator=fresh).requires_grad_()
        compiled(f, inner=inner)(x).backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, torch.zeros_like(x))  # x's own gradient and the reversed one


def test_double_backward_through_eager(fresh: torch.Generator) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.t().t() ** 3).sum()

    x = torch.randn(3, 4, generator=fresh, dtype=torch.float64).requires_grad_()
    (grad,) = torch.autograd.grad(compiled(f)(x), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(second, 6 * x.detach())


def test_checkpoint_and_functional_transforms(harness: Any, fresh: torch.Generator) -> None:
    from torch.utils.checkpoint import checkpoint

    layer = nn.Linear(6, 6)

    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(layer(x.t().t()))

    def f(x: torch.Tensor) -> torch.Tensor:
        return (
            checkpoint(body, x, use_reentrant=False).sum() + torch.func.vmap(lambda r: r.view(6).view(6) * 2)(x).sum()
        )

    def g(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda y: (y.t().t() ** 2).sum())(x)

    inputs = [torch.randn(4, 6, generator=fresh).requires_grad_()]
    a, b = harness.run(layer, inputs, f), harness.run(layer, inputs, compiled(f, inner="aot_eager"))
    torch.testing.assert_close(a.grads, b.grads)
    x = inputs[0].detach()
    torch.testing.assert_close(compiled(g, inner="aot_eager")(x), 2 * x)
    assert all(p.error is None for graph in build_report().graphs for p in graph.passes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, harness: Any, fresh: torch.Generator) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.softmax((x.float().to(dtype) @ w).float(), dim=-1).to(dtype)

    inputs = [torch.randn(4, 8, generator=fresh).to(dtype).requires_grad_() for _ in range(2)]
    inputs[1] = inputs[1].detach().t().contiguous().requires_grad_()
    a, b = harness.run(f, inputs), harness.run(f, inputs, compiled(f, inner="aot_eager"))
    assert applied() == 1
    for x, y in zip([*a.outputs, *a.grads.values()], [*b.outputs, *b.grads.values()], strict=True):
        assert torch.equal(x, y)
