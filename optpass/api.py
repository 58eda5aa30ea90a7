"""The Python interface: `analyze` a model ahead of time, and the `report` of what this process has compiled."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from optpass.errors import ConfigError, TraceError
from optpass.report.merge import totals, unknown_ops
from optpass.report.model import Analysis, GraphRecord, Report, Totals
from optpass.targets import OnnxTarget, Target, load, parse_dtype

if TYPE_CHECKING:
    import torch

    from optpass.backend.ahead import Capture
    from optpass.passes.devices import DeviceSpec
    from optpass.passes.roofline.program import Program

#: Called with the fraction done (None where nobody knows) and what is being done.
Progress = Callable[[float | None, str], None]
#: Part of the machine's memory that a model may take to be run for real, where fake tensors cannot follow it.
REAL_SHARE = 0.25
INNER = "none (analysis)"


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
    sets: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Analysis:
    """The roofline of every op of a model, before and after fusion. Nothing is compiled, run or allocated.

    A model that branches on values cannot be followed by fake tensors; where it takes less than a quarter of this
    machine's memory, a copy of it is run once for real instead, and a note says so.

    Args:
        model: a module or a function, with real, fake or meta tensors, which is not changed; or a target as on the
            command line: "gpt:gpt2", "file.py:factory", "hf:llama", "model.onnx".
        *args: inputs of `model`, real, fake or meta; none for a target.
        device: spec to plan for, by name ("h100"); "cpu" is this machine, measured once (up to 20 s). Default: the CUDA
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
        ConfigError: an unknown device, dtype or target.
        TraceError: the model raises, or cannot be captured; says what, and on which line.
    """
    tell = progress or (lambda fraction, text: None)
    spec = _named(device)
    if isinstance(model, str):
        if args or kwargs:
            raise ConfigError(f"analyze({model!r}): a target brings its own inputs; pass settings with sets={{...}}")
        tell(None, "building the model")
        target = load(model, sets=sets, dtype=_text(dtype), size=size, train=train)
    else:
        if sets or size is not None:
            raise ConfigError("analyze: size and sets belong to a target given by name, not to a model object")
        target = _given(model, args, kwargs, dtype)
    if name is not None:
        target = _renamed(target, name)
    if isinstance(target, OnnxTarget):
        return _of_onnx(target, spec or _present(None, tell), parse_dtype(_text(dtype)), train, tell)
    spec = spec or _present(target, tell)
    tell(None, "tracing")
    capture, notes = _captured(target, train, loss)
    tell(None, "counting")
    return _of_capture(target, capture, spec, train, notes)


def report(name: str = "") -> Report:
    """Everything that this process has compiled with `backend="optpass"` so far, priced for its device.

    Args:
        name: title of the report.
    """
    from optpass.backend.reporting import build_report

    return build_report(name)


def reset_report() -> None:
    """Forget every graph compiled so far in this process."""
    from optpass.backend.reporting import reset_report as reset

    reset()


# ---- target and device ----------------------------------------------------------------------------------------------


def _text(dtype: torch.dtype | str | None) -> str | None:
    return None if dtype is None else str(dtype)


def _given(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, dtype: torch.dtype | str | None
) -> Target:
    """A model object as a target."""
    if not callable(model):
        raise ConfigError(f"analyze: {type(model).__name__} is neither a module, a function nor the name of a target")
    from optpass.backend.model_tensors import data_free, mode_of

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


def _named(device: str | None) -> DeviceSpec | None:
    """The spec of a device by name; None for this machine's own, which may have to be measured first."""
    if device is None or device.strip().casefold() == "cpu":
        return None
    from optpass.passes import devices

    return devices.resolve(device)


def _present(target: Target | None, tell: Progress) -> DeviceSpec:
    """The CUDA device that the target's tensors are on; else this machine's processor, measured now if never before."""
    if target is not None:
        from optpass.backend.device import actual
        from optpass.backend.model_tensors import device_of

        found = device_of(target.model, (target.args, target.kwargs))
        if found is not None and found.type != "cpu":
            return actual(found)
    from optpass.passes.roofline import calibration

    return calibration.cached_spec() or calibration.calibrated_spec(
        lambda fraction, text: tell(fraction, f"measuring this CPU: {text}")
    )


# ---- capture --------------------------------------------------------------------------------------------------------


def _captured(
    target: Target, train: bool, loss: Callable[[Any], torch.Tensor] | None
) -> tuple[Capture, list[str]]:
    """The target's graphs, by fake tensors or, where they cannot follow it, for real; and what the user should know."""
    from optpass.backend import ahead
    from optpass.models import loss as generic

    reduce = (loss or target.loss or generic) if train else None

    def capture(chosen: Target, real: bool) -> Capture:
        return ahead.capture_model(
            chosen.model, chosen.args, chosen.kwargs, train=train, loss=reduce, fake=chosen.fake_mode,
            dtype=chosen.dtype, real=real,
        )  # fmt: skip

    try:
        return capture(target, False), list(target.notes)
    except TraceError as error:
        if error.__cause__ is None:
            raise
        rebuild = _may_run(target, error)
        first = error
    result = capture(rebuild(), True)
    return result, [*target.notes, f"a copy was run once for real, because on fake tensors {first}"]


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
        why = f"at {format_bytes(needed)} it is too large to be run here (limit {format_bytes(most)}); take a smaller size"
    raise TraceError(f"{error}; it depends on values, and {why}") from error.__cause__


# ---- the record -----------------------------------------------------------------------------------------------------


def _of_capture(target: Target, capture: Capture, spec: DeviceSpec, train: bool, notes: list[str]) -> Analysis:
    from optpass.passes.roofline.analysis import program_of

    programs = [program_of(item.graphs, on_cpu=spec.kind == "cpu") for item in capture.items]
    records = []
    for index in capture.calls:
        item = capture.items[index]
        records.append(
            GraphRecord(
                id=str(len(records)), function=_first_line(programs[index]), training=len(item.graphs) > 1, inner=INNER,
                nodes=item.nodes, t_compile_s=item.seconds if index not in capture.calls[: len(records)] else 0.0,
            )  # fmt: skip
        )
    analysis = _filled(target.name, train, capture.dtype, spec, [programs[i] for i in capture.calls], records)
    analysis.parameters = capture.parameters
    analysis.notes = [*notes, *_notes(target, capture, train), *_device_notes(spec)]
    return analysis


def _of_onnx(
    target: OnnxTarget, spec: DeviceSpec, dtype: torch.dtype | None, train: bool, tell: Progress
) -> Analysis:
    import time

    from optpass.passes.onnx_roofline import program_of_onnx

    if train:
        raise ConfigError(f"--train: {target.path} holds a forward graph only; analyse the torch model to train it")
    tell(None, "reading the graph")
    start = time.perf_counter()
    program, facts = program_of_onnx(target.path, dims=target.dims, dtype=dtype, on_cpu=spec.kind == "cpu")
    record = GraphRecord(
        id="0", function=str(target.path), inner=INNER, nodes=len(program.ops), t_compile_s=time.perf_counter() - start
    )
    analysis = _filled(target.name, False, _main_dtype(program), spec, [program], [record])
    analysis.parameters = facts.parameters
    inputs = ", ".join(facts.inputs)
    analysis.notes = [*([f"inputs: {inputs}"] if inputs else []), *facts.notes, *_device_notes(spec)]
    return analysis


def _filled(
    name: str, train: bool, dtype: str, spec: DeviceSpec, programs: Sequence[Program], records: list[GraphRecord]
) -> Analysis:
    """The analysis of graphs that run one after another: `programs[i]` is that of `records[i]`."""
    from optpass.passes.roofline.price import device_record, price

    device = device_record(spec)
    analysis = Analysis(target=name, train=train, dtype=dtype, device=device, totals=Totals(), graphs=records)
    for program, record in zip(programs, records, strict=True):
        _distinct(program)
        priced = price(program, spec)
        for op in priced.ops:
            op.graph = record.id
        for group in priced.groups:
            group.graph = record.id
        record.unknown_ops, record.totals = dict(program.unknown), priced.totals
        analysis.ops += priced.ops
        analysis.groups += priced.groups
    analysis.totals = totals(records, analysis.ops, device)
    analysis.unknown_ops = unknown_ops(records)
    return analysis


def _distinct(program: Program) -> None:
    """Give recomputed ops a name of their own: the partitioner leaves their twin of the forward the same one."""
    taken: set[str] = set()
    for op in program.ops:
        if op.name in taken:
            stem = f"{op.name}_recomputed" if op.recomputed else op.name
            names = itertools.chain([stem], (f"{stem}_{i}" for i in itertools.count(1)))
            op.name = next(n for n in names if n not in taken)
        taken.add(op.name)


def _first_line(program: Program) -> str:
    return next((f"{op.file}:{op.line}" for op in program.ops if op.file and op.phase == "forward"), "")


def _main_dtype(program: Program) -> str:
    """The dtype that most of the arithmetic runs in."""
    work: Counter[str] = Counter()
    for op in program.ops:
        if op.dtype and op.cost is not None:
            work[op.dtype] += int(op.cost.flops)
    return work.most_common(1)[0][0] if work else ""


def _notes(target: Target, capture: Capture, train: bool) -> list[str]:
    """Assumptions and limits that hold for a captured model."""
    from optpass.backend.capture import MIN_CUT_NODES

    notes = [f"inputs: {capture.inputs}"] if capture.inputs else []
    breaks = Counter(capture.items[i].ended_by for i in capture.calls if capture.items[i].ended_by)
    if len(capture.calls) > 1:
        notes.append(f"{len(capture.calls)} graphs are run; kernels do not fuse across them")
    notes += [f"graph break{f', {count} times' if count > 1 else ''}: {why}" for why, count in breaks.items()]
    if any(item.linear for item in capture.items):
        notes.append(
            f"a joint graph of more than {MIN_CUT_NODES} nodes is split by the linear partitioner: the backward is "
            "counted with every activation saved and none recomputed"
        )
    if train and not any(len(item.graphs) > 1 for item in capture.items):
        notes.append("no backward: nothing that the loss depends on needs a gradient")
    elif train:
        notes.append("no optimizer step is counted")
    return notes


def _device_notes(spec: DeviceSpec) -> list[str]:
    if spec.kind == "cpu" and spec.cpu is None:
        return ["this CPU was never measured, and a generic one stands in: optpass env --calibrate"]
    return []
