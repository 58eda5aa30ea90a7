"""One sample in one fresh process: nothing compiled, cached or imported before it can be in the figure.

`run_isolated` is the parent's side; `python -m optpass.bench.isolate TARGET ARGUMENTS OUT` is the child's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from optpass.bench.result import BenchError
from optpass.options import ENV_PREFIX, ENV_RESERVED

#: The compiler's settings in the caller's shell (a cache switched off, a debug flag) would measure something else.
_COMPILER_PREFIXES = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "TORCH_LOGS", "TORCH_TRACE")


def run_isolated(
    target: str,
    arguments: Mapping[str, Any],
    *,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = 900.0,
) -> dict[str, Any]:
    """Call `target` ("package.module:function") with keyword `arguments` in a fresh interpreter; what it returns.

    The child works in an empty folder of its own, which is also its Inductor and Triton cache, and which is removed
    afterwards. Options of the caller (an `optpass.toml` near the working folder, `OPTPASS_*` variables) do not reach
    it. `environ` is laid over the environment that it inherits. Arguments and result travel as JSON.

    Raises:
        BenchError: the child failed, was killed or took longer than `timeout_s`; one line with its last error.
    """
    with tempfile.TemporaryDirectory(prefix="optpass-bench-", ignore_cleanup_errors=True) as folder:
        out = Path(folder) / "out.json"
        work = Path(folder) / "work"
        work.mkdir()
        command = [sys.executable, "-m", "optpass.bench.isolate", target, json.dumps(dict(arguments)), str(out)]
        try:
            done = subprocess.run(
                command, cwd=work, env=child_environment(Path(folder), environ or {}), timeout=timeout_s,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise BenchError(f"{_what(target, arguments)}: took longer than {timeout_s:g} s") from None
        except OSError as error:
            raise BenchError(f"{_what(target, arguments)}: cannot start {sys.executable}: {error}") from None
        if done.returncode != 0:
            text = done.stderr.decode("utf-8", errors="replace")
            raise BenchError(f"{_what(target, arguments)}: {_cause(done.returncode, text)}")
        answer: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return answer


def last_error(stderr: str) -> str:
    """The one line of a child's standard error that says what went wrong: the last exception's, else the last one.

    Messages of torch go on for many lines after the exception's own; those are advice, and left out.
    """
    lines = stderr.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if starts:
        after = [i for i in range(starts[-1] + 1, len(lines)) if lines[i][:1].strip()]
        if after:
            first = lines[after[0]].strip()
            rest = lines[after[0] + 1 :]
            # "BackendCompilerFailed: backend='x' raised:" only announces; the cause is on the next line.
            following = next((line.strip() for line in rest if line.strip()), "")
            return f"{first} {following}" if first.endswith(":") and following else first
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def _cause(code: int, stderr: str) -> str:
    if code >= 0:
        return last_error(stderr)
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _what(target: str, arguments: Mapping[str, Any]) -> str:
    return f"{target.rpartition(':')[2]}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"


def child_environment(folder: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without settings of optpass and the compiler, with caches in `folder`, and `extra`."""
    own = ENV_RESERVED - {"OPTPASS_RUN_ID"}  # a sample is a run of its own
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX) or k in own}
    kept = {k: v for k, v in kept.items() if not k.startswith(_COMPILER_PREFIXES)}
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    return kept | caches | dict(extra)


def _child(target: str, arguments: str, out: str) -> None:
    module, _, function = target.partition(":")
    answer = getattr(import_module(module), function)(**json.loads(arguments))
    Path(out).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    _child(*sys.argv[1:4])
