"""How a tensor differs from what a guard expects, property by property, and the process's state likewise."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import torch

from optpass.backend.audit.values import describe
from optpass.backend.compat import audit_guards as dynamo

_EXPECTED = re.compile(
    r", (?P<type>[\w.<>]+), DispatchKeySet\((?P<keys>[^)]*)\), (?P<dtype>torch\.\w+), device=(?P<device>\w+), "
    r"requires_grad=(?P<requires_grad>True|False), size=\[(?P<size>[^\]]*)\], stride=\[(?P<stride>[^\]]*)\]\)$"
)
_STATE = re.compile(r"against (\{.*\})\s*$", re.DOTALL)
_LAYOUTS = (("SparseCsr", "torch.sparse"), ("Sparse", "torch.sparse_coo"), ("Mkldnn", "torch._mkldnn"))
#: c10's codes of dtypes, and the order of its autocast state.
_DTYPES = {5: "torch.float16", 6: "torch.float32", 7: "torch.float64", 15: "torch.bfloat16"}
_DEVICES = ("cpu", "cuda", "mtia", "maia", "xpu", "ipu", "hpu", "xla", "privateuseone", "mps")
#: Dispatch keys that name a device.
_DEVICE_KEYS = ("CPU", "CUDA", "MPS", "XPU", "Meta", "XLA", "HPU", "IPU", "PrivateUse1", "MTIA")


@dataclass(frozen=True)
class Difference:
    """One property; `before` is what the guard expects, `after` what it found."""

    property: str
    before: str
    after: str
    dimension: int | None = None
    text: str = ""


def differences(code: str, source: str, value: Any) -> list[Difference]:
    """What makes `value` fail the guard `check_tensor(source, ...)`, what explains most first; never empty."""
    expected = _EXPECTED.search(code)
    if not isinstance(value, torch.Tensor):
        before = expected["type"] if expected else "a tensor"
        return [Difference("type", before, describe(value))]
    if expected is None:
        return [Difference("other", "", describe(value))]
    found = [*_kind(expected, value), *_shape(expected, value)]
    return found or [Difference("other", f"({expected['keys']})", dynamo.dispatch_keys(value))]


def _kind(expected: re.Match[str], value: torch.Tensor) -> list[Difference]:
    found: list[Difference] = []
    name = type(value).__qualname__
    if expected["type"] != name:
        found.append(Difference("type", expected["type"], name))
    keys = _names(expected["keys"])
    device = _device(keys, expected["device"])
    index = "None" if value.device.index is None else str(value.device.index)
    if device != value.device.type and device is not None:
        before = device if expected["device"] == "None" else f"{device}:{expected['device']}"
        found.append(Difference("device", before, str(value.device)))
    elif expected["device"] != index:
        found.append(Difference("device", f"{value.device.type}:{expected['device']}", str(value.device)))
    if expected["dtype"] != str(value.dtype):
        found.append(Difference("dtype", expected["dtype"], str(value.dtype)))
    if expected["requires_grad"] != str(value.requires_grad):
        found.append(Difference("requires_grad", expected["requires_grad"], str(value.requires_grad)))
    return found or _traits(keys, value)


def _traits(keys: set[str], value: torch.Tensor) -> list[Difference]:
    """What dispatch keys alone tell."""
    found: list[Difference] = []
    if ("ADInplaceOrView" in keys) == value.is_inference():
        found.append(Difference("inference", str(not value.is_inference()), str(value.is_inference())))
    recorded = _autograd(keys)
    if recorded != (now := _autograd(_names(dynamo.dispatch_keys(value)))):
        found.append(Difference("inference_mode", str(not recorded), str(not now)))
    layout = next((name for start, name in _LAYOUTS if any(key.startswith(start) for key in keys)), "torch.strided")
    if not str(value.layout).startswith(layout) or (layout == "torch.sparse" and value.layout is torch.sparse_coo):
        found.append(Difference("layout", layout, str(value.layout)))
    for name, key, now in (("is_conj()", "Conjugate", value.is_conj()), ("is_neg()", "Negative", value.is_neg())):
        if (key in keys) != now:
            found.append(Difference(name, str(key in keys), str(now)))
    return found


def _autograd(keys: set[str]) -> bool:
    """Whether autograd would see an operation: inference mode takes it out of every tensor's keys."""
    return any(key.startswith("Autograd") for key in keys)


def _names(keys: str) -> set[str]:
    return set(keys.replace(" ", "").removeprefix("DispatchKeySet(").removesuffix(")").split(","))


def _device(keys: set[str], index: str) -> str | None:
    """Device type that the dispatch keys stand for; None where they do not tell."""
    for name in _DEVICE_KEYS:
        if any(key in (name, f"Sparse{name}", f"SparseCsr{name}", f"Quantized{name}") for key in keys):
            return {"PrivateUse1": None}.get(name, name.lower())
    return None


def _shape(expected: re.Match[str], value: torch.Tensor) -> list[Difference]:
    sizes, strides = (_numbers(expected[name]) for name in ("size", "stride"))
    if len(sizes) != value.dim():
        return [Difference("dim", str(len(sizes)), str(value.dim()))]
    found = [
        Difference("size", str(want), str(have), index)
        for index, (want, have) in enumerate(zip(sizes, value.shape, strict=True))
        if want is not None and want != have
    ]
    if found or value.layout is not torch.strided:
        return found  # strides follow from sizes
    return [
        Difference("stride", str(want), str(have), index)
        for index, (want, have) in enumerate(zip(strides, value.stride(), strict=False))
        if want is not None and want != have
    ]


def _numbers(text: str) -> list[int | None]:
    return [None if item.strip() == "None" else int(item) for item in text.split(",") if item.strip()]


def state_differences(code: str) -> list[Difference]:
    """Which part of the process's state differs from the guard `___check_global_state() against {...}`."""
    match = _STATE.search(code)
    now = dynamo.global_state()
    if match is None or not now:
        return [Difference("other", "", "", text=code)]
    try:
        before, after = json.loads(match[1]), json.loads(now)
    except ValueError:
        return [Difference("other", "", "", text=code)]
    changed = [key for key in before if before[key] != after.get(key)]
    return [_state(key, before[key], after.get(key)) for key in changed] or [Difference("other", "", "", text=code)]


def _state(key: str, before: Any, after: Any) -> Difference:
    if key == "autocast_state":
        first, second = _autocast(before), _autocast(after)
    elif key == "default_dtype":
        first, second = (_DTYPES.get(code, str(code)) for code in (before, after))
    else:
        first, second = str(before), str(after)
    return Difference(key, first, second, text=f"{key}: {first}, now {second}")


def _autocast(state: Any) -> str:
    """Devices for which autocast is on, with their dtype."""
    enabled, dtypes = (list(state.get(name, ())) if isinstance(state, dict) else [] for name in ("enabled", "dtype"))
    on = [
        f"{_DEVICES[index] if index < len(_DEVICES) else index} {_DTYPES.get(dtype, str(dtype))}"
        for index, (active, dtype) in enumerate(zip(enabled, dtypes, strict=False))
        if active
    ]
    cached = "" if not on or state.get("cached_enabled", True) else ", cache off"
    return f"on ({', '.join(on)}{cached})" if on else "off"
