"""What a break costs: bytes across it, compiling what is behind it, its guards."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from optpass.backend.audit.breaks import only_roots
from optpass.backend.audit.recording import Recording
from optpass.reporting.audit.model import Audit

Program = Callable[[str], ModuleType]
Record = Callable[..., Audit]


def test_bytes_across_the_boundary(program: Program, record: Record) -> None:
    module = program("def f(x, w):\n    y, z = x @ w, x.half()\n    print('a')\n    return y.sum() + z.sum()\n")
    (found,) = record(module.f, torch.randn(8, 4), torch.randn(4, 16)).breaks
    assert found.cost.boundary_bytes == 8 * 16 * 4 + 8 * 4 * 2


def test_a_break_before_the_first_operation_has_none(program: Program, record: Record) -> None:
    module = program("def f(x):\n    print('a')\n    return x + 1\n")
    (found,) = record(module.f, torch.randn(8)).breaks
    assert found.cost.boundary_bytes == 0
    assert found.cost.compile_s is not None and found.cost.compile_s > 0
    assert found.cost.guard_us is not None


def test_symbolic_sizes_take_their_hint_and_no_guard(program: Program, record: Record) -> None:
    module = program("def f(x):\n    y = x * 2\n    print('a')\n    return y + 1\n")
    (found,) = record(module.f, torch.randn(8, 4), dynamic=True).breaks
    assert found.cost.boundary_bytes == 8 * 4 * 4


def test_a_function_that_falls_to_eager_has_no_boundary(program: Program, record: Record) -> None:
    module = program("def f(x):\n    for i in range(2):\n        print(i)\n        x = x + 1\n    return x\n")
    first, *_ = record(module.f, torch.randn(8)).breaks
    assert first.effect == "frame eager"
    assert first.cost.boundary_bytes is None and first.cost.compile_s is None


def test_costs_go_to_the_break_in_front(program: Program, record: Record) -> None:
    module = program("""
        def f(x):
            y = x * 2
            print('a')  # first
            for i in range(40):
                y = y.sin() + i
            print('b')  # second
            return y + 1
    """)
    audit = record(module.f, torch.randn(8))
    first, second = sorted(audit.breaks, key=lambda found: found.line)
    assert first.cost.compile_s is not None and second.cost.compile_s is not None
    assert first.cost.compile_s > second.cost.compile_s  # the long part is behind the first
    assert audit.breaks[0] is first  # ranked by cost


def priced(program: Program, text: str, *args: torch.Tensor) -> float | None:
    torch._dynamo.reset()
    module = program(text)
    with Recording() as recording:
        torch.compile(module.f, backend="eager")(*args)
    assert all(found.cost.fusion_lost_us is None for found in recording.result().breaks)  # only where asked for
    (found,) = only_roots(recording.result(costs=True).breaks)
    assert recording.result(costs=True).breaks[0].cost.fusion_lost_us == found.cost.fusion_lost_us
    return found.cost.fusion_lost_us


def test_fusion_lost_grows_with_what_crosses(program: Program) -> None:
    text = "def f(x):\n    y = x.sin() + 1\n    print('a')\n    return y.cos() * 2\n"
    small, large = (priced(program, text, torch.randn(n, 1024)) for n in (64, 4096))
    assert small is not None and large is not None
    assert large > small >= 0


def test_nothing_is_lost_between_halves_that_share_nothing(program: Program) -> None:
    text = "def f(x, z):\n    y = x @ x\n    print('a')\n    return y, z @ z\n"
    lost = priced(program, text, torch.randn(256, 256), torch.randn(256, 256))
    text = "def f(x, z):\n    y = (x @ x) * 2\n    print('a')\n    return y.relu() + 1, z @ z\n"
    shared = priced(program, text, torch.randn(256, 256), torch.randn(256, 256))
    assert lost is not None and shared is not None
    assert shared > lost


def test_training_halves_are_priced(program: Program) -> None:
    text = "def f(x, w):\n    y = (x @ w).relu()\n    print('a')\n    return (y * 2).sum()\n"
    lost = priced(program, text, torch.randn(512, 256), torch.randn(256, 256, requires_grad=True))
    assert lost is not None and lost > 0


def test_no_fusion_figure_where_a_half_is_missing(program: Program) -> None:
    text = "def f(x):\n    for i in range(2):\n        print(i)\n        x = x + 1\n    return x\n"
    assert priced(program, text, torch.randn(4)) is None
