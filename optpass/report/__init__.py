"""The report: its model (`model`), how it is collected and written (`store`), and its views (`terminal`, `html`).

Nothing here may import torch, `optpass.passes` or `optpass.backend`: they file records, the report only holds them.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from optpass.report.model import Report


class _Package(types.ModuleType):
    """This package, which `optpass.report` is once it was imported: calling it is calling `optpass.api.report`."""

    def __call__(self, name: str = "") -> Report:
        api = importlib.import_module("optpass.api")  # by name: nothing here depends on it otherwise
        return cast("Report", api.report(name))


sys.modules[__name__].__class__ = _Package
