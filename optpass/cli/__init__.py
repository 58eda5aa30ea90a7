"""The command line. `main` is the console script; verbs live one per module and import torch only when they run."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `optpass` command."""
    from optpass.cli.app import run

    run()
