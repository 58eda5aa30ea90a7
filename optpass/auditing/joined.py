"""Python programs that the audited one starts by `subprocess`: they join the audit.

Where the program would start its own interpreter on a script or a module, this file is run in its place, by path, and
becomes that program in a process that records beside the first. The environment, streams, signals and `Popen.args`
stay as they are; only the new process's command line differs. Whatever is not plainly that is left alone: other
interpreters, `-c`, options that shut out what is installed, helpers of torch's own, and audits.
Standard library only until torch's compiler is loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Options of the interpreter's that change nothing for us; those that take a value, in the same or the next argument.
_FLAGS, _VALUED = frozenset("bBdOPqRsuvx"), frozenset("WX")
_EXECUTABLES, _CWD = 0, 3  # arguments of `_posixsubprocess.fork_exec` behind the first


def follow(folder: Path, told: str) -> None:
    """Have `subprocess` start such programs through this file from now on.

    Args:
        folder: of the files of records.
        told: settings as of `child.Recorder`, as JSON.
    """
    module = sys.modules["subprocess"]
    original = getattr(module, "_fork_exec", None)
    if original is None:
        return

    def fork_exec(arguments: Any, *others: Any) -> Any:
        given = arguments
        with contextlib.suppress(Exception):  # the program starts it as it asked for
            given = _through_here(arguments, others[_EXECUTABLES], others[_CWD], folder, told) or arguments
        return original(given, *others)

    module._fork_exec = fork_exec  # type: ignore[attr-defined]


def _through_here(
    arguments: Sequence[Any], executables: Sequence[bytes], cwd: Any, folder: Path, told: str
) -> list[str] | None:
    """The command line that runs the same program through this file; None for what is left alone."""
    texts = [os.fsdecode(argument) for argument in arguments]
    flags = interpreter_flags(texts[1:])
    if flags is None or not _is_ours(executables):
        return None
    rest = texts[1 + flags :]
    module = rest[0] == "-m"
    command, own = (rest[1], rest[2:]) if module else (rest[0], rest[1:])
    if not _joins(command, module, os.fsdecode(cwd) if cwd is not None else os.getcwd()):  # noqa: PTH109  # as Python
        return None
    what = json.dumps({"command": command, "module": module, "folder": str(folder), "told": told})
    return [*texts[: 1 + flags], __file__, what, *own]


def interpreter_flags(arguments: Sequence[str]) -> int | None:
    """How many arguments of the interpreter's come before the script or `-m`; None where there is neither, or where
    one of them changes what may be imported.
    """
    number = 0
    while number < len(arguments):
        text = arguments[number]
        if not text.startswith("-") or text == "-m":
            return number if number + (text == "-m") < len(arguments) else None
        letters = text[1:]
        valued = next((place for place, letter in enumerate(letters) if letter in _VALUED), None)
        if not letters or not set(letters[:valued]) <= _FLAGS:
            return None
        number += 2 if valued == len(letters) - 1 else 1
    return None


def _is_ours(executables: Sequence[bytes]) -> bool:
    """Whether the interpreter that is started is the one that runs here, by one of its names in the same folder."""
    started = next((os.fsdecode(path) for path in executables if os.access(path, os.X_OK)), None)
    if started is None or not sys.executable:
        return False
    same_folder = Path(started).absolute().parent == Path(sys.executable).absolute().parent
    return same_folder and Path(started).samefile(sys.executable)


def _joins(command: str, module: bool, cwd: str) -> bool:
    """Whether it is a program of the user's: neither a helper of torch's nor an audit of its own."""
    if module:
        return not command.startswith("torch._") and command.partition(".")[0] != "optpass"
    path = Path(cwd, command)
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    owners = [Path(__file__).parent.parent, *([Path(torch).parent] if torch else [])]
    return path.is_file() and not any(path.resolve().is_relative_to(owner.resolve()) for owner in owners)


# ---- in the new process ---------------------------------------------------------------------------------------------


def main() -> None:
    """Be the program that the first argument tells of; without a record where that is impossible."""
    what = json.loads(sys.argv[1])
    command, module, own = what["command"], what["module"], sys.argv[2:]
    try:
        from optpass.auditing import child, children
        from optpass.auditing.deferred import WhenCompilerLoads
        from optpass.auditing.program import Program
    except ImportError:  # it is given another place to import from
        _plainly(command, module, own)
        return
    path = children.new_path(Path(what["folder"]))
    outcome = child.Outcome(children.outcome_of(path))
    told = json.loads(what["told"])
    recorder = child.Recorder(path, outcome, told, first=False)
    atexit.register(child.at_exit, recorder)
    children.follow(Path(what["folder"]), told)
    WhenCompilerLoads(recorder.begin).install()
    try:
        child.run(Program(command, module, own), outcome)
    except SystemExit:
        if outcome.facts.get("ended") != "not found":
            raise
        sys.stderr.write(f"{sys.executable}: No module named {command}\n")
        raise SystemExit(1) from None


def _plainly(command: str, module: bool, own: list[str]) -> None:
    import runpy

    sys.argv[:] = [command, *own]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd() if module else os.path.dirname(os.path.realpath(command)))  # noqa: PTH109, PTH120
    if module:
        runpy.run_module(command, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command, run_name="__main__")


if __name__ == "__main__":
    # As in child.py: this file's folder is not the program's.
    if not sys.flags.safe_path:
        del sys.path[0]
    main()
