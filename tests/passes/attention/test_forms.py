"""Every form of `forms/` becomes what it should: kernels in the graph, results and gradients against float64.

The inner compiler runs the graph as it stands, so what is compared is the rewrite alone; a few forms go through
Inductor at the end.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodDescriptorType
from typing import Any

import pytest
import torch
from attention_forms.base import Sizes
from torch import fx

import optpass
from optpass.passes.attention import gate
from optpass.passes.attention.gate import Verdict
from optpass.passes.attention.write.few_keys import LANES

pytestmark = pytest.mark.usefixtures("clean", "seeded")

BY_MODE = pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])


@dataclass
class Errors:
    """Root mean square error of one output or gradient, and eager's own, against float64."""

    name: str
    ours: float
    eager: float
    rows: int


def measured(name: str, exact: torch.Tensor, ours: torch.Tensor, eager: torch.Tensor, largest: float) -> Errors | None:
    """The errors, or None where they are below what is counted.

    float32: up to 1e-5 of the largest element. A gradient that is zero in exact arithmetic (of a bias of the keys: a
    softmax does not see it) is rounding noise in both, and is measured by `largest`, the largest element of any
    gradient.
    """
    assert ours.dtype == eager.dtype and ours.shape == eager.shape, name
    error, size = ours.double() - exact, float(exact.abs().max())
    assert bool(torch.isfinite(error).all()), name
    unit = max(1e-5, torch.finfo(eager.dtype).eps)
    if eager.dtype == torch.float32 and float(error.abs().max()) <= unit * size:
        return None
    if size <= 1e-9 * largest and float(error.abs().max()) <= unit * largest:
        return None
    both = [float(e.square().mean().sqrt()) for e in (error, eager.double() - exact)]
    # Where an error is zero, the other may be a thousandth of a unit in the last place of the largest element.
    floor = 1e-3 * torch.finfo(eager.dtype).eps * size
    return Errors(name, both[0] + floor, both[1] + floor, max(1, exact.numel() // max(1, exact.shape[-1])))


def assert_as_exact(exact: Any, ours: Any, eager: Any) -> None:
    """Every output and gradient is as near to float64 as eager's, which is: its root mean square error is no larger.

    Both are estimates. Errors within a row share a factor (one rounded weight multiplies a row of values), rows are
    nearly independent, so the logarithm of the ratio of two estimates of one size scatters by about 1 / sqrt(rows):
    four times that is allowed for chance (1.29 for 240 rows, 7 for the 4 numbers of a temperature per head). All
    tensors of a program together scatter less: the geometric mean of their ratios, weighted by rows, may be 1.1, and
    twice its own scatter more (1.17 in all for the 960 rows of q, k, v and the output).
    """
    assert exact.grads.keys() == ours.grads.keys() == eager.grads.keys()
    outputs = zip(exact.outputs, ours.outputs, eager.outputs, strict=True)
    tensors = [(f"output {i}", *three) for i, three in enumerate(outputs)]
    tensors += [(f"grad of {k}", exact.grads[k], ours.grads[k], eager.grads[k]) for k in exact.grads]
    largest = max((float(g.abs().max()) for g in exact.grads.values()), default=0.0)
    errors = [e for tensor in tensors if (e := measured(*tensor, largest)) is not None]
    wrong = [e for e in errors if e.ours > math.exp(4 / math.sqrt(e.rows)) * e.eager]
    assert not wrong, wrong
    rows = max(1, sum(e.rows for e in errors))
    mean = sum(e.rows * math.log(e.ours / e.eager) for e in errors) / rows
    assert mean <= math.log(1.1) + 2 / math.sqrt(rows), errors


def assert_same(ours: Any, eager: Any) -> None:
    """Bit for bit."""
    assert len(ours.outputs) == len(eager.outputs) and ours.grads.keys() == eager.grads.keys()
    assert all(torch.equal(a, b) for a, b in zip(ours.outputs, eager.outputs, strict=True))
    assert all(torch.equal(ours.grads[k], eager.grads[k]) for k in eager.grads)


def assert_nodes(form: Any, target: str, kernels: Any, sizes: Any) -> None:
    """The kernels in the graph are those that `form` says; if not, the reasons of what was declined."""
    sdpa, flex = kernels.sdpa, kernels.flex
    if target == "either":
        return
    wanted = {"sdpa": (form.sites, 0), "flex": (0, form.sites), "decline": (0, 0)}
    counts = (len(sdpa), len(flex))
    right = counts == wanted[target] if target in wanted else sum(counts) == form.sites
    assert right, f"(sdpa, flex) = {counts} for {target}: {[s.reason for s in optpass.report().declined('attention')]}"
    for node in sdpa:
        causal, mask, scale = (_argument(node, *at) for at in ((5, "is_causal"), (3, "attn_mask"), (6, "scale")))
        if form.mask in ("none", "causal"):
            keys = _argument(node, 1, "key").meta["example_value"].shape[-2]
            few = form.mask == "none" and isinstance(keys, int) and keys < LANES
            assert bool(causal) == (form.mask == "causal") and (mask is not None) == few  # one that hides no key
        elif form.mask == "operand":
            assert not causal and mask is not None
        if form.scale is not None:
            dim = _argument(node, 0, "query").meta["example_value"].shape[-1]
            scale = dim**-0.5 if scale is None else scale
            assert isinstance(scale, fx.Node) or math.isclose(scale, form.scale(sizes), rel_tol=1e-6)
        if form.gqa:
            assert _argument(node, 7, "enable_gqa")


def _argument(node: Any, at: int, name: str) -> Any:
    return node.args[at] if len(node.args) > at else node.kwargs.get(name)


def assert_said(form: Any, target: str) -> None:
    """The report has as many sites as were swapped, and a reason and a line for what was declined."""
    if target in ("sdpa", "flex", "fused"):
        assert len(optpass.report().sites("attention")) == form.sites
    if target == "decline" and form.reason:
        sites = optpass.report().declined("attention")
        assert sites and all(Path(site.file or "") == Path(form.file) and site.line for site in sites)
        assert any(re.search(form.reason, site.reason) for site in sites), [site.reason for site in sites]


def assert_cacheable(graphs: list[fx.GraphModule]) -> None:
    """AOTAutograd's cache takes methods by name alone: with `torch.Tensor.to` as a function nothing is ever cached."""
    calls = [n for gm in graphs for n in gm.graph.nodes if n.op == "call_function"]
    assert not [n for n in calls if isinstance(n.target, MethodDescriptorType)]


def both(
    form: Any, dtype: torch.dtype, training: bool, compiled: Any, harness: Any, exact: Any, seed: int
) -> tuple[Any, Any, Any]:
    """The float64 reference, the compiled and the eager run of one program on one set of inputs."""
    with torch.set_grad_enabled(training):
        program, inputs = form.build(dtype, training)
        reference = exact(program, inputs)
        runs = []
        for call in (compiled(program), program):
            torch.manual_seed(seed)  # dropout that stays as it is draws the same numbers
            runs.append(harness.run(program, inputs, call))
    return reference, *runs


@pytest.mark.slow
def test_form(
    form: Any, dtype: torch.dtype, training: bool, kernels: Any, compiled: Any, harness: Any, exact: Any, seeded: int
) -> None:
    target = form.train if training else form.target
    reference, ours, eager = both(form, dtype, training, compiled, harness, exact, seeded)
    assert len(kernels.graphs) == 1
    assert_nodes(form, target, kernels, Sizes())
    assert_said(form, target)
    assert_cacheable(kernels.graphs)
    if target == "decline" or not (kernels.sdpa or kernels.flex):
        assert_same(ours, eager)
    else:
        assert_as_exact(reference, ours, eager)


@pytest.mark.slow
def test_in_blocks(
    some_form: Any, harness: Any, exact: Any, compiled: Any, seeded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own operator in the place of the kernel, in training and in bfloat16, which it is for."""
    asked = []

    def in_blocks_alone(problem: Any, target: str, *_: Any, **__: Any) -> Verdict:
        asked.append(target)
        return Verdict(target == "blocks", 1.0, 2.0, "by the test", "")

    monkeypatch.setattr(gate, "decide", in_blocks_alone)

    def by_the_gate(program: Any) -> Any:
        return compiled(program, inner="eager", mode="auto")

    reference, ours, eager = both(some_form, torch.bfloat16, True, by_the_gate, harness, exact, seeded)
    sites = optpass.report().sites("attention")
    assert all(site.after.startswith("attention in blocks") for site in sites)
    assert len(sites) == asked.count("blocks")  # none in float32, with dropout, with a gradient to the mask
    if sites:
        assert_as_exact(reference, ours, eager)


FLOAT16 = ["divided_after", "in_float32_and_back", "NanoGPT", "GroupedRotaryCausal", "padding_added", "RelativeBuckets"]


@pytest.mark.parametrize("name", FLOAT16)
def test_float16(name: str, forms: Any, kernels: Any, compiled: Any, harness: Any, exact: Any, seeded: int) -> None:
    """Training in float16, where a score can be as large as finfo.min: an added mask of it is a number among others."""
    reference, ours, eager = both(forms[name], torch.float16, True, compiled, harness, exact, seeded)
    form = forms[name] if name != "GroupedRotaryCausal" else replace(forms[name], mask="operand")
    assert_nodes(form, form.train, kernels, Sizes())
    assert_as_exact(reference, ours, eager)


@pytest.mark.slow
@pytest.mark.by_turns
@BY_MODE
def test_one_graph_for_all_lengths(
    dynamic_form: Any, training: bool, kernels: Any, compiled: Any, harness: Any, exact: Any
) -> None:
    """Compiled with dynamic shapes: the kernels are those of the static graph, and every length is right."""
    program, _ = dynamic_form.build(torch.float32, training)
    call = compiled(program, dynamic=True)
    for sizes in (Sizes(), Sizes(batch=2, length=33), Sizes(batch=5, length=7)):
        inputs = dynamic_form.build(torch.float32, training, sizes)[1]
        with torch.set_grad_enabled(training):
            ours = harness.run(program, inputs, call)
            assert_as_exact(exact(program, inputs), ours, harness.run(program, inputs))
    assert len(kernels.graphs) == 1
    form = replace(dynamic_form, gqa=False)  # the number of heads is dynamic too: that groups are even is not known
    assert_nodes(form, form.train if training else form.target, kernels, Sizes())


@pytest.mark.parametrize("name", ["NanoGPT", "expanded_and_reshaped", "padding_filled", "einsum_heads_last"])
def test_one_dim_marked_dynamic(name: str, forms: Any, kernels: Any, compiled: Any, exact: Any) -> None:
    """Only the length is dynamic, by `mark_dynamic`; the batch is a number in the graph."""
    form = forms[name]
    program, _ = form.build(torch.float32, False)
    call = compiled(program)
    for length in (20, 31, 9):
        inputs = form.build(torch.float32, False, Sizes(length=length))[1]
        for tensor in inputs:
            for dim in (dim for dim, size in enumerate(tensor.shape) if size == length):
                torch._dynamo.mark_dynamic(tensor, dim)
        with torch.no_grad():
            (wanted,), ours = exact(program, inputs).outputs, call(*inputs)
            assert measured("output", wanted, ours, program(*inputs), 0.0) is None
    assert len(kernels.graphs) == 1
    assert_nodes(form, form.target, kernels, Sizes())


def test_dropout_is_swapped_on_demand(dropout_form: Any, kernels: Any, compiled: Any) -> None:
    """Mean and variance of each element of the output over many calls, against what dropout on the weights gives.

    With weights P and keep probability 1 - p, an output has the mean (P v) and the variance p / (1 - p) · P² v².
    """
    program, (q, k, v) = dropout_form.build(torch.float32, True)
    call, p, runs = compiled(program, dropout="swap"), dropout_form.dropout, 600
    with torch.no_grad():
        drawn = torch.stack([call(q, k, v).double() for _ in range(runs)])
    q, k, v = (t.detach().double() for t in (q, k, v))
    weights = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1)
    mean, variance = weights @ v, p / (1 - p) * weights.square() @ v.square()
    (node,) = kernels.sdpa
    assert _argument(node, 4, "dropout_p") == pytest.approx(p)
    # Standardised, the means are nearly normal; 3840 of them stay under 6 but once in 10^5 runs.
    assert float(((drawn.mean(0) - mean) / (variance / runs).sqrt()).abs().max()) < 6
    # One ratio per element scatters by about (2 / 600)^0.5, their mean over 3840 elements by a tenth of a percent.
    assert float((drawn.var(0) / variance).mean()) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("dropout", ["keep", "swap"])
def test_dropout_of_nothing_is_no_dropout(dropout: str, kernels: Any, compiled: Any, forms: Any, harness: Any) -> None:
    """A dropout module of p = 0 in training: swapped without being asked, and equal to what the user wrote."""
    program, inputs = forms["DropoutModule"].build(torch.float64, True)
    program.dropout.p = 0.0
    ours, eager = harness.run(program, inputs, compiled(program, dropout=dropout)), harness.run(program, inputs)
    assert len(kernels.sdpa) == 1 and not _argument(kernels.sdpa[0], 4, "dropout_p")
    torch.testing.assert_close(ours.outputs, eager.outputs)
    torch.testing.assert_close(ours.grads, eager.grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["padded_on_both_sides", "lowest_numbers_under_autocast"])
def test_rows_of_padding_in_kernels_of_gpus(
    name: str, dtype: torch.dtype, forms: Any, compiled: Any, harness: Any, exact: Any, seeded: int, as_on_gpus: Any
) -> None:
    def by_gpu(program: Any) -> Any:
        return compiled(program, inner=lambda gm, _: as_on_gpus(gm))

    assert_as_exact(*both(forms[name], dtype, False, by_gpu, harness, exact, seeded))
    assert len(optpass.report().sites("attention")) == 1


def test_what_a_mask_of_a_gpu_would_round_is_not_put_into_it(forms: Any, compiled: Any, as_on_gpus: Any) -> None:
    """Kernels of GPUs have masks of their operands' dtype, and the program adds a bias in float32."""
    program, inputs = forms["a_wide_bias_under_autocast"].build(torch.float32, False)
    compiled(program, inner=lambda gm, _: as_on_gpus(gm))(*inputs)
    (declined,) = optpass.report().declined("attention")
    assert "float32 is added to the scores, and the kernel's mask would round it to bfloat16" in declined.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "training"),
    [
        ("padded_on_both_sides", torch.float32, True),
        ("GroupedRotaryCausal", torch.bfloat16, True),
        ("softcap", torch.float32, False),
    ],
)
def test_through_inductor(
    name: str, dtype: torch.dtype, training: bool, forms: Any, compiled: Any, harness: Any, exact: Any, seeded: int
) -> None:
    def through(program: Any) -> Any:
        return compiled(program, inner="inductor")

    reference, ours, eager = both(forms[name], dtype, training, through, harness, exact, seeded)
    assert len(optpass.report().sites("attention")) == 1
    assert_as_exact(reference, ours, eager)


def test_the_report_knows_the_cost_of_what_is_beside_the_kernel(forms: Any) -> None:
    """The operator that passes the gradient of lost rows writes zeros; the roofline is not to count it as unknown."""
    program, inputs = forms["learned_bias_then_causal_filled"].build(torch.float32, True)
    options = {"inner": "aot_eager", "strict": True, "attention": "always"}
    torch.compile(program, backend="optpass", options=options)(*inputs).sum().backward()
    assert not optpass.report().unknown_ops
