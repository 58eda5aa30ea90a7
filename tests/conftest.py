"""Random numbers of the whole suite, drawn again by `--seed N`; and what its thousands of compiles need not do."""

from __future__ import annotations

import gc
import importlib
import itertools
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Hypothesis draws from the test's own name: with a seed given, the same programs again.
settings.register_profile("seeded", derandomize=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "draw the random numbers of an earlier run again; without it they are new, and the run says its seed"
    parser.addoption("--seed", type=int, default=None, help=help_text)
    help_text = "run every second of the tests marked `slow`; with the next number, the others"
    parser.addoption("--part", type=int, default=None, help=help_text)
    help_text = "run what is marked `by_turns` with both values of its last parameter"
    parser.addoption("--all-runs", action="store_true", help=help_text)
    help_text = "make tensors on this device, e.g. cuda, where a test names none"
    parser.addoption("--device", default=None, help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    """Before the workers of xdist start, which are given the environment as it stands here."""
    if not hasattr(config, "workerinput"):
        # What an earlier run compiled would be taken from there, and not be compiled again.
        folder = tempfile.mkdtemp(prefix="optpass-tests-")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        # What the processor says that it can do is taken; each new cache would build a trial of it.
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        children = str(Path(__file__).with_name("children"))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (children, os.environ.get("PYTHONPATH"))))
        # A shell's background jobs ignore SIGINT, and so would all that the tests start and interrupt.
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    # The collector need not look every 700 objects.
    gc.set_threshold(20_000, 20, 20)
    if config.option.seed is not None:
        settings.load_profile("seeded")
    elif hasattr(config, "workerinput"):
        config.option.seed = config.workerinput["seed"]
    else:
        config.option.seed = random.SystemRandom().getrandbits(31)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker is given the arguments of the command line alone, and would draw a seed of its own."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests marked `by_turns`, whose last parameter has two values, one of each pair: the first, then the second.
    With `--part N`, every second of those marked `slow`; four numbers that follow each other run all there are.
    Those marked `gpu` want `--device`."""
    if not config.option.device:
        gone = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=gone)
    if config.option.all_runs:
        return
    part = config.option.part or 0
    marked = [item for item in items if item.get_closest_marker("by_turns")]
    functions = [list(of) for _, of in itertools.groupby(marked, lambda item: item.nodeid.partition("[")[0])]
    left = {item for of in functions for i, item in enumerate(of) if (i // 2 + i + part // 2) % 2}
    if config.option.part is not None:
        slow = [item for item in items if item.get_closest_marker("slow") and item not in left]
        left.update(item for i, item in enumerate(slow) if (i + part) % 2)
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=list(left))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Spare thousands of small compiles what nothing here tests; all modules are loaded by now, torch with them.

    Dynamo times every set of guards, and flushes the processor's caches for that. `torch.manual_seed` writes the whole
    stack down for every device that is not there. All that torch's trace log may be asked for is written out where it
    has a handler, and pytest gives its own to each logger that does not propagate.
    """
    logging.getLogger("torch.__trace").propagate = True
    if torch := sys.modules.get("torch"):
        if session.config.option.device:
            torch.set_default_device(session.config.option.device)
        importlib.import_module("torch._dynamo.guards").profile_guard_manager = lambda *_: 0.0
        for device in (torch.cuda, torch.xpu, torch.mtia):
            if not device.is_available():
                device.manual_seed_all = lambda _: None


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


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for plans that looks less far: how good they are is asked in `tests/passes/memory`. Plans found with one
    effort are not given with another."""
    refill = importlib.import_module("optpass.passes.memory.search.refill")
    for name, effort in (("EFFORT", 2_500), ("EFFORT_SMALL", 2_500), ("EFFORT_GAPS", 1_200)):
        monkeypatch.setattr(refill, name, effort)
    known = importlib.import_module("optpass.backend.memory.plans.searches")
    for found in (known.SEARCHES.found, known.CHOICES):
        monkeypatch.setattr(found, "_found", type(found._found)())


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist = importlib.import_module("torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
