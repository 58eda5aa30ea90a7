"""The peak of a training step before it runs: its graphs, or what Inductor generates for them, on fake tensors.

A replay is exact where the executor is: `graph` for aot_eager, which runs the partitioner's graphs as they stand, and
`inductor` for the generated wrapper. Both phases run on one count of storages, so that a saved tensor that is a view,
an output or an input is counted as what it is. A graph that is no step is `alone`'s. Which plan to
replay is the partitioner's to say; measured peaks are `measure`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from optpass.backend import compat
from optpass.backend.compat import memory as inductor
from optpass.backend.memory.replay.graph_run import GraphRun
from optpass.backend.memory.replay.graph_values import (
    concrete,
    contiguous,
    copied,
    outputs_of,
    restrided,
    sizes_read,
    values_of_inputs,
)
from optpass.backend.memory.replay.storages import Moment, Storages
from optpass.backend.memory.replay.tail import NO_TAIL, Tail
from optpass.backend.memory.replay.wrapper import Wrapper, fake_tensor

Executor = Literal["graph", "inductor"]


@dataclass(frozen=True)
class StepReplay:
    """Forward and backward, replayed; bytes are above those that are there throughout the step.

    Attributes:
        forward_peak, backward_peak: most bytes in each phase, saved tensors and held outputs included.
        boundary_bytes: bytes between the phases: saved tensors and outputs that are held.
        handed_bytes: bytes when the forward returns: saved tensors and outputs.
        saved_bytes: those of saved tensors alone, by name; views of one storage share its bytes under the first.
        gradient_bytes: bytes when the backward has returned: the gradients, and outputs that are held.
        peak_label: what ran at the peak.
        timeline: bytes after each operation of the step.
        lowered: where asked for, what Inductor generated for both; `compat.memory.reusing` compiles it. Large: drop it
            when both are compiled.
        unsound: as in `Storages`: it must not be run.
        kept_bytes: as in the `Tail` that it was replayed with.
    """

    forward_peak: int
    boundary_bytes: int
    backward_peak: int
    gradient_bytes: int
    peak_label: str
    saved_bytes: Mapping[str, int] = field(repr=False)
    timeline: tuple[Moment, ...] = field(repr=False)
    lowered: tuple[inductor.Lowered, ...] = field(default=(), repr=False)
    handed_bytes: int = 0
    unsound: bool = False
    kept_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Most bytes at one time in the step."""
        return max((moment.live_bytes for moment in self.timeline), default=0)


def replay_step(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *,
    n_outputs: int,
    executor: Executor,
    tail: Tail = NO_TAIL,
    mutated_inputs: int = 0,
    config_patches: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    improve: inductor.Improve | None = None,
    keep_lowered: bool = False,
) -> StepReplay:
    """The peak of one training step: `forward`, what the caller does with its outputs, `backward`.

    Args:
        forward, backward: the partitioner's graphs; they are not changed.
        n_outputs: outputs of the forward that are not saved tensors (the partitioner's `num_fwd_outputs`).
        executor: who runs the graphs.
        tail: what the caller does between the phases; nothing where the loss is in the graph.
        mutated_inputs: how many of these outputs, at the front, are new values of inputs.
        config_patches: Inductor settings of the compile.
        settings, improve: as for `compat.memory.lower`.
        keep_lowered: give back what was lowered, to compile it without lowering it again.

    Raises what Inductor raises.
    """
    mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
    storages = Storages()
    how = {"config_patches": config_patches, "settings": settings, "improve": improve}
    step = _Step(forward, backward, n_outputs, executor, mutated_inputs, how, mode, storages)
    result = step.run(tail)
    return replace(result, lowered=tuple(step.lowered)) if keep_lowered else result


@dataclass
class _Step:
    forward: fx.GraphModule
    backward: fx.GraphModule
    n_outputs: int
    executor: Executor
    mutated_inputs: int
    how: dict[str, Any]
    mode: compat.FakeTensorMode
    storages: Storages
    lowered: list[inductor.Lowered] = field(default_factory=list)

    def run(self, tail: Tail) -> StepReplay:
        storages = self.storages
        inputs = [concrete(value, self.mode) for value in values_of_inputs(self.forward)]
        for value in inputs:
            if isinstance(value, torch.Tensor):
                storages.external(value)
        storages.live += tail.early_bytes
        outputs = self._forward().run(list(inputs), storages)
        storages.live -= tail.early_bytes
        storages.mark("end of forward")
        forward_peak = storages.peak
        names = [n.name if isinstance(n, fx.Node) else "" for n in outputs_of(self.forward)]
        saved = dict(zip(names[self.n_outputs :], outputs[self.n_outputs :], strict=True))
        users = outputs[self.mutated_inputs : self.n_outputs]
        del outputs
        sizes = _sizes(saved, storages)
        handed = storages.live
        held = tail.after_forward(users, storages)
        del users
        boundary = storages.live
        storages.peak = 0
        arguments = self._backward_inputs(saved)
        program = self._backward(saved)
        storages.save(saved.values())
        retained = list(saved.values()) if tail.retains else []
        saved.clear()
        tangents = [arguments[i] for i in self._tangents()]
        tail.before_backward(tangents, held, storages)
        if inductor.TANGENTS_ARE_BOXED:
            tangents.clear()
        gradients = program.run(arguments, storages)
        storages.mark("end of backward")
        retained.clear()
        _accumulate(gradients, storages)
        gradient_bytes = storages.live
        more = storages.more_in_later_steps()
        timeline = storages.timeline
        if more:
            timeline = [replace(moment, live_bytes=moment.live_bytes + more) for moment in timeline]
        return StepReplay(
            forward_peak=forward_peak + more,
            boundary_bytes=boundary,
            backward_peak=storages.peak + more,
            gradient_bytes=gradient_bytes,
            peak_label=max(timeline, key=lambda moment: moment.live_bytes).label,
            saved_bytes=sizes,
            timeline=tuple(timeline),
            handed_bytes=handed,
            kept_bytes=tail.kept_bytes,
            unsound=storages.unsound,
        )

    def _forward(self) -> GraphRun | Wrapper:
        if self.executor == "graph":
            return GraphRun(self.forward, self.mode)
        users = range(self.mutated_inputs, self.n_outputs)
        outputs = outputs_of(self.forward)
        lowered = inductor.lower(
            copied(self.forward), values_of_inputs(self.forward), is_backward=False,
            user_outputs=[i for i in users if isinstance(outputs[i], fx.Node)], **self.how,
        )  # fmt: skip
        self.lowered.append(lowered)
        return Wrapper(lowered, self.mode, sizes_read(self.forward))

    def _backward(self, saved: Mapping[str, Any]) -> GraphRun | Wrapper:
        if self.executor == "graph":
            return GraphRun(self.backward, self.mode)
        placeholders = self.backward.graph.find_nodes(op="placeholder")
        values = [restrided(node.meta["val"], saved.get(node.name)) for node in placeholders]
        outputs = [i for i, node in enumerate(outputs_of(self.backward)) if isinstance(node, fx.Node)]
        lowered = inductor.lower(
            copied(self.backward), values, is_backward=True, **self.how,
            donated=inductor.donated_inputs(self.forward, self.backward, self.n_outputs),
            user_outputs=outputs if inductor.keeps_gradient_strides() else (),
        )  # fmt: skip
        self.lowered.append(lowered)
        return Wrapper(lowered, self.mode, sizes_read(self.backward))

    def _backward_inputs(self, saved: Mapping[str, Any]) -> list[Any]:
        """The arguments of the backward. A tangent or a seed is new, and counts from `tail.before_backward` on."""
        placeholders = self.backward.graph.find_nodes(op="placeholder")
        names = {n.name for n in placeholders}
        # States of generators have names of their own in the backward, and the order of the forward.
        states = (value for name, value in saved.items() if name not in names)
        return [
            saved[n.name] if n.name in saved
            else next(states) if n.name.startswith("rng_state_output")
            else concrete(n.meta["val"], self.mode)
            for n in placeholders
        ]  # fmt: skip

    def _tangents(self) -> list[int]:
        names = [node.name for node in self.backward.graph.find_nodes(op="placeholder")]
        return [i for i, name in enumerate(names) if name.startswith("tangents")]


def _accumulate(gradients: list[Any], storages: Storages) -> None:
    """What autograd does with the gradients; it takes most as they are, and copies one that is a view of few values.

    `AccumulateGrad` (torch/csrc/autograd/functions/accumulate_grad.h) keeps a gradient that is dense and laid out as
    the parameter; another one is copied, and then released.
    """
    for index, gradient in enumerate(gradients):
        if not isinstance(gradient, torch.Tensor):
            continue
        if torch._prims_common.is_non_overlapping_and_dense_or_false(gradient):
            continue
        assert isinstance(gradient, compat.FakeTensor)
        copied = fake_tensor(gradient.fake_mode, gradient.shape, contiguous(gradient), gradient.dtype, gradient.device)
        storages.add(copied)
        storages.mark("accumulate")
        gradients[index] = copied


def _sizes(values: Mapping[str, Any], storages: Storages) -> dict[str, int]:
    """Bytes of each tensor's storage, once, and 0 for one that is there throughout the step."""
    seen: set[int] = set()
    found: dict[str, int] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            key = value.untyped_storage()._cdata
            found[name] = 0 if key in seen else storages.size(value)
            seen.add(key)
    return found
