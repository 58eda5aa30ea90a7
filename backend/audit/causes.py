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

import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from optpass.backend.audit.guards import Failure, Scope
from optpass.backend.audit.sources_text import Words, condition_in_user_terms, prefixes, user_terms
from optpass.backend.audit.values import describe, shorten
from optpass.reporting.audit.model import Cause

_TYPE = re.compile(r"type=<(?:class|enum) '(?P<name>[^']+)'>")
_SAME = re.compile(r"[LG]\[.* is [LG]\[.*")
_OBJECT_ID = re.compile(r"___check_obj_id\(.*, (?P<id>\d+)\), type=")
_TENSOR: dict[str, Cause] = {
    "size": "shape", "dim": "shape", "stride": "stride", "dtype": "dtype", "device": "device",
    "requires_grad": "requires_grad", "inference": "grad mode", "type": "object identity",
}  # fmt: skip
_TENSOR_TEXT = {
    "size": "{0}.size({1})", "dim": "{0}.dim()", "stride": "{0}.stride({1})", "dtype": "{0}.dtype",
    "device": "{0}.device", "requires_grad": "{0}.requires_grad", "inference": "{0}.is_inference()", "type": "{0}",
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


@dataclass(frozen=True)
class Finding:
    """A failed guard in the user's terms.

    Attributes:
        place: the thing itself where `source` names a property of it: 'x' of 'x.size(1)'.
        dimension: of a size or stride.
        dynamic: the guard is a condition on a symbol: the value it was compiled for is not in it.
    """

    cause: Cause
    source: str
    before: str
    after: str
    place: str = ""
    dimension: int | None = None
    dynamic: bool = False
    replaced: bool = False


class Judge:
    """Names the findings of one frame.

    Args:
        scope: over the closest cache entry's names.
        free: names of the frame's closure variables.
        names: texts for expressions that are not the user's, see `sources_text.Words`.
        made_for: values that the entry was compiled for, by expression, where its guards are only conditions.
        identify: finds a living object by its id; None when it is gone.
    """

    def __init__(
        self,
        scope: Scope,
        free: tuple[str, ...],
        names: Mapping[str, str],
        made_for: Mapping[str, str],
        identify: Callable[[int], Any],
    ) -> None:
        self.scope, self.free, self.made_for, self.identify = scope, set(free), made_for, identify
        self.words = Words(scope.evaluate, names)

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

    def text(self, source: str) -> str:
        """A source in the user's terms."""
        return user_terms(source, self.words)

    def condition_text(self, code: str) -> str:
        """A guard's condition in the user's terms."""
        return condition_in_user_terms(code, self.words)

    def value(self, source: str) -> Any:
        """Its value now; `_GONE` where there is none."""
        try:
            return self.scope.evaluate(source)
        except Exception:  # noqa: BLE001  # whatever looking up an attribute of the user's object raises
            return _GONE

    def tensor(self, failure: Failure) -> Finding:
        name = self.text(failure.source)
        cause = _TENSOR.get(failure.property, "other")
        text = _TENSOR_TEXT.get(failure.property, "{0}").format(name, failure.dimension)
        before, after = failure.before or "", failure.after or ""
        if cause == "object identity" and self.value(failure.source) is None:
            cause = self.home(failure.source) or "other"
        return Finding(cause, text, before, after, name, failure.dimension)

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
        return Finding("other", code.partition(" == ")[0], code.partition(" == ")[2], "")

    def place(self, failure: Failure) -> Finding:
        kind = failure.kind
        if kind in ("OBJECT_ALIASING", "NO_TENSOR_ALIASING") or _SAME.fullmatch(failure.code):
            return self.aliasing(failure)
        if kind in ("LENGTH_CHECK", "DICT_LENGTH", "TUPLE_ITERATOR_LEN", "DICT_CONTAINS", "SET_CONTAINS"):
            return self.container(failure)
        if kind in ("MAPPING_KEYS_CHECK", "MAPPING_KEYS_MATCH", "DICT_VERSION", "KEY") or _is_key(failure.source):
            return self.keys(failure)
        if kind in ("HASATTR", "NO_HASATTR", "INDEX"):
            return self.presence(failure)
        if kind.startswith(("DIMENSION", "DYNAMIC")):
            return self.marking(failure)
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

    def container(self, failure: Failure) -> Finding:
        """A length, or a key that is or is not in it."""
        value = self.value(failure.source)
        if failure.kind in ("DICT_CONTAINS", "SET_CONTAINS"):
            return self.membership(failure)
        holder = self.held_by_module(failure.source)
        expected = failure.code.rpartition(" == ")[2] if " == " in failure.code else "0"
        now = str(len(value)) if value is not _GONE and hasattr(value, "__len__") else "gone"
        if isinstance(value, dict) and not isinstance(holder, (torch.nn.ModuleList, torch.nn.Sequential)):
            text = self.text(failure.source)
            before = self.made_for.get(keys_of(failure.source), f"{expected} key{'s' * (expected != '1')}")
            return Finding("dict keys", text, before, describe(list(value)), text)
        source = failure.source.removesuffix("._modules") if holder is not None else failure.source
        text = f"len({self.text(source)})"
        return Finding("list length", text, expected, now, self.text(source))

    def held_by_module(self, source: str) -> Any:
        """The module whose `_modules` the source is."""
        return self.value(source.removesuffix("._modules")) if source.endswith("._modules") else None

    def membership(self, failure: Failure) -> Finding:
        absent = failure.code.startswith("not ")
        before, after = ("missing", "there") if absent else ("there", "missing")
        key = re.search(r"___dict_contains\((?P<key>'[^']*'|\d+)", failure.code)
        owner = failure.source.removesuffix(".__dict__")
        if owner != failure.source and key is not None:
            name = f"{self.text(owner)}.{key['key'].strip(chr(39))}"
            cause: Cause = "module attribute" if isinstance(self.value(owner), torch.nn.Module) else "other"
            return Finding(cause, name, before, after, name)
        text = self.text(failure.source)
        if failure.kind == "SET_CONTAINS":
            item = failure.code.rpartition(", ")[2].removesuffix(")")
            return Finding("other", f"{item} in {text}", str(not absent), str(absent), text)
        shown = f"{text}[{key['key']}]" if key is not None else text
        return Finding("dict keys", shown, before, after, text)

    def keys(self, failure: Failure) -> Finding:
        """The keys of a dict, or their order."""
        source, code = failure.source, failure.code
        if failure.kind == "KEY":
            *_, owner, _ = ["", *prefixes(source)]
            text = self.text(owner) if owner else self.text(source)
            value = self.value(owner) if owner else None
            after = describe(list(value)) if isinstance(value, dict) else "missing"
            return Finding(
                "dict keys", text, self.made_for.get(keys_of(owner), f"has {_last_key(source)}"), after, text
            )
        inner = re.search(r"dict\.keys\((?P<dict>.*)\)\)", source)
        owner = inner["dict"] if inner else source
        value = self.value(owner)
        after = describe(list(value)) if isinstance(value, dict) else describe(value)
        text = self.text(owner)
        expected = code.partition(" == ")[2]
        position = re.search(r"\)\[(\d+)\]$", source)
        before = self.made_for.get(keys_of(owner), f"key {position[1]} is {expected}" if position else expected)
        return Finding("dict keys", text, before, after, text)

    def presence(self, failure: Failure) -> Finding:
        text = self.text(failure.source)
        name = re.search(r"hasattr\(.*, '(?P<name>[^']+)'\)", failure.code)
        if failure.kind == "NO_HASATTR" and name is not None:
            text, owner = f"{text}.{name['name']}", failure.source
            before, after = "missing", "there"
        else:
            owner = next(iter(prefixes(failure.source)[-2:-1]), failure.source)
            before, after = "there", "missing"
        module = isinstance(self.value(owner), torch.nn.Module)
        cause: Cause = "module attribute" if module else self.home(failure.source) or "other"
        if failure.kind == "INDEX":
            cause, text = "list length", self.text(owner)
        return Finding(cause, text, before, after, text)

    def marking(self, failure: Failure) -> Finding:
        """`mark_dynamic` and its kin."""
        name = re.search(r"'(?P<name>_dynamo_\w+)'", failure.code)
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
        source, code = failure.source, failure.code
        value = self.value(source)
        after = "gone" if value is _GONE else describe(value)
        text = self.text(source)
        before = self.expected(failure, value)
        if failure.kind == "TYPE_MATCH":
            return self.retyped(failure, value, text)
        replaced = failure.kind == "ID_MATCH"
        if source.endswith(".training") and isinstance(self.value(source.removesuffix(".training")), torch.nn.Module):
            return Finding("training flag", text, before, after, text)
        cause = self.home(source)
        if cause is None:
            cause = "object identity" if replaced else _of_text(before, value)
        del code
        return Finding(cause, text, before, after, text, replaced=replaced)

    def expected(self, failure: Failure, value: Any) -> str:
        """What the guard expects, as text."""
        code = failure.code
        if failure.kind in ("ID_MATCH", "NOT_NONE") and (match := _OBJECT_ID.search(code)) is not None:
            known = self.identify(int(match["id"]))
            if known is not None:
                return describe(known)
            kind = _TYPE.search(code)
            return f"another {kind['name'].rpartition('.')[2]}" if kind else "another object"
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
        return Finding(cause, text, before, "gone" if value is _GONE else after, text, replaced=True)

    def home(self, source: str) -> Cause | None:
        """Where the value lives, as far as that is a cause of its own."""
        path = prefixes(source)
        if not path:
            return None
        owners = [self.value(owner) for owner in path[:-1]]
        if any(isinstance(owner, torch.nn.Module) or _is_module_class(owner) for owner in owners):
            return "module attribute"
        if any(isinstance(owner, types.ModuleType) for owner in owners):
            return "global"
        if "cell_contents" in source or any(path[0] == f"L['{name}']" for name in self.free):
            return "closure"
        return "global" if path[0].startswith("G[") else None


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.nn.Module)


class _Gone:
    """Stands for a value that cannot be looked up any more."""


_GONE = _Gone()


def keys_of(source: str) -> str:
    """Name under which the keys of a dict are remembered beside values of expressions."""
    return f"keys of {source}"


def _is_key(source: str) -> bool:
    return source.startswith("list(dict.keys(")


def _last_key(source: str) -> str:
    found = re.search(r"\[([^\[\]]*)\]$", source)
    return found[1] if found else source


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
