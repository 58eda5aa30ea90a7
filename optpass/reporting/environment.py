"""Where a report was made: versions, processor, process and run. Reads the system; imports none of what it names."""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, MutableMapping
from importlib import metadata
from pathlib import Path

from optpass.reporting.model import ProcessRecord

PACKAGES = ("optpass", "torch", "triton", "transformers", "onnx", "numpy")
_RUN_ID_LOCK = threading.Lock()


def environment() -> dict[str, str]:
    """Versions of the packages that matter (those installed), Python, platform and processor."""
    facts = {name: version for name in PACKAGES if (version := _version(name)) is not None}
    facts["python"] = platform.python_version()
    facts["platform"] = platform.platform()
    facts["cpu"] = cpu_model()
    facts["cpu_count"] = str(os.cpu_count() or 0)
    return facts


@functools.cache
def _version(package: str) -> str | None:
    """Read once: parsing a package's metadata takes milliseconds, and every report asks for all of them."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def cpu_model() -> str:
    """The processor as the system names it, 'AMD EPYC 7B13'; the architecture where it gives no name."""
    return _processor_fact("model name") or _brand() or platform.processor() or platform.machine()


@functools.cache
def cpu_family() -> tuple[str, int, int] | None:
    """Vendor, family and model of an x86 processor as CPUID counts them, ('AuthenticAMD', 25, 17); None where nothing
    says them. Clouds hide names behind 'AMD EPYC', not these."""
    found = [_processor_fact(name) for name in ("vendor_id", "cpu family", "model")]
    if not all(found):  # Windows: 'AMD64 Family 25 Model 17 Stepping 1, AuthenticAMD'
        match = re.fullmatch(r".* Family (\d+) Model (\d+) .*, (\w+)", platform.processor())
        found = [match[3], match[1], match[2]] if match else []
    return (found[0], int(found[1]), int(found[2])) if found and found[1].isdigit() and found[2].isdigit() else None


def _processor_fact(name: str) -> str:
    """What the kernel says of the first processor; "" where it says nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    told = (line.partition(":") for line in lines)
    facts = (" ".join(value.split()) for key, _, value in told if key.strip().lower() == name)
    return next((fact for fact in facts if fact), "")


def _brand() -> str:
    """The processor's name where it is no file that says it; "" where nothing does."""
    tool = shutil.which("sysctl") if platform.system() == "Darwin" else None
    if tool is None:
        return ""
    try:
        done = subprocess.run(
            [tool, "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def process_record(environ: Mapping[str, str] | None = None) -> ProcessRecord:
    """This process; rank and world size as torchrun sets them (`RANK`, `WORLD_SIZE`)."""
    environ = os.environ if environ is None else environ
    return ProcessRecord(
        pid=os.getpid(),
        host=socket.gethostname(),
        rank=_integer(environ.get("RANK"), 0),
        world_size=_integer(environ.get("WORLD_SIZE"), 1),
        argv=list(sys.argv),
    )


def _integer(text: str | None, default: int) -> int:
    try:
        return int(text) if text is not None else default
    except ValueError:
        return default


def run_id(environ: MutableMapping[str, str] | None = None) -> str:
    """The id that all processes of one run share; exported as `OPTPASS_RUN_ID`, so that children inherit it.

    In this order: `OPTPASS_RUN_ID`; torchrun's `TORCHELASTIC_RUN_ID`; where torchrun was given no id ("none"), a
    name made from the launcher's process, which its local ranks have in common (ranks on several machines need
    `--rdzv-id` or `OPTPASS_RUN_ID`); else a new random id.
    """
    environ = os.environ if environ is None else environ
    with _RUN_ID_LOCK:
        known = environ.get("OPTPASS_RUN_ID", "").strip()
        if not known:
            elastic = environ.get("TORCHELASTIC_RUN_ID", "").strip()
            if elastic.lower() == "none":
                known = _launcher_id()
            else:
                known = elastic or str(uuid.uuid4())
            environ["OPTPASS_RUN_ID"] = known
        return known


def _launcher_id() -> str:
    """Names the parent process: host, pid, and start time where the system tells, since pids are used again."""
    parent = os.getppid()
    try:
        stat = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8", errors="replace")
        started = stat.rpartition(")")[2].split()[19]  # field 22 of proc(5), counted from the state after the name
    except (OSError, IndexError):
        started = ""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{socket.gethostname()}/{parent}/{started}"))
