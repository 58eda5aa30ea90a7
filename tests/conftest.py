"""Random numbers of the whole suite: new in every run, and drawn again by `--seed N`, which a run prints."""

from __future__ import annotations

import random
import sys
import zlib

import pytest
from hypothesis import settings

# Hypothesis draws from the test's own name: with a seed given, the same programs again.
settings.register_profile("seeded", derandomize=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "draw the random numbers of an earlier run again; without it they are new, and the run says its seed"
    parser.addoption("--seed", type=int, default=None, help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    """Before the workers of xdist start, which are given the options as they stand here."""
    if config.option.seed is None:
        config.option.seed = random.SystemRandom().getrandbits(31)
    elif not hasattr(config, "workerinput"):
        config.option.seeded = True
    if getattr(config.option, "seeded", False):
        settings.load_profile("seeded")


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    """The header is not shown by -q."""
    if exitstatus != pytest.ExitCode.OK:
        terminalreporter.write_line(f"to draw the same random numbers: --seed {config.option.seed}")


@pytest.fixture(autouse=True)
def drawn(request: pytest.FixtureRequest) -> int:
    """The seed of one test: it depends on the run's and on the test's name, not on what ran before it."""
    seed = zlib.crc32(f"{request.config.option.seed} {request.node.nodeid}".encode())
    random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
    return seed
