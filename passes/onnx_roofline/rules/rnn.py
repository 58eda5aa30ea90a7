"""Recurrent layers: LSTM, GRU and RNN, one layer in one or two directions."""

from __future__ import annotations

from optpass.passes.onnx_roofline.builder import meta_of
from optpass.passes.onnx_roofline.call import Call, NotKnown, Result
from optpass.passes.onnx_roofline.rules.norm import optional
from optpass.passes.onnx_roofline.rules.registry import register

_OPS = {"LSTM": "lstm.input", "GRU": "gru.input"}
#: Activations whose cost the aten ops stand for.
_USUAL = {"sigmoid", "tanh"}


@register("LSTM", "GRU", "RNN")
def _recurrent(c: Call) -> Result:
    """aten.lstm and its kin on the weights of each direction; peepholes add a multiply-add each per unit."""
    activations = {a.lower() for a in c.attr("activations", [])}
    name = _OPS.get(c.op, "rnn_relu.input" if activations == {"relu"} else "rnn_tanh.input")
    if activations - _USUAL and name != "rnn_relu.input":
        raise NotKnown(
            f"it has activations that torch's layer does not have: {', '.join(sorted(activations - _USUAL))}"
        )
    x, w, r = c.t(0), c.t(1), c.t(2)
    hidden, directions = meta_of(r).shape[-1], meta_of(w).shape[0]
    batch_first = bool(c.attr("layout", 0))
    batch, steps = (meta_of(x).shape[i] for i in ((0, 1) if batch_first else (1, 0)))
    weights = [c.b.select(m, 0, d) for d in range(directions) for m in (w, r)]
    start = optional(c, 5) or c.b.zeros((directions, batch, hidden), meta_of(x).dtype)
    states = [start, optional(c, 6) or start] if c.op == "LSTM" else start
    both = directions == 2
    c.emit(name, x, states, weights, False, 1, 0.0, False, both, batch_first, out=_primary(c))
    if c.op == "LSTM" and c.has(7):
        units = c.b.zeros((steps, directions, batch, hidden), meta_of(x).dtype)
        peephole = c.b.reshape(c.t(7), (directions, 1, 3, hidden))
        for gate in range(3):
            c.b.map("add", c.b.map("mul", units, c.b.select(peephole, 2, gate)), units)
    if c.has(3):
        c.b.emit("alias", c.t(3), out=meta_of(c.t(3)))
    return c.b.parts_or_none(c.b.collapse(c.outs()))


def _primary(c: Call) -> object:
    for index, spec in enumerate(c.specs):
        if spec is not None:
            return c.out(index)
    raise NotKnown("it has no output")
