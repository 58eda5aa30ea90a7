"""Plans beside the inner compiler's caches: where these answer, nothing is planned, and the report says what was.

One file per key of AOTAutograd's cache, in Inductor's cache folder, so that who clears one clears the other. The key
depends on the graph, on the budget and on our own code: a file is never read by another version than the one that
wrote it. A file that is not there or cannot be read is a plan that nobody knows, and no error.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import fx

from optpass.backend import compat
from optpass.backend.memory.partition.partitioner import BudgetPartitioner
from optpass.passes.memory.plan import CurvePoint, Ledger, MemoryPlan, Recomputed, Tensor
from optpass.passes.source import Source, locate

FOLDER = "optpass-plans"

_T = TypeVar("_T", bound=Tensor)


def sources_of(gm: fx.GraphModule) -> list[Source]:
    """Where each node of a Dynamo graph comes from; of one graph in another process as many, maybe on other lines."""
    return [locate(node) for node in gm.graph.nodes]


def wanted(partitioner: BudgetPartitioner | None, key: str) -> bool:
    """Whether the cache's entry may serve: what is planned together with others, once its step was seen, is planned
    anew, for such plans need the search that found them.

    Args:
        partitioner: None without a budget.
        key: of AOTAutograd's cache.
    """
    if partitioner is None:
        return True
    if partitioner.budget.settled:
        return False
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return not json.loads(_path(key).read_text(encoding="utf-8"))["together"]
    return True


def keep_or_find(partitioner: BudgetPartitioner, key: str | None, sources: Sequence[Source]) -> None:
    """Keep the plan that was made, or find the one that was when the cache's entry was.

    Args:
        partitioner: after its graph was compiled.
        key: of AOTAutograd's cache; None where that was not asked.
        sources: `sources_of` the graph, before it was compiled.
    """
    if key is None:
        return
    path, outcome = _path(key), partitioner.outcome

    def keep() -> None:
        if outcome.plan is None:
            return
        content = {
            "plan": asdict(outcome.plan),
            "notes": outcome.notes,
            "together": outcome.together,
            "sources": [[source.file, source.line, source.module] for source in sources],
        }
        with contextlib.suppress(OSError):  # a full disk is no reason to stop a training step
            _write(path, json.dumps(content))

    outcome.keep = keep
    if outcome.plan is not None:
        keep()
        return
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        outcome.plan, outcome.notes = _read(json.loads(path.read_text(encoding="utf-8")), sources)


def _path(key: str) -> Path:
    return Path(compat.inductor_cache_dir()) / FOLDER / f"{key}.json"


def _read(content: Mapping[str, Any], sources: Sequence[Source]) -> tuple[MemoryPlan, list[str]]:
    plan, before = content["plan"], [Source(*place) for place in content["sources"]]
    moved = dict(zip(before, sources, strict=True))
    found = MemoryPlan(
        **plan
        | {
            "ledger": Ledger(**plan["ledger"]),
            "saved": tuple(_moved(Tensor(**item), moved) for item in plan["saved"]),
            "recomputed": tuple(_moved(Recomputed(**item), moved) for item in plan["recomputed"]),
            "offloaded": tuple(_moved(Tensor(**item), moved) for item in plan["offloaded"]),
            "curve": tuple(CurvePoint(**point) for point in plan["curve"]),
        }
    )
    return found, [str(note) for note in content["notes"]]


def _moved(tensor: _T, moved: Mapping[Source, Source]) -> _T:
    """On the line where its operation stands now."""
    source = moved.get(Source(tensor.file, tensor.line, tensor.module))
    return tensor if source is None else replace(tensor, file=source.file, line=source.line, module=source.module)


def _write(path: Path, text: str) -> None:
    """Whole or not at all: other processes read and write the same plan."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
