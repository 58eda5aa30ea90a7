"""Tensors that change from one call to the next: one change each, explained in the user's terms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn


def double(x: Any) -> Any:
    return x * 2


def sizes_differ(compiled: Any) -> None:
    run = compiled(double)
    run(torch.randn(3, 4))
    run(torch.randn(5, 4))


def last_size_differs(compiled: Any) -> None:
    run = compiled(double)
    run(torch.randn(3, 4))
    run(torch.randn(3, 9))


def size_becomes_one(compiled: Any) -> None:
    run = compiled(double)
    run(torch.randn(3, 4))
    run(torch.randn(1, 4))


def static_sizes(compiled: Any) -> None:
    run = compiled(double, dynamic=False)
    run(torch.randn(3, 4))
    run(torch.randn(6, 4))


def dynamic_sizes_meet_one(compiled: Any) -> None:
    run = compiled(double, dynamic=True)
    run(torch.randn(3, 4))
    run(torch.randn(1, 4))


def marked_static(compiled: Any) -> None:
    run = compiled(double)
    first, second = torch.randn(3, 4), torch.randn(6, 4)
    torch._dynamo.mark_static(first, 0)
    torch._dynamo.mark_static(second, 0)
    run(first)
    run(second)


def specialised_by_the_function(compiled: Any) -> None:
    run = compiled(lambda x: x + 1 if x.shape[0] == 4 else x - 1, dynamic=True)
    run(torch.randn(4, 3))
    run(torch.randn(5, 3))


def bounded_by_the_function(compiled: Any) -> None:
    run = compiled(lambda x: x + 1 if x.shape[0] > 8 else x - 1, dynamic=True)
    run(torch.randn(4, 3))
    run(torch.randn(16, 3))


def more_dimensions(compiled: Any) -> None:
    run = compiled(double)
    run(torch.randn(3, 4))
    run(torch.randn(2, 3, 4))


def scalar_becomes_vector(compiled: Any) -> None:
    run = compiled(double)
    run(torch.tensor(1.0))
    run(torch.tensor([1.0, 2.0]))


def keyword_tensor(compiled: Any) -> None:
    run = compiled(lambda x, *, bias: x + bias)
    run(torch.randn(4), bias=torch.randn(4))
    run(torch.randn(4), bias=torch.randn(1))


def variadic(compiled: Any) -> None:
    run = compiled(lambda *xs: xs[0] + xs[1])
    run(torch.randn(4), torch.randn(1))
    run(torch.randn(4), torch.randn(4))


def variadic_keywords(compiled: Any) -> None:
    def total(**named: Any) -> Any:
        return named["a"].sum() + named["b"].sum()

    run = compiled(total)
    run(a=torch.randn(4), b=torch.randn(3))
    run(a=torch.randn(4), b=torch.randn(5))


def in_a_list(compiled: Any) -> None:
    run = compiled(lambda xs: xs[0].sum() + xs[1].sum())
    run([torch.randn(4), torch.randn(3)])
    run([torch.randn(4), torch.randn(5)])


def in_a_dict(compiled: Any) -> None:
    run = compiled(lambda batch: batch["ids"].sum() + batch["mask"].sum())
    run({"ids": torch.randn(4), "mask": torch.randn(3)})
    run({"ids": torch.randn(4), "mask": torch.randn(5)})


def in_a_tuple_in_a_dict(compiled: Any) -> None:
    run = compiled(lambda cache: cache["kv"][1] * 2)
    run({"kv": (1, torch.randn(3, 2))})
    run({"kv": (1, torch.randn(7, 2))})


def numpy_array(compiled: Any) -> None:
    run = compiled(lambda a: torch.from_numpy(a) * 2)
    run(np.ones((3, 2), dtype=np.float32))
    run(np.ones((5, 2), dtype=np.float32))


def float_to_double(compiled: Any) -> None:
    run = compiled(double)
    run(torch.randn(4))
    run(torch.randn(4, dtype=torch.float64))


def int_to_float(compiled: Any) -> None:
    run = compiled(double)
    run(torch.arange(4))
    run(torch.arange(4.0))


def half_mask(compiled: Any) -> None:
    run = compiled(lambda x, mask: x * mask)
    run(torch.randn(4), torch.ones(4, dtype=torch.bool))
    run(torch.randn(4), torch.ones(4, dtype=torch.bfloat16))


def numpy_dtype(compiled: Any) -> None:
    run = compiled(lambda a: torch.from_numpy(a) * 2)
    run(np.ones(3, dtype=np.float32))
    run(np.ones(3, dtype=np.int64))


def module_moved_to_double(compiled: Any) -> None:
    model = nn.Linear(4, 4)
    run = compiled(lambda x: x * model.weight)
    run(torch.randn(4))
    model.double()
    run(torch.randn(4))


def other_device(compiled: Any) -> None:
    run = compiled(double)
    run(torch.randn(4))
    run(torch.randn(4, device="meta"))


def transposed(compiled: Any) -> None:
    run = compiled(double)
    run(torch.randn(4, 4))
    run(torch.randn(4, 4).t())


def strided(compiled: Any) -> None:
    run = compiled(double, dynamic=False)
    run(torch.randn(4))
    run(torch.randn(8)[::2])


def channels_last(compiled: Any) -> None:
    run = compiled(double)
    x = torch.randn(2, 3, 4, 5)
    run(x)
    run(x.contiguous(memory_format=torch.channels_last))


def grad_required(compiled: Any) -> None:
    run = compiled(double)
    run(torch.randn(4))
    run(torch.randn(4, requires_grad=True))


def grad_no_longer_required(compiled: Any) -> None:
    run = compiled(double)
    run(torch.randn(4, requires_grad=True))
    run(torch.randn(4))


def frozen_weight(compiled: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    run = compiled(model)
    run(torch.randn(4))
    model[0].weight.requires_grad_(False)
    run(torch.randn(4))


def frozen_own_weight(compiled: Any) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Any) -> Any:
            return x * self.weight

    model = Scale()
    run = compiled(model)
    run(torch.randn(4))
    model.weight.requires_grad_(False)
    run(torch.randn(4))


def buffer_grows(compiled: Any) -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: Any) -> Any:
            return x + self.seen.sum()

    model = Cache()
    run = compiled(model)
    run(torch.randn(4))
    model.seen = torch.zeros(5)
    run(torch.randn(4))


def global_tensor(compiled: Any) -> None:
    global TABLE
    TABLE = torch.randn(3)
    run = compiled(lambda x: x + TABLE.sum())
    run(torch.randn(4))
    TABLE = torch.randn(6)
    run(torch.randn(4))


def closure_tensor(compiled: Any) -> None:
    table = torch.randn(3)

    def look_up(x: Any) -> Any:
        return x + table.sum()

    run = compiled(look_up)
    run(torch.randn(4))
    table = torch.randn(6)
    run(torch.randn(4))


def inference_tensor(compiled: Any) -> None:
    run = compiled(double)
    run(torch.randn(4))
    with torch.inference_mode():
        x = torch.randn(4)
    run(x)


def parameter_instead_of_tensor(compiled: Any) -> None:
    run = compiled(double)
    run(torch.randn(4, requires_grad=True))
    run(nn.Parameter(torch.randn(4)))


def marked_dynamic_later(compiled: Any) -> None:
    run = compiled(double)
    run(torch.randn(4, 3))
    x = torch.randn(4, 3)
    torch._dynamo.mark_dynamic(x, 0)
    run(x)


TABLE = torch.zeros(1)

CASES = [
    (sizes_differ, "shape", "x.size(0)", "3", "5"),
    (last_size_differs, "shape", "x.size(1)", "4", "9"),
    (size_becomes_one, "shape", "x.size(0)", "3", "1"),
    (static_sizes, "shape", "x.size(0)", "3", "6"),
    (dynamic_sizes_meet_one, "shape", "x.size(0)", "3", "1"),
    (marked_static, "shape", "x.size(0)", "3", "6"),
    (specialised_by_the_function, "shape", "x.size(0)", "4", "5"),
    (bounded_by_the_function, "shape", "x.size(0)", "4", "16"),
    (more_dimensions, "shape", "x.dim()", "2", "3"),
    (scalar_becomes_vector, "shape", "x.dim()", "0", "1"),
    (keyword_tensor, "shape", "bias.size(0)", "4", "1"),
    (variadic, "shape", "xs[1].size(0)", "1", "4"),
    (variadic_keywords, "shape", "named['b'].size(0)", "3", "5"),
    (in_a_list, "shape", "xs[1].size(0)", "3", "5"),
    (in_a_dict, "shape", "batch['mask'].size(0)", "3", "5"),
    (in_a_tuple_in_a_dict, "shape", "cache['kv'][1].size(0)", "3", "7"),
    (numpy_array, "shape", "a.size(0)", "3", "5"),
    (float_to_double, "dtype", "x.dtype", "torch.float32", "torch.float64"),
    (int_to_float, "dtype", "x.dtype", "torch.int64", "torch.float32"),
    (half_mask, "dtype", "mask.dtype", "torch.bool", "torch.bfloat16"),
    (numpy_dtype, "dtype", "a.dtype", "torch.float32", "torch.int64"),
    (module_moved_to_double, "dtype", "model.weight.dtype", "torch.float32", "torch.float64"),
    (other_device, "device", "x.device", "cpu", "meta"),
    (transposed, "stride", "x.stride(0)", "4", "1"),
    (strided, "stride", "x.stride(0)", "1", "2"),
    (channels_last, "stride", "x.stride(1)", "20", "1"),
    (grad_required, "requires_grad", "x.requires_grad", "False", "True"),
    (grad_no_longer_required, "requires_grad", "x.requires_grad", "True", "False"),
    (frozen_weight, "requires_grad", "self[0].weight.requires_grad", "True", "False"),
    (frozen_own_weight, "requires_grad", "self.weight.requires_grad", "True", "False"),
    (buffer_grows, "shape", "self.seen.size(0)", "3", "5"),
    (global_tensor, "shape", "TABLE.size(0)", "3", "6"),
    (closure_tensor, "shape", "table.size(0)", "3", "6"),
    (inference_tensor, "grad mode", "x.is_inference()", "False", "True"),
    (parameter_instead_of_tensor, "object identity", "x", "Tensor", "Parameter"),
    (marked_dynamic_later, "shape", "x", "unmarked", "dimensions {0} marked dynamic"),
]


@pytest.mark.parametrize(
    ("script", "cause", "source", "before", "after"), CASES, ids=lambda v: getattr(v, "__name__", "")
)
def test_one_change(check: Any, script: Any, cause: str, source: str, before: str, after: str) -> None:
    check(script, cause, source, before, after)
