"""What a failed guard means to the user: cause class, place, value before and after.

Precedence, from the first that fits:
1. a property of a tensor names itself, wherever the tensor lives: shape, dtype, device, stride, requires_grad;
2. the process's state: grad mode, autocast, dtype (the default one), device (the default one), backend;
3. `training` of a module: training flag; an object that is gone: weak reference;
4. the form of a container, wherever it lives: list length, dict keys;
5. where the value lives: module attribute (reached through an attribute of an nn.Module), closure, global;
6. what the value is: bool, int, float, str, dtype, device; for anything else, object identity.
"""

from __future__ import annotations

import enum
import inspect
import re
from typing import Any

import torch

from optpass.backend.audit.containers import Containers, is_key
from optpass.backend.audit.findings import GONE, Finding
from optpass.backend.audit.guards import Failure
from optpass.backend.audit.sources_text import prefixes
from optpass.backend.audit.values import describe, shorten
from optpass.reporting.audit.model import Cause

_TYPE = re.compile(r"type=<(?:class|enum) '(?P<name>[^']+)'>")
_SAME = re.compile(r"[LG]\[.* is [LG]\[.*")
#: Where `mark_dynamic` and its kin note what they were told; before torch 2.13 that it is not there is guarded plainly.
_MARK = re.compile(r"'(?P<name>_dynamo_\w+_(?:indices|range))'")
_CONTAINS = re.compile(r"not ___dict_contains\('(?P<name>[^']+)', ")
_OBJECT_ID = re.compile(r"___check_obj_id\(.*, (?P<id>\d+)\), type=")
_TENSOR: dict[str, Cause] = {
    "size": "shape", "dim": "shape", "stride": "stride", "dtype": "dtype", "device": "device",
    "requires_grad": "requires_grad", "inference": "grad mode", "inference_mode": "grad mode",
    "type": "object identity",
}  # fmt: skip
_TENSOR_TEXT = {
    "size": "{0}.size({1})", "dim": "{0}.dim()", "stride": "{0}.stride({1})", "dtype": "{0}.dtype",
    "device": "{0}.device", "requires_grad": "{0}.requires_grad", "inference": "{0}.is_inference()",
    "inference_mode": "torch.is_inference_mode_enabled()", "type": "{0}",
}  # fmt: skip
_STATE: dict[str, tuple[Cause, str]] = {
    "grad_mode": ("grad mode", "torch.is_grad_enabled()"),
    "autocast_state": ("autocast", "torch.autocast"),
    "default_dtype": ("dtype", "torch.get_default_dtype()"),
    "deterministic_algorithms": ("other", "torch.are_deterministic_algorithms_enabled()"),
    "deterministic_algorithms_warn_only": ("other", "torch.is_deterministic_algorithms_warn_only_enabled()"),
    "num_threads": ("other", "torch.get_num_threads()"),
    "torch_function": ("other", "torch function overrides"),
    "allow_tf32": ("other", "torch.backends.cuda.matmul.allow_tf32"),
    "allow_fp16_reduce": ("other", "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction"),
    "allow_bf16_reduce": ("other", "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction"),
}
_VALUES: tuple[tuple[tuple[type, ...], Cause], ...] = (
    ((bool,), "bool"),
    ((int,), "int"),
    ((float, complex), "float"),
    ((str, bytes), "str"),
    ((torch.dtype,), "dtype"),
    ((torch.device,), "device"),
)
_NAMES: dict[str, Cause] = {"bool": "bool", "int": "int", "float": "float", "complex": "float", "str": "str"}


class Judge(Containers):
    """Names the findings of one frame."""

    def finding(self, failure: Failure) -> Finding:
        """What the failure means."""
        if failure.kind == "tensor":
            return self.tensor(failure)
        if failure.kind == "state":
            cause, text = _STATE.get(failure.property, ("other", failure.property or "global state"))
            return Finding(cause, text, failure.before or "", failure.after or "")
        if not failure.source:
            return self.process(failure)
        return self.place(failure)

    def tensor(self, failure: Failure) -> Finding:
        name = self.text(failure.source)
        cause = _TENSOR.get(failure.property, "other")
        known = _TENSOR_TEXT.get(
            failure.property, f"{{0}}.{failure.property}" if failure.property != "other" else "{0}"
        )
        text = known.format(name, failure.dimension)
        before, after = failure.before or "", failure.after or ""
        if cause == "object identity" and self.value(failure.source) is None:
            cause = self.home(failure.source) or "other"
        fixed = self.fixed(failure.source)
        library = bool(fixed) and self.of_torch(failure.source)
        return Finding(cause, text, before, after, name, failure.dimension, fixed=fixed, library=library)

    def fixed(self, source: str) -> str:
        """'parameter' or 'buffer' where the tensor is a module's; '' for any other."""
        path = prefixes(source)
        holder = path[-2] if len(path) > 1 else ""
        if holder.endswith("._buffers"):
            return "buffer"
        value = self.value(source)
        held = holder.endswith("._parameters") or isinstance(value, torch.nn.Parameter)
        return "parameter" if held else ""

    def process(self, failure: Failure) -> Finding:
        code = shorten(failure.code)
        if failure.kind == "DEFAULT_DEVICE":
            before = code.partition(" == ")[2]
            return Finding("device", "torch.get_default_device()", before, describe(_current_device()))
        if failure.kind == "TORCH_FUNCTION_MODE_STACK":
            if failure.property == "device":
                before, after = failure.before or "", failure.after or ""
                return Finding("device", "torch.get_default_device()", before.replace("none", "None"), after)
            return Finding("other", "torch function modes", failure.before or "", failure.after or "")
        if failure.kind == "DUAL_LEVEL":
            return Finding("grad mode", "torch.autograd.forward_ad level", code.partition(" == ")[2], "another")
        if "compare_functorch_state" in code:
            return Finding("other", "transforms of torch.func (vmap, grad)", code.partition("state(")[2][:-1], "others")
        return Finding("other", code.partition(" == ")[0], code.partition(" == ")[2], "")

    def place(self, failure: Failure) -> Finding:
        kind = failure.kind
        if kind in ("OBJECT_ALIASING", "NO_TENSOR_ALIASING") or _SAME.fullmatch(failure.code):
            return self.aliasing(failure)
        if kind in ("LENGTH_CHECK", "DICT_LENGTH", "TUPLE_ITERATOR_LEN", "DICT_CONTAINS", "SET_CONTAINS"):
            return self.container(failure)
        if kind in ("MAPPING_KEYS_CHECK", "MAPPING_KEYS_MATCH", "DICT_VERSION", "KEY") or is_key(failure.source):
            return self.keys(failure)
        if kind.startswith(("DIMENSION", "DYNAMIC")) or _MARK.search(failure.code):
            return self.marking(failure)
        if kind in ("HASATTR", "NO_HASATTR", "INDEX"):
            return self.presence(failure)
        if kind in ("WEAKREF_ALIVE", "NOT_NONE") and self.value(failure.source) is None:
            return Finding("weak reference", self.text(failure.source), "alive", "gone")
        if kind in ("LAMBDA_GUARD", "SYMBOLIC_SHAPE_GUARD"):
            return self.condition(failure)
        return self.held(failure)

    def aliasing(self, failure: Failure) -> Finding:
        first, _, second = failure.code.partition(" is ")
        other = self.text(second.removeprefix("not "))
        same, apart = f"the same object as {other}", f"another object than {other}"
        before, after = (apart, same) if failure.kind == "NO_TENSOR_ALIASING" else (same, apart)
        return Finding("object identity", self.text(first), before, after)

    def marking(self, failure: Failure) -> Finding:
        """`mark_dynamic` and its kin."""
        name = _MARK.search(failure.code)
        what = name["name"].removeprefix("_dynamo_").removesuffix("_indices") if name else "dynamic"
        text = self.text(failure.source)
        attribute = getattr(self.value(failure.source), name["name"], None) if name else None
        before = "unmarked" if failure.code.endswith("== False") else "marked otherwise"
        return Finding("shape", text, before, f"dimensions {describe(attribute)} marked {what}", text)

    def condition(self, failure: Failure) -> Finding:
        """A condition over symbols: sizes, or numbers that became symbols."""
        source, text = failure.source, self.text(failure.source)
        value = self.value(source)
        now, condition = describe(value), self.condition_text(failure.code)
        before = self.made_for.get(source, condition)
        if (size := re.search(r"\.(size|stride)\(\)\[(\d+)\]$", source)) is not None:
            base = self.text(source[: size.start()])
            cause: Cause = "shape" if size[1] == "size" else "stride"
            return Finding(cause, text, before, now, base, int(size[2]), dynamic=True)
        if source.endswith(".storage_offset()"):
            return Finding("stride", text, before, now, text, dynamic=True)
        equal = re.fullmatch(r"(?:\w+\()?(?P<left>.*?)\)? == (?P<right>.+)", failure.code)
        if equal is not None and equal["left"] == source:
            before = equal["right"]
        return Finding(self.home(source) or _of(value), text, before, now, text, dynamic=before == condition)

    def held(self, failure: Failure) -> Finding:
        """A value, or an object, held somewhere."""
        source = failure.source
        value = self.value(source)
        after = "gone" if value is GONE else describe(value)
        text = self.text(source)
        before = self.expected(failure, value)
        if failure.kind == "TYPE_MATCH":
            return self.retyped(failure, value, text)
        owner = source.removesuffix("._size")
        if owner != source and isinstance(self.value(owner), torch.nn.ParameterList):
            place = self.text(owner)
            return Finding("list length", f"len({place})", before, after, place)
        replaced = failure.kind == "ID_MATCH"
        if source.endswith(".training") and isinstance(self.value(source.removesuffix(".training")), torch.nn.Module):
            return Finding("training flag", text, before, after, text)
        cause = self.home(source)
        if cause is None:
            cause = "object identity" if replaced else _of_text(before, value)
        return Finding(
            cause, text, before, after, text, replaced=replaced, choice=isinstance(value, enum.Enum),
            library=self.of_torch(source), shared=cause == "closure" and replaced and source.endswith(".__code__"),
        )  # fmt: skip

    def membership(self, failure: Failure) -> Finding:
        """A key that is or is not there; an attribute that hides its class's since is a value that has changed."""
        owner, key = failure.source.removesuffix(".__dict__"), _CONTAINS.match(failure.code)
        holder = self.value(owner) if owner != failure.source and key is not None else None
        before = inspect.getattr_static(type(holder), key["name"], GONE) if key is not None else GONE
        after = vars(holder).get(key["name"], GONE) if key is not None and hasattr(holder, "__dict__") else GONE
        if key is None or before is GONE or after is GONE or hasattr(before, "__get__"):
            return super().membership(failure)
        text = f"{self.text(owner)}.{key['name']}"
        told = describe(before)
        cause: Cause = "module attribute" if isinstance(holder, torch.nn.Module) else _of_text(told, after)
        return Finding(cause, text, told, describe(after), text, library=self.of_torch(f"{owner}.{key['name']}"))

    def of_torch(self, source: str) -> bool:
        """Whether it is an attribute of a module whose class torch defines: what it does with it is not the user's."""
        owners = [self.value(owner) for owner in prefixes(source)[:-1]]
        holder = next((owner for owner in reversed(owners) if isinstance(owner, torch.nn.Module)), None)
        return type(holder).__module__.startswith("torch.")

    def expected(self, failure: Failure, value: Any) -> str:
        """What the guard expects, as text."""
        code = failure.code
        if failure.kind in ("ID_MATCH", "NOT_NONE") and (match := _OBJECT_ID.search(code)) is not None:
            known = self.identify(int(match["id"]))
            if known is not None:
                return describe(known)
            kind = _TYPE.search(code)
            name = kind["name"].rpartition(".")[2] if kind else "object"
            return f"another {'function' if name == 'code' else name}"
        if failure.kind == "NONE_MATCH" or code.endswith(" is None"):
            return "None"
        if code.endswith(" is not None"):
            return "not None"
        if "isnan(" in code:
            return "nan"
        return shorten(code.partition(" == ")[2] or code)

    def retyped(self, failure: Failure, value: Any, text: str) -> Finding:
        match = _TYPE.search(failure.code)
        before = match["name"].rpartition(".")[2] if match else "another type"
        kind = type(value).__name__
        after = kind if kind != before else f"another class {kind}"
        cause = self.home(failure.source) or _NAMES.get(before) or "object identity"
        return Finding(cause, text, before, "gone" if value is GONE else after, text, replaced=True)


def _of(value: Any) -> Cause:
    return next((cause for kinds, cause in _VALUES if isinstance(value, kinds)), "other")


def _of_text(before: str, value: Any) -> Cause:
    """The class of a value by what the guard expects; by what came, where None was expected."""
    if before == "None":
        return _of(value)
    if before in ("True", "False"):
        return "bool"
    if re.fullmatch(r"-?\d+", before):
        return "int"
    if re.fullmatch(r"-?(\d.*|inf|nan)", before):
        return "float"
    if before[:1] in ("'", '"') or before[:2] in ("b'", 'b"'):
        return "str"
    if before.startswith("torch."):
        return "dtype"
    if before.startswith("device("):
        return "device"
    return "other" if _of(value) == "other" else _of(value)


def _current_device() -> Any:
    from torch.utils import _device

    return getattr(_device, "CURRENT_DEVICE", None)
