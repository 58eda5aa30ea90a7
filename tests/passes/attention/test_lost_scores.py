"""Rows without a single key, of which half precision loses small scores beside the number of their mask, and large not.

Eager's weights are those of sums in steps of 16 or 64; which scores are lost is not known when compiling.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from optpass.passes.attention.strides import has_gaps
from optpass.passes.attention.write import lost

pytestmark = pytest.mark.usefixtures("clean")


@pytest.mark.parametrize("scale", [0.5, 12.0], ids=["lost", "left"])
@pytest.mark.parametrize("groups", [1, 2], ids=["own keys", "shared keys"])
@pytest.mark.parametrize(
    ("dtype", "number"), [(torch.float16, -65504.0), (torch.bfloat16, -1e4)], ids=["float16", "bfloat16"]
)
def test_rounded_as_in_eager(
    dtype: torch.dtype, number: float, groups: int, scale: float, kernels: Any, compiled: Any, seeded: int
) -> None:
    torch.manual_seed(seeded)
    keep = torch.rand(2, 1, 6, 6) < 0.6
    keep[..., 0], keep[..., -1, :] = True, False
    drawn = [torch.randn(2, 4, 6, 8), *torch.randn(2, 2, 4 // groups, 6, 8)]
    weight = torch.randn(2, 4, 6, 8)

    def attention(q: Any, k: Any, v: Any) -> Any:
        k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        return (q @ k.mT * scale + (1.0 - keep.to(q.dtype)) * number).softmax(-1) @ v

    def run(call: Any, wide: bool = False) -> list[torch.Tensor]:
        leaves = [t.to(dtype).to(torch.float64 if wide else dtype).requires_grad_() for t in drawn]
        out = call(*leaves)
        (out * weight.to(dtype).to(out.dtype)).sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]

    exact, ours, eager = run(attention, wide=True), run(compiled(attention)), run(attention)
    assert len(kernels.sdpa) == 1
    for true, mine, theirs in zip(exact, ours, eager, strict=True):
        size = float(true.abs().max())
        assert float((mine - theirs).abs().max()) <= 32 * torch.finfo(dtype).eps * size


def test_float32_is_rounded_by_the_kernel(kernels: Any, compiled: Any, seeded: int) -> None:
    """In inference, beside one mask: nothing is computed apart, whatever the mask holds."""
    torch.manual_seed(seeded)
    mask = torch.randn(2, 4, 6, 6)
    mask[:, :, -1] = -1e9
    q, k, v = torch.randn(2, 4, 6, 8) * 12.0, *torch.randn(2, 2, 4, 6, 8)

    def attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return (q @ k.mT + mask).softmax(-1) @ v

    with torch.no_grad():
        ours, eager = compiled(attention)(q, k, v, mask), attention(q, k, v, mask)
    assert len(kernels.sdpa) == 1 and not kernels.nodes("lost_rows")
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


def test_one_mask_is_examined_once(kernels: Any, compiled: Any, seeded: int) -> None:
    """For all sites that it is added at; a site without gradients and another mask have flags of their own."""
    torch.manual_seed(seeded)
    keep, other = (torch.rand(2, 2, 1, 6, 6) < 0.6).to(torch.bfloat16)
    keep[..., -1, :] = 0.0
    drawn = torch.randn(3, 2, 4, 6, 8).bfloat16()

    def attention(q: Any, k: Any, v: Any, keep: Any, other: Any) -> Any:
        for mask in (keep, keep, keep, other):
            q = q + (q @ k.mT + (1.0 - mask) * -1e4).softmax(-1) @ v
        with torch.no_grad():
            apart = (q @ k.mT + (1.0 - keep) * -1e4).softmax(-1) @ v
        return q + apart

    def run(call: Any) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in drawn]
        out = call(*leaves, keep, other)
        out.sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]

    ours, eager = run(compiled(attention)), run(attention)
    lost = kernels.nodes("lost_rows")
    assert len(lost) == 5 and len({node.args[5] for node in lost}) == 3
    for mine, theirs in zip(ours, eager, strict=True):
        assert float((mine - theirs).abs().max()) <= 0.1 * float(theirs.abs().max())


def test_a_bias_is_not_rounded_beside_a_mask(kernels: Any, compiled: Any, seeded: int) -> None:
    """A row of nothing but -1e4 is shifted before a bias is added: gradients are closer to float64's than eager's."""
    torch.manual_seed(seeded)
    keep, weight = torch.rand(2, 1, 6, 6) < 0.6, torch.randn(2, 4, 6, 8)
    keep[..., -1, :] = False
    drawn = [*torch.randn(3, 2, 4, 6, 8), torch.randn(4, 6, 6)]

    def attention(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return (q @ k.mT + bias + (1.0 - keep.to(q.dtype)) * -1e4).softmax(-1) @ v

    def run(call: Any, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in drawn]
        (call(*leaves) * weight.to(dtype)).sum().backward()
        return [leaf.grad for leaf in leaves]  # type: ignore[misc]

    exact, ours, eager = run(attention, torch.float64), run(compiled(attention)), run(attention)
    assert len(kernels.sdpa) == 1
    for true, mine, theirs in zip(exact, ours, eager, strict=True):
        assert 10 * float((mine - true).abs().max()) <= float((theirs - true).abs().max())


@pytest.mark.parametrize("some", [True, False])
def test_gradients_lie_in_memory_as_is_said_of_them(some: bool, seeded: int) -> None:
    """Inductor checks strides: those of a bias that is permuted, as T5's is, of keys side by side, of no bias."""
    assert lost.OPERATOR
    query, key, value, result = (torch.randn(2, 3, 5, 4, dtype=torch.float16) for _ in range(4))
    key = key.transpose(1, 2).contiguous().transpose(1, 2)
    rows = torch.full((2, 1, 5, 1), some)
    for mask in (torch.randn(5, 5, 3, dtype=torch.float16).permute(2, 0, 1)[None], None):
        terms = [] if mask is None else [mask]
        operands = (query, key, value, rows, torch.tensor(some), terms, "round float16" + ";add 1.0" * len(terms))
        call = torch.ops.optpass.lost_rows_backward.default
        found = call(result, *operands, mask, None, 0.5, 0.0)
        with FakeTensorMode(allow_non_fake_inputs=True):
            said = call(result, *operands, mask, None, 0.5, 0.0)
        assert [_form(t) for t in found] == [_form(t) for t in said]


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Dtype, shape and strides; where there is one element, its stride says nothing."""
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tensor.dtype, tensor.shape, strides


def test_what_is_kept_of_symbolic_sizes_has_no_gaps() -> None:
    """Inductor lays it out anew, and AOTAutograd takes its strides for numbers: another length was an error."""
    graphs: list[torch.fx.GraphModule] = []

    def inner(gm: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(gm)
        return gm.forward

    def shifted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        """Transformer-XL's relative positions."""
        bias = torch.nn.functional.pad(q @ r.mT, (1, 0))
        b, h, i, j = bias.shape
        bias = bias.view(b, h, j, i)[:, :, 1:].view(b, h, i, j - 1)[..., :i]
        return ((q @ k.mT + bias) * 0.25).softmax(-1) @ v

    call = torch.compile(shifted, backend="optpass", dynamic=True, options={"attention": "always", "inner": inner})
    for length in (12, 17):
        call(*(torch.randn(2, 4, n, 16, requires_grad=True) for n in (length, length, length, 2 * length - 1)))
    (graph,) = graphs
    (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.optpass.lost_rows.default)
    for term in node.args[6]:
        assert not has_gaps(term.meta["example_value"])
