"""Conformance: minimal programs that break in over 200 of Dynamo's registered ways, each found once, on its line.

Programs are in `corpus/`, grouped by topic. A program is a function without arguments whose docstring is the id that
torch's source gives to what it does wrong, and which gives `(function, arguments)` or `(function, arguments, more)`:

    more["config"]   Dynamo's settings that the break needs
    more["compile"]  keywords of `torch.compile`
    more["fixed"]    the function as the advice says it should be: breaks nowhere, gives the same
    more["fixed_config"], more["fixed_arguments"]  settings and arguments that the advice names

The line that must be found ends in `# break`, so no line number is written down and none can go stale. "of the whole
graph" in the docstring: the fault is no line's, any line of the program will do. Some programs are wrong in eager mode
too, or raise while being compiled: what they raise does not matter here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import io
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from optpass.auditing.fixes.knowledge import advise
from optpass.backend.audit.recording import Recording
from optpass.backend.compat.audit_trace import TraceListener
from optpass.reporting.audit.model import Audit, Break

CORPUS = Path(__file__).parent / "corpus"
#: What breaks, and under which id, is written down for this torch and Python; others trace some of it, or say it so.
AS_WRITTEN = torch.__version__.startswith("2.13.") and sys.version_info < (3, 12)


@dataclass
class Program:
    """One program and what watching it found."""

    name: str
    gb_id: str
    file: str
    first: int
    last: int
    line: int
    whole: bool
    build: Callable[[], tuple[Any, ...]]
    found: list[Break] = field(default_factory=list)
    logged: int = 0  # breaks that torch itself tells of in its trace log

    def more(self) -> dict[str, Any]:
        built = self.build()
        return built[2] if len(built) > 2 else {}

    def run(self, key: str = "") -> tuple[Audit, Any]:
        """Compile and call the program's function, or the one under `key`; gives the audit and the output."""
        torch.manual_seed(0)
        function, arguments, *rest = self.build()
        more = rest[0] if rest else {}
        settings = more.get(f"{key}_config" if key else "config", {})
        compile_options = {"backend": "eager", **({} if key else more.get("compile", {}))}
        arguments = more.get("fixed_arguments", arguments) if key else arguments
        torch._dynamo.reset()
        out = None
        log = TraceListener(self._on_record)
        log.start()
        try:
            with Recording(user_roots=(CORPUS,)) as recording, torch._dynamo.config.patch(settings), silence():
                compiled = torch.compile(more[key] if key else function, **compile_options)
                with contextlib.nullcontext() if key else contextlib.suppress(Exception):
                    out = compiled(*arguments)
        finally:
            log.stop()
        return recording.result(), out

    def _on_record(self, name: str, metadata: dict[str, Any], payload: str) -> None:
        self.logged += name == "dynamo_graph_break_reason"

    def here(self, record: Break) -> int | None:
        """The line of a break in this program, None if it is elsewhere."""
        for file, line in ((record.file, record.line), (record.user_file, record.user_line)):
            if file == self.file and line is not None and self.first <= line <= self.last:
                return line
        return None

    def at_line(self) -> list[Break]:
        """What was found on the marked line; of a fault of the whole graph, anywhere in the program."""
        return [b for b in self.found if (line := self.here(b)) is not None and (self.whole or line == self.line)]

    def expected(self) -> list[Break]:
        """What was found on that line under the id."""
        return [record for record in self.at_line() if record.gb_id == self.gb_id]

    def __str__(self) -> str:
        found = [(b.gb_id or b.gb_type, self.here(b) or f"{Path(b.file).name}:{b.line}") for b in self.found]
        return f"{Path(self.file).name}:{self.line} {self.name}: {self.gb_id} expected, found {found}"


@contextlib.contextmanager
def silence() -> Iterator[None]:
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


@functools.cache  # operators can be registered once
def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"corpus_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dynamo looks up globals of the programs there
    spec.loader.exec_module(module)
    return module


def programs(path: Path) -> Iterator[Program]:
    module = load(path)
    for name, build in list(vars(module).items()):
        doc = getattr(build, "__doc__", None) or ""
        if not inspect.isfunction(build) or build.__module__ != module.__name__ or not doc.startswith("GB"):
            continue
        source, first = inspect.getsourcelines(build)
        marked = [first + i for i, text in enumerate(source) if text.rstrip().endswith("# break")]
        assert len(marked) == 1, f"{name}: one line ends in '# break'"
        yield Program(
            name, doc.split()[0], str(path), first, first + len(source) - 1, marked[0], "whole graph" in doc, build
        )


FILES = sorted(CORPUS.glob("*.py"))
by_topic = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


@pytest.fixture(autouse=True)
def unchanged_environment() -> Iterator[None]:
    """Programs may set variables and seeds."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def watch(path: Path) -> list[Program]:
    """The programs of a file, each run once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the deprecated things that programs are about
        found = list(programs(path))
        for program in found:
            program.found = program.run()[0].breaks
    return found


def listed(wrong: list[Program]) -> str:
    return "\n".join(map(str, wrong))


def test_covers_the_registry() -> None:
    every = [program for path in FILES for program in programs(path)]
    assert len({program.gb_id for program in every}) >= 200
    assert not [name for name, count in Counter(p.name for p in every).items() if count > 1]
    assert sum(Path(program.file).stem == "gates" for program in every) == 13
    with silence():
        assert sum("fixed" in program.more() for program in every) >= 50


@pytest.mark.slow
@by_topic
def test_each_is_found_on_its_line(path: Path) -> None:
    """Caught, on the line, with the registered id, once, not as a consequence of something else, with advice."""
    watched = watch(path)
    missed = [p for p in watched if not any(p.here(record) for record in p.found) and (AS_WRITTEN or p.logged)]
    assert not missed, f"not caught:\n{listed(missed)}"
    if AS_WRITTEN:
        elsewhere = [p for p in watched if not p.at_line()]
        assert not elsewhere, f"not on the line:\n{listed(elsewhere)}"
        otherwise = [p for p in watched if not p.expected()]
        assert not otherwise, f"under another id:\n{listed(otherwise)}"
    else:
        assert sum(bool(p.at_line()) for p in watched) >= 0.7 * len(watched)
        assert all(record.gb_id for p in watched for record in p.found)
    for program in watched:
        places = Counter((b.file, b.line, b.column, b.gb_type) for b in program.found)
        assert max(places.values(), default=1) == 1, f"twice: {program}"
        roots = [b for b in program.at_line() if b.caused_by is None]
        assert roots or not program.at_line(), f"only as a consequence: {program}"
        for b in program.expected():
            text = advise(b.gb_type, b.gb_id, b.context, b.reason, b.hints)
            assert text and "report an issue" not in text.lower(), f"no advice: {program}"


@by_topic
def test_advice_works(path: Path) -> None:
    """Programs rewritten as their advice says break nowhere and give what the broken ones give."""
    for program in programs(path):
        if "fixed" not in program.more():
            continue
        audit, out = program.run("fixed")
        assert not audit.breaks or not AS_WRITTEN, f"{program.name}: {[(b.gb_type, b.line) for b in audit.breaks]}"
        torch.manual_seed(0)
        function, arguments, *_ = program.build()
        with silence():
            torch.testing.assert_close(out, function(*arguments), msg=lambda text, p=program: f"{p.name}: {text}")
