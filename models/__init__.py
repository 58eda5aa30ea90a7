"""Small reference models, each in the eager manner people write by hand, and the registry that builds them by name.

Importing this package imports no torch: a model's module is imported when it is built, `loss` when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optpass.models.registry import build, describe, names, sizes

if TYPE_CHECKING:
    from optpass.models.common import loss

__all__ = ["build", "describe", "loss", "names", "sizes"]


def __getattr__(name: str) -> Any:
    if name == "loss":
        from optpass.models.common import loss

        return loss
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
