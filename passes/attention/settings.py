"""What decides the attention pass's output, as plain data: part of the cache identity."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionConfig:
    """What decides this pass's output."""

    mode: str = "auto"
    dropout: str = "keep"
    masked_rows: str = "exact"
    tables: str = ""  #: digest of what the cost gate reads
