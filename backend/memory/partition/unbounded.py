"""Steps whose memory nobody can say ahead: what a graph does depends on data, and nothing bounds it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from optpass.backend import compat
from optpass.errors import ConfigError
from optpass.passes.memory.unbacked import UnboundedSizeError


@contextlib.contextmanager
def refused_where_unbounded(where: str) -> Iterator[None]:
    """A budget for such a step is refused, in words; Dynamo would leave the graph to eager without a word.

    Args:
        where: what set the budget.

    Raises:
        ConfigError: inside, something asked for what only running tells.
    """
    try:
        yield
    except Exception as error:
        unbounded = isinstance(error, UnboundedSizeError)
        if not unbounded and not compat.needs_values(error):
            raise
        why = str(error) if unbounded else f"what a graph does depends on data ({error})"
        raise ConfigError(f"{where}: the memory of this step cannot be planned: {why}") from error
