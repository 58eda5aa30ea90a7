"""One model type measured: attentions that an eager run computes, fused calls of the compiled one, and their results.

Runs inside a worker process; the sweep over model types and the claim are `attention_coverage`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from optpass.backend import compat
from optpass.bench.attention_judge import Case, Values, compared
from optpass.bench.attention_sites import Sites, counted
from optpass.bench.result import BenchError
from optpass.bench.tiny_models import Tiny, build
from optpass.models.common import default_dtype
from optpass.reporting.model import GraphRecord

#: Probability of every dropout where dropout is active.
DROPOUT = 0.1
#: Eager runs that are asked, beside the first, before a gradient that differs from it is called wrong.
ROUNDINGS = 8
FUSED = frozenset({F.scaled_dot_product_attention, flex_attention, torch.ops.higher_order.flex_attention})
#: The roofline would trace every graph once more, for a report that nobody reads here.
OPTIONS: Mapping[str, Any] = {
    "attention": {"mode": "always", "dropout": "swap"}, "disable_passes": ["roofline"],
}  # fmt: skip


def measure(model_type: str, seed: int = 0, cases: Sequence[str] | None = None) -> dict[str, Any]:
    """All cases of one model type, as plain data.

    Raises:
        BenchError: no tiny model of the type runs.
    """
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    exact = build(model_type, dropout=0.0, seed=seed)
    found: dict[str, Case] = {}
    skipped: dict[str, str] = {}
    for padding in ("", ", padding"):
        inputs = exact.padded if padding else exact.inputs
        if inputs is None:
            continue
        runs: dict[str, Callable[[], Case]] = {
            f"inference{padding}": partial(inference, exact.model, inputs),
            f"training{padding}": partial(training, model_type, exact, padded=bool(padding), seed=seed),
        }
        for name, run in runs.items():
            if cases is not None and name not in cases:
                continue
            try:
                found[name] = _guarded(run, exact.model.train(name.startswith("training")), inputs)
            except BenchError as error:
                skipped[name] = str(error)
    if skipped and not found:
        raise BenchError("; ".join(skipped.values()))
    return {"cases": {name: vars(case) for name, case in found.items()}, "skipped": skipped}


def _guarded(run: Callable[[], Case], model: nn.Module, inputs: Mapping[str, Any]) -> Case:
    """A case; one that raises is wrong, unless Dynamo alone raises too."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - whatever a compiled model raises is a finding
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        compat.reset_dynamo()
        try:
            torch.compile(model, backend="eager")(**inputs)
        except Exception as own:
            raise BenchError(f"torch.compile cannot take it: {said}") from own
        with counted([*model.parameters(), *model.buffers()]) as sites:
            model(**inputs)
        return Case(sites.count, wrong=f"raises {said}")


def inference(model: nn.Module, inputs: Mapping[str, Any]) -> Case:
    """Sites, fused calls and outputs without gradients."""
    model.eval()
    with torch.no_grad():
        case, ours = coverage(model, inputs)
        exact = _in_double(lambda m, i: _outputs(m(**i)), model, inputs)
        eager = _outputs(model(**inputs))
    return compared(case, exact, eager, ours)


def training(model_type: str, exact: Tiny, *, padded: bool, seed: int) -> Case:
    """Sites and fused calls with active dropout; outputs and gradients with dropouts at 0."""
    try:
        active = build(model_type, dropout=DROPOUT, seed=seed)
    except BenchError:  # an architecture that allows no dropout in its attention
        active = exact
    inputs = active.padded if padded else active.inputs
    # Each run has a model of its own: one that keeps a state between calls would go on from another's.
    compiled, double, fresh = (copy.deepcopy(exact.model).train() for _ in range(3))
    case, _ = coverage(active.model.train(), inputs or active.inputs)
    own = (exact.padded if padded else exact.inputs) or exact.inputs
    ours = _step(_compiled(compiled, Inner()), own, compiled)
    reference = _in_double(lambda m, i: _step(m, i, m), double, own)
    for rounding in range(1 + ROUNDINGS):
        eager = _rounded_otherwise(copy.deepcopy(fresh), rounding)
        judged = compared(replace(case), reference, _step(eager, own, eager), ours)
        if not judged.wrong:
            break
    return judged


def _rounded_otherwise(model: nn.Module, seed: int) -> nn.Module:
    """`model` with weights that differ by a rounding; with seed 0, itself.

    Where a ReLU is at its kink, the last bit decides about a gradient: what eager gives then is one of several.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters() if seed else ():
            noise = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            weight.addcmul_(weight, noise, value=torch.finfo(weight.dtype).eps)
    return model


def coverage(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Case, Values]:
    """The sites of an eager run, and the calls of fused attention of a compiled one with its outputs."""
    torch.manual_seed(1)
    with counted([*model.parameters(), *model.buffers()]) as sites:
        model(**inputs)
    inner = Inner()
    import optpass

    optpass.reset_report()
    output = _compiled(model, inner)(**inputs)
    graphs = optpass.report().graphs
    declined = [reason for place in inner.ran for reason in _declined(graphs[place])]
    already = _already(model, inputs, sites)
    return Case(sites.count, inner.fused - already, inner.graphs, declined), _outputs(output)


def _declined(graph: GraphRecord) -> list[str]:
    """Why attentions of a graph were left as they are, with the place of each."""
    sites = [s for p in graph.passes for s in p.declined if s.kind == "attention"]
    failed = [f"{p.name} failed: {p.error}" for p in graph.passes if p.error is not None]
    return [f"{s.reason} at {Path(s.file or '?').name}:{s.line}" for s in sites] + failed


def _already(model: nn.Module, inputs: Mapping[str, Any], sites: Sites) -> int:
    """Fused calls that are in the graphs of the program as it is."""
    if not sites.fused:
        return 0
    inner = Inner()
    _compiled(model, inner, attention="off")(**inputs)
    return inner.fused


class Inner:
    """An inner compiler that runs graphs as they are and counts the calls of fused attention as they run.

    Attributes:
        ran: places of graphs among all that were compiled; of one that runs twice, twice.
    """

    def __init__(self) -> None:
        self.fused = self.graphs = 0
        self.ran: list[int] = []

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        calls, place = fused_calls(gm), self.graphs
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.fused += calls
            self.ran.append(place)
            return gm(*args)

        return run


def fused_calls(gm: fx.GraphModule) -> int:
    """Nodes that call fused attention, in a graph and in the graphs that its higher-order operators run."""
    own = sum(1 for n in gm.graph.nodes if n.op == "call_function" and n.target in FUSED and not _sums_alone(n))
    return own + sum(fused_calls(child) for _, child in gm.named_children() if isinstance(child, fx.GraphModule))


def _sums_alone(node: fx.Node) -> bool:
    """FlexAttention of which the result itself is not used: the other half of a site with dropout."""
    parts = [user.args[1] if user.target is getitem else 0 for user in node.users]
    return bool(parts) and all(isinstance(part, int) and part != 0 for part in parts)


def _compiled(model: nn.Module, inner: Inner, **options: Any) -> Callable[..., Any]:
    compat.reset_dynamo()
    compiled: Callable[..., Any] = torch.compile(
        model, backend="optpass", options={"inner": inner, **OPTIONS, **options}
    )
    return compiled


def _step(call: Callable[..., Any], inputs: Mapping[str, Any], model: nn.Module) -> Values:
    """Outputs, and the gradients of every parameter of a fixed random sum of the outputs."""
    model.zero_grad()
    torch.manual_seed(1)
    outputs = _outputs(call(**inputs))
    generator = torch.Generator().manual_seed(2)
    wanted = [t for t in outputs.values() if t.requires_grad]
    terms = [(t * torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype)).sum() for t in wanted]
    if terms:
        torch.autograd.backward(terms)
    grads = {f"grad of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {name: t.detach().clone() for name, t in (outputs | grads).items()}


def _in_double(
    call: Callable[[nn.Module, Mapping[str, Any]], Values], model: nn.Module, inputs: Mapping[str, Any]
) -> Values | None:
    """The same in float64; None where the model's own dtypes do not allow it."""
    wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    exact = copy.deepcopy(model).double()
    for config in {id(c): c for m in exact.modules() if (c := getattr(m, "config", None)) is not None}.values():
        if getattr(config, "dtype", None) is torch.float32:  # which masks are made in
            config.dtype = torch.float64
        if getattr(config, "_experts_implementation", None) is not None:  # the grouped product knows no float64
            config._experts_implementation = "eager"
    try:
        with default_dtype(torch.float64), _Wide():
            return call(exact, wide)
    except RuntimeError:  # a value that the model makes in float32 all the same
        return None


class _Wide(TorchFunctionMode):
    """Float32 where a program asks for it by name becomes float64: the reference is exact all through."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = [torch.float64 if a is torch.float32 else a for a in args]
        return func(*wide, **{k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()})


def _outputs(output: Any) -> Values:
    leaves = pytree.tree_leaves(output if not hasattr(output, "to_tuple") else output.to_tuple())
    return {f"output {i}": t for i, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.is_floating_point()}
