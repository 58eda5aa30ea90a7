"""From the option `memory_budget` to bytes on a device. How the option is written is `optpass.units`' business."""

from __future__ import annotations

from optpass.errors import ConfigError
from optpass.options import Options
from optpass.passes.devices import DeviceSpec
from optpass.units import BUDGET_FORMS, Budget, format_bytes


def budget_bytes(options: Options, device: DeviceSpec | None) -> int | None:
    """The budget in bytes; None where none is asked for.

    Args:
        options: resolved options.
        device: what the plan is for; None where it is in no table.

    Raises:
        ConfigError: a share of a device whose memory is not known, or more than the device has.
    """
    if options.budget is None:
        return None
    named = options.device is not None
    if device is not None and device.kind == "cpu" and not named and options.budget.share is None:
        device = None  # nobody chose this machine's memory as the measure
    return resolve(options.budget, device, f"{options.where('memory_budget')}={options.memory_budget!r}", named=named)


def resolve(budget: Budget, device: DeviceSpec | None, where: str, *, named: bool = True) -> int:
    """A budget in bytes on `device`; errors begin with `where`, which names the place and the value.

    Args:
        named: whether someone named the device. A share of a processor's memory is meant only then, so that a plan
            takes what a compile takes.
    """
    memory = device.memory_bytes if device is not None else None
    if budget.share is not None:
        if memory is None:
            whose = f"{device.name}'s memory" if device is not None else "the device's memory"
            raise ConfigError(f"{where}: {whose} is not known, so a share of it is no number of bytes; {BUDGET_FORMS}")
        if device is not None and device.kind == "cpu" and not named:
            raise ConfigError(
                f"{where}: a share of this machine's memory is taken only where its processor is named as the device "
                f"(option `device` = 'cpu'); {BUDGET_FORMS}"
            )
        return max(1, int(budget.share * memory))
    assert budget.amount is not None  # one of the two is given
    if memory is not None and budget.amount > memory:
        assert device is not None
        raise ConfigError(
            f"{where} is more than {device.name} has ({format_bytes(memory)}); {BUDGET_FORMS}, at most that much"
        )
    return budget.amount
