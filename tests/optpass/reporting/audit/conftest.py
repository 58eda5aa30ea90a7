"""An audit made by hand, with its program on disk."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optpass.reporting.audit.model import (
    Audit,
    AuditSummary,
    Break,
    BreakCost,
    Fix,
    FunctionRecord,
    Recompile,
    SilentEager,
)
from optpass.reporting.audit.source import annotate
from optpass.reporting.model import ProcessRecord

PROGRAM = textwrap.dedent(
    """\
    import torch

    def step(x, scale):
        y = x * scale
        if y.sum() > 0:
            print("positive")
        return y

    def wide(x):
        return x @ x.T
    """
)
DIFF = textwrap.dedent(
    """\
    --- a/train.py
    +++ b/train.py
    @@ -4,4 +4,3 @@
         y = x * scale
         if y.sum() > 0:
    -        print("positive")
    +        pass
         return y
    """
)


def make_audit(folder: Path, rank: int = 0) -> Audit:
    """Two breaks (one follows from the other), a recompile and a poisoned function of `folder`/train.py."""
    path = folder / "train.py"
    if not path.exists():
        path.write_text(PROGRAM)
    file = str(path)
    breaks = [
        Break(
            file=file, line=5, column=8, end_line=5, end_column=19, function="step", module="blocks.0",
            gb_type="Data-dependent branching", gb_id="GB0170", reason="The branch depends on the tensor's values.",
            occurrences=3, rank=rank, effect="rest eager",
            cost=BreakCost(boundary_bytes=2**20, fusion_lost_us=120.0, compile_s=1.5, guard_us=12.0),
        ),
        Break(
            file=file, line=6, column=9, function="step", gb_type="Failed to trace builtin operator", gb_id="GB0059",
            reason="Dynamo cannot trace `print`.", caused_by=0, fix=Fix(text="Remove the print.", diff=DIFF),
        ),
    ]  # fmt: skip
    recompile = Recompile(
        file=file, line=3, function="step", cause="float", source="scale", before="0.5", after="0.25", count=2,
        values=["0.5", "0.25", "0.125"], seconds=0.8, guards=["L['scale'] == 0.5"], fix=Fix(text="Make it a tensor."),
    )  # fmt: skip
    silent = SilentEager(
        file=file, line=9, function="wide", kind="skip poisoned", calls=7, reason="First call had no op."
    )
    functions = [
        FunctionRecord(
            file=file, line=3, function="step", graphs=3, compiles=3, ops_captured=8, ops_total=10, compile_s=2.0,
            t_first_s=2.5, t_steady_s=0.002, calls=20,
        ),
        FunctionRecord(file=file, line=9, function="wide", graphs=1, compiles=1, ops_captured=2, ops_total=2, calls=8),
    ]  # fmt: skip
    made = Audit(
        target="train.py --lr 1",
        created="2030-01-02T03:04:05+00:00",
        environment={"torch": "2.13.0", "python": "3.11.7"},
        processes=[ProcessRecord(pid=100 + rank, host="node0", rank=rank, world_size=2)],
        summary=AuditSummary(
            graphs=4,
            breaks=1,
            recompiles=2,
            silent_eager=1,
            ops_captured_fraction=0.83,
            t_first_s=2.5,
            t_steady_s=0.002,
        ),
        breaks=breaks,
        recompiles=[recompile],
        silent_eager=[silent],
        functions=functions,
        hooks={"breaks": "a hook"},
        notes=["a note"],
    )
    return annotate(made, folder)


@pytest.fixture
def audit(tmp_path: Path) -> Audit:
    return make_audit(tmp_path)


@pytest.fixture
def new_audit() -> Callable[..., Audit]:
    return make_audit


@pytest.fixture
def large(tmp_path: Path) -> Audit:
    """Thousands of records with hostile texts."""
    evil = "</pre><script>alert(1)</script>`x` \"' & \x1b[31m |"
    made = make_audit(tmp_path)

    def again(record: Any, **changes: Any) -> Any:
        return record.model_copy(update=changes, deep=True)

    fix = Fix(text=evil, diff=DIFF)
    made.breaks = [
        again(made.breaks[0], file=f"/far/{i}.py", reason=f"{evil} {i}", gb_type=evil, code=evil, fix=fix)
        for i in range(3000)
    ]
    made.recompiles = [again(made.recompiles[0], function=f"f{i}{evil}", guards=[evil] * 5) for i in range(3000)]
    made.silent_eager = [again(made.silent_eager[0], function=f"f{i}", reason=evil) for i in range(3000)]
    made.functions = [again(made.functions[0], function=f"f{i}{evil}") for i in range(3000)]
    return made
