"""What was found in this process for graphs that were planned: see `passes.memory.known`."""

from __future__ import annotations

from optpass.passes.memory.known import Known
from optpass.passes.memory.search import Found

SEARCHES: Known[Found] = Known()
