"""The Python interface: `analyze` a model ahead of time, and the `report` of what this process has compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpass.arguments import check_types, settings_of
from optpass.errors import ConfigError, TraceError
from optpass.naming import given
from optpass.reporting.model import Analysis, Report
from optpass.targets import OnnxTarget, Target, load, parse_dtype

if TYPE_CHECKING:
    import torch
    from torch import fx

    from optpass.backend.ahead import Capture
    from optpass.backend.capture import Ready
    from optpass.passes.devices import DeviceSpec

#: Called with the fraction done (None where nobody knows) and what is being done.
Progress = Callable[[float | None, str], None]
#: Part of the machine's memory that a model may take to be run for real, where fake tensors cannot follow it.
REAL_SHARE = 0.25


def analyze(
    model: Callable[..., Any] | str,
    *args: Any,
    device: str | None = None,
    train: bool = False,
    loss: Callable[[Any], torch.Tensor] | None = None,
    dtype: torch.dtype | str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    size: str | None = None,
    sets: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Analysis:
    """The roofline of every op of a model, before and after fusion. Nothing is compiled, run or allocated.

    A model that branches on values cannot be followed by fake tensors; where it takes less than a quarter of this
    machine's memory, a copy of it is run once for real instead, and a note says so.

    Args:
        model: a module or a function, with real, fake or meta tensors, which is not changed; or a target as on the
            command line: "gpt:gpt2", "file.py:factory", "hf:llama", "model.onnx".
        *args: inputs of `model`, real, fake or meta; none for a target.
        device: spec to plan for, by name ("h100"); "cpu" is this machine, measured once (10 to 20 s). Default: the CUDA
            device that the model is on, else "cpu".
        train: forward and backward, as the partitioner splits the joint graph; else inference.
        loss: reduces the output to a scalar when training. Default: the sum of the scalars in the output, or, where
            there is none, of the mean squares of its tensors (`optpass.models.loss`).
        dtype: what floating-point parameters and inputs are cast to.
        kwargs: keyword inputs.
        name: what the analysis calls the model.
        size, sets: of a target, as `--size` and `--set` on the command line.
        progress: told what is being done.

    Raises:
        ConfigError: an unknown device, dtype or target, an argument of another type, or a lazy module that was never
            called.
        TraceError: the model raises, or cannot be captured; says what, and on which line.
    """
    check_types(loss=loss, kwargs=kwargs, name=name, size=size, sets=sets, progress=progress)
    tell = progress or (lambda fraction, text: None)
    spec = named_device(device)
    if isinstance(model, str):
        if args or kwargs:
            raise ConfigError(f"analyze({model!r}): a target brings its own inputs; pass settings with sets={{...}}")
        tell(None, "building the model")
        target = load(model, sets=settings_of(sets), dtype=_text(dtype), size=size, train=train)
    else:
        if sets or size is not None:
            raise ConfigError("analyze: size and sets belong to a target given by name, not to a model object")
        target = given_target(model, args, kwargs, dtype)
    if name is not None:
        target = _renamed(target, name)
    from optpass.analysis import analysis_of_capture, analysis_of_onnx
    from optpass.passes.attention.elsewhere import as_on_a_gpu

    if isinstance(target, OnnxTarget):
        return analysis_of_onnx(target, spec or present_device(None, tell), parse_dtype(_text(dtype)), train, tell)
    spec = spec or present_device(target, tell)
    tell(None, "tracing")
    capture, notes = captured(target, train, loss, prepare=None if spec.kind == "cpu" else as_on_a_gpu)
    tell(None, "counting")
    return analysis_of_capture(target, capture, spec, train, notes)


def report(name: str = "", *, measure: bool = False) -> Report:
    """Everything that this process has compiled with `backend="optpass"` so far, priced for its device.

    Args:
        name: title of the report.
        measure: time every attention site that was swapped, beside the way that it was written: seconds for each
            size that differs. The figures stand in the cost of the sites.
    """
    from optpass.backend.reporting import build_report

    if measure:
        from optpass.backend.measured_attention import measure_sites

        measure_sites()
    built = build_report(name)
    if built.audit is not None:
        from optpass.auditing.finish import finish

        finish(built.audit, Path(built.audit.root))
    return built


def reset_report() -> None:
    """Forget every graph compiled so far in this process."""
    from optpass.backend.reporting import reset_report as reset

    reset()


# ---- target and device ----------------------------------------------------------------------------------------------


def _text(dtype: torch.dtype | str | None) -> str | None:
    return None if dtype is None else str(dtype)


def given_target(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    dtype: torch.dtype | str | None,
    *,
    verb: str = "analyze",
) -> Target:
    """A model object as a target; `verb` is the function that was called.

    Raises:
        ConfigError: it cannot be called, or has parameters whose size nobody knows yet.
    """
    if not callable(model):
        raise ConfigError(f"{verb}: {type(model).__name__} is neither a module, a function nor the name of a target")
    from optpass.backend.model_tensors import check_initialised, data_free, mode_of

    check_initialised(model, verb)
    called = getattr(model, "__qualname__", None) or type(model).__qualname__
    target = Target(
        model, tuple(args), dict(kwargs or {}), called, fake_mode=mode_of(model, (args, kwargs)),
        dtype=parse_dtype(_text(dtype)),
    )  # fmt: skip
    if not data_free(model, (args, kwargs)):
        target.rebuild = lambda: target
    return target


def _renamed(target: Target | OnnxTarget, name: str) -> Target | OnnxTarget:
    if isinstance(target, OnnxTarget):
        return OnnxTarget(target.path, target.dims, name)
    target.name = name
    return target


def named_device(device: str | None) -> DeviceSpec | None:
    """The spec of a device by name; None for this machine's own, which may have to be measured first."""
    if device is not None and not isinstance(device, str):
        raise ConfigError(f"{given('device', device)}: write the name of a device, such as 'h200', or 'cpu'")
    if device is None or device.strip().casefold() == "cpu":
        return None
    from optpass.passes import devices

    try:
        return devices.resolve(device)
    except ConfigError as error:
        raise ConfigError(f"{given('device', device)}: {error}") from None


def present_device(target: Target | None, tell: Progress) -> DeviceSpec:
    """The CUDA device that the target's tensors are on; else this machine's processor, measured now if never before."""
    if target is not None:
        from optpass.backend.device import measured
        from optpass.backend.model_tensors import device_of

        found = device_of(target.model, (target.args, target.kwargs))
        if found is not None and found.type != "cpu":
            return measured(found)
    from optpass.passes.roofline import calibration

    return calibration.cached_spec() or calibration.calibrated_spec(
        lambda fraction, text: tell(fraction, f"measuring this CPU: {text}")
    )


# ---- capture --------------------------------------------------------------------------------------------------------


def captured(
    target: Target,
    train: bool,
    loss: Callable[[Any], torch.Tensor] | None,
    *,
    joint: bool = False,
    prepare: Callable[[fx.GraphModule], None] | None = None,
    as_inductor: bool = True,
    ready: Ready | None = None,
) -> tuple[Capture, list[str]]:
    """The target's graphs, by fake tensors or, where they cannot follow it, for real; and what the user should know.

    Args:
        target: a model and its inputs.
        train: forward and backward.
        loss: reduces the output to a scalar; default the target's own, else the generic one.
        joint, prepare, as_inductor, ready: as in `ahead.capture_model`.
    """
    from optpass.backend import ahead
    from optpass.models import loss as generic

    reduce = (loss or target.loss or generic) if train else None

    def capture(chosen: Target, real: bool) -> Capture:
        return ahead.capture_model(
            chosen.model, chosen.args, chosen.kwargs, train=train, loss=reduce, fake=chosen.fake_mode,
            dtype=chosen.dtype, real=real, joint=joint, prepare=prepare,
            as_inductor=as_inductor, ready=ready,
        )  # fmt: skip

    try:
        return capture(target, False), list(target.notes)
    except TraceError as error:
        if error.__cause__ is None:
            raise
        rebuild = _may_run(target, error)
        first = error
    result = capture(rebuild(), True)
    return result, [
        *target.notes,
        f"a copy was run once for real, so ops outside of graphs are not counted; on fake tensors {first}",
    ]


def _may_run(target: Target, error: TraceError) -> Callable[[], Target]:
    """How to get the model for real; `error`, with the reason added, where it must not be run."""
    from optpass.backend import compat
    from optpass.backend.model_tensors import data_bytes, memory_bytes
    from optpass.units import format_bytes

    needed, most = data_bytes(target.model, (target.args, target.kwargs)), int(REAL_SHARE * memory_bytes())
    if target.rebuild is not None and needed <= most:
        return target.rebuild
    if not compat.needs_values(error):
        raise error
    if target.rebuild is None:
        why = "its tensors hold none; pass a model with real tensors"
    else:
        size, limit = format_bytes(needed), format_bytes(most)
        why = f"at {size} it is too large to be run here (limit {limit}); take a smaller size"
    raise TraceError(f"{error}; it depends on values, and {why}") from error.__cause__
