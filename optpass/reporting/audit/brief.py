"""The audit inside the compile report: one headline, one line for each thing found. The whole is `optpass audit`'s."""

from __future__ import annotations

from optpass.reporting.audit import words
from optpass.reporting.audit.model import Audit


def headline(audit: Audit) -> str:
    """`2 graph breaks, 1 recompile, 0 functions run eager; 5 graphs`."""
    return words.headline(audit)


def rows(audit: Audit) -> list[tuple[str, str]]:
    """(what, where and why) of every break that follows from no other, every recompile and every silent eager."""
    found = [
        ("graph break", f"{words.where(chain.record, audit.root)}: {words.kind(chain.record)}: {chain.record.reason}")
        for chain in words.chains(audit)
    ]
    found += [
        ("recompile", f"{words.where_function(record, audit.root)}: {words.changed(record)}")
        for record in audit.recompiles
    ]
    found += [
        ("runs eager", f"{words.where_function(record, audit.root)}: {words.silent(record)}")
        for record in audit.silent_eager
    ]
    return found
