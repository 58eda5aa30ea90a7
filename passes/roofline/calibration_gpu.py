"""What fraction of its datasheet a GPU that is present reaches: measured once, kept in the user's cache folder.

Products are of random data (zeros draw less power and run faster than any real input), large enough to fill the
device; the copy is far larger than the L2 cache; the launch cost is that of dependent kernels that do nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from optpass.errors import ReportError
from optpass.passes.devices import DeviceSpec
from optpass.passes.roofline.calibration import cache_folder
from optpass.reporting.files import write_text

log = logging.getLogger(__name__)

_VERSION = 1
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
#: Side of the square products, and bytes of the copy: 788 TFLOP/s bf16 and 4.3 TB/s on an H200 were taken with these.
SIDE, COPY_BYTES = 8192, 1 << 30
_REPEATS, _LAUNCHES = 7, 200


def measured_spec(spec: DeviceSpec, device: torch.device, *, force: bool = False) -> DeviceSpec:
    """`spec` with the fractions that `device` reaches; measures (a few seconds) where that was not done yet."""
    found = None if force else _read(_path(spec))
    if found is None:
        found = measure(spec, device)
        try:
            write_text(json.dumps(found, indent=1), _path(spec))
        except ReportError as error:
            log.warning("the calibration of %s is not kept: %s", spec.name, error)
    return _applied(spec, found)


def cached_spec(spec: DeviceSpec) -> DeviceSpec:
    """`spec` with the fractions measured before; `spec` itself where none were."""
    found = _read(_path(spec))
    return spec if found is None else _applied(spec, found)


def measure(
    spec: DeviceSpec, device: torch.device, *, side: int = SIDE, copy_bytes: int = COPY_BYTES
) -> dict[str, Any]:
    """Measure now: `{"efficiency": {dtype: fraction}, "bandwidth_efficiency": fraction, "launch_s": seconds}`."""
    generator = torch.Generator(device=device).manual_seed(0)
    efficiency = {}
    for name, dtype in _DTYPES.items():
        if name not in spec.peak_flops:
            continue
        n = side if name != "float64" else side // 4
        a, b = (torch.randn(n, n, device=device, dtype=torch.float32, generator=generator).to(dtype) for _ in range(2))
        seconds = _seconds(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
        efficiency[name] = 2.0 * n**3 / seconds / spec.peak_flops[name]
    source = torch.randn(copy_bytes // 4, device=device, generator=generator)
    target = torch.empty_like(source)
    copied = 2.0 * source.nbytes / _seconds(lambda: target.copy_(source), device)
    one = torch.zeros(1, device=device)
    launch = _seconds(lambda: [one.add_(1) for _ in range(_LAUNCHES)], device) / _LAUNCHES
    return {"efficiency": efficiency, "bandwidth_efficiency": copied / spec.bandwidth, "launch_s": launch}


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median over repeats, by device events on a GPU and by the clock anywhere else."""
    for _ in range(2):
        work()
    taken: list[float] = []
    for _ in range(_REPEATS):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            work()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
    return float(statistics.median(taken))


def _applied(spec: DeviceSpec, found: dict[str, Any]) -> DeviceSpec:
    return spec.measured(
        f"measured on this machine, torch {torch.__version__}",
        efficiency=found["efficiency"],
        bandwidth_efficiency=found["bandwidth_efficiency"],
        launch_s=found["launch_s"],
    )


def _path(spec: DeviceSpec) -> Path:
    key = json.dumps([_VERSION, spec.key, spec.fingerprint(), str(torch.__version__), str(torch.version.cuda)])
    return cache_folder() / f"gpu-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        fractions = {str(k): float(v) for k, v in found["efficiency"].items()}
        figures = {key: float(found[key]) for key in ("bandwidth_efficiency", "launch_s")}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.info("the GPU calibration in %s is not used: %s", path, error)
        return None
    return {"efficiency": fractions, **figures}
