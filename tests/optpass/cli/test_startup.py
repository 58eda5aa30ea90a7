"""What must be instant imports neither torch nor pydantic."""

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
print("\\n", code, round(time.process_time() - start, 3), *(m for m in ("torch", "pydantic", "jinja2") if m in sys.modules))
"""
RUN = "from optpass.cli import main; main()"
#: CPU seconds; what is promised is 0.3 s on an idle machine, and a shared CI machine is given room.
LIMIT = 1.5


@pytest.mark.parametrize(
    ("statement", "arguments"),
    [
        ("import optpass; dir(optpass)", []),
        (RUN, ["--help"]),
        (RUN, ["--version"]),
        (RUN, ["analyze", "--help"]),
        (RUN, ["analyze", "--list"]),
        (RUN, ["analyze", "--list-devices"]),
        (RUN, ["env", "--help"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_instant(statement: str, arguments: list[str]) -> None:
    text = PROBE.format(arguments=arguments, statement=statement)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=True)
    code, seconds, *heavy = done.stdout.splitlines()[-1].split()
    assert code == "0" and heavy == []
    assert float(seconds) < LIMIT
