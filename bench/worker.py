"""A child process that answers many calls, for sweeps where starting one process each would be most of the time.

`Worker` is the parent's side: it starts the child when it is first needed, again after it died or took too long, and
after every so many calls, so that no call suffers from what an earlier one left behind. Where nothing may be left
behind at all, `isolate` is the one to use.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from optpass.bench.isolate import child_environment, last_error
from optpass.bench.result import BenchError

#: How a child says that a call raised, instead of a result.
_FAILED = "worker failed"


class Worker:
    """Calls one function ("package.module:function") in a child process, with keyword arguments; JSON both ways."""

    def __init__(
        self, target: str, *, environ: Mapping[str, str] | None = None, timeout_s: float = 300.0, calls: int = 20
    ) -> None:
        """
        Args:
            target: the function.
            environ: laid over the environment that the child inherits.
            timeout_s: longest that one call may take; then the child is killed.
            calls: after so many calls the next one gets a fresh child.

        Attributes:
            timeout_s: as given; of the calls that follow, where it is set anew.
        """
        self._target, self.timeout_s, self._most = target, timeout_s, calls
        self._environ = dict(environ or {})
        self._child: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._answered = 0

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, **arguments: Any) -> Any:
        """What the function returns.

        Raises:
            BenchError: it raised, died or took longer than `timeout_s`; one line.
        """
        if self._answered >= self._most:
            self.close()
        child = self._child or self._start()
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(json.dumps(arguments).encode() + b"\n")
            child.stdin.flush()
        except OSError:
            raise BenchError(self._died()) from None
        ready, _, _ = select.select([child.stdout], [], [], self.timeout_s)
        if not ready:
            self.close()
            raise BenchError(f"took longer than {self.timeout_s:g} s")
        line = child.stdout.readline()
        if not line:
            raise BenchError(self._died())
        self._answered += 1
        answer = json.loads(line)
        if isinstance(answer, dict) and _FAILED in answer:
            raise BenchError(str(answer[_FAILED]))
        return answer

    def close(self) -> None:
        """End the child, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> subprocess.Popen[bytes]:
        self._folder = tempfile.TemporaryDirectory(prefix="optpass-worker-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        with (folder / "stderr").open("wb") as stderr:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "optpass.bench.worker", self._target], cwd=folder, stderr=stderr,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment(folder, self._environ),
            )  # fmt: skip
        self._answered = 0
        return self._child

    def _died(self) -> str:
        """Why the child is gone."""
        assert self._child is not None and self._folder is not None
        code = self._child.wait()
        text = (Path(self._folder.name) / "stderr").read_text(encoding="utf-8", errors="replace")
        self.close()
        return f"killed by signal {-code}" if code < 0 else last_error(text)


def _serve(target: str) -> None:
    """The child: one line of arguments, one line of answer, until the parent closes the pipe."""
    module, _, function = target.partition(":")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    called = getattr(import_module(module), function)
    for line in sys.stdin:
        try:
            answer = called(**json.loads(line))
        except Exception as error:  # noqa: BLE001 - the parent's to report: a sweep goes on with the next call
            answer = {_FAILED: " ".join(f"{type(error).__name__}: {error}".split())[:400]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])
