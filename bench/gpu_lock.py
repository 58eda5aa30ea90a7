"""One program at a time on the GPU, while others compile: a locked file, taken when code has been compiled."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def lock_path() -> str:
    """The file that all benchmarks of this user lock: two that run side by side take turns on the GPU."""
    return str(Path(tempfile.gettempdir()) / f"optpass-bench-gpu-{os.getuid()}.lock")


@contextlib.contextmanager
def nobody_else(path: str) -> Iterator[None]:
    """With the lock of the file `path`: whoever is told to may run on the GPU."""
    with Path(path).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class GpuLock:
    """Held by whoever runs on the GPU. Taking what is held already, and leaving what is not, does nothing.

    A process has one: it lets go between a compile and the next, and holds it from the end of one on.
    """

    def __init__(self, path: str) -> None:
        """Takes the lock of the file `path` after each compile of this process, before what was compiled runs."""
        from optpass.backend.compat.dynamo import call_when_compiled

        self._file = Path(path).open("w")  # noqa: SIM115  # as long as the process
        self._held = False
        call_when_compiled(self.take)

    def take(self, *_: Any) -> None:
        """Wait until nobody else holds it."""
        if not self._held:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._held = True

    def leave(self) -> None:
        """Let the GPU finish, and others have it."""
        import torch

        if self._held:
            torch.cuda.synchronize()
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._held = False

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """While a caller in another process has the lock, and waits for this one: a compile does not wait for it."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def __enter__(self) -> GpuLock:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
