"""From captured graphs or an ONNX file to the `Analysis` record: priced ops, totals, and what the user should know."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from optpass.errors import ConfigError
from optpass.naming import argument
from optpass.reporting.merge import totals, unknown_ops
from optpass.reporting.model import Analysis, GraphRecord, Totals

if TYPE_CHECKING:
    import torch

    from optpass.backend.ahead import Capture
    from optpass.passes.devices import DeviceSpec
    from optpass.passes.roofline.program import Program
    from optpass.targets import OnnxTarget, Target

INNER = "none (analysis)"


def analysis_of_capture(target: Target, capture: Capture, spec: DeviceSpec, train: bool, notes: list[str]) -> Analysis:
    """The analysis of a captured model; `notes` come first among its notes."""
    from optpass.passes.roofline.analysis import program_of

    programs = [program_of(item.graphs, on_cpu=spec.kind == "cpu") for item in capture.items]
    records: list[GraphRecord] = []
    for index in capture.calls:
        item = capture.items[index]
        records.append(
            GraphRecord(
                id=str(len(records)),
                function=_first_line(programs[index]),
                training=len(item.graphs) > 1,
                inner=INNER,
                nodes=item.nodes,
                t_compile_s=item.seconds if index not in capture.calls[: len(records)] else 0.0,
            )
        )
    analysis = _filled(target.name, train, capture.dtype, spec, [programs[i] for i in capture.calls], records)
    analysis.parameters = capture.parameters
    analysis.notes = [*notes, *_notes(target, capture, train), *_device_notes(spec)]
    return analysis


def analysis_of_onnx(
    target: OnnxTarget,
    spec: DeviceSpec,
    dtype: torch.dtype | None,
    train: bool,
    tell: Callable[[float | None, str], None],
) -> Analysis:
    """The analysis of an ONNX file. `ConfigError` where it cannot be read, or for training."""
    from optpass.passes.onnx_roofline import program_of_onnx

    if train:
        what = f"{argument('train')}: {target.path} holds a forward graph only"
        raise ConfigError(f"{what}; analyse the torch model to train it")
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
    eager = ", ".join(f"{name} x{count}" for name, count in capture.eager.most_common(3))
    if capture.whole:
        notes.append(
            "torch.compile leaves a part of the model to eager (a graph break where Dynamo cannot resume, as in a "
            f"loop): {eager}. It was traced whole instead, as one graph; eager kernels do not fuse as predicted here"
        )
    elif capture.eager:
        notes.append(f"{capture.eager.total()} ops run outside of any graph and are not counted: {eager}")
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
