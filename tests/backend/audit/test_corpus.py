"""Conformance: minimal programs that break in over 170 of Dynamo's registered ways, each found once, on its line.

Programs are in `corpus/`, grouped by topic. A program is a function without arguments whose docstring is the id that
torch's source gives to what it does wrong, and which gives `(function, arguments)` or `(function, arguments, more)`:

    more["config"]   Dynamo's settings that the break needs
    more["compile"]  keywords of `torch.compile`
    more["fixed"]    the function as the advice says it should be: breaks nowhere, gives the same
    more["fixed_config"]  settings that the advice names

The line that must be found ends in `# break`, so no line number is written down and none can go stale. Some programs
are wrong in eager mode too, or raise while being compiled: what they raise does not matter here.
"""

from __future__ import annotations

import contextlib
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
from optpass.reporting.audit.model import Audit, Break

CORPUS = Path(__file__).parent / "corpus"
#: What Dynamo wraps around a break that it cannot get over; the break inside is the one to report.
pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="what breaks, and under which id, is written down for torch 2.13"
)


@dataclass
class Program:
    """One program and what watching it found."""

    name: str
    gb_id: str
    file: str
    first: int
    last: int
    line: int
    build: Callable[[], tuple[Any, ...]]
    found: list[Break] = field(default_factory=list)

    def more(self) -> dict[str, Any]:
        built = self.build()
        return built[2] if len(built) > 2 else {}

    def run(self, key: str = "") -> tuple[Audit, Any]:
        """Compile and call the program's function, or the one under `key`; gives the audit and the output."""
        function, arguments, *rest = self.build()
        more = rest[0] if rest else {}
        settings = more.get(f"{key}_config" if key else "config", {})
        compile_options = {"backend": "eager", **({} if key else more.get("compile", {}))}
        torch._dynamo.reset()
        torch.manual_seed(0)
        out = None
        with Recording(user_roots=(CORPUS,)) as recording, torch._dynamo.config.patch(settings), silence():
            compiled = torch.compile(more[key] if key else function, **compile_options)
            with contextlib.nullcontext() if key else contextlib.suppress(Exception):
                out = compiled(*arguments)
        return recording.result(), out

    def here(self, record: Break) -> int | None:
        """The line of a break in this program, None if it is elsewhere."""
        for file, line in ((record.file, record.line), (record.user_file, record.user_line)):
            if file == self.file and line is not None and self.first <= line <= self.last:
                return line
        return None

    def __str__(self) -> str:
        found = [(b.gb_id or b.gb_type, self.here(b) or f"{Path(b.file).name}:{b.line}") for b in self.found]
        return f"{Path(self.file).name}:{self.line} {self.name}: {self.gb_id} expected, found {found}"


@contextlib.contextmanager
def silence() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield


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
        yield Program(name, doc.split()[0], str(path), first, first + len(source) - 1, marked[0], build)


@pytest.fixture(scope="module")
def corpus() -> Iterator[list[Program]]:
    """All programs, run once each."""
    every = [program for path in sorted(CORPUS.glob("*.py")) for program in programs(path)]
    before = dict(os.environ)
    for program in every:
        program.found = program.run()[0].breaks
    yield every
    os.environ.clear()
    os.environ.update(before)
    torch._dynamo.reset()


def listed(wrong: list[Program]) -> str:
    return "\n".join(map(str, wrong))


def on_line(program: Program) -> list[Break]:
    return [record for record in program.found if program.here(record) == program.line]


def test_covers_the_registry(corpus: list[Program]) -> None:
    ids = {program.gb_id for program in corpus}
    assert len(ids) >= 170
    names = Counter(program.name for program in corpus)
    assert not [name for name, count in names.items() if count > 1]


def test_caught(corpus: list[Program]) -> None:
    missed = [p for p in corpus if not any(p.here(record) for record in p.found)]
    assert len(missed) <= 0.01 * len(corpus), listed(missed)


def test_on_the_exact_line(corpus: list[Program]) -> None:
    wrong = [p for p in corpus if not on_line(p)]
    assert len(wrong) <= 0.02 * len(corpus), listed(wrong)


def test_with_the_registered_id(corpus: list[Program]) -> None:
    wrong = [p for p in corpus if on_line(p) and p.gb_id not in {record.gb_id for record in on_line(p)}]
    assert not wrong, listed(wrong)


def test_every_break_once(corpus: list[Program]) -> None:
    for program in corpus:
        places = Counter((b.file, b.line, b.column, b.gb_type) for b in program.found)
        assert max(places.values(), default=1) == 1, str(program)


def test_the_expected_break_is_not_a_consequence(corpus: list[Program]) -> None:
    """The record under the expected id stands for itself; at most what wraps it names it as its cause."""
    wrong = []
    for program in corpus:
        records = [record for record in on_line(program) if record.gb_id == program.gb_id]
        if records and all(record.caused_by is not None for record in records):
            wrong.append(program)
    assert len(wrong) <= 0.02 * len(corpus), listed(wrong)


def test_the_gates_let_nothing_pass(corpus: list[Program]) -> None:
    gates = [program for program in corpus if Path(program.file).stem == "gates"]
    assert len(gates) == 13
    assert not [str(p) for p in gates if p.gb_id not in {record.gb_id for record in on_line(p)}]


def test_advice_is_concrete(corpus: list[Program]) -> None:
    """At least 95% of the ids here have a text that says what to write instead."""
    advised: dict[str, str] = {}
    for program in corpus:
        for record in on_line(program):
            if record.gb_id == program.gb_id:
                text = advise(record.gb_type, record.gb_id, "", record.reason, record.hints)
                advised[program.gb_id] = advised.get(program.gb_id) or text
    assert len(advised) >= 170
    bare = sorted(gb_id for gb_id, text in advised.items() if not text)
    assert len(bare) <= 0.05 * len(advised), bare
    assert not [text for text in advised.values() if "report an issue" in text.lower()]


def test_advice_works(corpus: list[Program]) -> None:
    """Programs rewritten as their advice says break nowhere and give what the broken ones give."""
    rewritten = [program for program in corpus if "fixed" in program.more()]
    assert len(rewritten) >= 40
    for program in rewritten:
        audit, out = program.run("fixed")
        assert not audit.breaks, f"{program.name}: {[(b.gb_type, b.line) for b in audit.breaks]}"
        function, arguments, *_ = program.build()
        torch.manual_seed(0)
        with silence():
            torch.testing.assert_close(out, function(*arguments), msg=lambda text, p=program: f"{p.name}: {text}")
