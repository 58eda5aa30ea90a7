"""The memory plan of a training file: its model under fake tensors, its batch, its optimizer, its budget.

Nothing here runs or allocates the model; what a run measures is `run`'s business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from optpass import api
from optpass.backend import compat
from optpass.backend.device import actual, chosen
from optpass.errors import ConfigError, sizes_of
from optpass.options import ARGUMENT
from optpass.passes.devices import DeviceSpec
from optpass.plan_api import AUTO, budget_place, check_names, checked_batch
from optpass.planning.plan import plan_step
from optpass.planning.prepare import Prepared
from optpass.planning.request import Captured, Progress, Request
from optpass.planning.shard import Shard
from optpass.reporting.plan.model import PlanReport
from optpass.targets import Target
from optpass.training import network, text
from optpass.training.config import Job, load
from optpass.training.loop import OPTIMIZERS, optimizer_settings

#: Part of the budget that a run with micro_batch = "auto" leaves free: what is compiled differs a little from the plan.
HEADROOM = 0.03


def plan_file(
    path: Path,
    *,
    flags: Mapping[str, Any] | None = None,
    option_pairs: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> PlanReport:
    """The memory plan of a training file, for any device.

    Args:
        path: the TOML file.
        flags: what wins over the file: `memory_budget`, `optimizer` (a name of the ledger), `batch` (a number or
            "auto"), `accumulation`, `shard`, `device`.
        option_pairs: backend options from the command line.
        progress: told what is being done.

    Raises:
        ConfigError: the file, a flag or the device cannot be used as given.
        BudgetInfeasibleError: no plan fits.
    """
    flags = dict(flags or {})
    table: dict[str, Any] = {key: flags[key] for key in ("memory_budget", "accumulation") if key in flags}
    if "batch" in flags:
        table["micro_batch"] = checked_batch(flags["batch"]) or AUTO
    job = load(path, overrides=table, option_pairs=option_pairs)
    given: dict[str, Any] = {key: flags[key] for key in ("optimizer", "device") if key in flags}
    job = replace(job, options=job.options.override(given, ARGUMENT))
    shard = Shard.parse(flags["shard"]) if "shard" in flags else None
    check_names(job.options)
    return plan_job(job, shard=shard, progress=progress, vocabulary=text.read(job).vocabulary)


def plan_job(
    job: Job,
    *,
    shard: Shard | None = None,
    headroom: float = 0.0,
    progress: Progress | None = None,
    vocabulary: int | None = None,
    quick: bool = False,
) -> PlanReport:
    """The memory plan of a checked training file.

    Args:
        job: the file.
        shard: how the state is divided.
        headroom: part of the budget that a search for the micro-batch leaves free.
        progress: told what is being done.
        vocabulary: number of tokens that the tokenizer may give, which the model must take; None asks nothing of it.
        quick: as in `Request`.

    Raises:
        ConfigError: the device is neither present nor named, or the model cannot be built.
        BudgetInfeasibleError: no plan fits.
    """
    check_names(job.options)
    config, options = job.config, job.options
    name = options.optimizer
    request = Request(
        capture=_Model(job, vocabulary).capture,
        device=device_of(job),
        budget=options.budget,
        where=budget_place(options),
        optimizer=OPTIMIZERS[config.optimizer].ledger if name is None else name,
        settings=optimizer_settings(config) if name is None else {},
        accumulation=config.accumulation,
        shard=shard,
        options=options,
        search_batch=config.micro_batch == AUTO,
        headroom=headroom,
        batch=None if config.micro_batch == AUTO else config.samples,
        progress=progress or (lambda fraction, text: None),
        quick=quick,
    )
    return plan_step(request)


def device_of(job: Job) -> DeviceSpec:
    """The spec that a training file is planned for: the named one, else that of the device that it trains on.

    Raises:
        ConfigError: neither is known.
    """
    device = network.device_named(job)  # a run refuses it whatever it was planned for
    if job.options.device is not None:
        return chosen(job.options)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"{job.said('device')} is not here; name the device to plan for with --device, e.g. h200, or with device "
            "in [options]"
        )
    try:
        return actual(device)
    except ConfigError as error:
        raise ConfigError(f"{job.said('device')}: {error}") from None


def sized(
    job: Job, progress: Progress | None = None, *, vocabulary: int | None = None
) -> tuple[Job, PlanReport | None]:
    """The job with its micro-batch as a number, and its plan; no plan where no budget is asked for.

    Args:
        job: the training file.
        progress: told what is being done.
        vocabulary: as for `plan_job`.

    Raises:
        ConfigError, BudgetInfeasibleError: as `plan_job`.
    """
    if job.options.memory_budget is None:
        return job, None
    plan = plan_job(job, headroom=HEADROOM, progress=progress, vocabulary=vocabulary, quick=True)
    if job.config.micro_batch != AUTO:
        return job, plan
    assert plan.batch.size is not None  # the inputs are [micro-batch, sequence]
    return replace(job, config=job.config.model_copy(update={"micro_batch": plan.batch.size})), plan


@dataclass(frozen=True)
class _Model:
    """The model of a training file, captured at any micro-batch as the training loop calls it."""

    job: Job
    vocabulary: int | None

    def capture(self, batch: int | None, prepare: Prepared) -> Captured:
        """The step as the loop runs it: the model's own loss, under the loop's precision."""
        config = self.job.config
        mode = compat.fake_mode_for_planning()
        with mode:
            module = network.skeleton(self.job)
            with sizes_of(self.job.said("micro_batch")):
                tokens, targets = (torch.zeros(batch or 1, config.sequence, dtype=torch.int64) for _ in range(2))
        if self.vocabulary is not None:
            network.check_sizes(self.job, module, self.vocabulary)
        dtype = torch.bfloat16 if config.precision == "bf16-true" else None
        target = Target(module, (tokens, targets), {}, _name(self.job), fake_mode=mode, dtype=dtype)
        with _autocast(config.precision):
            capture, notes = api.captured(
                target, True, _own_loss, joint=True, prepare=prepare, as_inductor=prepare.as_inductor,
                ready=prepare.ready,
            )  # fmt: skip
        return Captured(target.name, capture, batch or 1, tuple(notes))


def _own_loss(output: Any) -> torch.Tensor:
    """The loss of a model that returns (logits, loss)."""
    loss: torch.Tensor = output[1]
    return loss


def _autocast(precision: str) -> contextlib.AbstractContextManager[Any]:
    """The autocast region of the training loop, for the host, where the tensors that stand for the device's are."""
    return torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


def _name(job: Job) -> str:
    config = job.config
    return config.model if ":" in config.model else f"{config.model}:{config.size}"
