"""The Python interface to memory plans: `plan` a training step ahead of time, for any device, within a budget."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from optpass import api
from optpass.arguments import check_types, settings_of
from optpass.errors import ConfigError, sizes_of
from optpass.naming import given
from optpass.options import ARGUMENT, Options, resolve
from optpass.planning.request import Captured, CostBut, Progress, Request
from optpass.reporting.plan.model import PlanReport
from optpass.targets import Target, load

if TYPE_CHECKING:
    import torch

    from optpass.passes.memory.optimizers.optimizers import OptimizerCost
    from optpass.planning.prepare import Prepared

AUTO = "auto"


def plan(
    model: Callable[..., Any] | str,
    *args: Any,
    memory_budget: int | str | None = None,
    optimizer: str | None = None,
    device: str | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    dtype: torch.dtype | str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    batch: int | str | None = None,
    accumulation: int = 1,
    shard: str | None = None,
    name: str | None = None,
    size: str | None = None,
    sets: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | Options | None = None,
    progress: Progress | None = None,
) -> PlanReport:
    """What a training step would save and recompute within a budget, and what it costs. Nothing is run or allocated.

    Args:
        model: a module or a function, with real, fake or meta tensors, which is not changed; or a target as on the
            command line: "llama:8b", "file.py:factory", "hf:llama".
        *args: inputs of `model`; none for a target.
        memory_budget: most bytes that the step may have allocated: an int, "20GiB", "500MB", or "80%" of the device.
            Default: no budget; the plan is then the unconstrained one, with the curve of all others.
        optimizer: name of the optimizer whose state counts, e.g. "adamw". Default: the torch optimizer that holds the
            model's parameters, where there is one.
        device: spec to plan for, by name ("h200"). Default: the CUDA device that the model is on, else this processor.
        loss: reduces the output to a scalar. Default: the generic one of `optpass.models.loss`.
        dtype: what floating-point parameters and inputs are cast to.
        kwargs: keyword inputs.
        batch: micro-batch, or "auto" for the largest that fits the budget. Of a model object, the leading dimension of
            its inputs.
        accumulation: micro-batches per optimizer step; with more than one, gradients are there from the start.
        shard: "fsdp:8" divides parameters, gradients and optimizer state among so many devices.
        name: what the plan calls the model.
        size, sets: of a target, as `--size` and `--set` on the command line.
        options: backend options that decide what passes run, e.g. {"attention": "off"}, or resolved ones.
        progress: told what is being done.

    Raises:
        ConfigError: an unknown device, dtype, optimizer, option or target; an argument of another type; a budget that
            the device cannot have.
        TraceError: the model raises, cannot be captured, or has no backward.
        BudgetInfeasibleError: no plan fits; says what is largest and what would help.
    """
    from optpass.planning.plan import plan_step
    from optpass.planning.shard import Shard

    check_types(loss=loss, kwargs=kwargs, name=name, size=size, sets=sets, progress=progress)
    tell = progress or (lambda fraction, text: None)
    resolved = resolved_options(options, memory_budget=memory_budget, optimizer=optimizer, device=device)
    if isinstance(accumulation, bool) or not isinstance(accumulation, int) or accumulation < 1:
        raise ConfigError(f"{given('accumulation', accumulation)}: write a number of micro-batches of at least 1")
    number, divided = checked_batch(batch), None if shard is None else Shard.parse(shard)
    check_names(resolved)
    source = _Source(model, args, kwargs, loss, dtype, name, size, settings_of(sets))
    spec = api.named_device(resolved.device) or api.present_device(source.device_target(), tell)
    found, notes = _found(model, resolved)
    request = Request(
        capture=source.capture, device=spec, budget=resolved.budget, where=budget_place(resolved),
        optimizer=resolved.optimizer, found=found, accumulation=accumulation, shard=divided, options=resolved,
        search_batch=batch == AUTO, batch=number, progress=tell, notes=notes,
    )  # fmt: skip
    return plan_step(request)


def resolved_options(options: Mapping[str, Any] | Options | None, **named: Any) -> Options:
    """The options that hold, with those given by name above the others."""
    base = options if isinstance(options, Options) else resolve(options)
    return base.override({key: value for key, value in named.items() if value is not None}, ARGUMENT)


def budget_place(options: Options) -> str:
    """What set the budget, with its value, for messages."""
    return f"{options.where('memory_budget')}={options.memory_budget!r}"


def check_names(options: Options) -> None:
    """The names in the options, which a compile would look up.

    Raises:
        ConfigError: an inner compiler, a setting of Inductor or a pass that there is not, or a device or an optimizer
            that is in no table.
    """
    from optpass.backend import inner
    from optpass.backend.device import chosen
    from optpass.passes.memory.optimizers import optimizers
    from optpass.passes.registry import selected

    inner.check(options, None)
    selected(options)
    optimizers.check(options)
    if options.device is not None:
        chosen(options)


def checked_batch(batch: int | str | None) -> int | None:
    """A micro-batch as an int; None for the target's own, and for "auto".

    Raises:
        ConfigError: neither a positive int nor "auto".
    """
    if batch is None or (isinstance(batch, str) and batch == AUTO):
        return None
    text = str(batch).strip()
    if isinstance(batch, bool) or not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{given('batch', batch)}: write a number of samples of at least 1, or 'auto'")
    return int(text)


def _found(model: Callable[..., Any] | str, options: Options) -> tuple[CostBut | None, tuple[str, ...]]:
    """The optimizer that holds a model object's parameters, where none was named."""
    if options.optimizer is not None or isinstance(model, str):
        return None, ()
    from optpass.backend.memory.probe import library_workspace
    from optpass.backend.model_tensors import owner
    from optpass.passes.memory.optimizers.optimizers import OptimizerCost
    from optpass.passes.memory.optimizers.search import find_optimizer

    module = owner(model)
    found = find_optimizer(module.parameters(), library_workspace) if module is not None else None
    if module is None or found is None:
        return None, ()

    def cost(untrained: Collection[str]) -> OptimizerCost:
        idle = {id(p) for name, p in module.named_parameters() if name in untrained}
        held = find_optimizer(module.parameters(), library_workspace, idle) if idle else found
        assert held is not None  # as above
        return OptimizerCost(held.name, held.state_bytes, held.step_bytes, "found in this process")

    return cost, (f"optimizer: {found.name}, found in this process", *found.notes)


class _Source:
    """A target or a model object that can be captured at any micro-batch."""

    def __init__(
        self,
        model: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        loss: Callable[[Any], torch.Tensor] | None,
        dtype: torch.dtype | str | None,
        name: str | None,
        size: str | None,
        sets: dict[str, str],
    ) -> None:
        if isinstance(model, str):
            if args or kwargs:
                raise ConfigError(f"plan({model!r}): a target brings its own inputs; pass settings with sets={{...}}")
        elif sets or size is not None:
            raise ConfigError("plan: size and sets belong to a target given by name, not to a model object")
        self.model, self.args, self.kwargs, self.loss = model, args, dict(kwargs or {}), loss
        self.dtype, self.name, self.size, self.sets = dtype, name, size, sets

    def device_target(self) -> Target | None:
        """What says which device is present; None for a target by name, whose tensors are on none."""
        return None if isinstance(self.model, str) else self._target(None)

    def capture(self, batch: int | None, prepare: Prepared) -> Captured:
        """The step at a micro-batch, or at the target's own."""
        target = self._target(batch)
        capture, notes = api.captured(
            target, True, self.loss, joint=True, prepare=prepare, as_inductor=prepare.as_inductor,
            ready=prepare.ready,
        )  # fmt: skip
        size = leading(target.args, target.kwargs)
        return Captured(self.name or target.name, capture, size, (*notes, "the loss is computed in the graph"))

    def _target(self, batch: int | None) -> Target:
        if not isinstance(self.model, str):
            target = api.given_target(self.model, self.args, self.kwargs, self.dtype, verb="plan")
            return target if batch is None else rebatched(target, batch)
        return by_name(self.model, batch, self.dtype, self.size, self.sets)


#: What can be planned, for messages.
FORMS = (
    "write a model's name (optpass analyze --list), path/to/file.py:factory, hf:<model_type>, or, on the command line, "
    "a training file that ends in .toml"
)


def by_name(
    text: str, batch: int | None, dtype: torch.dtype | str | None, size: str | None, sets: Mapping[str, str]
) -> Target:
    """A target given by name, at a micro-batch: by its own setting `batch` where it has one."""
    wanted = None if dtype is None else str(dtype)
    if batch is not None and _has_batch(text):
        sets, batch = {**sets, "batch": str(batch)}, None
    target = load(text, sets=sets, dtype=wanted, size=size, train=True, forms=FORMS, onnx=False)
    assert isinstance(target, Target)  # an ONNX file is refused
    return target if batch is None else rebatched(target, batch)


def _has_batch(text: str) -> bool:
    from optpass.models.registry import names

    return text.startswith("hf:") or text.partition(":")[0] in names()


def _tensors(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    from optpass.backend.model_tensors import input_tensors

    return input_tensors((tuple(args), dict(kwargs)))


def leading(args: Iterable[Any], kwargs: Mapping[str, Any]) -> int | None:
    """The micro-batch of inputs: the leading dimension of the first tensor that has one."""
    return next((int(t.shape[0]) for t in _tensors(args, kwargs) if t.dim()), None)


def rebatched(target: Target, batch: int) -> Target:
    """The target with another micro-batch: every input tensor with the first one's leading dimension gets the new one.

    The new inputs are meta tensors, which the capture takes for tensors without values.

    Raises:
        ConfigError: no input has a leading dimension, or there is no such tensor.
    """
    import torch

    before = leading(target.args, target.kwargs)
    if before is None:
        raise ConfigError(f"{target.name}: no input has a leading dimension that could be the micro-batch")

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != before:
            return tensor
        with sizes_of(given("batch", batch)):
            made = torch.empty((batch, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
        return made.requires_grad_(tensor.requires_grad)

    args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, changed, (target.args, target.kwargs))
    return Target(
        target.model, tuple(args), dict(kwargs), target.name, loss=target.loss, fake_mode=target.fake_mode,
        dtype=target.dtype, notes=list(target.notes),
    )  # fmt: skip
