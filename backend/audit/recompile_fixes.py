"""What to do about a recompile: one text per cause, with the user's own names and values."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from optpass.backend.audit import recompile_fixes_tensors as tensors
from optpass.backend.audit.buckets import buckets
from optpass.backend.audit.findings import THREADS, Finding
from optpass.backend.audit.recompile_fixes_tensors import Case
from optpass.reporting.audit.model import Cause

_TENSORS = ("Tensor", "Parameter")
_CLASS = re.compile(r"^type\((.*)\)$")


def advice(finding: Finding, values: Sequence[str], count: int, dynamic: bool | None, *, entry: bool = True) -> str:
    """What to do, in one to three sentences; never empty."""
    case = Case(finding, values, count, dynamic, entry)
    if finding.behind is not None:
        return _behind(case)
    return _TEXTS.get(finding.cause, _other)(case)


def _behind(case: Case) -> str:
    found = case.finding
    text = (
        f"{found.place or found.source} is computed in front of the graph break in line {found.behind}, so that what "
        "goes on behind the break depends on it: solve that break, and only the function's own inputs count."
    )
    if found.cause in ("shape", "stride"):
        return text + " Until then, make the inputs that it is computed from dynamic, or pad them."
    if found.cause in ("int", "float", "bool"):
        return text + " A tensor's value (`.item()`) is best kept a tensor: as a Python number it is a constant."
    return text


def _dtype(case: Case) -> str:
    found = case.finding
    if found.source == "torch.get_default_dtype()":
        return "Call torch.set_default_dtype once, before the first compiled call."
    if not found.source.endswith(".dtype"):
        return _value(case, "a dtype")
    target = found.before
    return f"Convert {found.place} to one dtype before the call: {found.place} = {found.place}.to({target})."


def _device(case: Case) -> str:
    found = case.finding
    if found.source == "torch.get_default_device()":
        return "Call torch.set_default_device once, before the first compiled call, or name the device at each tensor."
    if not found.source.endswith(".device"):
        return _value(case, "a device")
    return (
        f"Move {found.place} to one device before the call ({found.place}.to({found.before!r})), or compile a copy of "
        "the function for each device."
    )


def _container(case: Case) -> str:
    return (
        f"Keep the number of items in {case.finding.place} fixed (pad it), pass one stacked tensor, or loop over it "
        "outside of the compiled function: its loops are unrolled for one length."
    )


def _keys(case: Case) -> str:
    return (
        f"Give {case.finding.place} the same keys in the same order in every call (None for what is missing), or pass "
        "what the function needs of it as arguments."
    )


def _value(case: Case, what: str = "") -> str:
    found, several = case.finding, len(case.values) > 2
    kind = what or {"int": "an int", "float": "a float", "str": "a str", "bool": "a bool"}.get(found.cause, "a value")
    if found.cause == "float" and "param_groups" in found.source:
        return (
            f"Give the optimizer a tensor (lr=torch.tensor({found.before})), which schedulers change in place: the "
            "graph is made for a float's value."
        )
    if found.cause == "float":
        return f"Pass {found.source} as a tensor, torch.tensor({found.after}): {_made_for(case)}"
    if found.cause == "int":
        limit = (
            "" if case.dynamic is not False else " Leave dynamic=False out of torch.compile: an int can be a symbol."
        )
        text = (
            f"Pass {found.source} as a tensor if it is only computed with, or hoist what depends on it out of the "
            f"compiled function; where it is a size, torch.compile(dynamic=True) makes it a symbol.{limit}"
        )
        lengths = [int(value) for value in case.values if value.isdigit()]
        bounds = buckets(lengths) if len(lengths) >= 3 else []
        return text + (f" As a length, round it up to the next of {', '.join(map(str, bounds))}." if bounds else "")
    shown = f" ({', '.join(case.values[:6])})" if several else ""
    return (
        f"{found.source} is {kind} that chooses the code: each value is a graph, which is right for a few{shown}. For "
        "many, choose outside of the compiled function, or compute both ways and take one with torch.where."
    )


def _made_for(case: Case) -> str:
    """Why a Python number costs a compile. Dynamo takes most for variable once they change; ints of modules not."""
    found = case.finding
    fixed = found.cause == "module attribute" and not any("." in value for value in (found.before, found.after))
    if case.dynamic is False:
        return "with dynamic=False a graph is made for each value of a Python number."
    if fixed or case.count > 1:
        return "a graph is made for each value of this Python number."
    return (
        "a graph is made for the first value of a Python number, and one more when it changes, for all others that the "
        "function does not decide by."
    )


def _attribute(case: Case) -> str:
    found = case.finding
    if found.replaced:
        return (
            f"Set {found.source} once, before the first call; where it must change, keep both objects and compile one "
            "function for each."
        )
    if _is_number(found.before) and not found.library:
        name = found.source.rpartition(".")[2]
        if name.isidentifier() and name != found.source:
            owner = _CLASS.sub(r"\1", found.source.removesuffix(f".{name}"))  # an attribute of its class
            made = f"{owner}.register_buffer({name!r}, torch.tensor({found.before}))"
            return (
                f"Make it a tensor: {made} in __init__, and change it in place with {owner}.{name}.fill_(value): "
                f"{_made_for(case)}"
            )
        return f"Make {found.source} a tensor and change it in place: {_made_for(case)}"
    if found.library:
        return f"Set {found.source} before the first call and leave it: each value is a graph."
    return (
        f"Set {found.source} before the first call and leave it, or pass it to forward as an argument where it must "
        "change: each value is a graph."
    )


def _global(case: Case) -> str:
    found = case.finding
    if found.replaced:
        return f"Do not put another object in {found.source}: pass it as an argument, or set it once."
    if _is_number(found.after):
        return (
            f"Make {found.source} a tensor and change it in place, or pass a tensor as an argument: {_made_for(case)}"
        )
    return (
        f"Set {found.source} once, before the first call, or pass it as an argument: a graph is made for each value "
        "of it."
    )


def _closure(case: Case) -> str:
    found = case.finding
    if found.shared:
        return (
            "Functions that one decorator or factory makes share their code, and what is compiled of it: each, told "
            f"apart by {found.source}, is compiled once. That is right for up to torch._dynamo.config.recompile_limit "
            f"of them; for more, raise it. If one function rebinds {found.source}, pass that as an argument instead."
        )
    if found.replaced:
        return f"Do not rebind {found.source}: the compiled function closes over it; pass it as an argument."
    if _is_number(found.after):
        return f"Pass {found.source} as an argument, as a tensor, instead of closing over it: {_made_for(case)}"
    return f"Pass {found.source} as an argument, instead of closing over it: a graph is made for each value of it."


def _identity(case: Case) -> str:
    found = case.finding
    if found.choice:
        return _value(case, "an enum member")
    if "the same object" in found.before + found.after:
        return (
            f"Pass {found.source} the same way in every call: always one tensor for both, or always two (clone() it)."
        )
    if found.before in _TENSORS and found.after in _TENSORS:
        return f"Pass {found.source} as one type throughout: detach() gives a plain tensor for a parameter."
    if found.before in _TENSORS or found.after in _TENSORS:
        return (
            f"Pass {found.source} as one type throughout, torch.as_tensor({found.source}) or a Python number: a number "
            "of numpy's counts as a tensor."
        )
    return (
        f"Make the object once and reuse it: {found.source} is compared by identity or type. Create functions, "
        "lambdas, partials and modules outside of the loop that calls the compiled function."
    )


def _training(case: Case) -> str:
    return (
        "train() and eval() are two graphs, so one recompile is right. If it comes again and again, keep a compiled "
        f"function for each mode, and do not switch {case.finding.source} inside of the loop."
    )


def _backend(case: Case) -> str:
    return (
        "Call torch.compile once for the function and reuse what it returns: another backend, option or dynamic= is "
        "compiled anew. Give a backend of your own as the same function object each time."
    )


def _weak(case: Case) -> str:
    return f"Keep {case.finding.source} alive between calls (hold it in a variable): its compiled code went with it."


def _other(case: Case) -> str:
    name = case.finding.source
    if "None" in (case.finding.before, case.finding.after):
        return (
            f"None and a value are two graphs, so one recompile is right. To have only one, pass {name} always: a "
            "tensor that changes nothing (zeros to add, ones to multiply with) where there is none."
        )
    if name == THREADS:
        return "Call it once in one thread before others do: threads that call it at the same time compile it each."
    if name.startswith("torch."):
        return f"Set it once, before the first compiled call: {name} is part of what the graph was made for."
    if name:
        return f"Keep {name} as it is between calls, or take it out of the compiled function."
    return "TORCH_LOGS=recompiles_verbose tells what Dynamo compared."


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_TEXTS: dict[Cause, Callable[[Case], str]] = {
    "shape": tensors.shape, "dtype": _dtype, "device": _device, "stride": tensors.stride,
    "requires_grad": tensors.requires_grad, "grad mode": tensors.grad_mode, "autocast": tensors.autocast,
    "list length": _container, "dict keys": _keys,
    "int": _value, "float": _value, "str": _value, "bool": _value, "module attribute": _attribute, "global": _global,
    "closure": _closure, "object identity": _identity, "training flag": _training, "backend": _backend,
    "weak reference": _weak, "other": _other,
}  # fmt: skip
