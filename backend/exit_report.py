"""The report when the process ends (option `report`), and per-graph artifacts for tlparse as graphs compile."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import sys

# Imported only because they register exit hooks of their own when they first are, which Python refuses to take during
# exit: and that is when the graphs of cache hits are traced, with parts of torch that import them.
from concurrent.futures import process as _process  # noqa: F401
from concurrent.futures import thread as _thread  # noqa: F401
from pathlib import Path

import optpass
from optpass.backend import compat
from optpass.errors import ConfigError, OptPassError
from optpass.options import Options
from optpass.reporting import store
from optpass.reporting.model import GraphRecord
from optpass.reporting.writable import check_file


class _AtExit:
    """Paths to write at exit, of this process only: a forked child registers its own."""

    def __init__(self) -> None:
        self.pid = 0
        self.paths: dict[str, None] = {}

    def add(self, path: str) -> None:
        if self.pid != os.getpid():
            self.pid, self.paths = os.getpid(), {}
            atexit.register(self.write)
            if multiprocessing.parent_process() is not None:
                # A forked worker of multiprocessing leaves by os._exit, which runs its finalizers but not atexit's.
                multiprocessing.util.Finalize(None, self.write, exitpriority=0)
        self.paths[path] = None

    def write(self) -> None:
        """Write every path, once; a failure is one line on standard error, never a traceback at exit."""
        if self.pid != os.getpid():
            return
        paths, self.paths = self.paths, {}
        for path in paths:
            try:  # what a user's own call gives: with what to do about each graph break
                store.write_merged(optpass.report(), Path(path))
            except OptPassError as error:
                print(f"optpass: error: {error}", file=sys.stderr)


_AT_EXIT = _AtExit()


def register(options: Options) -> None:
    """Arrange for `options.report` to be written at exit; paths are made absolute now, before anybody changes folder.

    Raises:
        ConfigError: the path ends in neither .json nor .html, or its folder cannot be written to.
    """
    if options.report is None:
        return
    path = Path(options.report).absolute()
    if path.suffix.lower() not in (".json", ".html"):
        raise ConfigError(f"{options.where('report')}={options.report!r}: write a path that ends in .json or .html")
    check_file(path, f"{options.where('report')}={options.report!r}")
    store.run_id()  # made now, so that processes started from here on belong to the same run
    _AT_EXIT.add(str(path))


def trace(record: GraphRecord) -> None:
    """The graph's record as a structured-trace artifact, so that tlparse shows it beside Inductor's own."""
    compat.trace_artifact("optpass_graph", record.model_dump_json)
