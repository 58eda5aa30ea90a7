"""Recurrent layers and cells. Products: 2 * (batch * steps) * elements of every weight matrix; biases are
epilogues.

Pointwise per hidden unit and step: LSTM 22 (sum of input and hidden gates 4; three sigmoids 12; two tanh 2; c
= f c + i g 3; o * tanh(c) 1), 5 of them transcendental. GRU 16 (r and z: add and sigmoid 10; n = tanh(a + r
b) 3; z h + (1 - z) n as n + z (h - n) 3), 3 transcendental. Plain RNN 2: add, tanh or relu. Their backwards:
LSTM 23, GRU 16, RNN tanh 4 (add the two gradients of h, 1 - h * h, times), relu 3 (add, compare, select).
Products backward: twice the forward. Not here: cells written out in Python.
"""

from __future__ import annotations

from math import prod
from typing import Any

from optpass.passes.roofline.flops.cost import OpCost
from optpass.passes.roofline.flops.registry import Call, register
from optpass.passes.roofline.flops.shapes import first_numel, shape, tensors

#: gates, forward flops, forward transcendental, backward flops, backward transcendental: per hidden unit and step.
_CELLS: dict[str, tuple[int, int, int, int, int]] = {
    "lstm": (4, 22, 5, 23, 1),
    "gru": (3, 16, 3, 16, 0),
    "rnn_tanh": (1, 2, 1, 4, 0),
    "rnn_relu": (1, 2, 0, 3, 0),
}
#: cuDNN's, MIOpen's and oneDNN's mode numbers.
_MODES = {0: "rnn_relu", 1: "rnn_tanh", 2: "lstm", 3: "gru"}


def _layer(cell: str, rows: int, matrices: list[Any], hidden: int, layers: int, batch: int, backward: bool) -> OpCost:
    """`rows`: batch x steps; `layers`: layers x directions; `matrices`: every 2-d weight, each used once per
    row.
    """
    gates, forward, t_forward, back, t_back = _CELLS[cell]
    products = 2 * rows * sum(prod(shape(w)) for w in matrices) * (2 if backward else 1)
    per, transcendental = (back, t_back) if backward else (forward, t_forward)
    units = rows * hidden * layers
    mnk = (batch, gates * hidden, hidden)
    return OpCost(products + per * units, "rnn", mnk, layers, transcendental * units)


def _matrices(params: Any) -> list[Any]:
    return [w for w in tensors(params) if len(shape(w)) == 2]


@register("lstm", "gru", "rnn_tanh", "rnn_relu")
def _module_rnn(c: Call) -> OpCost:
    """aten::lstm.input(input, hx, params, has_biases, layers, dropout, train, bidirectional, batch_first) and
    .data.
    """
    matrices = _matrices(c.arg("params"))
    x, layers = c.at(0), int(c.arg("num_layers")) * (2 if c.arg("bidirectional") else 1)
    rows = prod(shape(x)[:-1])
    hx = next(tensors(c.arg("hx")))
    hidden = shape(matrices[0])[0] // _CELLS[c.base][0]
    cost = _layer(c.base, rows, matrices, hidden, layers, shape(hx)[-2], backward=False)
    if not (c.arg("train") and c.arg("dropout")):
        return cost
    # Between layers: draw, compare, mask, scale, on every output of all layers but the last.
    width = first_numel(c.out) // max(rows, 1)
    dropped = 4 * rows * width * (int(c.arg("num_layers")) - 1)
    return OpCost(cost.flops + dropped, "rnn", cost.mnk, cost.batch, cost.transcendental)


@register("_cudnn_rnn", "miopen_rnn", "_cudnn_rnn_backward", "miopen_rnn_backward")
def _vendor_rnn(c: Call) -> OpCost:
    backward = c.base.endswith("_backward")
    layers = int(c.arg("num_layers")) * (2 if c.arg("bidirectional") else 1)
    rows = prod(shape(c.arg("input"))[:-1])
    cell = _MODES[int(c.arg("mode"))]
    matrices, batch = _matrices(c.arg("weight")), shape(c.arg("hx"))[-2]
    return _layer(cell, rows, matrices, c.arg("hidden_size"), layers, batch, backward)


@register("mkldnn_rnn_layer")
def _onednn_layer(c: Call) -> OpCost:
    # One layer, one direction: (input, weight_ih, weight_hh, bias, bias, ...).
    return _onednn(c, c.arg("weight0"), c.arg("weight1"), backward=False)


@register("mkldnn_rnn_layer_backward")
def _onednn_layer_backward(c: Call) -> OpCost:
    return _onednn(c, c.arg("weight1"), c.arg("weight2"), backward=True)


def _onednn(c: Call, w_ih: Any, w_hh: Any, backward: bool) -> OpCost:
    rows = prod(shape(c.arg("input"))[:-1])
    cell, batch = _MODES[int(c.arg("mode"))], shape(c.arg("hx_"))[-2]
    # Weights may be reordered into oneDNN's own layout, of which only the element count is to be trusted.
    gates, hidden, width = _CELLS[cell][0], int(c.arg("hidden_size")), shape(c.arg("input"))[-1]
    products = 2 * rows * gates * hidden * (width + hidden) * (2 if backward else 1)
    base = _layer(cell, rows, [], hidden, 1, batch, backward)
    return OpCost(products + base.flops, "rnn", base.mnk, 1, base.transcendental)


@register("_lstm_mps")
def _lstm_mps(c: Call) -> OpCost:
    layers = int(c.arg("num_layers")) * (2 if c.arg("bidirectional") else 1)
    matrices, hx = _matrices(c.arg("params")), next(tensors(c.arg("hx")))
    rows = prod(shape(c.at(0))[:-1])
    return _layer("lstm", rows, matrices, shape(hx)[-1], layers, shape(hx)[-2], backward=False)


@register("lstm_mps_backward")
def _lstm_mps_backward(c: Call) -> OpCost:
    layers = int(c.arg("num_layers")) * (2 if c.arg("bidirectional") else 1)
    matrices, hx = _matrices(c.arg("params")), next(tensors(c.arg("hx")))
    rows = prod(shape(c.arg("input"))[:-1])
    return _layer("lstm", rows, matrices, shape(hx)[-1], layers, shape(hx)[-2], backward=True)


@register("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def _cell(c: Call) -> OpCost:
    matrices = [c.arg("w_ih"), c.arg("w_hh")]
    hidden, rows = shape(matrices[1])[-1], first_numel(c.at(0)) // max(shape(c.at(0))[-1], 1)
    return _layer(c.base.removesuffix("_cell"), rows, matrices, hidden, 1, rows, backward=False)


def _biases(c: Call) -> int:
    return (c.arg("input_bias") is not None) + (c.arg("hidden_bias") is not None)


@register("_thnn_fused_lstm_cell")
def _fused_lstm_cell(c: Call) -> OpCost:
    """Pointwise half of a cell; here biases are operands of their own: an add per gate and bias."""
    units = first_numel(c.arg("cx"))
    return OpCost((22 + 4 * _biases(c)) * units, "rnn", transcendental=5 * units)


@register("_thnn_fused_gru_cell")
def _fused_gru_cell(c: Call) -> OpCost:
    units = first_numel(c.arg("hx"))
    return OpCost((16 + 3 * _biases(c)) * units, "rnn", transcendental=3 * units)


@register("_thnn_fused_lstm_cell_backward", "_thnn_fused_lstm_cell_backward_impl")
def _fused_lstm_cell_backward(c: Call) -> OpCost:
    """tanh(c) 1; do = dh tanh(c), times o (1 - o) 1 + 3; dc += dh o (1 - tanh^2) 5; di, df, dg 1 + 3 each; dc
    * f 1; bias sums 4.
    """
    units = first_numel(c.arg("cx"))
    # The gate sums that make the bias gradient: one tensor even where both biases exist.
    return OpCost((23 + 4 * bool(c.arg("has_bias"))) * units, "rnn", transcendental=units)


@register("_thnn_fused_gru_cell_backward")
def _fused_gru_cell_backward(c: Call) -> OpCost:
    """dz = dh (h - n)(1 - z) z 5; dh z 1; dn = dh (1 - z)(1 - n n) 5; dn r 1; dr = dn b (1 - r) r 4; bias
    sums 3 each.
    """
    units = first_numel(c.arg("grad_hy"))
    return OpCost((16 + 6 * bool(c.arg("has_bias"))) * units, "rnn")


@register("_thnn_differentiable_lstm_cell_backward", "_thnn_differentiable_gru_cell_backward")
def _differentiable_cell_backward(c: Call) -> OpCost:
    # As the fused forms, with the activations computed again from the gates.
    lstm = "lstm" in c.base
    units = first_numel(c.arg("cx") if lstm else c.arg("hx"))
    per, transcendental = (23 + 17, 5) if lstm else (16 + 13, 3)
    return OpCost(per * units, "rnn", transcendental=transcendental * units)


@register("_pack_padded_sequence", "_pack_padded_sequence_backward", "_pad_packed_sequence")
def _packing(c: Call) -> OpCost:
    return OpCost(0, "copy")
