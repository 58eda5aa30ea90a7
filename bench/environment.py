"""Where a figure was measured: processor, versions, threads, load, revision. Never a path or a host name."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from optpass.reporting.environment import cpu_model


class Environment(BaseModel):
    """The conditions of a measurement."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str = Field(description="Name of the device measured: the processor's, or the GPU's.")
    device_kind: str = Field(description="'cpu' or 'cuda'.")
    cpu: str = Field(description="Model name of the processor.")
    instructions: str = Field(
        default="", description="Vector instructions of the processor and the half precisions that it multiplies."
    )
    cores: int = Field(description="Logical processors that this process may use.")
    os: str = Field(description="System and machine type, e.g. 'Linux x86_64'.")
    python: str
    torch: str
    optpass: str
    cuda: str | None = Field(default=None, description="CUDA version of the torch build.")
    threads: int = Field(description="torch's intra-op threads in this process; isolated samples may use others.")
    load_before: float | None = Field(default=None, description="One-minute load average before the measurement.")
    load_after: float | None = Field(default=None, description="The same afterwards; it contains our own load.")
    revision: str | None = Field(default=None, description="Git revision of a checkout, '+changes' if it had any.")

    @property
    def kind(self) -> str:
        """The device by what tells its figures from another's: virtual machines give one name to many processors."""
        return f"{self.device} {self.instructions}".strip() if self.device_kind == "cpu" else self.device

    def finished(self) -> Environment:
        """The same with the load average of now as `load_after`."""
        return self.model_copy(update={"load_after": load_average()})


def environment(device: str = "cpu") -> Environment:
    """The conditions here and now, to be taken before measuring; call `finished()` on it afterwards."""
    import torch

    from optpass import __version__
    from optpass.passes.processor import instructions

    cpu = cpu_model()
    return Environment(
        device=torch.cuda.get_device_name() if device == "cuda" else cpu,
        device_kind=device,
        cpu=cpu,
        instructions=instructions(),
        cores=usable_cores(),
        os=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        optpass=__version__,
        cuda=torch.version.cuda,
        threads=torch.get_num_threads(),
        load_before=load_average(),
        revision=revision(),
    )


def usable_cores() -> int:
    """Logical processors this process may run on, which in a container are often fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_average() -> float | None:
    """The one-minute load average, or None where the system has none."""
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


def checkout() -> Path | None:
    """The root of the source tree that this package runs from; None where it is installed without one."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "pyproject.toml").is_file() and (root / "optpass" / "__init__.py").is_file() else None


def revision() -> str | None:
    """The short git revision of the checkout, with '+changes' where files differ; None without git or commits."""
    root, git = checkout(), shutil.which("git")
    if root is None or git is None or not (root / ".git").exists():
        return None
    commit = _output([git, "-C", str(root), "rev-parse", "--short", "HEAD"])
    if not commit:
        return None
    changed = _output([git, "-C", str(root), "status", "--porcelain"])
    return f"{commit}+changes" if changed else commit


def _output(command: list[str]) -> str:
    """What a command prints, or nothing where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
