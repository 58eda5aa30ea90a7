"""What must be instant imports no torch, and no pydantic unless typer does, to read the arguments of a verb."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import sys, time
sys.argv = ["optpass", *{arguments!r}]
start = time.process_time()
try:
    {statement}
except SystemExit as stop:
    code = stop.code or 0
else:
    code = 0
heavy = [name for name in ("torch", "pydantic", "jinja2") if name in sys.modules]
print("\\n", code, round(time.process_time() - start, 3), *heavy)
"""
RUN = "from optpass.cli import main; main()"
#: CPU seconds; what is promised is 0.3 s on an idle machine, and a shared CI machine is given room.
LIMIT = 1.5


@pytest.mark.parametrize(
    ("statement", "arguments", "allowed"),
    [
        ("import optpass; dir(optpass)", [], []),
        (RUN, ["--help"], []),
        (RUN, ["--version"], []),
        (RUN, ["analyze", "--help"], ["pydantic"]),
        (RUN, ["analyze", "--list"], ["pydantic"]),
        (RUN, ["analyze", "--list-devices"], ["pydantic"]),
        (RUN, ["env", "--help"], ["pydantic"]),
        (RUN, ["audit", "--help"], ["pydantic"]),
    ],
    ids=["import", "help", "version", "analyze-help", "list", "list-devices", "env-help", "audit-help"],
)
def test_instant(statement: str, arguments: list[str], allowed: list[str]) -> None:
    text = PROBE.format(arguments=arguments, statement=statement)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=True)
    code, seconds, *heavy = done.stdout.splitlines()[-1].split()
    assert code == "0" and set(heavy) <= set(allowed)
    assert float(seconds) < LIMIT
