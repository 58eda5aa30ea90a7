"""What a library allocates inside an operator is asked while a profiler of the program's own runs."""

from __future__ import annotations

import torch

from optpass.backend.memory.measure import measure_peak
from optpass.backend.memory.probe import library_workspace
from optpass.passes.memory.workspace.call import Call


def test_a_question_is_no_release_to_the_programs_profiler() -> None:
    """What the operator gives is released by the thread that allocated it, which that profiler does not see."""
    image, weight = torch.zeros(2, 3, 41, 43), torch.zeros(16, 3, 3, 3)
    arguments = {
        "input": image, "weight": weight, "bias": None, "stride": [1, 1], "padding": [1, 1], "dilation": [1, 1],
        "transposed": False, "output_padding": [0, 0], "groups": 1,
    }  # fmt: skip
    call = Call("convolution", "default", torch.ops.aten.convolution.default, arguments, torch.zeros(2, 16, 41, 43))
    size = 1 << 20

    def ask_and_allocate() -> None:
        assert library_workspace(call) is not None
        torch.zeros(size // 4)

    assert measure_peak(ask_and_allocate).bytes_above_start >= size
