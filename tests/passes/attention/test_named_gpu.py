"""Which kernel a site gets on a GPU that is not here: programs on tensors without memory, as for `device="H200"`.

torch evaluates them for CUDA where it was built with it; no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import optpass
from optpass.passes.attention import choice

pytestmark = [
    pytest.mark.usefixtures("clean", "seeded"),
    pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch was built without CUDA"),
]

#: A cuDNN that torch takes first on Hopper.
CUDNN = 91900


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is asked of the device that is here."""
    monkeypatch.setattr(choice, "present", lambda _: ("sm_90", CUDNN))
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return (scores if bias is None else scores + bias).softmax(-1) @ v


def draw(*shape: int, grad: bool = False, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=grad)


def taken(inner: Any, arguments: list[torch.Tensor], **options: Any) -> str:
    options = {"inner": inner, "strict": True, "attention": "always", "device": "H200", **options}
    options["disable_passes"] = ["roofline", *options.get("disable_passes", [])]
    torch.compile(attend, backend="optpass", fullgraph=True, options=options)(*arguments)
    (site,) = optpass.report().sites("attention")
    return site.after


@pytest.mark.parametrize(("training", "kernel"), [(False, "SDPA cudnn"), (True, "SDPA flash")])
def test_where_no_pass_sees_the_backward_cudnn_has_none(training: bool, kernel: str, kernels: Any) -> None:
    assert taken(kernels, [draw(2, 4, 128, 64, grad=training) for _ in range(3)]) == kernel


def test_nothing_is_computed_by_cudnn_with_a_mask_operand(kernels: Any) -> None:
    q, k, v = (draw(2, 4, 128, 64) for _ in range(3))
    assert taken(kernels, [q, k, v, draw(1, 4, 128, 128)]).startswith("SDPA mem_efficient")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_mask_of_one_column_is_written_out(dtype: torch.dtype, kernels: Any) -> None:
    """SDPA expands it to all keys, which its kernels for GPUs refuse."""
    q, k, v = (draw(2, 4, 128, 64, dtype=dtype) for _ in range(3))
    taken(kernels, [q, k, v, draw(1, 4, 128, 1, dtype=dtype)])
    masks = [node.kwargs["attn_mask"].meta["example_value"] for node in kernels.sdpa]
    assert [mask.shape[-1] for mask in masks] == [128] and masks[0].stride(-1) == 1
