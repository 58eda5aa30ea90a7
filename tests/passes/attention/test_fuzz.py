"""Random programs around attention, compiled in mode 'always' and compared with eager and float64, gradients too.

`make test` draws 50; `OPTPASS_FUZZ=10000 pytest tests/passes/attention/test_fuzz.py` draws as many as it says. The
generator is in `fuzz/`; a failing program is printed as a script. Hypothesis reduces it to a smaller one only with
`OPTPASS_FUZZ_SHRINK=1`, since that can take five minutes.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st

import optpass

HERE = Path(__file__).parent
#: No options, so they must be gone before options are read from the environment.
EXAMPLES = int(os.environ.pop("OPTPASS_FUZZ", "50"))
SHRINK = bool(os.environ.pop("OPTPASS_FUZZ_SHRINK", ""))
PHASES = (Phase.generate, Phase.shrink) if SHRINK else (Phase.generate,)


def _modules() -> list[Any]:
    """`near_misses/` and `fuzz/` as packages; no import path leads there."""
    for name, folder in (("attention_near_misses", "near_misses"), ("attention_fuzz", "fuzz")):
        if name not in sys.modules:
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(HERE / folder)]
            sys.modules[name] = importlib.util.module_from_spec(spec)
    names = ("attention_near_misses.check", "attention_near_misses.careless", "attention_fuzz.programs")
    return [importlib.import_module(name) for name in names]


check, careless, programs = _modules()

#: What became of each program of this process; one that is drawn twice counts once.
BECAME: dict[str, str] = {}


@st.composite
def sources(draw: st.DrawFn) -> Any:
    """A program. It follows from one number: Hypothesis, which draws choice by choice what it is to reduce, draws the
    same few choices over and over (of 100 programs fewer than half were distinct)."""
    if SHRINK:
        return programs.generate(lambda options: draw(st.sampled_from(options)))
    chance = random.Random(draw(st.integers(0, 2**63)))
    return programs.generate(lambda options: options[chance.randrange(len(options))])


@pytest.fixture(autouse=True, scope="module")
def clean_slate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No options from outside, no code left over."""
    with pytest.MonkeyPatch.context() as patch:
        for key in list(os.environ):
            if key.startswith("OPTPASS_"):
                patch.delenv(key)
        patch.chdir(tmp_path_factory.mktemp("fuzz"))
        yield
    torch._dynamo.reset()
    optpass.reset_report()


@pytest.mark.slow
@pytest.mark.timeout(0 if EXAMPLES > 500 else 300)
@settings(
    max_examples=EXAMPLES, phases=PHASES, deadline=None, suppress_health_check=list(HealthCheck), database=None,
    report_multiple_bugs=False, print_blob=False,
)  # fmt: skip
@given(sources(), st.integers(0, 2**30))
def test_random_programs(source: Any, seed: int) -> None:
    program, counting = source.program(), check.Counting()
    drawn = f"{source.mode} {source.sizes} {source.lines}"
    try:
        check.execute(program, source.mode, seed)
    except (RuntimeError, IndexError):  # eager refuses it: not a program
        BECAME[drawn] = "rejected"
        reject()
    options = {"inner": counting, "strict": True, "attention": "always", "disable_passes": ["roofline"]}
    optpass.reset_report()
    try:
        verdict = check.judge(
            program, source.mode, seed,
            lambda f: torch.compile(f, backend="optpass", dynamic=program.dynamic, options=options), counting,
        )  # fmt: skip
    except Exception as error:
        raise AssertionError(f"crashed\n\n{source.runnable(seed)}") from error
    BECAME[drawn] = "swapped" if verdict.fused else "kept" if optpass.report().declined("attention") else "silent"
    assert not verdict.problems, "\n".join(verdict.problems) + f"\n\n{source.runnable(seed)}"


def test_a_fair_share_was_swapped() -> None:
    """Runs after the fuzzer: a generator whose programs are all declined, or all taken, proves little."""
    if not BECAME:
        pytest.skip("the fuzzer ran in another process, or not at all")
    became = Counter(BECAME.values())
    total = len(BECAME) - became["rejected"]
    print(f"{became['swapped']} of {total} swapped, {became['rejected']} were no programs")
    assert 0.25 * total <= became["swapped"] <= 0.75 * total
    assert became["rejected"] <= 0.15 * total
    assert became["silent"] <= 1 + 0.005 * total  # sizes of 1 everywhere make an attention of products of elements


@pytest.mark.slow
def test_the_fuzzer_catches_a_careless_rewrite() -> None:
    """Of the programs that a wildcard match would swap wrongly, the comparison finds nearly all that have a twist."""
    swapped = caught = 0
    start = random.randrange(2**30)
    for seed in range(start, start + 50):
        chance = random.Random(seed)
        source = programs.generate(lambda options, chance=chance: options[chance.randrange(len(options))])
        program, counting = source.program(), check.Counting()
        try:
            verdict = check.judge(program, source.mode, seed, careless.compiler(counting), counting)
        except (RuntimeError, IndexError):
            continue
        swapped += verdict.fused > 0
        caught += verdict.fused > 0 and bool(verdict.problems)
    assert swapped >= 3, f"seeds from {start}"
    assert caught >= swapped // 2, f"{caught} of {swapped}, seeds from {start}"
