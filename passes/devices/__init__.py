"""The device table: what is known of each GPU, with a source for each figure, and how its names are recognised.

Imports no torch, so that the CLI lists devices at once. Measuring a device is not done here.
"""

from __future__ import annotations

from optpass.passes.devices.dtypes import DTYPES, canonical_dtype, compute_dtype
from optpass.passes.devices.resolve import resolve
from optpass.passes.devices.spec import DeviceSpec, Kind, attainable
from optpass.passes.devices.table import names, table

__all__ = [
    "DTYPES",
    "DeviceSpec",
    "Kind",
    "attainable",
    "canonical_dtype",
    "compute_dtype",
    "names",
    "resolve",
    "table",
]
