"""The advice: right for the case at hand, concrete, true of the torch that is installed, and there for nearly all."""

from __future__ import annotations

import json
import re
from importlib import resources

import pytest
import torch
import torch._dynamo.config

from optpass.auditing.fixes.knowledge import advise, knowledge

TEXTS = sorted({entry.text for entries in knowledge().values() for entry in entries})
SKIPPED = "Attempted to call function marked as skipped"
BUILTIN = "Failed to trace builtin operator"


def builtin(name: str, kinds: str = "['str']") -> str:
    return f"Dynamo does not know how to trace builtin operator `{name}` with argument types {kinds} (has_kwargs False)"


def in_c(name: str) -> str:
    return (
        f"Dynamo does not know how to trace the builtin `{name}.` This function is either a Python builtin "
        "(e.g. _warnings.warn) or a third-party C/C++ Python extension (perhaps created with pybind)."
    )


@pytest.mark.parametrize(
    ("kind", "explanation", "context", "says"),
    [
        (BUILTIN, builtin("print"), "", "torch.compiler.is_compiling()"),
        (BUILTIN, builtin("open"), "", "Files and the console"),
        (BUILTIN, builtin("eval"), "", "Write the expression as code"),
        (BUILTIN, builtin("divmod", "['Money', 'int']"), "", "`divmod` is not traced for arguments of type"),
        (BUILTIN, builtin("max", "['Money', 'int']"), "", "type ['Money', 'int']"),
        (SKIPPED, in_c("time.time"), "module: time, qualname: time, skip reason: <missing reason>", "Read the clock"),
        (SKIPPED, in_c("<unknown module>.Random.random"), "", "this draw of Python's `random`"),
        (
            "Unsupported method call",
            "Dynamo does not know how to trace method `normal` of class `Generator`",
            "call_method UserDefinedObjectVariable(Generator) normal [] {}",
            "NumPy's random numbers",
        ),
        (SKIPPED, in_c("zlib.crc32"), "", "`zlib.crc32` is written in C"),
        (SKIPPED, in_c("posix.getpid"), "", "(`posix`) cannot be in a graph"),
        (SKIPPED, in_c("_thread.get_ident"), "module: _thread, qualname: get_ident", "threads"),
        (SKIPPED, "Dynamo does not know how to trace the Python builtin `_warnings.warn`.", "", "Warn before or after"),
        (
            SKIPPED,
            (
                "Dynamo developers have intentionally marked that the function `helper` in file `/srv/json/lib.py` "
                "should not be traced."
            ),
            "module: json_lib, qualname: helper, skip reason: <missing reason>",
            "does not trace `helper`",
        ),
        (
            SKIPPED,
            (
                "Dynamo developers have intentionally marked that the function `run` in file "
                "`/usr/lib/python3.12/subprocess.py` should not be traced."
            ),
            "",
            "(`subprocess`)",
        ),
        ("Unsupported method call", "Dynamo does not know how to trace method `now` of class `type`", "", "clock"),
        (
            "Unsupported method call",
            "Dynamo does not know how to trace method `quantize` of class `Decimal`",
            "",
            "`Decimal.quantize`",
        ),
        (
            "Unsupported method call",
            "Dynamo does not know how to trace method `__iter__` of class `zip`",
            "",
            "An iterator (`zip`)",
        ),
        (
            "Unsupported method call",
            "Dynamo does not know how to trace method `step` of class `Simulator`",
            "",
            "`Simulator.step`",
        ),
        (
            "missing tp_iter",
            "Dynamo does not know how to iterate over `UserDefinedObjectVariable(dict_values)`.",
            "",
            "`list(values)`",
        ),
        ("missing tp_iter", "Dynamo does not know how to iterate over `Robot`.", "", "`__iter__`"),
        (
            "Data dependent operator",
            "Operator `aten.equal.default` has a non-Tensor output whose value is dependent on the data.",
            "",
            "(a == b).all()",
        ),
        (
            "Data dependent operator",
            "Operator `mine.count.default` has a non-Tensor output whose value is dependent on the data.",
            "",
            "`mine.count.default`",
        ),
        (
            "Dynamic shape operator",
            "Operator `aten.nonzero.default`'s output shape depends on input Tensor data.",
            "",
            "torch.nonzero_static",
        ),
        (
            "Dynamic shape operator",
            "Operator `aten.repeat_interleave.Tensor`'s output shape depends on input Tensor data.",
            "",
            "`output_size=`",
        ),
        ("Unsupported context manager", "Dynamo does not know how to enter a `RLock` context manager.", "", "lock"),
        (
            "Unsupported context manager",
            "Dynamo does not know how to enter a `Timer` context manager.",
            "",
            "`with` of `Timer`",
        ),
        (
            "Operator does not support running with fake tensors",
            "",
            "unsupported operator: mine.roll.default",
            "`mine.roll.default` has no fake",
        ),
        ("Operator does not support running with fake tensors", "", "", "register_fake"),
    ],
)
def test_fits_the_case(kind: str, explanation: str, context: str, says: str) -> None:
    assert says in advise(kind, None, context, explanation, [])


@pytest.mark.parametrize("kind", ["Data-dependent branching", "copy.deepcopy()", "graph break in loop"])
def test_needs_the_kind_only(kind: str) -> None:
    assert advise(kind, None, "", "", [])


def test_falls_back_on_hints_without_their_boilerplate() -> None:
    hints = [
        "Use a narrower dtype. Please report an issue to PyTorch.",
        "This is likely to be a Dynamo bug. Please report an issue to PyTorch.",
        (
            "This graph break is fundamental - it is unlikely that Dynamo will ever be able to trace through your "
            "code. Consider finding a workaround."
        ),
    ]
    assert advise("never seen before", "GB9999", "", "", hints[:2]) == "Use a narrower dtype."
    assert "fundamental" not in advise("never seen before", "GB9999", "", "", hints)


def test_says_nothing_where_nothing_is_known() -> None:
    assert advise("never seen before", None, "context", "explanation", []) == ""
    assert advise("never seen before", None, "", "", ["Please report an issue to PyTorch."]) == ""


def test_covers_what_dynamo_registers() -> None:
    registry = json.loads((resources.files("torch._dynamo") / "graph_break_registry.json").read_text())
    kinds = {entries[0]["Gb_type"] for entries in registry.values()}
    known = kinds & knowledge().keys()
    seen = tuple(int(part) for part in torch.__version__.split(".")[:2]) <= (2, 15)
    assert len(known) >= (0.99 if seen else 0.75) * len(kinds)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:40])
def test_is_plain_and_short(text: str) -> None:
    assert text.endswith(".") and 20 <= len(text) <= 520
    assert text.count("`") % 2 == 0
    assert not re.search(r"report an issue|file an issue|limitation", text, re.IGNORECASE)


def test_names_what_exists() -> None:
    """Every `torch.…` name in the texts is one of the installed torch, and every setting is one of Dynamo's."""
    missing = set()
    for text in TEXTS:
        for name in re.findall(r"(?<![\w.])torch(?!\.ops\.)(?:\.\w+)+", text):
            value: object = torch
            for part in name.split(".")[1:]:
                if not hasattr(value, part):
                    missing.add(name)
                    break
                value = getattr(value, part)
    assert not missing
