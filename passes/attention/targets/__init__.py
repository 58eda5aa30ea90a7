"""Which kernel computes an attention site: what each can compute and which goes first, as data with sources.

Decides from sizes, dtypes and masks alone; what a kernel costs is the gate's business, and the rewrite is `emit`'s.
"""

from __future__ import annotations

from optpass.passes.attention.targets.architecture import Architecture, arch_of, architecture, architectures, present
from optpass.passes.attention.targets.choose import Choice, choose, taken, usable
from optpass.passes.attention.targets.kernel import Kernel, kernels

__all__ = [
    "Architecture",
    "Choice",
    "Kernel",
    "arch_of",
    "architecture",
    "architectures",
    "choose",
    "kernels",
    "present",
    "taken",
    "usable",
]
