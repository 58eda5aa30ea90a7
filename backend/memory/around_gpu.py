"""What is allocated on a GPU beside a step's tensors: workspaces that cuBLAS keeps, and what the allocator rounds up.

`torch.cuda.max_memory_allocated` counts both. cuBLAS is given a workspace for each thread that calls it, which is never
given back: the thread that runs the forward, and autograd's of the device. Sizes: `getChosenWorkspaceSize` and
`getCUDABlasLtWorkspaceSize` in aten/src/ATen/cuda (CublasHandlePool.cpp and CUDABlas.cpp of torch 2.11 to 2.15);
measured on an H100 with torch 2.11: 32 MiB and 1 MiB.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

import torch

from optpass.backend import compat
from optpass.passes.devices import DeviceSpec

MIB = 1 << 20
#: Threads of a training step that multiply.
_THREADS = 2
_LT_WORKSPACE = MIB
#: What is rounded up differs by a block or two from process to process; plans and caches had better not.
_GRAIN = 2 * MIB


def beside(spec: DeviceSpec | None, held: Sequence[torch.Tensor], multiplies: bool, *, again: float = 0.0) -> int:
    """Bytes allocated throughout a step beside its tensors; 0 where they are not on a GPU that torch calls 'cuda'.

    Args:
        spec: the GPU; None where nothing is known of it.
        held: what is there before the step, parameters first.
        multiplies: it has products of matrices.
        again: bytes that are not there yet, such as an optimizer's state, over those of `held`, rounded up alike.
    """
    on_gpu = [t for t in held if t.device.type == "cuda"]
    if not on_gpu:
        return 0
    rounded = int(lost_in_blocks(on_gpu) * (1 + again))
    return (kept_by_libraries(spec) if multiplies else 0) + -(-rounded // _GRAIN) * _GRAIN


def kept_by_libraries(spec: DeviceSpec | None) -> int:
    """Bytes of the workspaces that a training step's products of matrices keep, on a GPU."""
    return _THREADS * (workspace_bytes(spec) + _LT_WORKSPACE)


def workspace_bytes(spec: DeviceSpec | None) -> int:
    """Bytes of the workspace that cuBLAS is given in one thread."""
    given = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    pairs = re.findall(r":(\d+):(\d+)", given)
    if pairs:
        return sum(int(kib) * 1024 * int(count) for kib, count in pairs)
    capability = spec.capability if spec is not None else None
    return 32 * MIB if capability is not None and capability[0] in (9, 10) else (4096 * 2 + 16 * 8) * 1024


def lost_in_blocks(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes by which the blocks that hold the tensors are larger than they are; 0 for what is not allocated here."""
    held: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layout == torch.strided and not isinstance(tensor, compat.FakeTensor):
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    if not held or not torch.cuda.is_available():
        return 0
    lost = 0
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call, unused-ignore]
        address = segment["address"]
        for block in segment["blocks"]:
            lost += block["size"] - held.get(address, block["size"])
            address += block["size"]
    return lost
