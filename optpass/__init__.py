"""optpass: a torch.compile backend that analyses, optimises and explains every graph it compiles.

    model = torch.compile(model, backend="optpass")   # nothing to import, nothing to register

Importing this package does not import torch: the names below load on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from optpass.api import analyze, report, reset_report
    from optpass.auditing.session import audit
    from optpass.errors import (
        AuditError,
        BudgetInfeasibleError,
        ConfigError,
        OptPassError,
        PassError,
        ReportError,
        TraceError,
    )
    from optpass.options import Options
    from optpass.plan_api import plan
    from optpass.reporting.model import Analysis, Report
    from optpass.reporting.plan.model import PlanReport

_LAZY = {
    "plan": "optpass.plan_api",
    "PlanReport": "optpass.reporting.plan.model",
    "analyze": "optpass.api",
    "audit": "optpass.auditing.session",
    "report": "optpass.api",
    "reset_report": "optpass.api",
    "Options": "optpass.options",
    "Analysis": "optpass.reporting.model",
    "Report": "optpass.reporting.model",
    "OptPassError": "optpass.errors",
    "AuditError": "optpass.errors",
    "BudgetInfeasibleError": "optpass.errors",
    "ConfigError": "optpass.errors",
    "PassError": "optpass.errors",
    "ReportError": "optpass.errors",
    "TraceError": "optpass.errors",
}

__all__ = [
    "Analysis",
    "AuditError",
    "BudgetInfeasibleError",
    "ConfigError",
    "OptPassError",
    "Options",
    "PassError",
    "PlanReport",
    "Report",
    "ReportError",
    "TraceError",
    "__version__",
    "analyze",
    "audit",
    "plan",
    "report",
    "reset_report",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'optpass' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
