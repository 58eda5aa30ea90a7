"""The calibration of this machine's processor: measured once, kept in the user's cache folder, attached to a spec.

The probes are in `calibration_probes` and `calibration_compiled`, what they found in `calibration_data`, its use in
`cpu_model`. Nothing here runs while a model is being compiled: measuring takes seconds.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from optpass.errors import ReportError
from optpass.passes.devices import DeviceSpec
from optpass.passes.devices.dtypes import DTYPES
from optpass.passes.processor import instructions
from optpass.passes.roofline import calibration_compiled as loops
from optpass.passes.roofline import calibration_probes as probes
from optpass.passes.roofline.calibration_clock import Budget
from optpass.passes.roofline.calibration_data import (
    VECTOR,
    VERSION,
    CpuCalibration,
    GemmFit,
    attention_products,
    scaled,
)
from optpass.passes.roofline.calibration_library import Library, take
from optpass.reporting.environment import cpu_model
from optpass.reporting.files import write_text

__all__ = ["CpuCalibration", "cache_folder", "cached_spec", "calibrated_spec", "measure", "spec_of"]

log = logging.getLogger(__name__)

Report = Callable[[float, str], None]

#: Least seconds of a parallel loop's entry that can be told from noise.
_LEAST_REGION_S = 1e-7
_LEAST_SCORE_S = 1e-12


def calibrated_spec(progress: Report | None = None, force: bool = False) -> DeviceSpec:
    """This machine's processor as it was measured; measures (10 to 20 s) and caches where that was not done yet.

    Args:
        progress: told the fraction done, 0 to 1, and what is measured next.
        force: measure even where a cached calibration exists.
    """
    found = None if force else _cached(_path(), _identity())
    if found is None:
        found = measure(progress)
        _remember(found)
    return spec_of(found)


def cached_spec() -> DeviceSpec | None:
    """This machine's processor as it was measured before under this torch and thread count; None where it was not."""
    found = _cached(_path(), _identity())
    return None if found is None else spec_of(found)


def measure(progress: Report | None = None) -> CpuCalibration:
    """Measure this processor now, with torch's present number of threads; nothing is cached.

    Where other processes hold so many cores that parallel loops stall, one thread is measured and its rates are
    multiplied; such a calibration is `estimated`, and is not written to the cache.

    The caller's random state and grad mode are left as they were.
    """
    tell = progress or (lambda fraction, label: None)
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
        torch.manual_seed(0)
        if not probes.contended():
            found = _measure(tell)
            if not probes.contended():
                return found
        log.warning("other processes keep this machine busy: one thread is measured and scaled to %d", threads)
        try:
            torch.set_num_threads(1)
            return scaled(_measure(tell), threads)
        finally:
            torch.set_num_threads(threads)


def _measure(tell: Report) -> CpuCalibration:
    budget = Budget()
    library = take(budget, lambda done, label: tell(0.2 * done, label))
    tell(0.2, "kernel calls")
    kernel_s, graph_s, backward_s = loops.call_seconds(budget)
    tell(0.5, "compiled loops")
    element_s, idle, compiled = loops.element_seconds(budget)
    library = library.best(take(budget, lambda done, label: tell(0.8 + 0.2 * done, f"{label}, again")))
    bandwidth = library.bandwidth()
    gemm, conv = library.fits(bandwidth)
    exact = gemm["float32"]
    threads = torch.get_num_threads()
    # The idle call enters one parallel region per loop; what it takes beyond a plain call is theirs.
    region = (idle - graph_s - 2 * kernel_s) / len(loops.CLASSES) if compiled and threads > 1 else 0.0
    tell(1.0, "done")
    return CpuCalibration(
        **_processor(), threads=threads, torch=str(torch.__version__), gemm=gemm, conv=conv,
        conv_backward=sum(2.0 * f / b for f, b in library.gradients) / len(library.gradients),
        attention=_attention(library, exact), bandwidth=bandwidth,
        element_s=element_s
        | {"sort": library.sort, "bag": library.bag, "unroll": _unroll(library, exact)},
        kernel_s=kernel_s, graph_s=graph_s, backward_s=backward_s, compiled=compiled,
        region_s=max(_LEAST_REGION_S, region) if threads > 1 else 0.0,
        cold_s=max(0.0, library.cold[1] - library.cold[0]) / (4 * probes.COLD_SHAPE[1] ** 2),
        fault_s=max(0.0, library.fresh / probes.FRESH - 1.0 / bandwidth.at(probes.FRESH)),
    )  # fmt: skip


def _unroll(library: Library, exact: GemmFit) -> float:
    """Seconds per element of im2col: an unrolled convolution without its product."""
    _, channels, side, _, taps, _, _ = probes.UNROLLED
    m, k = side * side, channels * taps * taps
    return max(0.0, library.unroll - 2.0 * m * channels * k / exact.rate(channels, m, k)) / (m * k)


def _attention(library: Library, exact: GemmFit) -> dict[str, float]:
    """Seconds per score beside the products, and what scores that do not fill a vector cost in addition."""
    per_score = []
    for shape, seconds in zip(probes.ATTENTION, library.attention, strict=True):
        batch, heads, length, width = shape
        scores = batch * heads * length * length
        products = attention_products(4.0 * scores * width, length, width, exact.rate)
        # The backward has five products, the forward two.
        per_score.append([(s - p * products) / scores for s, p in zip(seconds, (1.0, 2.5), strict=True)])
    part = probes.ATTENTION[1][2] % VECTOR / probes.ATTENTION[1][2]
    found = {}
    for way, whole, ragged in zip(("forward", "backward"), *per_score, strict=True):
        found[way] = max(_LEAST_SCORE_S, whole)
        found[f"{way}_tail"] = max(_LEAST_SCORE_S, (ragged - whole) / part)
    return found


def spec_of(calibration: CpuCalibration) -> DeviceSpec:
    """The device that a calibration describes.

    Its peaks are the highest rates that large products (for float32, convolutions too) were measured at, of which
    matrix products reach `efficiency`; its bandwidth is a large copy's.
    """
    source = f"measured on this machine: {calibration.threads} threads, torch {calibration.torch}"
    rates = {dtype: fit.peak for dtype, fit in calibration.gemm.items() if dtype in DTYPES}
    peaks = rates | {"float32": max(rates["float32"], calibration.conv.peak)}
    figures = [*(f"{kind}.{dtype}" for kind in ("peak_flops", "efficiency") for dtype in peaks)]
    figures += ["bandwidth", "bandwidth_efficiency", "launch_s", "memory_bytes"]
    memory = _memory_bytes()
    return DeviceSpec(
        key="cpu", name=calibration.cpu, kind="cpu", peak_flops=peaks,
        efficiency={dtype: rates[dtype] / peak for dtype, peak in peaks.items()},
        bandwidth=calibration.bandwidth.values[-1], bandwidth_efficiency=1.0, memory_bytes=memory, sm_count=None,
        l2_bytes=None, launch_s=calibration.kernel_s, nvlink_bytes_per_s=None, pcie_bytes_per_s=None,
        capability=None, sources={f: source for f in figures if f != "memory_bytes" or memory}, cpu=calibration,
    )  # fmt: skip


# ---- the cache ------------------------------------------------------------------------------------------------------

#: Calibrations of this process, by file: serves where the cache folder cannot be written. Filled by `_remember` alone.
_in_memory: dict[Path, CpuCalibration] = {}


def _remember(found: CpuCalibration) -> None:
    """Keep a calibration for this process, and in the cache folder where that can be written."""
    path = _path()
    _in_memory[path] = found
    _read.cache_clear()
    if found.estimated:
        return
    try:
        write_text(found.to_json(), path)
    except ReportError as error:
        log.warning("the CPU calibration is kept for this process only: %s", error)


def _cached(path: Path, identity: Mapping[str, object]) -> CpuCalibration | None:
    found = _in_memory.get(path)
    if found is None:
        found = _read(path)
    if found is None or any(getattr(found, name) != value for name, value in identity.items()):
        return None
    return found


@functools.lru_cache(maxsize=8)
def _read(path: Path) -> CpuCalibration | None:
    """The calibration in a file; None where there is none, or none that this version can read."""
    try:
        return CpuCalibration.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.info("the CPU calibration in %s is not used: %s", path, error)
        return None


def cache_file() -> Path:
    """Where this processor's calibration is kept, under this torch and thread count; it need not be there."""
    return _path()


def _path() -> Path:
    """The file for this processor, torch and thread count."""
    key = json.dumps([VERSION, *(str(v) for v in _identity().values())])
    return cache_folder() / f"cpu-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def cache_folder() -> Path:
    """Where calibrations are kept: `$OPTPASS_CACHE_DIR`, else `optpass` in the user's cache folder."""
    own = os.environ.get("OPTPASS_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path("~/.cache").expanduser()) / "optpass"


def _identity() -> dict[str, object]:
    """What a calibration holds for; named like the fields of `CpuCalibration`."""
    return {**_processor(), "threads": torch.get_num_threads(), "torch": str(torch.__version__)}


def _processor() -> dict[str, Any]:
    """Model name, vector instructions, and the logical processors that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"cpu": cpu_model(), "instructions": instructions(), "cores": cores}


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
