"""In which order a GPU's cells are compiled and timed, with processes that only take notes."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from optpass.bench import attention_gpu
from optpass.bench.attention_gpu import COMPILE, TIME, WHOLE, Cell
from optpass.bench.progress import NoProgress
from optpass.bench.result import BenchError


class Notes:
    """In place of `Worker`: what each is called for, in order, and by which of them."""

    calls: list[tuple[int, str, str]]
    lock = threading.Lock()

    def __init__(self, target: str, *, environ: Any, calls: int) -> None:
        self.timeout_s = 0.0

    def __enter__(self) -> Notes:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def call(self, *, name: str, part: str, lock: str) -> dict[str, Any]:
        with self.lock:
            self.calls.append((id(self), name, part))
        if name == "broken":
            raise BenchError("RuntimeError: no such operator")
        if name == "large" and sum(called == name for _, called, _ in self.calls) == 1:
            raise BenchError("OutOfMemoryError: CUDA out of memory")
        return {"name": name, "left_out": ["eager"] if name == "too large" else []}


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> type[Notes]:
    monkeypatch.setattr(attention_gpu, "Worker", Notes)
    monkeypatch.setattr(attention_gpu, "usable_cores", lambda: 4)
    monkeypatch.setattr(Notes, "calls", [], raising=False)
    return Notes


def cells(*names: str, short: bool) -> list[Cell]:
    return [Cell(name, {"name": name}, short) for name in names]


def measured(given: list[Cell], folder: Path, seconds: float = 60.0) -> dict[str, Any]:
    return attention_gpu.measured("module:function", given, str(folder), time.monotonic() + seconds, NoProgress())


def test_short_cells_are_timed_when_all_are_compiled(notes: type[Notes], tmp_path: Path) -> None:
    found = measured(cells(*"abcde", short=True), tmp_path)
    assert found == {name: {"name": name, "left_out": []} for name in "abcde"}
    parts = [part for _, _, part in notes.calls]
    assert parts == [COMPILE] * 5 + [TIME] * 5
    compiled = {name: worker for worker, name, part in notes.calls if part == COMPILE}
    timed = [(worker, name) for worker, name, part in notes.calls if part == TIME]
    assert timed == [(compiled[name], name) for name in "abcde"], "by the process that has compiled it"


def test_no_process_holds_more_than_dynamo_compiles(notes: type[Notes], tmp_path: Path) -> None:
    names = [str(i) for i in range(2 * attention_gpu.HELD + 1)]  # two processes, and one cell more than they hold
    assert list(measured(cells(*names, short=True), tmp_path)) == names
    parts = [part for _, _, part in notes.calls]
    assert parts == [COMPILE] * (len(names) - 1) + [TIME] * (len(names) - 1) + [COMPILE, TIME]


def test_other_cells_are_measured_at_once(notes: type[Notes], tmp_path: Path) -> None:
    given = [*cells("a", short=True), *cells("b", "c", short=False)]
    assert measured(given, tmp_path).keys() == {"a", "b", "c"}
    assert [part for _, _, part in notes.calls] == [COMPILE, TIME, WHOLE, WHOLE]


@pytest.mark.parametrize("short", (True, False))
def test_what_fails_is_told(short: bool, notes: type[Notes], tmp_path: Path) -> None:
    found = measured(cells("broken", "a", short=short), tmp_path)
    assert isinstance(found["broken"], BenchError) and found["a"]["name"] == "a"
    assert [name for _, name, part in notes.calls if part == TIME] == (["a"] if short else [])


def test_what_time_is_over_for_is_missing(notes: type[Notes], tmp_path: Path) -> None:
    assert measured([*cells("a", short=True), *cells("b", short=False)], tmp_path, seconds=0.0) == {}
    assert not notes.calls


def test_what_the_memory_does_not_hold_beside_others_is_tried_alone(notes: type[Notes], tmp_path: Path) -> None:
    found = measured(cells("large", "too large", "a", "broken", short=False), tmp_path)
    assert found["large"]["name"] == "large" and found["too large"]["left_out"] == ["eager"]
    assert isinstance(found["broken"], BenchError)
    assert [name for _, name, _ in notes.calls][4:] == ["large", "too large"]
