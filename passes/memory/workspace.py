"""Bytes that an operator allocates and releases inside itself, beside its outputs."""

from __future__ import annotations

from typing import Any


def op_workspace(target: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes."""
    return 0
