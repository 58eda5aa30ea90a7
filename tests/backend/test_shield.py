"""Inductor's attention matcher takes dims and scalars for wildcards; nothing compiled by optpass may suffer from it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import functional as F

from optpass.backend import compat, inner
from optpass.backend.compat import attention_matcher
from optpass.backend.reporting import build_report
from optpass.options import Options

#: What is left of optpass without its own pass for attention: the shield does not depend on it.
OPTIONS: dict[str, Any] = {"attention": "off"}
LOWEST = torch.finfo(torch.float32).min


@dataclass
class Program:
    """What looks like attention to Inductor: the program, makers of its inputs, and whether it does in training too."""

    name: str
    function: Callable[..., torch.Tensor]
    inputs: Sequence[Callable[[], torch.Tensor]]
    trains: bool = False


def normal(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(shape)


def words() -> torch.Tensor:
    return torch.randint(0, 3, (2, 8))


def hidden_row() -> torch.Tensor:
    visible = torch.ones(8, 8, dtype=torch.bool).tril()
    visible[3] = False
    return visible


def additive(value: float) -> Callable[[], torch.Tensor]:
    return lambda: torch.zeros(2, 1, 8, 8).masked_fill(~hidden_row(), value)


def heads_first(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(t.permute(0, 2, 1, 3) for t in tensors)


def over(dim: int) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: ((q @ k.transpose(-2, -1)) / 4.0).softmax(dim) @ v


def permuted_over(dim: int) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: over(dim)(*heads_first(q, k, v))


def batches_over(dim: int) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(dim), v)


def masked_over(dim: int) -> Callable[..., torch.Tensor]:
    return lambda q, k, v, m: ((q @ k.transpose(-2, -1)) / 4.0 + m).softmax(dim) @ v


def filled(word: int, fill: float) -> Callable[..., torch.Tensor]:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        q, k, v = heads_first(q, k, v)
        scores = (q @ k.transpose(-2, -1)) / 4.0
        return scores.masked_fill((m == word).view(2, 1, 1, 8).expand_as(scores), fill).softmax(-1) @ v

    return function


def chosen(fill: float) -> Callable[..., torch.Tensor]:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        q, k, v = heads_first(q, k, v)
        scores = q @ k.transpose(-2, -1)
        scores = scores / torch.full([], 4.0, dtype=scores.dtype)
        return torch.where(visible, scores, torch.full([], fill, dtype=scores.dtype)).softmax(-1) @ v

    return function


def permuted_key(*order: int) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: ((q @ k.permute(order)) / 4.0).softmax(-1) @ v


def permuted(*order: int) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: over(-1)(q.permute(order), k.permute(order), v.permute(order))


def five_dims(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return over(-1)(*(t.permute(0, 2, 3, 1, 4) for t in (q, k, v)))


def scaled_by(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return ((q @ k.transpose(-2, -1)) * scale).softmax(-1) @ v


def regrouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.reshape(8, -1, 16) for t in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(2, 4, 8, 8) + m
    return torch.bmm(F.softmax(scores.view(8, 8, 8), -2), v).view(2, 4, 8, 16)


QKV = [normal(2, 4, 8, 16)] * 3
LATER = [normal(2, 8, 4, 16)] * 3
CUBE = [normal(4, 4, 4, 4)] * 3
PROGRAMS = [
    Program("softmax over -2", over(-2), QKV, trains=True),
    Program("softmax over 1", over(1), QKV, trains=True),
    Program("softmax over 0", over(0), QKV, trains=True),
    Program("permuted, softmax over -2", permuted_over(-2), LATER, trains=True),
    Program("permuted, softmax over 0", permuted_over(0), LATER, trains=True),
    Program("masked, softmax over -2", masked_over(-2), [*QKV, normal(2, 1, 8, 8)]),
    Program("bmm, softmax over 1", batches_over(1), [normal(4, 8, 16)] * 3),
    Program("bmm, softmax over 0", batches_over(0), [normal(4, 8, 16)] * 3),
    Program("words other than 0 and 1", filled(0, -math.inf), [*LATER, words]),
    Program("another word", filled(2, -math.inf), [*LATER, words]),
    Program("real words", filled(0, -math.inf), [*LATER, normal(2, 8)]),
    Program("filled with 0", filled(0, 0.0), [*LATER, words]),
    Program("0 chosen", chosen(0.0), [*LATER, hidden_row]),
    Program("1e4 chosen", chosen(1e4), [*LATER, hidden_row]),
    Program("lowest chosen, a hidden row", chosen(LOWEST), [*LATER, hidden_row]),
    Program("a hidden row of -inf", masked_over(-1), [*QKV, additive(-math.inf)]),
    Program("a hidden row of the lowest", masked_over(-1), [*QKV, additive(LOWEST)]),
    Program("the key not transposed", permuted_key(0, 1, 2, 3), CUBE, trains=True),
    Program("the key permuted", permuted_key(1, 2, 0, 3), CUBE, trains=True),
    Program("everything permuted", permuted(0, 3, 2, 1), CUBE, trains=True),
    Program("batch and heads swapped", permuted(1, 0, 2, 3), CUBE, trains=True),
    Program("a scale of 0 dims", scaled_by, [*QKV, lambda: torch.rand(()) + 0.1]),
    Program("five dims", five_dims, [normal(2, 8, 4, 3, 16)] * 3, trains=True),
    Program("regrouped, softmax over -2", regrouped, [*QKV, normal(2, 1, 8, 8)]),
]


def together(programs: list[Program]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """All programs as one function of all their inputs: one compile, in which none is lost."""

    def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left = list(inputs)
        return tuple(p.function(*[left.pop(0) for _ in p.inputs]) for p in programs)

    return function


def made(programs: list[Program], train: bool) -> list[torch.Tensor]:
    values = [make() for program in programs for make in program.inputs]
    return [value.requires_grad_(train) if value.is_floating_point() else value for value in values]


def assert_right(name: str, ours: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor) -> None:
    """To 1e-5 of the largest element; the gradient of a number is a sum whose terms may cancel, and as exact as eager
    mode's then, but for a few roundings."""
    allowed = 1e-5 * float(exact.nan_to_num().abs().max())
    if exact.dim() == 0:
        allowed = max(allowed, 4 * float((eager.double() - exact).nan_to_num().abs()))
    torch.testing.assert_close(
        ours.double(), exact, rtol=0, atol=allowed, equal_nan=True, msg=lambda text: f"{name}: {text}"
    )


def assert_all_right(programs: list[Program], train: bool, harness: Any) -> None:
    """Outputs and gradients of all programs, compiled together, are those of float64."""
    function, inputs = together(programs), made(programs, train)
    compiled = torch.compile(function, backend="optpass", fullgraph=True, dynamic=False, options=OPTIONS)
    ours, exact = harness.run(function, inputs, compiled), harness.in_double(function, inputs)
    eager = harness.run(function, inputs)
    assert build_report().graphs[0].inner == "inductor"
    for program, out, reference, own in zip(programs, ours.outputs, exact.outputs, eager.outputs, strict=True):
        assert_right(program.name, out, reference, own)
    names = [f"{program.name}: input {i}" for program in programs for i in range(len(program.inputs))]
    assert ours.grads.keys() == exact.grads.keys() and bool(ours.grads) is train
    for key, grad in exact.grads.items():
        assert_right(names[int(key.split()[1])], ours.grads[key], grad, eager.grads[key])


@pytest.mark.slow
@pytest.mark.by_turns
@pytest.mark.parametrize("train", [True, False])
def test_right_under_inductor(train: bool, harness: Any, fresh: torch.Generator) -> None:
    assert_all_right(PROGRAMS[1::4] if not train else [p for p in PROGRAMS if p.trains][::3], train, harness)


@pytest.fixture
def uncached() -> Iterator[None]:
    import torch._inductor.config

    with torch._inductor.config.patch(force_disable_caches=True):
        yield


@pytest.fixture
def no_code(uncached: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor up to the graph that it would make code of, which is run as it is."""
    from torch._inductor import compile_fx

    monkeypatch.setattr(compile_fx, "compile_fx_inner", lambda gm, inputs, **_: compat.boxed_nop(gm, inputs))


@pytest.mark.slow
@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("train", [False, True])
def test_the_graphs_that_inductor_makes_are_right(train: bool, harness: Any, fresh: torch.Generator) -> None:
    assert_all_right(PROGRAMS, train, harness)


def attention_nodes(function: Callable[..., Any], inputs: list[torch.Tensor]) -> int:
    """Attention ops in the graph that plain Inductor would lower; nothing is lowered."""
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    found: list[int] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        joint_graph_passes(graph)
        found.append(sum("scaled_dot_product" in str(n.target) for n in graph.graph.nodes))
        return compat.boxed_nop(graph, _)

    backend = compat.aot_autograd(
        fw_compiler=count, inference_compiler=count, decompositions=compat.inductor_decompositions()
    )
    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=False)(*inputs)
    return sum(found)


def test_inductor_would_take_them() -> None:
    taken = []
    for program in PROGRAMS:
        try:
            if attention_nodes(program.function, made([program], train=False)):
                taken.append(program.name)
        except Exception:  # noqa: BLE001  # it crashes on some: those it takes as well
            taken.append(program.name)
    assert len(taken) >= 20, taken


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return ((q @ k.transpose(-2, -1)) / 4.0).softmax(-1) @ v


def options_of(backend: str) -> dict[str, Any] | None:
    return OPTIONS if backend == "optpass" else None


def fused() -> int:
    return int(counters["inductor"]["fuse_attention"])


@pytest.mark.usefixtures("uncached")
def test_plain_inductor_keeps_its_patterns() -> None:
    inputs = [torch.randn(2, 4, 8, 16) for _ in range(3)]
    expected = attention(*(t.double() for t in inputs)).float()
    seen = []
    for backend in ("optpass", "inductor", "optpass", "inductor"):
        torch._dynamo.reset()
        counters.clear()
        torch.testing.assert_close(
            torch.compile(attention, backend=backend, options=options_of(backend))(*inputs), expected
        )
        seen.append((backend, fused()))
    assert seen == [("optpass", 0), ("inductor", 1), ("optpass", 0), ("inductor", 1)]


@pytest.mark.slow
def test_the_first_compile_decides_nothing(python: Callable[..., Any]) -> None:
    text = """
        import json, sys
        import torch
        from torch._dynamo.utils import counters
        from torch._inductor.fx_passes import joint_graph
        from optpass.backend import compat

        PASSES = {"optpass": compat.joint_graph_passes(), "inductor": joint_graph.joint_graph_passes}

        def attention(q, k, v):
            return ((q @ k.transpose(-2, -1)) / 4.0).softmax(-1) @ v

        def joint_only(graph, inputs):
            PASSES[name](graph)
            return compat.boxed_nop(graph, inputs)

        backend = compat.aot_autograd(
            fw_compiler=joint_only, inference_compiler=joint_only, decompositions=compat.inductor_decompositions()
        )
        result = {}
        for name in sys.argv[1:]:
            torch._dynamo.reset()
            counters.clear()
            torch.compile(attention, backend=backend)(*[torch.randn(2, 4, 8, 16) for _ in range(3)])
            entries = [e for found in joint_graph.patterns.patterns.values() for e in found]
            known = sum(map(compat.is_attention_pattern, entries))
            result[name] = counters["inductor"]["fuse_attention"], known
        result["table"] = {
            str(key): [type(e).__name__ + str(getattr(e, "pattern_name", "")) for e in entries]
            for key, entries in joint_graph.patterns.patterns.items() if entries
        }
        print(json.dumps(result))
    """
    ours, theirs = python(text, "optpass", "inductor").json, python(text, "inductor", "optpass").json
    assert ours["optpass"] == [0, 0], "registering patterns that nobody needs takes time"
    assert theirs["inductor"] == ours["inductor"] and theirs["inductor"][0] == 1 and theirs["inductor"][1] > 30
    assert theirs["optpass"][0] == 0
    assert ours["table"] == theirs["table"], "plain Inductor tries other patterns, or in another order"


def test_every_thread_for_itself() -> None:
    """A shield in one thread, held open, is none in another."""
    seen: dict[str, bool] = {}
    inside, done = threading.Event(), threading.Event()

    def ours() -> None:
        with compat.shielded():
            inside.set()
            done.wait(10)
            seen["ours"] = compat.is_shielded()

    def theirs() -> None:
        inside.wait(10)
        seen["theirs"] = compat.is_shielded()
        seen["found"] = attention_nodes(attention, [torch.randn(2, 4, 8, 16) for _ in range(3)]) > 0
        done.set()

    threads = [threading.Thread(target=f) for f in (ours, theirs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"ours": True, "theirs": False, "found": True}
    assert not compat.is_shielded()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "order"),
    [(False, ["inductor", "optpass", "optpass", "inductor"]), (True, ["optpass", "inductor", "inductor", "optpass"])],
)
def test_no_cache_entry_is_shared(train: bool, order: list[str]) -> None:
    from torch._inductor.utils import fresh_cache

    program = PROGRAMS[0].function
    inputs = [torch.randn(2, 4, 8, 16, requires_grad=train) for _ in range(3)]
    exact = program(*(t.double() for t in inputs))
    hits = []
    with fresh_cache():
        for backend in order:
            torch._dynamo.reset()
            counters.clear()
            out = torch.compile(program, backend=backend, options=options_of(backend))(*inputs)
            if train:
                out.sum().backward()
            hits.append(counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"] > 0)
            assert backend == "inductor" or torch.allclose(out.double(), exact, atol=1e-5), "an entry of plain Inductor"
    assert hits == [False, False, True, True], "the first of either must miss, and the second hit"


def test_analysis_is_shielded_too() -> None:
    options = OPTIONS | {"inner": "eager"}
    inputs = [torch.randn(2, 4, 8, 16) for _ in range(3)]
    torch.compile(PROGRAMS[0].function, backend="optpass", options=options)(*inputs)
    ops = {op.target for op in build_report().ops}
    assert any("bmm" in op for op in ops) and not any("scaled_dot_product" in op for op in ops), ops


@pytest.fixture
def no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_matcher, "_install", lambda: "_sfdp_init is not there")


@pytest.mark.usefixtures("no_hook")
def test_without_the_hook_no_pattern_runs() -> None:
    patches = inner.inductor_patches(Options(inductor={"pattern_matcher": True}), None, hooks())
    assert patches["pattern_matcher"] is False
    assert any("_sfdp_init is not there" in text for text in compat.self_test())
    inputs = [torch.randn(2, 4, 8, 16) for _ in range(3)]
    program = PROGRAMS[0].function
    out = torch.compile(program, backend="optpass", options=OPTIONS)(*inputs)
    torch.testing.assert_close(out, program(*(t.double() for t in inputs)).float())
    assert any("pattern_matcher=False" in text for text in build_report().warnings)


def hooks() -> Any:
    from optpass.backend.hooks import Hooks

    return Hooks("u", lambda gm: None, lambda f, b: None, lambda g: None, lambda b, s: None)


@pytest.mark.usefixtures("uncached")
def test_patterns_that_are_not_recognised_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = [torch.randn(2, 4, 8, 16) for _ in range(3)]
    assert attention_nodes(attention, inputs) == 1  # registered by now
    attention_matcher._warn_once.cache_clear()
    monkeypatch.setattr(attention_matcher, "is_attention_pattern", lambda entry: False)
    torch._dynamo.reset()
    program = PROGRAMS[0].function
    out = torch.compile(program, backend="optpass", options=OPTIONS)(*inputs)
    torch.testing.assert_close(out, program(*(t.double() for t in inputs)).float())
    assert "cannot be told from its other joint-graph patterns" in caplog.text
