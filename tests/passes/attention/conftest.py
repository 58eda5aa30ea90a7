"""The attention programs in `forms/`, what counts kernels in a graph, and a float64 reference of a program.

`forms/` is importable as `attention_forms` once this module is loaded.
"""

from __future__ import annotations

import copy
import importlib
import importlib.machinery
import importlib.util
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

import optpass
from optpass.passes.attention.write import mask_operand, rows

FOLDER = Path(__file__).parent / "forms"
CORPUS = (
    "scale", "spelling", "softmaxes", "quotients", "parts", "elements", "pieces", "layout", "heads", "bias",
    "distances", "programmable", "masking", "floors", "context", "declines",
)  # fmt: skip
MASKS = ("causal_masks", "causal_buffers", "other_masks", "almost_causal", "almost_buffers")


def _load() -> list[Any]:
    """All forms, in the order of the files."""
    if "attention_forms" not in sys.modules:
        spec = importlib.machinery.ModuleSpec("attention_forms", None, is_package=True)
        spec.submodule_search_locations = [str(FOLDER)]
        sys.modules["attention_forms"] = importlib.util.module_from_spec(spec)
    for name in CORPUS + MASKS:
        importlib.import_module(f"attention_forms.{name}")
    return list(importlib.import_module("attention_forms.base").FORMS)


FORMS = _load()


@pytest.fixture(scope="session")
def forms() -> dict[str, Any]:
    """All forms by name."""
    return {f.name: f for f in FORMS}


#: Forms of which neither the dtype nor a backward changes what must be understood: one of their four cases is run.
ALIKE = (
    "spelling",
    "quotients",
    "parts",
    "elements",
    "pieces",
    "layout",
    "heads",
    "distances",
    "programmable",
    "declines",
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MODES = {"inference": False, "training": True}


def _cases(everything: bool, part: int) -> Iterator[Any]:
    """Forms in two of four cases, by turns: each dtype and each mode, or in one where they are `ALIKE`; or in all.

    Four parts that follow each other are all.
    """
    for turn, form in enumerate((f for f in FORMS if f.group == "form"), part):
        for (i, (dtype, value)), (j, (mode, training)) in itertools.product(
            enumerate(DTYPES.items()), enumerate(MODES.items())
        ):
            chosen = (2 * i + j - turn) % 4 == 0 if _alike(form) else (i + j - turn) % 2 == 0
            if everything or chosen:
                yield pytest.param(form, value, training, id=f"{form.name}-{dtype}-{mode}")


def _alike(form: Any) -> bool:
    return form.program.__module__.rpartition(".")[-1] in ALIKE


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`form`, `mask_form` and `almost_form` run over their groups; `dynamic_form` and `dropout_form` over parts, and
    `some_form` over one of three where forms are `ALIKE`.

    A test of `form`, `dtype` and `training` runs over `_cases`.
    """
    everything, part = metafunc.config.option.all_runs, metafunc.config.option.part or 0
    if {"form", "dtype", "training"} <= set(metafunc.fixturenames):
        metafunc.parametrize(("form", "dtype", "training"), list(_cases(everything, part)))
        return
    turns = itertools.count(part)
    chosen: dict[str, Callable[[Any], bool]] = {
        "form": lambda f: f.group == "form",
        "some_form": lambda f: f.group == "form" and (everything or not _alike(f) or next(turns) % 3 == 0),
        "mask_form": lambda f: f.group == "mask",
        "almost_form": lambda f: f.group == "almost",
        "dynamic_form": lambda f: f.group == "form" and f.dynamic,
        "dropout_form": lambda f: f.dropout > 0,
    }
    for name in set(chosen) & set(metafunc.fixturenames):
        forms = [f for f in FORMS if chosen[name](f)]
        metafunc.parametrize(name, forms, ids=[f.name for f in forms])


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled before counts, and neither TOML files nor variables of the caller do."""
    for key in list(os.environ):
        if key.startswith("OPTPASS_"):
            monkeypatch.delenv(key)
    monkeypatch.setenv("OPTPASS_CACHE_DIR", str(tmp_path / "optpass"))
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    optpass.reset_report()
    yield
    torch._dynamo.reset()
    optpass.reset_report()


@pytest.fixture
def seeded(drawn: int) -> int:
    """Random numbers that are new in every run."""
    return drawn


@pytest.fixture(scope="session")
def harness() -> Any:
    """`tests/harness.py`, which no import path leads to under `--import-mode=importlib`."""
    return _at(Path(__file__).parents[2] / "harness.py", "optpass_test_harness")


def _at(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[fx.GraphModule], Callable[..., Any]]:
    """Programs are written for a GPU's kernels; of such a graph, what runs it with CPU tensors as they compute it."""
    monkeypatch.setattr(rows, "takes_powers_of_two", lambda _: True)
    monkeypatch.setattr(mask_operand.MaskOperand, "dtype", property(lambda self: self.plan.dtype))
    run: Callable[[fx.GraphModule], Callable[..., Any]] = _at(
        Path(__file__).with_name("gpu_kernels.py"), "attention_gpu_kernels"
    ).run
    return run


class Kernels:
    """An inner compiler that runs the graph as it is and keeps the attention nodes of every graph that it got."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        self.graphs.append(gm)
        return gm

    def nodes(self, name: str) -> list[fx.Node]:
        """Calls of functions of that name in the last graph, bodies of higher-order operators included."""
        modules = [m for m in self.graphs[-1].modules() if isinstance(m, fx.GraphModule)]
        calls = [n for m in modules for n in m.graph.nodes if n.op == "call_function"]
        return [n for n in calls if re.search(name, _name(n.target))]

    @property
    def sdpa(self) -> list[fx.Node]:
        """Calls of scaled_dot_product_attention."""
        return self.nodes("scaled_dot_product_attention")

    @property
    def flex(self) -> list[fx.Node]:
        """Calls of flex_attention."""
        return self.nodes(r"flex_attention")


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", target))


@pytest.fixture
def kernels() -> Kernels:
    """See `Kernels`."""
    return Kernels()


@pytest.fixture
def compiled(kernels: Kernels) -> Callable[..., Any]:
    """Compiles with the attention pass switched on and the counting inner compiler; keywords go into the option."""

    def compile(program: Any, dynamic: bool | None = None, inner: Any = kernels, **attention: Any) -> Any:
        options = {"inner": inner, "strict": True, "attention": {"mode": "always", **attention}}
        options["disable_passes"] = ["roofline"]  # which would trace every graph once more for the report
        return torch.compile(program, backend="optpass", fullgraph=True, dynamic=dynamic, options=options)

    return compile


class _Widened(TorchFunctionMode):
    """Runs a program in float64 although it says float32 or its own dtype: casts down become casts to float64."""

    NARROW = (torch.float32, torch.bfloat16, torch.float16)
    CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.CASTS:
            return args[0].double()
        widen = lambda value: torch.float64 if value in self.NARROW else value  # noqa: E731
        args = tuple(widen(a) if isinstance(a, torch.dtype) else a for a in args)
        kwargs = {k: widen(a) if isinstance(a, torch.dtype) else a for k, a in (kwargs or {}).items()}
        return func(*args, **kwargs)


@pytest.fixture(scope="session")
def exact(harness: Any) -> Callable[[Any, list[Any]], Any]:
    """(program, inputs) -> outputs and gradients in float64, `.float()` and `dtype=torch.float32` widened too."""

    def run(program: Any, inputs: list[Any]) -> Any:
        if isinstance(program, nn.Module):
            program = copy.deepcopy(program).double()
        torch.set_default_dtype(torch.float64)
        try:
            with _Widened():
                return harness.in_double(program, inputs)
        finally:
            torch.set_default_dtype(torch.float32)

    return run
