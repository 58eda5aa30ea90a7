"""The silent eager ledger beside what else goes on: resets, stances, threads, other ledgers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from optpass.backend.audit import eager_calls
from optpass.backend.audit.silent import SilentCollector
from optpass.reporting.audit.model import SilentEager

X = torch.randn(4)
Ledger = Callable[[], list[SilentEager]]


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, **({"backend": "eager"} | options))


def told(ledger: Ledger) -> list[tuple[str, str, int | None]]:
    return [(r.kind, r.function.rpartition(".")[2], r.calls) for r in ledger()]


def early(x: Any, leave: Any) -> Any:
    if leave:
        return x
    return x * 2


@pytest.mark.parametrize("unsafe", [False, True])
def test_stances_that_raise_pass_over_skipped_code(ledger: Ledger, unsafe: bool) -> None:
    run = compiled(early)
    run(X, True)
    stance = ("default", {"skip_guard_eval_unsafe": True}) if unsafe else ("fail_on_recompile", {})
    with torch.compiler.set_stance(stance[0], **stance[1]):
        run(X, False)  # as without an audit: nothing is raised, since Dynamo is not asked
    run(X, False)
    assert told(ledger) == [("skip poisoned", "early", 2)]


def test_reset_undoes_a_decision(ledger: Ledger) -> None:
    run = compiled(early)
    run(X, True)
    torch._dynamo.reset()
    run(X, False)
    run(X, False)
    assert told(ledger) == [("skip poisoned", "early", 1)]


def test_reset_before_uninstall_stays_a_reset() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    collector = SilentCollector()
    collector.install()
    compiled(early, backend=counter)(X, True)
    torch._dynamo.reset()
    collector.uninstall()
    compiled(early, backend=counter)(X, False)
    assert counter.frame_count == 1


def test_calls_are_counted_only_so_far(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_calls, "MOST", 5)
    run = compiled(early)
    for _ in range(9):
        run(X, True)
    (record,) = ledger()
    assert record.calls == 5
    assert "up to here" in record.reason


def test_several_ledgers(ledger: Ledger) -> None:
    run = compiled(early)
    run(X, True)
    second = SilentCollector()
    second.install()
    run(X, False)
    second.uninstall()
    run(X, False)
    assert told(second.records) == [("skip poisoned", "early", 1)]
    assert told(ledger) == [("skip poisoned", "early", 3)]


def test_threads(ledger: Ledger) -> None:
    run = compiled(early)
    run(X, True)
    threads = [threading.Thread(target=lambda: [run(X, False) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told(ledger) == [("skip poisoned", "early", 201)]


def test_non_recursive_disable_is_respected(ledger: Ledger) -> None:
    graphs: list[int] = []

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append(sum(node.op == "call_function" for node in gm.graph.nodes))
        return gm

    @torch.compiler.disable(recursive=False)
    def left_out(x: Any) -> Any:
        return early(x * 2 * 3, False)

    compiled(lambda x: left_out(x + 1) + 1, backend=backend)(X)
    assert graphs == [1, 1, 1]
