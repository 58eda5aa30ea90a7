"""Ordering of passes from their own data: `requires` and `runs_after`. Nothing here runs a pass."""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

from optpass.errors import ConfigError
from optpass.passes.contract import Pass


def ordered(passes: Sequence[Pass]) -> list[Pass]:
    """The passes in an order that their declarations allow; ties keep the given order.

    Raises:
        ConfigError: two passes share a name, or the declarations form a cycle.
    """
    by_name: dict[str, Pass] = {}
    for item in passes:
        if item.name in by_name:
            raise ConfigError(f"two passes are called {item.name!r}; a pass name must be unique")
        by_name[item.name] = item
    position = {name: i for i, name in enumerate(by_name)}
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for item in passes:
        sorter.add(item.name, *(n for n in (*item.requires, *item.runs_after) if n in by_name))
    try:
        sorter.prepare()
    except CycleError as error:
        raise ConfigError(f"passes wait for each other: {' -> '.join(error.args[1])}") from None
    result: list[Pass] = []
    ready = list(sorter.get_ready())
    while ready:
        ready.sort(key=position.__getitem__)
        name = ready.pop(0)
        result.append(by_name[name])
        sorter.done(name)
        ready.extend(sorter.get_ready())
    return result


def missing_requirement(item: Pass, done: set[str]) -> str | None:
    """The first pass that `item` requires and that has not run, or None."""
    return next((name for name in item.requires if name not in done), None)
