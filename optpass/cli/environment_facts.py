"""The facts that `optpass env` shows, as plain data. Changes nothing, and never fails for a missing part."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import optpass
from optpass.backend import compat
from optpass.errors import ConfigError
from optpass.option_files import find_toml
from optpass.options import Options, environment_layer, resolve
from optpass.passes import devices
from optpass.passes.roofline import calibration
from optpass.reporting.environment import cpu_model
from optpass.units import format_bytes, format_rate

SCHEMA = "optpass.env/1"
PACKAGES = ("optpass", "torch", "triton", "numpy", "pydantic", "typer", "rich", "jinja2", "onnx", "transformers")
_ABSENT = "not installed"
#: Variables that change what is compiled or how fast it runs.
_VARIABLES = (
    "OPTPASS_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_LOGS", "TORCH_TRACE", "TORCH_COMPILE_", "TRITON_", "OMP_",
    "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "CXX", "XDG_CACHE_HOME",
)  # fmt: skip


def collect() -> dict[str, Any]:
    """Every section; values are text, numbers, or lists and tables of them."""
    return {
        "schema": SCHEMA,
        "versions": versions(),
        "machine": machine(),
        "compilers": compilers(),
        "hooks": hooks(),
        "calibration": calibrated(),
        "options": options(),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
    }


def versions() -> dict[str, str]:
    """Of Python and the packages that matter, and where optpass is installed."""
    found = {"python": f"{platform.python_version()} ({sys.executable})"}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = _ABSENT
    found["torch"] = str(torch.__version__)
    found["optpass in"] = str(Path(optpass.__file__).parent)
    return found


def machine() -> dict[str, Any]:
    """System, processor, memory, GPUs."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        memory = format_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        memory = "unknown"
    return {
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cores": f"{os.cpu_count()}, of which this process may use {usable}",
        "threads": f"{torch.get_num_threads()} in torch",
        "memory": memory,
        "cuda": f"torch built for {torch.version.cuda or torch.version.hip or 'the CPU alone'}",
        "gpus": list(_gpus()),
    }


def _gpus() -> Iterator[str]:
    if not torch.cuda.is_available():
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        try:
            spec = devices.resolve(
                facts.name, memory_bytes=facts.total_memory, sm_count=facts.multi_processor_count
            ).key  # fmt: skip
        except ConfigError as error:
            spec = f"none: {error}"
        memory = format_bytes(facts.total_memory)
        yield f"{index}: {facts.name}, {memory}, {facts.multi_processor_count} SMs; device spec {spec}"


def compilers() -> dict[str, str]:
    """Whether Inductor can build here, and with what."""
    cpp = compat.cpp_compiler_problem()
    gpu = compat.triton_problem()
    return {
        "c++": _first_line_of(os.environ.get("CXX") or "g++", "--version"),
        "inductor on cpu": "available" if cpp is None else f"not available: {cpp}",
        "inductor on gpu": "available" if gpu is None else f"not available: {gpu}",
    }


def _first_line_of(command: str, *arguments: str) -> str:
    path = shutil.which(command)
    if path is None:
        return f"{command}: not on PATH"
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path}: does not run: {error}"
    lines = (done.stdout or done.stderr).splitlines()
    return f"{path}: {lines[0] if lines else f'exit code {done.returncode}'}"


def hooks() -> dict[str, Any]:
    """What optpass needs of this torch, and whether the entry point is found."""
    missing = compat.self_test()
    visible = "optpass" in compat.backends()
    if not visible:
        missing.append("entry point: torch.compile(backend='optpass') is not found; install optpass with pip")
    return {
        "torch hooks": "all present" if not missing else f"{len(missing)} missing",
        'backend="optpass"': "registered" if visible else "not registered",
        "missing": missing,
    }


def calibrated() -> dict[str, Any]:
    """This CPU's measured figures, or that there are none yet."""
    spec = calibration.cached_spec()
    if spec is None:
        state = {"state": f"not measured yet for {torch.get_num_threads()} threads; optpass env --calibrate measures"}
        return {**state, "cache": str(calibration.cache_file())}
    peaks = {dtype: format_rate(spec.attainable_flops(dtype), "FLOP/s") for dtype in spec.peak_flops}
    return {
        "state": "measured",
        "matmul": peaks,
        "memory": format_rate(spec.bandwidth * spec.bandwidth_efficiency, "B/s"),
        "kernel call": f"{spec.launch_s * 1e6:.2f} us",
        "cache": str(calibration.cache_file()),
    }


def options() -> dict[str, str]:
    """The options that hold here without any given in code, each with where it comes from."""
    try:
        resolved = resolve().to_json()
        file = find_toml(Path.cwd())
    except ConfigError as error:
        return {"invalid": str(error)}
    layers: list[tuple[str, Mapping[str, Any]]] = [(str(file[0]), file[1])] if file is not None else []
    variables = environment_layer(os.environ)
    found = {}
    for key in Options.model_fields:
        origin = next((name for name, layer in layers if key in layer), None)
        if origin is None and key in variables:
            origin = f"OPTPASS_{key.upper()}"
        found[key] = f"{resolved[key]!r} ({origin or 'default'})"
    return found


def calibrate_gpus() -> None:
    """Measure every GPU that is present and in the device table; one that is not is passed over."""
    from optpass.backend.device import measured

    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        with contextlib.suppress(ConfigError):  # no figures of its datasheet to be a fraction of
            measured(torch.device("cuda", index), force=True)
