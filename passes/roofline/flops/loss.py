"""Losses, forward and backward. n: elements of the prediction; a mean reduction adds n and 1, a sum n.

Derivations stand beside each rule. Not here: the log-softmax inside cross entropy when it is its own op.
"""

from __future__ import annotations

from math import prod
from typing import Any

from optpass.passes.roofline.flops.cost import OpCost
from optpass.passes.roofline.flops.registry import Call, register
from optpass.passes.roofline.flops.shapes import broadcast_numel, first_numel, shape

_NONE, _MEAN, _SUM = 0, 1, 2


def _reduced(n: int, reduction: Any) -> int:
    """Flops of the reduction of n losses."""
    return {_NONE: 0, _MEAN: n + 1, _SUM: n}[int(reduction)]


def _elements(c: Call) -> int:
    return broadcast_numel([c.arg("self"), c.arg("target")])


def _simple(c: Call, per: int, transcendental: int = 0) -> OpCost:
    n = _elements(c)
    return OpCost(per * n + _reduced(n, c.arg("reduction")), "reduction", transcendental=transcendental * n)


@register("mse_loss")
def _mse(c: Call) -> OpCost:
    return _simple(c, 2)  # subtract, square


@register("l1_loss")
def _l1(c: Call) -> OpCost:
    return _simple(c, 2)  # subtract, abs


@register("smooth_l1_loss", "huber_loss")
def _huber(c: Call) -> OpCost:
    # d = |x - y| 2; compare; 0.5 * d * d / beta 3; d - beta / 2; select. huber: delta * (d - 0.5 delta) instead
    return _simple(c, 8)


@register("soft_margin_loss")
def _soft_margin(c: Call) -> OpCost:
    return _simple(c, 4, 2)  # log1p(exp(-y * x))


@register("mse_loss_backward")
def _mse_backward(c: Call) -> OpCost:
    return OpCost(3 * _elements(c), "pointwise")  # scale * (x - y) * grad, scale folded


@register("smooth_l1_loss_backward", "huber_loss_backward")
def _huber_backward(c: Call) -> OpCost:
    # x - y; two compares; x / beta; two selects; * norm * grad 2
    return OpCost(8 * _elements(c), "pointwise")


@register("soft_margin_loss_backward")
def _soft_margin_backward(c: Call) -> OpCost:
    n = _elements(c)
    return OpCost(8 * n, "pointwise", transcendental=n)  # z = exp(-y x) 3; -norm * y * z / (z + 1) * grad 5


@register("binary_cross_entropy")
def _bce(c: Call) -> OpCost:
    # (y - 1) * max(log1p(-x), -100) - y * max(log x, -100): three subtractions or negations, two
    # logs, two maxima, two products
    return _simple(c, 9 + (c.arg("weight") is not None), 2)


@register("binary_cross_entropy_backward")
def _bce_backward(c: Call) -> OpCost:
    # grad * (x - y) / max((1 - x) * x, eps); the mean scales it
    per = 6 + (c.arg("weight") is not None) + (c.arg("reduction") == _MEAN)
    return OpCost(per * _elements(c), "pointwise")


@register("binary_cross_entropy_with_logits")
def _bce_logits(c: Call) -> OpCost:
    # (1 - y) * x 2; minus log_sigmoid(x) 6 + 1; a positive weight scales the latter: (p - 1) * y + 1, multiply 4
    per = 9 + 4 * (c.arg("pos_weight") is not None) + (c.arg("weight") is not None)
    return _simple(c, per, 2)


@register("kl_div")
def _kl_div(c: Call) -> OpCost:
    # y * (log y - x), with xlogy's test and select; log_target: exp(y) * (y - x)
    return _simple(c, 3 if c.arg("log_target") else 6, 1)


@register("nll_loss", "nll_loss2d", "nll_loss_nd", "nll_loss_forward", "nll_loss2d_forward")
def _nll(c: Call) -> OpCost:
    """Per target: negate (the gather is free), * weight; the mean of weighted losses sums the weights too."""
    n, weighted = first_numel(c.arg("target")), c.arg("weight") is not None
    reduction = c.arg("reduction", _MEAN)
    flops = n * (1 + weighted) + _reduced(n, reduction)
    return OpCost(flops + (n if weighted and reduction == _MEAN else 0), "reduction")


@register("nll_loss_backward", "nll_loss2d_backward")
def _nll_backward(c: Call) -> OpCost:
    """One scatter per target of -grad (* weight); the mean divides grad once by the total weight."""
    n, weighted = first_numel(c.arg("target")), c.arg("weight") is not None
    return OpCost(n * (1 + weighted) + (c.arg("reduction") == _MEAN), "indexing")


@register("cross_entropy_loss")
def _cross_entropy(c: Call) -> OpCost:
    """log-softmax 5n + r and then either nll or, with probabilities as target, multiply and sum over classes."""
    x, target = c.at(0), c.at(1)
    n, sizes = first_numel(x), shape(x)
    rows = n // max(sizes[1 if len(sizes) > 1 else 0], 1)
    weighted = c.arg("weight") is not None
    reduction = c.arg("reduction", _MEAN)
    if shape(target) == sizes:
        per_row = (2 + weighted) * n + rows
    else:
        per_row = rows * (1 + weighted) + (rows if weighted and reduction == _MEAN else 0)
    smoothing = 2 * n + 2 * rows if c.arg("label_smoothing") else 0  # -mean over classes, mixed in
    flops = 5 * n + rows + per_row + smoothing + _reduced(rows, reduction)
    return OpCost(flops, "reduction", transcendental=n + rows)


@register(
    "torch_nn::_linear_cross_entropy_batch_chunked",
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction",
)
def _linear_cross_entropy(c: Call) -> OpCost:
    """torch.nn.functional.linear_cross_entropy: N rows of F features, V classes, in chunks of the batch; s = N V.

    Logits 2 N V F; log-softmax at the target 4s (max, subtract, exp, sum) and, per row, log and the weighted
    difference: 3, or 5 where the sum over rows is taken at once. That op also makes the gradients: logits times
    weight / denominator s + N; input 2 N V F + N F, weight 2 N V F + 2 N F, bias s.
    """
    (rows, width), classes = shape(c.arg("input")), shape(c.arg("linear_weight"))[0]
    s, product = rows * classes, 2 * rows * classes * width
    d_input, d_weight, d_bias = (
        bool(c.arg(f"compute_{name}_grad", False)) for name in ("input", "linear_weight", "linear_bias")
    )
    flops = product * (1 + d_input + d_weight) + 4 * s + (3 if c.base.endswith("no_reduction") else 5) * rows
    flops += (s + rows) * (d_input or d_weight or d_bias) + s * d_bias
    flops += rows * width * (d_input + 2 * d_weight)
    chunk = min(int(c.arg("batch_chunk_size")), rows)
    chunks = -(-rows // max(chunk, 1))
    return OpCost(flops, "matmul", (chunk, classes, width), chunks, s + rows)


@register("multi_margin_loss", "multilabel_margin_loss", "multilabel_margin_loss_forward")
def _margin(c: Call) -> OpCost:
    """margin - x_y + x_j, max with 0, add: 4 per pair; the multilabel form has at most n pairs per target
    class.
    """
    x = c.arg("self")
    n, classes = first_numel(x), (shape(x) or (1,))[-1]
    pairs = n if c.base == "multi_margin_loss" else n * classes
    squared = pairs if c.arg("p", 1) == 2 else 0
    rows = n // max(classes, 1)
    return OpCost(4 * pairs + squared + _reduced(rows, c.arg("reduction")), "reduction")


@register("multi_margin_loss_backward", "multilabel_margin_loss_backward")
def _margin_backward(c: Call) -> OpCost:
    # The same test per pair, then one add into either end.
    x = c.arg("self")
    pairs = first_numel(x) * (1 if c.base == "multi_margin_loss_backward" else (shape(x) or (1,))[-1])
    return OpCost(6 * pairs, "reduction")


def _ctc_sizes(c: Call) -> tuple[int, int, int, int]:
    """(batch, classes, lattice cells, frames): lengths exact where they are ints, else the longest possible."""
    t, *rest = shape(c.arg("log_probs"))
    batch, classes = (rest[0], rest[1]) if len(rest) == 2 else (1, rest[0])
    inputs, labels = c.arg("input_lengths"), c.arg("target_lengths")
    if not isinstance(inputs, list | tuple) or not isinstance(labels, list | tuple):
        targets = shape(c.arg("targets"))
        longest = targets[-1] if len(targets) == 2 else prod(targets) // max(batch, 1)
        inputs, labels = [t] * batch, [longest] * batch
    cells = sum(i * (2 * s + 1) for i, s in zip(inputs, labels, strict=True))
    return batch, classes, cells, sum(inputs)


@register("ctc_loss", "_ctc_loss")
def _ctc(c: Call) -> OpCost:
    """Alpha recursion: a three-way log-sum-exp and an add per cell of T x (2S + 1): 2 max, 3 - , 3 exp, 2 +,
    log, 2 + = 13.
    """
    _, _, cells, _ = _ctc_sizes(c)
    return OpCost(13 * cells, "scan", transcendental=4 * cells)


@register("_ctc_loss_backward")
def _ctc_backward(c: Call) -> OpCost:
    """Beta recursion 13, log-add of alpha + beta into the class 8 per cell; exp(p) - exp(q + nll - p), * grad
    6 per output.
    """
    _, classes, cells, frames = _ctc_sizes(c)
    n = frames * classes
    return OpCost(21 * cells + 6 * n, "scan", transcendental=6 * cells + 2 * n)
