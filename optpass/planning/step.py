"""What a training step holds throughout, from the model itself: parameters, buffers, inputs, optimizer. No graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optpass.backend.model_tensors import input_tensors, owner
from optpass.passes.devices import DeviceSpec
from optpass.passes.memory.optimizers.optimizers import OptimizerCost
from optpass.passes.memory.optimizers.rehearsal import ParameterSize, sizes_of
from optpass.passes.memory.plan import Ledger

#: CUDA's caching allocator hands out multiples of this many bytes, and counts them as allocated.
GPU_GRANULARITY = 512


@dataclass(frozen=True)
class StepState:
    """Bytes that are there whatever the plan.

    Attributes:
        parameters, buffers, inputs: bytes, as the device's allocator counts them.
        gradients: bytes of the gradients of all trained parameters.
        trained: the trained parameters.
        optimizer: what the optimizer needs.
        accumulation: micro-batches per optimizer step.
    """

    parameters: int
    buffers: int
    inputs: int
    gradients: int
    trained: tuple[ParameterSize, ...]
    optimizer: OptimizerCost
    accumulation: int = 1

    def statics(self) -> Ledger:
        """What is there throughout the forward and the backward.

        Gradients of a single micro-batch are made by the backward itself; those of earlier micro-batches are there
        from the start.
        """
        return Ledger(
            parameters=self.parameters,
            gradients=self.gradients if self.accumulation > 1 else 0,
            optimizer=self.optimizer.state_bytes,
            buffers=self.buffers,
            inputs=self.inputs,
        )

    def at_optimizer(self, outputs: int) -> Ledger:
        """The ledger while the optimizer steps: no plan changes it.

        Args:
            outputs: bytes of the forward's outputs, which the caller still holds.
        """
        return Ledger(
            parameters=self.parameters,
            gradients=self.gradients,
            optimizer=self.optimizer.state_bytes,
            buffers=self.buffers,
            inputs=self.inputs,
            activations=outputs,
            temporaries=self.optimizer.step_bytes,
        )


def granularity(device: DeviceSpec) -> int:
    """Bytes that the allocator of `device` rounds up to."""
    return 1 if device.kind == "cpu" else GPU_GRANULARITY


def bytes_of(tensors: Iterable[Tensor], unit: int) -> int:
    """Bytes of the storages behind `tensors`, each rounded up to `unit`; tensors that are one object count once."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            seen[storage._cdata] = max(seen.get(storage._cdata, 0), int(storage.nbytes()) or int(size))
        else:
            seen[id(tensor)] = int(size)
    return sum(-(-size // unit) * unit for size in seen.values())


def trained_parameters(model: Any) -> list[Tensor]:
    """Parameters that need a gradient, tied ones once."""
    module = owner(model)
    return [p for p in module.parameters() if p.requires_grad] if module is not None else []


def held_tensors(model: Any) -> Iterator[Tensor]:
    """Buffers and tensors kept as plain attributes of the model's modules."""
    module = owner(model)
    if module is None:
        return
    yield from module.buffers()
    for part in module.modules():
        yield from (value for value in vars(part).values() if isinstance(value, Tensor))


def state_of(
    model: Any, arguments: Sequence[Any], optimizer: OptimizerCost, *, unit: int, accumulation: int = 1,
    graded: Collection[int] | None = None,
) -> StepState:  # fmt: skip
    """The state of a step of `model(*arguments)`, whose tensors may be fake.

    Args:
        unit: as `granularity` gives it.
        graded: identities of the parameters that get a gradient, where that is known.
    """
    module = owner(model)
    parameters = list(module.parameters()) if module is not None else []
    trained = [p for p in parameters if p.requires_grad and (graded is None or id(p) in graded)]
    return StepState(
        parameters=bytes_of(parameters, unit),
        buffers=bytes_of(held_tensors(model), unit),
        inputs=bytes_of(input_tensors(arguments), unit),
        gradients=bytes_of(trained, unit),
        trained=tuple(sizes_of(trained)),
        optimizer=optimizer,
        accumulation=accumulation,
    )
