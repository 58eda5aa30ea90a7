"""Every source break once: the broken functions that gates miss, folding, cascades, owners, columns, module paths."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from optpass.backend.audit import message
from optpass.backend.audit.breaks import only_roots
from optpass.reporting.audit.model import Audit, Break

Program = Callable[[str], ModuleType]
Line = Callable[[ModuleType, str], int]
Record = Callable[..., Audit]

HEAD = """
import contextlib, logging, time, zlib
log = logging.getLogger("quiet")

@contextlib.contextmanager
def manager():
    yield

@torch._dynamo.disable
def disabled(x):
    return x + 1

def callee(x):
    print("callee")  # CALLEE
    return x + 1

def generator(x):
    for i in range(2):
        print(i)  # YIELDS
        yield x + i

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        print("double")  # FORWARD
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2

class Outer:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False

linear = torch.nn.Linear(4, 4)
linear.register_forward_hook(lambda module, args, out: print("hook"))  # HOOK
"""
#: name: (source of `f`, text on the line that breaks, GB ids that it has in one torch or another).
BROKEN = {
    "print": ("    y = x + 1\n    print('hi')  # BREAK\n    return y * 2", "# BREAK", "GB0059"),
    "item": ("    return x * x.sum().item()  # BREAK", "# BREAK", "GB0124"),
    "branch": ("    if x.sum() > 0:  # BREAK\n        return x + 1\n    return x - 1", "# BREAK", "GB0170"),
    "log": ("    log.warning('w')  # BREAK\n    return x + 1", "# BREAK", "GB0291"),
    "loop": ("    for i in range(3):\n        x = x + 1\n        print(i)  # BREAK\n    return x", "# BREAK", "GB0059"),
    "finally": (
        "    x = x + 1\n    try:\n        print('t')  # BREAK\n    finally:\n        x = x + 3\n    return x",
        "# BREAK", "GB0059",
    ),
    "context": ("    with Outer():\n        print('c')  # BREAK\n        x = x * 2\n    return x", "# BREAK", "GB0059"),
    "manager": ("    with manager():\n        print('m')  # BREAK\n        x += 2\n    return x", "# BREAK", "GB0059"),
    "mask": ("    return x[x > 0] * 2  # BREAK", "# BREAK", "GB0036"),
    "disable": ("    return disabled(x * 2) * 3  # BREAK", "# BREAK", "GB0098"),
    "time": ("    return x * time.time()  # BREAK", "# BREAK", "GB0007 GB9193"),  # a kind of its own since torch 2.14
    "open": ("    file = open('/dev/null')  # BREAK\n    return x + 1", "# BREAK", "GB0059"),
    "C function": ("    return x + zlib.crc32(b'a')  # BREAK", "# BREAK", "GB0007"),
    "backward": ("    (linear.weight * x).sum().backward()  # BREAK\n    return x + 1", "# BREAK", "GB0123"),
    "nested": ("    return callee(x * 2) * 3", "# CALLEE", "GB0059"),
    "generator": ("    return sum(generator(x))", "# YIELDS", "GB0059"),
    "Function": ("    return Double.apply(x) + 1", "# FORWARD", "GB0059"),
    "hook": ("    return linear(x) + 1", "# HOOK", "GB0059"),
}  # fmt: skip


def source(body: str) -> str:
    return f"{HEAD}\ndef f(x):\n{body}\n"


def at(audit: Audit, file: str | None, line: int) -> list[Break]:
    """Roots of breaks whose line, or whose user's line, this is."""
    places = ((b, {(b.file, b.line), (b.user_file, b.user_line)}) for b in only_roots(audit.breaks))
    return [b for b, found in places if (file, line) in found]


@pytest.mark.parametrize("name", BROKEN)
def test_caught_on_the_line(name: str, program: Program, line: Line, record: Record) -> None:
    body, text, gb_ids = BROKEN[name]
    module = program(source(body))
    audit = record(module.f, torch.randn(4, 4), calls=2)
    found = at(audit, module.__file__, line(module, text))
    assert len(found) == 1, audit.breaks
    assert audit.summary.breaks == 1, audit.breaks
    assert found[0].gb_id in gb_ids.split()
    assert found[0].reason and "***" not in found[0].reason
    assert found[0].column is not None
    assert not audit.notes
    assert set(audit.hooks.values()) == {"ok"}


@pytest.mark.parametrize("name", BROKEN)
def test_caught_when_raised(name: str, program: Program, line: Line, record: Record) -> None:
    body, text, _ = BROKEN[name]
    module = program(source(body))
    audit = record(module.f, torch.randn(4, 4), fullgraph=True)
    if name in ("item", "mask"):  # fullgraph=True captures these
        assert not audit.breaks
        return
    (found,) = at(audit, module.__file__, line(module, text))
    assert found.effect == "error"


def test_whole_function_is_not_broken(program: Program, record: Record) -> None:
    module = program("def f(x):\n    for i in range(3):\n        x = torch.relu(x) + i\n    return x\n")
    audit = record(module.f, torch.randn(4, 4), calls=3)
    assert not audit.breaks
    assert audit.summary.graphs == 1
    assert audit.summary.ops_captured_fraction == 1.0


def test_two_on_one_line_are_two(program: Program, record: Record) -> None:
    module = program("def f(x):\n    return x * x.sum().item() + x.mean().item()\n")
    audit = record(module.f, torch.randn(4, 4))
    assert sorted(b.column or 0 for b in only_roots(audit.breaks)) == [16, 33]


def test_columns_count_characters(program: Program, record: Record) -> None:
    module = program("def f(x):\n    größe = 'ä'; print(größe)\n    return x + 1\n")
    (found,) = record(module.f, torch.randn(4)).breaks
    assert (found.column, found.end_column) == (18, 30)


def test_loop_and_manager_follow_from_the_break(program: Program, record: Record) -> None:
    for name, kind in (("loop", "GB7000"), ("manager", "GB0066")):
        audit = record(program(source(BROKEN[name][0])).f, torch.randn(4, 4))
        follower = next(b for b in audit.breaks if b.gb_id == kind)
        assert follower.caused_by is not None
        assert audit.breaks[follower.caused_by].gb_id == "GB0059"
        assert audit.breaks[follower.caused_by].effect == "frame eager"


def test_context_manager_entered_again_follows(program: Program, record: Record) -> None:
    module = program("def f(x):\n    x = x + 1\n    with open('/dev/null') as file:\n        x = x * 2\n    return x\n")
    first, second = record(module.f, torch.randn(4)).breaks
    assert (first.gb_id, second.gb_id, second.caused_by) == ("GB0059", "GB0142", 0)


def test_what_encloses_a_break_and_breaks_by_itself_follows_from_nothing(program: Program, record: Record) -> None:
    audit = record(program("def f(x):\n    print(x.sum().item())\n    return x + 1\n").f, torch.randn(4))
    assert [(b.gb_id, b.caused_by) for b in sorted(audit.breaks, key=lambda b: b.column or 0)] == [
        ("GB0059", None), ("GB0124", None),
    ]  # fmt: skip


def test_nested_reports_are_folded(program: Program, record: Record) -> None:
    audit = record(program(source(BROKEN["nested"][0])).f, torch.randn(4, 4), calls=2)
    (found,) = audit.breaks
    assert found.occurrences == 2  # met while inlining, and again in the function itself
    assert found.function == "callee"


def test_generator_that_runs_alone_follows(program: Program, record: Record) -> None:
    audit = record(program(source(BROKEN["manager"][0])).f, torch.randn(4, 4))
    alone = next(b for b in audit.breaks if b.gb_id == "GB0003")
    assert alone.function == "manager" and alone.caused_by == 0


def test_generator_itself(program: Program, line: Line, record: Record) -> None:
    module = program(source("    return x"))
    (found,) = record(module.generator, torch.randn(4)).breaks
    assert (found.gb_id, found.line, found.caused_by) == ("GB0003", line(module, "def generator"), None)


def test_module_path_and_occurrences(program: Program, record: Record) -> None:
    module = program("""
        class Block(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 4)

            def forward(self, x):
                x = self.layer(x)
                print("block")
                return x

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = Block(), torch.nn.Linear(4, 4)

            def forward(self, x):
                return self.second(self.first(x))
    """)
    (found,) = record(module.Net(), torch.randn(2, 4)).breaks
    assert (found.module, found.function) == ("first", "Block.forward")


def test_line_of_a_library_names_the_users(program: Program, line: Line, record: Record) -> None:
    module = program("import json\n\ndef f(x):\n    json.dumps({'a': 1})  # USER\n    return x + 1\n")
    (found,) = record(module.f, torch.randn(4)).breaks
    assert found.owner == "library"
    assert (found.user_file, found.user_line) == (module.__file__, line(module, "# USER"))


def test_line_of_torch_names_the_users(program: Program, line: Line, record: Record) -> None:
    module = program("""
        layer = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def f(x):
            layer(x).sum().backward()
            optimizer.step()  # STEP
            return x + 1
    """)
    inside = [b for b in record(module.f, torch.randn(4, 4)).breaks if b.owner == "torch"]
    assert inside
    assert {(b.user_file, b.user_line) for b in inside} == {(module.__file__, line(module, "# STEP"))}


def test_break_inside_an_operator_that_takes_functions(program: Program, line: Line, record: Record) -> None:
    module = program("""
        def f(x):
            def other(x):
                print("in")  # INSIDE
                return x + 1
            return torch.cond(x.sum() > 0, other, lambda x: x - 1, (x,))
    """)
    audit = record(module.f, torch.randn(4))
    (found,) = at(audit, module.__file__, line(module, "# INSIDE"))
    assert (found.gb_id, found.effect) == ("GB0059", "error")


def test_recompile_does_not_double(program: Program, record: Record) -> None:
    module = program("def f(x, n):\n    y = x * n\n    print('a')\n    return y + n\n")
    torch._dynamo.reset()
    from optpass.backend.audit.recording import Recording

    with Recording() as recording:
        compiled = torch.compile(module.f, backend="eager", dynamic=False)
        for n in (1, 2, 3):
            compiled(torch.randn(4), n)
    (found,) = recording.result().breaks
    assert found.occurrences == 3


def test_message_taken_apart() -> None:
    text = (
        "Kind one\n  Explanation: why\n    it broke.\n  Hint: do this.\n  Hint: or\n    that.\n\n"
        "  Developer debug context: secret\n\n For more details about this graph break, please visit: https://x/y.html"
        "\n\n*** While handling this graph break, another graph break occurred: ***\n\n"
        "Kind two\n  Explanation: as a consequence.\n\n\n  Developer debug context: \n\nfrom user code:\n   File ..."
    )
    first, second = message.parse(text, "Kind two")
    assert (first.kind, first.reason, first.hints) == ("Kind one", "why it broke.", ("do this.", "or that."))
    assert first.context == "secret"
    assert (second.kind, second.reason, second.hints) == ("Kind two", "as a consequence.", ())
    (only,) = message.parse("Something else. And more.")
    assert (only.kind, only.reason) == ("Something else", "Something else. And more.")
