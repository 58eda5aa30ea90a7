"""The choice of a kernel for one problem, and what scaled_dot_product_attention would take by itself.

Pure: the same problem on the same device gives the same answer. Whether the kernel pays is the gate's business.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from typing import get_args

import torch

from optpass.errors import ConfigError, did_you_mean
from optpass.passes.attention.problem import Problem
from optpass.passes.attention.targets.architecture import architecture
from optpass.passes.attention.targets.conditions import Situation
from optpass.passes.attention.targets.kernel import Kernel, Target, kernels, sources

MODES = ("auto", "always", "off", "sdpa", "flex")


@dataclass(frozen=True)
class Choice:
    """The kernel for a problem, and why not another.

    Attributes:
        target: 'sdpa', 'flex' or 'blocks'; None where no kernel computes the problem.
        kernel: name of the kernel in the tables: 'flash', 'cudnn', 'mem_efficient', 'math', 'cpu_flash', 'flex' or
            'blocks'; "" for none.
        reason: why this kernel, or why none.
        sources: what that rests on, with addresses.
        materialises: a tensor of batch x heads x queries x keys is put in memory, or saved for the backward. A bool
            mask operand also becomes a float one of the size it is stored in; that is not counted.
        by_default: SDPA takes this kernel by itself; where it does not, or may not, the backend must be named.
        computed_in: dtype that it is given the operands in; None for their own.
        rejected: (kernel, why) of each kernel before it in the order.
    """

    target: Target | None
    kernel: str
    reason: str
    sources: tuple[str, ...] = ()
    materialises: bool = False
    by_default: bool = False
    computed_in: torch.dtype | None = None
    rejected: tuple[tuple[str, str], ...] = ()


def choose(
    problem: Problem,
    *,
    arch: str | None,
    mode: str,
    available: frozenset[str] | None = None,
    cudnn: int | None = None,
) -> Choice:
    """The first kernel in the order of the architecture that computes `problem`.

    Sizes are taken as they are: where they may change, a rule about a remainder may hold later though it does not now.

    Args:
        arch: 'cpu', 'sm_90', 'gfx942', ... (`arch_of`, `present`); None where it is not known.
        mode: option `attention.mode`. 'sdpa' and 'flex' allow that target alone, 'off' allows none; 'always' differs
            from 'auto' in the gate, not here.
        available: names of the kernels that can be used here (`usable`); None for all.
        cudnn: version of cuDNN, 91501 for 9.15.1; None where it is not known, and then no newer one is assumed.

    Raises:
        ConfigError: an unknown mode.
    """
    if mode not in MODES:
        raise ConfigError(f"attention mode {mode!r}: {did_you_mean(mode, MODES)}")
    if mode == "off":
        return Choice(None, "", "the option attention is 'off'")
    group = architecture(problem.device, arch)
    if group is None:
        return Choice(None, "", f"no attention kernel is known for device type {problem.device!r}")
    at, rejected = Situation(problem, arch, cudnn), []
    for place in group.places(problem):
        kernel = place.kernel
        refused = _unwanted(kernel, mode, available) or _wider(problem) or kernel.refusal(at)
        if refused:
            rejected.append((kernel.name, f"{kernel.title} {refused}"))
            continue
        made, wider = kernel.made(at), kernel.widened(at)
        reasons = [f"{kernel.title}: {place.why}", made if kernel.fused else "", wider.why if wider else ""]
        cited = [place.source, *kernel.sources, *([wider.source] if wider else [])]
        return Choice(
            target=kernel.target,
            kernel=kernel.name,
            reason="; ".join(filter(None, reasons)),
            sources=tuple(sources()[key] for key in dict.fromkeys(cited)),
            materialises=bool(made),
            by_default=kernel.target == "sdpa" and kernel.name == taken(problem, arch=arch, cudnn=cudnn),
            computed_in=wider.to if wider else None,
            rejected=tuple(rejected),
        )
    return Choice(None, "", "; ".join(why for _, why in rejected), rejected=tuple(rejected))


def _unwanted(kernel: Kernel, mode: str, available: frozenset[str] | None) -> str:
    if mode in get_args(Target) and kernel.target != mode:
        return f"is ruled out by the option attention = {mode!r}"
    return "" if available is None or kernel.name in available else "cannot be used here"


def _wider(problem: Problem) -> str:
    """No kernel computes a softmax in a wider dtype than float32, or than that of its operands."""
    if problem.score_dtype == torch.float64 and problem.dtype != torch.float64:
        return "computes no softmax in float64 from operands of another dtype"
    return ""


def taken(problem: Problem, *, arch: str | None = None, cudnn: int | None = None) -> str:
    """The kernel that `F.scaled_dot_product_attention` takes for `problem` where nobody chose a backend.

    By the checks that the dispatcher of every supported torch makes, so also where a known fault makes us refuse that
    kernel; a newer torch that checks more may pass one by. Operands are taken to be four-dimensional with stride 1 in
    the last dim. 'math' where no fused kernel applies.

    Args:
        arch, cudnn: as in `choose`; None where not known: torch's order for any device, and before cuDNN went first.

    Raises:
        ConfigError: a device type without a table.
    """
    group = architecture(problem.device, arch)
    if group is None:
        raise ConfigError(f"no attention kernel is known for device type {problem.device!r}")
    asked = replace(problem, score_ops=frozenset())  # what SDPA has no argument for, it is not asked about
    at, known = Situation(asked, arch, cudnn), kernels(problem.device)
    return next((name for name in group.tried(cudnn) if not known[name].refusal(at, by_torch=True)), "math")


def usable(device: str, *, compiled: bool, unfused: bool = False) -> frozenset[str]:
    """Names of the kernels of a device type that can run in this process.

    Args:
        compiled: what is handed on is compiled by Inductor. Every other compiler runs FlexAttention unfused, with all
            scores in memory.
        unfused: that will do.
    """
    flex = compiled and (_compiles_flex_cpu() if device == "cpu" else True)

    def runs(kernel: Kernel) -> bool:
        return kernel.target != "flex" or (flex if kernel.fused else unfused)

    return frozenset(name for name, kernel in kernels(device).items() if runs(kernel))


def _compiles_flex_cpu() -> bool:
    """As Inductor asks (torch/_inductor/kernel/flex/flex_cpu.py, check_cpu_supported)."""
    vector = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return vector and os.environ.get("ATEN_CPU_CAPABILITY") != "default" and sys.platform != "darwin"
