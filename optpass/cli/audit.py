"""`optpass audit`: reads the flags, runs the program, shows and writes what was found, and decides the exit code.

The program's standard output is its own: what is said here goes to standard error, but for `--json -`, which turns the
two around. Running is `optpass.auditing.runner`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from optpass.cli.flags import Html, Json
from optpass.errors import AuditError, ConfigError
from optpass.reporting.writable import STDOUT, check_targets

if TYPE_CHECKING:
    from optpass.auditing.runner import Ended, Job
    from optpass.reporting.audit.baseline import Difference
    from optpass.reporting.audit.model import Audit

FailOn = Literal["new", "any", "never"]
#: Exit codes of our own, where the program's is 0.
FOUND, NOTHING_COMPILED = 1, 4


class NothingCompiled(AuditError):
    """The program never compiled anything, so there is nothing to audit."""

    exit_code = NOTHING_COMPILED


def audit(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SCRIPT] [-- ARGS...]", help="The program, and behind '--' what it is given."),
    ] = None,
    module: Annotated[
        str | None, typer.Option("--module", "-m", help="A module instead, as 'python -m' runs it.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", min=1, metavar="N", help="End the run after N optimizer steps (or calls, without one)."
        ),
    ] = None,
    json: Json = None,
    html: Html = None,
    markdown: Annotated[
        str | None, typer.Option("--markdown", metavar="PATH", help="Write Markdown for a pull request to PATH.")
    ] = None,
    sarif: Annotated[
        str | None, typer.Option("--sarif", metavar="PATH", help="Write SARIF 2.1.0 for code review to PATH.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="PATH", help="Compare with an audit that --json wrote before.")
    ] = None,
    save_baseline: Annotated[
        str | None, typer.Option("--save-baseline", metavar="PATH", help="Write JSON to PATH too, for later runs.")
    ] = None,
    fail_on: Annotated[
        FailOn,
        typer.Option("--fail-on", help="Exit 1 on findings that the baseline lacks, on any finding, or never."),
    ] = "never",
    verify_fixes: Annotated[
        bool, typer.Option("--verify-fixes", help="Try each diff on a copy: is the break gone, are outputs equal?")
    ] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="Change the program's files by the diffs that were verified.")
    ] = False,
    top: Annotated[int, typer.Option("--top", min=1, metavar="N", help="Entries per section.")] = 10,
) -> None:
    """Run a program unchanged, and tell its graph breaks, recompiles and what runs eager: where, why, what it costs.

    optpass audit train.py --steps 20 -- --its --own flags

    Exit code: the program's own; where that is 0: 1 by --fail-on, 4 if it never compiled anything.
    """
    if fail_on == "new" and baseline is None:
        raise ConfigError("--fail-on new needs --baseline PATH, the audit to compare with")
    named = {"--json": json, "--html": html, "--markdown": markdown, "--sarif": sarif, "--save-baseline": save_baseline}
    check_targets(named)
    from optpass.auditing.runner import run
    from optpass.reporting.audit.files import read

    before = read(baseline, "baseline") if baseline is not None else None
    job = _job(command or [], module, steps, stdout=sys.stderr.fileno() if json == STDOUT else None)
    ended = run(job)
    found = _merged(ended, job, json)
    if found is None:
        _exit(ended, 0)
        return
    if verify_fixes or apply:
        if len({process.rank for process in found.processes}) > 1:
            raise ConfigError(
                "--verify-fixes and --apply run the program again, which ranks cannot; run it without torchrun"
            )
        found = _verified(found, job, apply=apply)
    difference = None
    if before is not None:
        from optpass.reporting.audit.baseline import compare

        difference = compare(before, found)
    written = _write(found, difference, named)
    if ended.compiled or json == STDOUT:
        _show(found, difference, json, top)
    elif ended.code:
        print("optpass: the program compiled nothing before it ended", file=sys.stderr)
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
    if not ended.compiled and "problem" in ended.facts:
        raise AuditError(f"nothing could be recorded: {ended.facts['problem']}; please report this bug")
    if not ended.compiled and ended.code == 0:
        raise NothingCompiled(
            f"{job.target} never called a function compiled by torch.compile, so there is nothing to audit; "
            "what forked processes and other programs compile is not seen, but ranks are: "
            "torchrun ... -m optpass audit SCRIPT"
        )
    _exit(ended, _gate(found, difference, fail_on))


def _job(command: list[str], module: str | None, steps: int | None, stdout: int | None) -> Job:
    from optpass.auditing.runner import Job

    if module is None and not command:
        raise ConfigError("no program given: optpass audit SCRIPT [-- ARGS], or optpass audit -m MODULE [-- ARGS]")
    program, arguments = (module, command) if module is not None else (command[0], command[1:])
    return Job(program, module is not None, tuple(arguments), steps, stdout)


def _merged(ended: Ended, job: Job, json: str | None) -> Audit | None:
    """The run's records, with those of other ranks; None where another rank is left to show them."""
    from optpass.auditing.ranks import together
    from optpass.auditing.runner import nothing_recorded

    found = ended.audit if ended.audit is not None else nothing_recorded(job, ended)
    merged, complete = together(found, json if json != STDOUT else None)
    return merged if complete else None


def _verified(found: Audit, job: Job, *, apply: bool) -> Audit:
    from optpass.auditing.verify import verify_fixes  # imported here: it runs the program again

    return verify_fixes(found, job, apply=apply)


def _write(found: Audit, difference: Difference | None, named: dict[str, str | None]) -> list[str]:
    """Every file that was asked for, written before anything is printed; their paths."""
    from optpass.auditing.outputs import write_as

    views = {
        "--json": "json",
        "--save-baseline": "json",
        "--html": "html",
        "--markdown": "markdown",
        "--sarif": "sarif",
    }
    wanted = {flag: path for flag, path in named.items() if path is not None and path != STDOUT}
    for flag, path in wanted.items():
        write_as(found, path, views[flag], difference)
    return list(wanted.values())


def _show(found: Audit, difference: Difference | None, json: str | None, top: int) -> None:
    if json == STDOUT:
        from optpass.reporting.audit.files import to_json

        sys.stdout.write(to_json(found))
        sys.stdout.flush()
        return
    from optpass.cli.output import console
    from optpass.reporting.audit.terminal import render

    render(found, console(stderr=True), top=top, difference=difference)


def _gate(found: Audit, difference: Difference | None, fail_on: FailOn) -> int:
    """1 where the findings that are asked about exist; says which."""
    if fail_on == "new" and difference is not None and difference.new:
        new = len(difference.new)
        print(f"optpass: failed: {new} new finding{'s' * (new != 1)} (--fail-on new)", file=sys.stderr)
        return FOUND
    if fail_on == "any":
        from optpass.reporting.audit.baseline import findings

        if number := len(findings(found)):
            print(f"optpass: failed: {number} finding{'s' * (number != 1)} (--fail-on any)", file=sys.stderr)
            return FOUND
    return 0


def _exit(ended: Ended, gate: int) -> None:
    """End as the program ended; by the gate's code where it ended well."""
    if ended.code < 0:
        from optpass.auditing.runner import die_by

        die_by(-ended.code)
        raise typer.Exit(128 - ended.code)
    if ended.code or gate:
        raise typer.Exit(ended.code or gate)
