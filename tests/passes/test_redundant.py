"""The redundant pass: what it removes, what it must not, and why it says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from optpass.options import Options
from optpass.passes.contract import PassContext, PassResult
from optpass.passes.redundant import Redundant, RedundantConfig

BF, HALF, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Seen:
    """What the pass did to the one graph of a function, and the compiled function."""

    def __init__(
        self, function: Callable[..., Any], config: RedundantConfig | None = None, **compile_args: Any
    ) -> None:
        self.results: list[PassResult] = []
        self.graphs: list[fx.Graph] = []
        self.config = config
        torch._dynamo.reset()
        self.call = torch.compile(function, backend=self._backend, fullgraph=True, **compile_args)

    def _backend(self, gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        def no_device() -> Any:
            raise AssertionError("this pass asks for no device")

        self.results.append(Redundant(self.config).run(gm, PassContext(Options(), no_device, "0", False)))
        gm.graph.lint()
        gm.recompile()
        self.graphs.append(gm.graph)
        return gm.forward

    @property
    def applied(self) -> list[str]:
        return [s.before for s in self.results[-1].applied]

    @property
    def reasons(self) -> list[str]:
        return [s.reason for s in self.results[-1].declined]

    @property
    def calls(self) -> list[str]:
        return [str(getattr(n.target, "__name__", n.target)) for n in self.graphs[-1].nodes if n.op.startswith("call")]


def x(dtype: torch.dtype = F32, grad: bool = False) -> torch.Tensor:
    return torch.randn(4, 6).to(dtype).requires_grad_(grad)


@pytest.mark.parametrize(
    ("function", "before"),
    [
        (lambda a: a.transpose(0, 1).transpose(0, 1) + 1, "transpose.transpose"),
        (lambda a: torch.transpose(torch.transpose(a, 0, 1), 1, 0) + 1, "transpose.transpose"),
        (lambda a: a.permute(1, 0).permute(1, 0) + 1, "permute.permute"),
        (lambda a: a.T.T + 1, "T.T"),
        (lambda a: a.mT.mT + 1, "mT.mT"),
        (lambda a: a.view(-1).view(4, 6) + 1, "view.view"),
        (lambda a: a.reshape(2, 12).reshape(4, 6) + 1, "reshape.reshape"),
        (lambda a: a.unsqueeze(0).squeeze(0) + 1, "unsqueeze.squeeze"),
        (lambda a: a.flatten().unflatten(0, (4, 6)) + 1, "flatten.unflatten"),
        (lambda a: a.unsqueeze(1).transpose(0, 1).squeeze(0) + 1, "unsqueeze.transpose.squeeze"),
        (lambda a: a.contiguous() + 1, "contiguous"),
        (lambda a: a.float() + 1, "float"),
        (lambda a: a.to(F32) + 1, "to"),
        (lambda a: a.expand(4, 6) + 1, "expand"),
        (lambda a: a.view_as(a) + 1, "view_as"),
        (lambda a: a.narrow(0, 0, 4) + 1, "narrow"),
        (lambda a: a.view(torch.int32).view(F32) + 1, "view.view"),
        (lambda a: a.double().float() + 1, "double.float"),
        (lambda a: a.to(F64).to(F32) + 1, "to.to"),
        (lambda a: a.type(F64).type_as(a) + 1, "type.type_as"),
    ],
)
def test_positive(function: Callable[..., torch.Tensor], before: str) -> None:
    seen, a = Seen(function), x()
    assert torch.equal(seen.call(a), function(a))
    (applied,) = seen.applied
    assert applied.partition(".")[2] == before
    assert seen.calls == ["add"]
    assert seen.reasons == []
    site = seen.results[0].applied[0]
    assert site.reason and site.line and site.file == __file__ and site.node


@pytest.mark.parametrize(("low", "high"), [(BF, F32), (HALF, F32), (BF, F64), (HALF, F64), (F32, F64)])
def test_casts_that_are_exact(low: torch.dtype, high: torch.dtype) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        return a.to(high).to(low) * 2

    seen, a = Seen(f), x(low, grad=True)
    seen.call(a).sum().backward()
    theirs = a.detach().clone().requires_grad_()
    f(theirs).sum().backward()
    assert a.grad is not None and theirs.grad is not None and torch.equal(a.grad, theirs.grad)
    (site,) = seen.results[0].applied
    assert site.cost["bytes_saved"] == 2 * a.numel() * (low.itemsize + high.itemsize)
    assert site.cost["nodes_removed"] == 2
    assert "is exact in" in site.reason


def test_exactness_of_the_table() -> None:
    from optpass.passes.redundant import EXACT_IN

    for low, wide in EXACT_IN.items():
        if low.is_floating_point:
            bits = torch.arange(-(2**15), 2**15).to(torch.int16)
            values = (
                bits.view(low) if low.itemsize == 2 else torch.randint(-(2**31), 2**31 - 1, (10**5,)).int().view(low)
            )
            values = values[~values.isnan()]
        else:
            info = torch.iinfo(low)
            few = info.max <= 2**15
            values = (
                torch.arange(info.min, info.max + 1).to(low) if few else torch.randint(info.min, info.max, (10**5,))
            )
            values = torch.cat([values.to(low), torch.tensor([info.min, info.max], dtype=low)])
        for high in wide:
            assert torch.equal(values.to(high).to(low), values), (low, high)
            if low.is_floating_point:
                back = values.to(high).to(low)
                assert torch.equal(back.signbit(), values.signbit())


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda a: a.t().t(), "its result is returned"),
        (lambda a: (a.double().float(),), "its result is returned"),
        (lambda a: a.double().float().t(), "a view of its result is returned"),
        (lambda a: a.to(BF).float() + 1, "bfloat16 does not hold every float32 exactly"),
        (lambda a: a.half().float() + 1, "float16 does not hold every float32 exactly"),
        (lambda a: (a.t().t() + 1, a.add_(1))[0], "is modified in place by add_"),
        (lambda a: (a.double().float() + 1, a.add_(1))[0], "is modified in place by add_"),
        (lambda a: a.double().float().mul_(2) + 1, "is modified in place by mul_"),
        (lambda a: a.t().t().mul_(2) + 1, "is modified in place by mul_"),
        (lambda a: torch.relu_(a.t().t()) + 1, "is modified in place by relu_"),
        (lambda a: a.t().detach().t() * 2, None),
    ],
)
def test_near_misses(function: Callable[..., Any], reason: str | None) -> None:
    seen, a = Seen(function), x()
    theirs = a.clone()
    mine_out, their_out = seen.call(a), function(theirs)
    torch.testing.assert_close(mine_out, their_out, rtol=0, atol=0)
    assert torch.equal(a, theirs)
    if reason is None:  # nothing needs a gradient, so detaching is a view like any other
        assert seen.applied and not seen.reasons
        return
    assert seen.applied == []
    (found,) = seen.reasons
    assert reason in found
    assert not seen.results[0].changed


def test_the_value_between_two_casts_is_written() -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        wide = a.double()
        wide.mul_(2)
        return wide.float() + 1

    seen, a = Seen(f), x()
    assert torch.equal(seen.call(a), f(a))
    assert "double" in seen.reasons[0] or "is modified in place by mul_" in seen.reasons[0]


def test_a_gradient_that_is_cut_off() -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        return (a.t().detach().t() * a).sum()

    seen, a = Seen(f), x(grad=True)
    seen.call(a).backward()
    assert a.grad is not None and torch.equal(a.grad, a.detach())
    assert seen.applied == [] and "differ in requires_grad" in seen.reasons[0]

    def g(a: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            b = a.double().float()
        return (b * a).sum()

    seen = Seen(g)
    a = x(grad=True)
    seen.call(a).backward()
    assert a.grad is not None and torch.equal(a.grad, a.detach())
    assert "differ in requires_grad" in seen.reasons[0]


def test_a_view_of_a_view_without_gradient_claims_to_have_one() -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        turned = (a * 1).t()
        with torch.no_grad():
            back = turned.t()
        return (back.double() * 2).sum() + a.sum()

    seen, a = Seen(f), x(grad=True)
    seen.call(a).backward()
    assert a.grad is not None and torch.equal(a.grad, torch.ones_like(a))
    assert seen.applied == [] and "cut off from the gradient" in seen.reasons[0]


def test_gradients_are_not_summed_in_the_narrow_dtype() -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        wide = a.float()
        return (wide.to(BF) * 3).float().sum() + (wide * 1.001).sum() + (wide * 1e-3).sum()

    seen, a = Seen(f), x(BF, grad=True)
    seen.call(a).backward()
    theirs = a.detach().clone().requires_grad_()
    f(theirs).backward()
    assert a.grad is not None and theirs.grad is not None and torch.equal(a.grad, theirs.grad)
    assert seen.applied == [] and "summed in bfloat16 instead of float32" in seen.reasons[0]
    seen = Seen(f)
    seen.call(x(BF))  # nothing to sum: the second cast goes, the first is still used
    (site,) = seen.results[0].applied
    assert site.cost["nodes_removed"] == 1 and site.cost["bytes_saved"] == 24 * 6
    assert "float" in seen.calls


def test_conjugates() -> None:
    def twice(a: torch.Tensor) -> torch.Tensor:
        return a.t().conj().t() + a

    seen = Seen(twice)
    a = torch.randn(3, 4, dtype=torch.complex64)
    assert torch.equal(seen.call(a), twice(a))
    assert seen.applied == [] and "conjugate" in seen.reasons[0]


def test_ops_that_only_look_alike() -> None:
    def transposed_other_dims(a: torch.Tensor) -> torch.Tensor:
        return a.view(2, 2, 6).transpose(0, 1).transpose(1, 2) + 1

    def copied(a: torch.Tensor) -> torch.Tensor:
        return a.t().contiguous().t() + 1

    def cloned(a: torch.Tensor) -> torch.Tensor:
        return a.to(F32, copy=True) + a.clone()

    def sliced(a: torch.Tensor) -> torch.Tensor:
        return a.narrow(0, 1, 3) + 1

    for function in (transposed_other_dims, copied, cloned, sliced):
        seen, a = Seen(function), x()
        assert torch.equal(seen.call(a), function(a))
        assert seen.applied == [] and seen.reasons == [], function.__name__


def test_a_function_named_like_a_view_is_none() -> None:
    @torch._dynamo.allow_in_graph
    def view(a: torch.Tensor) -> torch.Tensor:
        return a.view_as(a)

    def f(a: torch.Tensor) -> torch.Tensor:
        return view(a) * 2

    seen, a = Seen(f), x()
    seen.call(a)
    assert seen.applied == []


def test_nested_trips_collapse_to_the_first_link() -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        b = a * 1
        return b.t().t().unsqueeze(0).squeeze(0).double().float() + 1

    seen, a = Seen(f), x()
    assert torch.equal(seen.call(a), f(a))
    assert seen.calls == ["mul", "add"]


@pytest.mark.parametrize("dynamic", [True, None])
def test_dynamic_shapes_add_no_guard(dynamic: bool | None) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        return a.view(-1).view(a.shape).transpose(0, 1).transpose(0, 1) + a.double().float()

    def guards(config: RedundantConfig) -> tuple[int, int]:
        seen = Seen(f, config, dynamic=dynamic)
        found: list[Any] = []
        for rows in (4, 6, 8, 12):
            a = torch.randn(rows, 6)
            if dynamic is None:
                torch._dynamo.mark_dynamic(a, 0)
            assert torch.equal(seen.call(a), f(a))
        for node in seen.graphs[-1].nodes:
            value = node.meta.get("example_value")
            if isinstance(value, torch.Tensor):
                found = value.fake_mode.shape_env.guards  # type: ignore[attr-defined]
        return len(seen.graphs), len(found)

    with_pass, without = guards(RedundantConfig()), guards(RedundantConfig(layout=False, cast=False))
    assert with_pass == without


def test_each_rule_can_be_left_out() -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        return a.t().t() + a.double().float()

    for config, expected in (
        (RedundantConfig(), 2),
        (RedundantConfig(layout=False), 1),
        (RedundantConfig(cast=False), 1),
        (RedundantConfig(layout=False, cast=False), 0),
    ):
        seen, a = Seen(f, config), x()
        assert torch.equal(seen.call(a), f(a))
        assert len(seen.applied) == expected


def test_two_inputs_that_share_memory() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = a.double().float()
        b.add_(1)
        return c * 2

    base = torch.randn(4, 6)
    theirs = base.clone()
    seen = Seen(f)
    assert torch.equal(seen.call(base, base.view(-1)), f(theirs, theirs.view(-1)))
    assert torch.equal(base, theirs)
    assert seen.applied == []
