"""How results are laid out on a CPU: as the replay takes them to be, whatever the layout of the operands."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from optpass.backend.memory.measure import measure_peak
from optpass.backend.memory.replay.alone import replay_graph
from optpass.backend.memory.replay.strides import RULES, as_run

aten = torch.ops.aten
SHAPE = (3, 4, 5, 6)
_STATISTICS = tuple(torch.zeros(4) for _ in range(3))
_ROWS = tuple(torch.zeros(3, 4, 1, 1) for _ in range(2))
_WEIGHTS = tuple(torch.ones(SHAPE[2:]) for _ in range(2))
_MASK = (True, True, True)
Two = Callable[[torch.Tensor, torch.Tensor], tuple[Any, ...]]

#: By the name of the rule: the operator and its arguments, of two tensors; how it rounds.
CASES: dict[str, Two] = {
    "native_dropout_backward": lambda a, b: (aten.native_dropout_backward.default, (a, b > 0, 2.0)),
    "hardtanh_backward": lambda a, b: (aten.hardtanh_backward.default, (a, b, -1.0, 1.0)),
    "hardswish_backward": lambda a, b: (aten.hardswish_backward.default, (a, b)),
    "logit_backward": lambda a, b: (aten.logit_backward.default, (a, b, 0.1)),
    "xlogy": lambda a, b: (aten.xlogy.Tensor, (a, b)),
    "copysign": lambda a, b: (aten.copysign.Tensor, (a, b)),
    "floor_divide": lambda a, b: (aten.floor_divide.default, (a, b)),
    "div": lambda a, b: (aten.div.Tensor_mode, (a, b), "floor"),
    "huber_loss_backward": lambda a, b: (aten.huber_loss_backward.default, (a, b, b, 1, 1.0)),
    "mse_loss_backward": lambda a, b: (aten.mse_loss_backward.default, (a, b, b, 1)),
    "smooth_l1_loss_backward": lambda a, b: (aten.smooth_l1_loss_backward.default, (a, b, b, 1, 1.0)),
    "_log_softmax_backward_data": lambda a, b: (aten._log_softmax_backward_data.default, (a, b, 1, torch.float32)),
    "log_sigmoid_forward": lambda a, b: (aten.log_sigmoid_forward.default, (a,)),
    "native_layer_norm_backward": lambda a, b: (
        aten.native_layer_norm_backward.default, (a, b, SHAPE[2:], *_ROWS, *_WEIGHTS, _MASK),
    ),
    "binary_cross_entropy": lambda a, b: (aten.binary_cross_entropy.default, (a * 0 + 0.5, b * 0, None, 0)),
    "binary_cross_entropy_backward": lambda a, b: (
        aten.binary_cross_entropy_backward.default, (a, b * 0 + 0.5, b * 0, None, 0),
    ),
    "native_batch_norm": lambda a, b: (
        aten.native_batch_norm.default, (a, *_STATISTICS, _STATISTICS[0], True, 0.1, 1e-5),
    ),
    "_native_batch_norm_legit": lambda a, b: (
        aten._native_batch_norm_legit.no_stats, (a, *_STATISTICS[:2], True, 0.1, 1e-5),
    ),
    "_native_batch_norm_legit_functional": lambda a, b: (
        aten._native_batch_norm_legit_functional.default, (a, *_STATISTICS, _STATISTICS[0] + 1, True, 0.1, 1e-5),
    ),
    "native_batch_norm_backward": lambda a, b: (
        aten.native_batch_norm_backward.default, (a, b, *_STATISTICS, *_STATISTICS[:2], True, 1e-5, _MASK),
    ),
    "reflection_pad2d_backward": lambda a, b: (
        aten.reflection_pad2d_backward.default, (torch.nn.functional.pad(a, (1, 1, 1, 1)), b, (1, 1, 1, 1)),
    ),
    "replication_pad2d_backward": lambda a, b: (
        aten.replication_pad2d_backward.default, (torch.nn.functional.pad(a, (1, 1, 1, 1)), b, (1, 1, 1, 1)),
    ),
}  # fmt: skip
#: Taken like one of those above.
ALIKE = {
    "_batch_norm_with_update", "_batch_norm_with_update_functional", "batch_norm_backward", "reflection_pad3d",
    "reflection_pad3d_backward", "replication_pad3d", "replication_pad3d_backward",
}  # fmt: skip


def laid_out(order: tuple[int, ...]) -> torch.Tensor:
    """Of `SHAPE`, the dimensions in memory in `order`."""
    stored = torch.rand([SHAPE[i] for i in order]) + 0.1
    return stored.permute([order.index(i) for i in range(len(order))])


ORDERS = ((0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0), (1, 0, 2, 3), (0, 1, 3, 2))


def results(operator: Any, args: tuple[Any, ...], rounding: str | None = None) -> tuple[Any, Any, Any]:
    """The first result: real, fake, and as the replay has it."""
    kwargs = {} if rounding is None else {"rounding_mode": rounding}
    real = operator(*args, **kwargs)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        fake = operator(*fakes, **kwargs)
        laid = as_run(operator, fakes, kwargs, fake)
    return tuple(r[0] if isinstance(r, tuple) else r for r in (real, fake, laid))


@pytest.mark.parametrize("name", sorted(CASES))
def test_results_are_laid_out_as_the_replay_has_them(name: str) -> None:
    differs = False
    for one, other in itertools.product(ORDERS, repeat=2):
        real, fake, laid = results(*CASES[name](laid_out(one), laid_out(other)))
        assert laid.stride() == real.stride(), (one, other)
        differs |= fake.stride() != real.stride()
    assert differs, "PyTorch says so itself: the rule is needed no more"


def test_each_rule_has_its_case() -> None:
    assert RULES.keys() == CASES.keys() | ALIKE


def test_a_permuted_gradient_is_copied_for_a_softmax() -> None:
    """As of attention whose heads come last and that is written with `einsum`."""
    gradient, mask, weights = torch.rand(4, 64, 64).permute(1, 2, 0), torch.rand(64, 64, 4) > 0.5, torch.rand(64, 64, 4)

    def backward(gradient: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        dropped = aten.native_dropout_backward(gradient, mask, 2.0)
        return aten._softmax_backward_data(dropped, weights, 1, torch.float32)

    gm = make_fx(backward, tracing_mode="fake")(gradient, mask, weights)
    backward(gradient, mask, weights)
    measured = measure_peak(lambda: backward(gradient, mask, weights)).bytes_above_start
    assert abs(replay_graph(gm, static_inputs=range(3)).peak_bytes - measured) <= 16
