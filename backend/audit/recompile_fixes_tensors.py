"""What to do about a recompile that a property of a tensor, or the mode that it is computed in, made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optpass.backend.audit.buckets import buckets
from optpass.backend.audit.findings import Finding

_ODD = (
    "size {0} is always compiled by itself: pad or skip such a {1}, or call torch._dynamo.decorators."
    "mark_unbacked({1}, {2}) before the first call, if nothing in the function asks for the size."
)

_STATIC = ("force_parameter_static_shapes", "force_nn_module_property_static_shapes")


@dataclass(frozen=True)
class Case:
    """What a fix may depend on.

    Attributes:
        values: values seen, in order, each once.
        count: recompiles so far.
        dynamic: what `torch.compile(dynamic=...)` was given; None: nothing.
        entry: the function is what the user compiled, not one that it calls by itself behind or at a break.
    """

    finding: Finding
    values: Sequence[str]
    count: int
    dynamic: bool | None
    entry: bool = True


def shape(case: Case) -> str:
    """A size, or how many dimensions."""
    finding, name = case.finding, case.finding.place
    if finding.source.endswith(".dim()"):
        return f"Give {name} the same number of dimensions in every call, e.g. with unsqueeze or reshape before it."
    if finding.dimension is None:
        return f"Mark {name}'s dimensions before its first call, not behind it: a mark that is new is compiled anew."
    mark = f"torch._dynamo.mark_dynamic({name}, {finding.dimension})"
    if finding.fixed:
        names = _STATIC if finding.library else _STATIC[:1]  # the second for what a module of torch's own holds
        settings = " and ".join(f"torch._dynamo.config.{setting} = False" for setting in names)
        return (
            f"{name} is a {finding.fixed} of a module, whose sizes the graph is made for: keep them, and compile a "
            f"function for each set of them. Where they change often, set {settings}, and call {mark} for each that is "
            "put there."
        )
    lengths = [int(value) for value in case.values if value.isdigit()]
    if not case.entry:
        return _called(case) + _bucket_text(case, lengths)
    odd = next((value for value in (finding.before, finding.after, *case.values) if value in ("0", "1")), None)
    if case.dynamic is False:
        first = f"Leave dynamic=False out of torch.compile, and call {mark} before the first call."
    elif odd is not None and len(lengths) > 2:
        first = f"Call {mark} before the first call; {_ODD.format(odd, name, finding.dimension)}"
    elif odd is not None:
        text = _ODD.format(odd, name, finding.dimension)
        first = text[0].upper() + text[1:]
    elif case.dynamic is True or finding.dynamic or case.count > 1:
        first = (
            f"The function itself asks for {finding.source} (a branch on it, a fixed size to reshape or expand to), "
            f"which ties the graph to it: do without, or make it hold for all sizes with torch._check; {mark} then "
            "says where it is tied."
        )
    else:
        first = f"Call {mark} before the first call, or compile with torch.compile(dynamic=True)."
    return first + _bucket_text(case, lengths)


def _called(case: Case) -> str:
    """A mark cannot be set in code that is compiled itself, up to the break at which it calls this function."""
    text = (
        f"The function is compiled by itself, since what calls it breaks there or runs eager: solve that, and "
        f"{case.finding.place} is no input any more."
    )
    if case.dynamic is None and not case.finding.dynamic:
        return text + " Until then, compile with torch.compile(dynamic=True)."
    return text


def _bucket_text(case: Case, lengths: list[int]) -> str:
    bounds = buckets(lengths) if len(lengths) >= 3 else []
    if not bounds:
        return ""
    shown = ", ".join(map(str, bounds))
    return f" Or pad dimension {case.finding.dimension} of {case.finding.place} up to the next of {shown}."


def stride(case: Case) -> str:
    """The layout."""
    name = case.finding.place
    return f"Pass {name}.contiguous() (or one memory format throughout): the compiled code is made for one layout."


def requires_grad(case: Case) -> str:
    """Whether gradients are asked for."""
    found = case.finding
    if "." in found.place:
        return f"Set {found.source} before the first call and keep it: freeze between runs, not between calls."
    return (
        f"Pass {found.place} with the same requires_grad in every call: detach() it, or requires_grad_() it, before "
        "the call."
    )


def grad_mode(case: Case) -> str:
    """The mode of autograd."""
    if case.finding.source == "torch.is_grad_enabled()":
        return (
            "Training and evaluation are two graphs, so one recompile is right. To have only one, enter "
            "torch.no_grad() (or torch.set_grad_enabled) in the same place for all calls, outside of the compiled "
            "function, or compile one function for each."
        )
    if case.finding.source == "torch.is_inference_mode_enabled()":
        return (
            "Calls inside and outside of torch.inference_mode() need a graph each, so one recompile is right. To have "
            "only one, make all calls inside, or use torch.no_grad() instead."
        )
    return (
        f"Tensors made under torch.inference_mode() and others need a graph each: make {case.finding.place or 'them'} "
        "under one mode, or use torch.no_grad() instead."
    )


def autocast(case: Case) -> str:
    """Autocast's setting."""
    return "Enter torch.autocast inside of the compiled function, or around all of its calls: each setting is a graph."
