"""What `attention_compile` runs in fresh processes: compiles of reference models, and what the report says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optpass.bench.harness import schedule

#: Every site is rewritten, in training too.
ATTENTION = {"mode": "always", "dropout": "swap"}

Sample = dict[str, float]


def survey(models: Sequence[str], size: str, device: str, seed: int) -> dict[str, dict[str, int]]:
    """Nodes of each model's Dynamo graphs and the attentions that the pass sees in them, in inference."""
    found = {}
    for name in models:
        _compiled(name, {"size": size}, "inference", device, seed, _options("eager"))
        taken = _filed()
        found[name] = {"nodes": int(taken["nodes"]), "sites": int(taken["fused"] + taken["declined"])}
    return found


def share(model: str, size: str, mode: str, device: str, seed: int) -> Sample:
    """One compile for Inductor, which must be this process's first: seconds of the pass and of the whole."""
    _compiled(model, {"size": size}, mode, device, seed, _options("inductor"))
    return _filed()


def grow(model: str, mode: str, layers: Sequence[int], rounds: int, device: str, seed: int) -> dict[str, list[Sample]]:
    """By number of layers, one sample of each round."""
    import gc

    import torch
    from torch import fx

    from optpass.backend.entry import optpass
    from optpass.backend.snapshot import copy_graph

    captured: dict[int, tuple[fx.GraphModule, Sequence[Any]]] = {}
    for depth in layers:

        def keep(gm: fx.GraphModule, inputs: Sequence[Any], depth: int = depth) -> Any:
            captured[depth] = gm, inputs
            return gm.forward

        _compiled(model, {"size": "tiny", "layers": depth}, mode, device, seed, None, keep)
    samples: dict[str, list[Sample]] = {str(depth): [] for depth in layers}
    with torch.set_grad_enabled(mode == "training"):
        gm, inputs = captured[min(layers)]  # once before, for what is paid once in a process and once for each shape
        optpass(fx.GraphModule(gm, copy_graph(gm.graph, keep=True)), inputs, options=_options("eager"))
        gc.collect()
        gc.freeze()  # collecting between samples then looks at what the samples left, not at all of torch
        for _, order in schedule([str(depth) for depth in layers], rounds, seed):
            for depth_name in order:
                gm, inputs = captured[int(depth_name)]
                copied = fx.GraphModule(gm, copy_graph(gm.graph, keep=True))
                _forget()
                gc.collect()
                gc.disable()
                optpass(copied, inputs, options=_options("eager"))
                gc.enable()
                samples[depth_name].append(_filed())
    return samples


def _compiled(
    model: str, size: Mapping[str, Any], mode: str, device: str, seed: int, options: Any, backend: Any = "optpass"
) -> None:
    """Build the model, compile it and run it once; in training, the backward too."""
    import torch

    from optpass import models
    from optpass.backend import compat

    compat.reset_dynamo()
    _forget()
    torch.manual_seed(seed)
    training = mode == "training"
    with torch.device(device):
        module, inputs = models.build(model, **size)
    module.train(training)
    with torch.set_grad_enabled(training):
        out = torch.compile(module, backend=backend, options=options)(*inputs)
    if training:
        torch.autograd.backward(models.loss(out))


def _options(inner: str) -> dict[str, Any]:
    # The roofline is no part of compiling with inner="eager", where the report would trace the graph for it.
    unneeded = {} if inner == "inductor" else {"disable_passes": ["roofline"]}
    return {"inner": inner, "attention": ATTENTION, "strict": True} | unneeded


def _forget() -> None:
    from optpass.api import reset_report

    reset_report()


def _filed() -> Sample:
    """What the report says of the graphs compiled since it was reset, in sum."""
    from optpass.api import report

    graphs = report().graphs
    own = [record for graph in graphs for record in graph.passes if record.name == "attention"]
    return {
        "nodes": float(sum(graph.nodes for graph in graphs)),
        "compile_s": sum(graph.t_compile_s for graph in graphs),
        "pass_s": sum(record.seconds for record in own),
        "fused": float(sum(len(record.applied) for record in own)),
        "declined": float(sum(len(record.declined) for record in own)),
    }
