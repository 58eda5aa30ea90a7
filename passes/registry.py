"""The list of passes. A new pass is one new file and one line here."""

from __future__ import annotations

from optpass.errors import ConfigError, did_you_mean
from optpass.options import Options
from optpass.passes.attention.attention import Attention
from optpass.passes.contract import Pass
from optpass.passes.order import ordered
from optpass.passes.redundant import Redundant
from optpass.passes.roofline.analysis import Roofline

PASSES: tuple[type[Pass], ...] = (Redundant, Attention, Roofline)


def names() -> tuple[str, ...]:
    """Names of all passes, as `disable_passes` takes them."""
    return tuple(p.name for p in PASSES)


def selected(options: Options) -> list[Pass]:
    """The passes that run under these options, in order.

    Raises:
        ConfigError: `disable_passes` names a pass that does not exist.
    """
    for name in options.disable_passes:
        if name not in names():
            where = options.where("disable_passes")
            raise ConfigError(f"{where}: no pass is called {name!r}; {did_you_mean(name, names())}")
    built = [cls.from_options(options) for cls in PASSES if cls.name not in options.disable_passes]
    return ordered([item for item in built if item is not None])
