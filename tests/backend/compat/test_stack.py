"""Room on the interpreter's stack: no depth at which calls of a small function map memory every time."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from optpass.backend.compat.stack import run_with_room, with_room

resource = pytest.importorskip("resource")

CALLS = 300
DEPTHS = range(1, 200)


def leaf(value: int) -> int:
    return value


def faults_at(depth: int) -> int:
    """Pages that are touched anew by calls of a small function, made that many frames below."""
    if depth:
        return faults_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        leaf(1)
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_minflt) - before


def most(call: Callable[[int], int]) -> int:
    return max(call(depth) for depth in DEPTHS)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts pages as Linux does")
def test_no_depth_maps_memory_at_every_call() -> None:
    if sys.version_info < (3, 14):
        assert most(faults_at) >= CALLS  # what room is for; where this fails, it is not needed any more
    assert most(lambda depth: run_with_room(faults_at, depth)) < CALLS / 2


def test_arguments_results_and_errors_pass() -> None:
    assert run_with_room(divmod, 7, 2) == (3, 1)
    assert run_with_room(dict, a=1) == {"a": 1}
    with pytest.raises(ZeroDivisionError):
        run_with_room(divmod, 1, 0)


def test_the_code_is_otherwise_the_same() -> None:
    made = with_room(leaf.__code__)
    assert made.co_stacksize > leaf.__code__.co_stacksize
    assert made.replace(co_stacksize=leaf.__code__.co_stacksize) == leaf.__code__
