"""Which peak a dtype is held to: the dtype names of the device table and how torch's names map onto them.

No figures live here and nothing here may import torch: dtypes are spelled as strings.
"""

from __future__ import annotations

from collections.abc import Collection

from optpass.errors import ConfigError, did_you_mean

#: The dtypes that a device may have a matmul peak for, widest first.
DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8", "int8")

_ALIASES = {
    "double": "float64",
    "complex128": "float64",
    "fp64": "float64",
    "float": "float32",
    "fp32": "float32",
    "complex64": "float32",
    "half": "float16",
    "fp16": "float16",
    "complex32": "float16",
    "bf16": "bfloat16",
    "fp8": "float8",
    "uint8": "int8",
    "qint8": "int8",
    "quint8": "int8",
    # Integer and boolean arithmetic runs on the lanes that do float32; there is no datasheet rate for it.
    "bool": "float32",
    "int16": "float32",
    "int32": "float32",
    "int64": "float32",
    "uint16": "float32",
    "uint32": "float32",
    "uint64": "float32",
}

# Where a device has no units for a dtype, libraries convert to the next of these that it has.
_WIDER: dict[str, tuple[str, ...]] = {
    "float64": (),
    "float32": (),
    "tf32": ("float32",),
    "bfloat16": ("float32",),
    "float16": ("float32",),
    "float8": ("bfloat16", "float16", "float32"),
    "int8": ("float32",),
}


def canonical_dtype(name: str) -> str:
    """The table's name for a dtype: `"torch.float8_e4m3fn"` is `"float8"`, `"bf16"` is `"bfloat16"`.

    Complex dtypes stand for their real parts, wider integers and bool for float32 (the lanes they run on).

    Raises:
        ConfigError: no such dtype.
    """
    short = name.removeprefix("torch.").lower()
    if short.startswith("float8_"):
        return "float8"
    short = _ALIASES.get(short, short)
    if short not in DTYPES:
        raise ConfigError(f"{name!r} is not a dtype with a known peak; {did_you_mean(short, DTYPES)}")
    return short


def compute_dtype(dtype: str, available: Collection[str]) -> str:
    """The dtype that arithmetic on `dtype` really runs in, on a device with peaks for `available`.

    bfloat16 on a device without bfloat16 units runs at the float32 rate; float8 falls back to half precision first.

    Raises:
        ConfigError: neither the dtype nor a wider one is available.
    """
    wanted = canonical_dtype(dtype)
    for candidate in (wanted, *_WIDER[wanted]):
        if candidate in available:
            return candidate
    have = ", ".join(d for d in DTYPES if d in available) or "nothing"
    raise ConfigError(f"no rate is known for {wanted} on this device (it has {have})")
