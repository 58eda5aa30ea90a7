"""The typer application: verbs, the global flags, and the one place where errors become one line and an exit code.

Verb modules are imported here, so they must import only the standard library, typer and light optpass modules at
the top; torch, pydantic and rich come in inside the functions. `optpass --help` stays under 0.3 s that way.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from optpass import __version__
from optpass.cli import analyze, audit, bench, env, plan, report, train
from optpass.errors import OptPassError
from optpass.naming import on_the_command_line

#: Exit code after Ctrl-C: 128 + SIGINT, as shells have it. Typer turns the exception into it.
INTERRUPTED = 130
#: Exit code where the reader of standard output left: 128 + SIGPIPE.
_READER_LEFT = 141
#: What the system says where standard output takes no more.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

app = typer.Typer(
    name="optpass",
    help="Analyse, optimise and explain what torch.compile compiles.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("analyze")(analyze.analyze)
app.command("plan")(plan.plan)
app.command("train")(train.train)
app.command("audit")(audit.audit)
app.command("bench")(bench.bench)
app.command("report")(report.report)
app.command("env")(env.env)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"optpass {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Analyse, optimise and explain what torch.compile compiles."""


def run(argv: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 2 bad input, 130 interrupted, 141 where the reader of the output left.

    Verbs may add codes of their own.

    `--debug` may stand anywhere before `--`; it turns the one-line error into a traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in own or os.environ.get("OPTPASS_DEBUG", "") not in ("", "0")
    arguments = [a for i, a in enumerate(arguments) if a != "--debug" or i >= len(own)]
    if sys.stdout is None:  # closed by who started us
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # for as long as the process is
    try:
        with on_the_command_line():
            code = app(arguments or ["--help"], prog_name="optpass", standalone_mode=False)
        sys.stdout.flush()
    except OptPassError as error:
        if debug:
            raise
        _fail(str(error), error.exit_code)
    except BrokenPipeError:
        _no_more_output()
        raise SystemExit(_READER_LEFT) from None
    except OSError as error:
        if debug or error.filename is not None or error.errno not in _FULL:
            raise
        _no_more_output()
        _fail(f"standard output cannot be written: {error.strerror}; free some space, or send it elsewhere", 2)
    except Exception as error:
        usage = getattr(error, "format_message", None)  # typer's own: a flag or a value that the parser refuses
        if usage is None or debug:
            raise
        _fail(f"{usage().rstrip('.')}. See {_command(arguments)} --help.", 2)
    if code == INTERRUPTED:
        _fail("interrupted", INTERRUPTED)
    raise SystemExit(code or 0)


def _no_more_output() -> None:
    """What standard output still holds goes nowhere, so that Python's exit does not fail by it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _command(arguments: list[str]) -> str:
    """`optpass VERB`, as far as the arguments name a verb."""
    verbs = [str(command.name) for command in app.registered_commands]
    return " ".join(["optpass", *(a for a in arguments[:1] if a in verbs)])


def _fail(message: str, code: int) -> None:
    typer.echo("optpass: error: " + " ".join(message.split()), err=True)
    raise SystemExit(code)
