"""Programs that look like attention: none is swapped that no kernel computes, and none comes out different.

The programs are in `near_misses/`, by topic. `make test` runs a quarter of them, which by its seed and part, each in
one of its modes; `pytest --all-runs` runs all in all modes, and every program through Inductor as well.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import optpass

FOLDER = Path(__file__).parent / "near_misses"
#: Inductor's own attention matcher gets these wrong, or dies of them, in torch 2.13; it is not to see them.
SPELLINGS = "inductor_spellings"
INDUCTOR_IS_WRONG = (
    *(f"{SPELLINGS}/{name}" for name in ("div, over -2", "div, over 0", "mul, over 1")),
    f"{SPELLINGS}/div, over -2-bfloat16", f"{SPELLINGS}/padding, empty sequence, finfo.min-bfloat16",
    *(f"{SPELLINGS}/padding{end}" for end in (" of 0 to 3", " of 0 to 3, m == 1", ", empty sequence")),
    f"{SPELLINGS}/padding, empty sequence, finfo.min",
    *(f"{SPELLINGS}/padding, fill {fill}" for fill in ("0", "1", "-5", "1e+09")),
    *(f"{SPELLINGS}/where, {end}" for end in ("empty row", "fill 0", "fill -5")),
    *(f"{SPELLINGS}/bert[bias {end}]" for end in ("(6,)", "of infinities")),
    f"{SPELLINGS}/bert_over_queries[bias over queries]", f"{SPELLINGS}/bert_alpha[bias with alpha]",
    f"{SPELLINGS}/t5_over_heads[T5, over heads]", f"{SPELLINGS}/Bart, over queries", f"{SPELLINGS}/Bart, over batch",
    "softmax_dims/cross over -2", "softmax_dims/transposed_scores_not_transposed_back", "normalisers/max over queries",
    "mask_contents/square, triu +1",
)  # fmt: skip
#: And these in training too.
WRONG_IN_TRAINING = tuple(f"{SPELLINGS}/{name}" for name in ("div, over -2", "mul, over 1", "bert[bias of infinities]"))
INDUCTOR_RUNS = [(n, "inference") for n in INDUCTOR_IS_WRONG] + [(n, "training") for n in WRONG_IN_TRAINING]


def _package() -> list[Any]:
    """Modules of `near_misses/`, which stands as the package `attention_near_misses`: no import path leads there."""
    if "attention_near_misses" not in sys.modules:
        spec = importlib.machinery.ModuleSpec("attention_near_misses", None, is_package=True)
        spec.submodule_search_locations = [str(FOLDER)]
        sys.modules["attention_near_misses"] = importlib.util.module_from_spec(spec)
    return [importlib.import_module(f"attention_near_misses.{name}") for name in ("loading", "check", "careless")]


loading, check, careless = _package()
PROGRAMS = {p.name: p for p in loading.programs()}
ALL_RUNS = [(name, mode) for name, p in PROGRAMS.items() for mode in p.modes]
#: Of so many programs `make test` runs one.
PARTS = 4
INFERENCE = [(name, mode) for name, mode in ALL_RUNS if mode == "inference"]
ONE_MODE_EACH = [(name, p.modes[i // PARTS % len(p.modes)]) for i, (name, p) in enumerate(PROGRAMS.items())]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What `make test` runs of the programs, and what `--all-runs` does."""
    option = metafunc.config.option
    part = slice((option.seed + (option.part or 0)) % PARTS, None, PARTS)
    some = {
        "test_stays_equal": (ONE_MODE_EACH[part], ALL_RUNS),
        "test_kernels_of_gpus_get_it_right_too": (INFERENCE[part], INFERENCE),
        "test_inductor_gets_it_right_too": (INDUCTOR_RUNS, ALL_RUNS),
    }
    if found := some.get(metafunc.function.__name__):
        runs = found[bool(option.all_runs)]
        metafunc.parametrize(("name", "mode"), runs, ids=[f"{name}-{mode}" for name, mode in runs])


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing compiled before counts, nor do options from outside."""
    for key in list(os.environ):
        if key.startswith("OPTPASS_"):
            monkeypatch.delenv(key)
    monkeypatch.chdir(tmp_path)
    optpass.reset_report()
    yield
    torch._dynamo.reset()
    optpass.reset_report()


@pytest.fixture
def seed(drawn: int) -> int:
    """New in every run, and with room for the seeds made of it."""
    return drawn // 2


def compiler(program: Any, inner: Any, **more: Any) -> Callable[[Any], Any]:
    """What compiles `program`'s callable with the attention pass in mode 'always'."""
    options = {"inner": inner, "strict": True, "attention": "always", **more}
    return lambda call: torch.compile(call, backend="optpass", dynamic=program.dynamic, options=options)


def test_stays_equal(name: str, mode: str, seed: int) -> None:
    program, counting = PROGRAMS[name], check.Counting()
    verdict = check.judge(program, mode, seed, compiler(program, counting, disable_passes=["roofline"]), counting)
    assert not verdict.problems, f"{program.why}\n" + "\n".join(verdict.problems)
    assert counting.graphs, "nothing was compiled"
    declined = optpass.report().declined("attention")
    if program.expect == "decline" and not program.quiet:
        assert declined, "looked at and declined without a word"
    assert len(optpass.report().sites("attention")) == verdict.fused


def test_kernels_of_gpus_get_it_right_too(name: str, mode: str, seed: int, as_on_gpus: Any) -> None:
    """Rows without a key, above all, which come out of them as zeros beside the lowest numbers, too."""
    program, counting = PROGRAMS[name], check.Counting()

    def inner(gm: Any, inputs: Any) -> Any:
        counting(gm, inputs)
        return as_on_gpus(gm)

    verdict = check.judge(program, mode, seed, compiler(program, inner, disable_passes=["roofline"]), counting)
    assert not verdict.problems, f"{program.why}\n" + "\n".join(verdict.problems)


def through_inductor(name: str, mode: str, seed: int, inductor: dict[str, Any]) -> list[str]:
    program = PROGRAMS[name]
    # Random numbers are eager's, which those of a random program are compared with.
    settings = {"fx_graph_cache": False, "fallback_random": program.random, **inductor}
    compiled = compiler(program, "inductor", inductor=settings)
    return check.judge(program, mode, seed, compiled, check.Counting()).problems


@pytest.mark.slow
def test_inductor_gets_it_right_too(name: str, mode: str, seed: int) -> None:
    """Its code generator is switched off, which does not matter to its matcher and saves a C++ compiler's time."""
    problems = through_inductor(name, mode, seed, {"fallback_by_default": True})
    assert not problems, f"{PROGRAMS[name].why}\n" + "\n".join(problems)


def test_inductor_gets_it_right_with_its_own_code(seed: int) -> None:
    assert not through_inductor(f"{SPELLINGS}/div, over -2", "inference", seed, {})


@pytest.mark.parametrize(
    "name", ["softmax_dims/4-D over -1", "buffers/Masked[tril]", "fills/-inf, where, one empty row"]
)
def test_stays_equal_with_deterministic_algorithms(name: str, seed: int) -> None:
    program, counting = PROGRAMS[name], check.Counting()
    torch.use_deterministic_algorithms(True)
    try:
        verdict = check.judge(program, "training", seed, compiler(program, counting), counting)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not verdict.problems


# ---- the suite itself ---------------------------------------------------------------------------------------------


def test_the_suite_is_large_enough() -> None:
    assert sum(p.expect == "decline" for p in PROGRAMS.values()) >= 150
    assert len(PROGRAMS) >= 220
    assert all(p.why and p.modes for p in PROGRAMS.values())


def test_the_comparison_catches_a_careless_rewrite(seed: int, pytestconfig: pytest.Config) -> None:
    """Values and gradients alone tell, for nearly all programs that a wildcard match would have swapped."""
    topics = ("softmax_dims", "normalisers", "after_softmax")
    swapped, caught = set(), set()
    candidates = [p for p in PROGRAMS.values() if p.expect == "decline" and p.name.split("/")[0] in topics]
    for program in candidates[:: 1 if pytestconfig.option.all_runs else 2]:
        counting = check.Counting()
        try:
            verdict = check.judge(program, program.modes[0], seed, careless.compiler(counting), counting)
        except RuntimeError:  # shapes that SDPA does not take
            continue
        if verdict.fused:
            swapped.add(program.name)
            caught |= {program.name} if len(verdict.problems) > 1 else set()  # one is that it was swapped at all
    assert len(swapped) >= 20
    assert swapped == caught, f"not told apart: {sorted(swapped - caught)}"


def _outcome(**grads: torch.Tensor | None) -> Any:
    return check.Outcome(outputs=[torch.tensor([1.0, 2.0])], inputs=[], grads=grads)


def test_the_comparison_sees_each_kind_of_difference() -> None:
    zero, nan = torch.zeros(2), torch.tensor([0.0, float("nan")])
    good = _outcome(a=torch.tensor([1.0, 2.0]))
    assert not check.differences(good, good, good)
    for other in (
        _outcome(a=None), _outcome(a=nan), _outcome(a=torch.ones(2, dtype=torch.float64)), _outcome(a=torch.ones(3)),
        _outcome(a=torch.tensor([1.0, 2.001])), _outcome(b=zero), _outcome(a=torch.tensor([1.0, float("inf")])),
    ):  # fmt: skip
        assert check.differences(good, other, good)
    assert check.differences(_outcome(a=zero), _outcome(a=nan), _outcome(a=zero))


def test_where_eager_overflows_eager_is_right() -> None:
    exact, eager = _outcome(a=torch.tensor([1.0, 2.0])), _outcome(a=torch.tensor([1.0, 7.0]))
    assert not check.differences(exact, eager, eager)
    assert check.differences(exact, exact, eager)
