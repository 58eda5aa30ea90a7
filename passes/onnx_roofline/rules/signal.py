"""Fourier transforms, windows, random numbers and losses."""

from __future__ import annotations

import torch
from torch import fx

from optpass.passes.onnx_roofline.builder import meta_of, wrap
from optpass.passes.onnx_roofline.call import Call, NotKnown, Result
from optpass.passes.onnx_roofline.rules.norm import optional
from optpass.passes.onnx_roofline.rules.reduction import log_softmax
from optpass.passes.onnx_roofline.rules.registry import register

_MEAN, _SUM, _NONE = 1, 2, 0


def _scalar(c: Call, index: int) -> int | None:
    numbers = c.const(index)
    return int(numbers.reshape(-1)[0]) if numbers is not None and numbers.size else None


def _transform(c: Call, x: fx.Node, axis: int, real: bool, points: int, onesided: bool) -> None:
    """One transform along `axis` of a value whose last dim holds 1 (real) or 2 (complex) numbers."""
    sizes = list(meta_of(x).shape[:-1])
    sizes[axis] = points
    dtype = torch.float32 if real else torch.complex64
    wide = c.b.emit("constant_pad_nd", x, [], out=torch.empty(sizes, dtype=dtype, device="meta"))
    sizes[axis] = points // 2 + 1 if onesided else points
    out = torch.empty(sizes, dtype=torch.complex64, device="meta")
    if real:
        c.b.emit("_fft_r2c", wide, [axis], 0, onesided, out=out)
    else:
        c.b.emit("_fft_c2c", wide, [axis], 0, True, out=out)


@register("DFT")
def _dft(c: Call) -> Result:
    """Real input has a last dim of 1; onesided gives half the spectrum, and with inverse takes it."""
    x, out = c.t(0), c.out()
    rank = meta_of(x).dim()
    axis = _scalar(c, 2) if c.version >= 20 else c.attr("axis", 1)
    if axis is None:
        if c.has(2):
            raise NotKnown("its axis is an input of the model")
        axis = rank - 2 if c.version >= 20 else 1
    axis = wrap(axis, rank)
    onesided, inverse = bool(c.attr("onesided", 0)), bool(c.attr("inverse", 0))
    if onesided and inverse:
        half = torch.empty(meta_of(x).shape[:-1], dtype=torch.complex64, device="meta")
        spectrum = c.b.emit("view_as_complex", x, out=half)
        c.b.emit(
            "_fft_c2r",
            spectrum,
            [axis],
            2,
            out.shape[axis],
            out=torch.empty(out.shape[:-1], dtype=out.dtype, device="meta"),
        )
    else:
        points = _scalar(c, 1) or (meta_of(x).shape[axis] if onesided else out.shape[axis])
        _transform(c, x, axis, meta_of(x).shape[-1] == 1, points, onesided)
    return c.b.collapse(out)


@register("STFT")
def _stft(c: Call) -> Result:
    """Frames of the signal, times the window, transformed."""
    x, out = c.t(0), c.out()
    window = optional(c, 2)
    length = _scalar(c, 3) or (meta_of(window).shape[0] if window is not None else 0)
    if not length:
        raise NotKnown("its frame length is an input of the model")
    real = meta_of(x).dim() == 2 or meta_of(x).shape[-1] == 1
    frames = torch.empty((out.shape[0], out.shape[1], length, 1 if real else 2), dtype=out.dtype, device="meta")
    laid = c.b.emit("unfold_copy", x, 1, length, _scalar(c, 1) or 1, out=frames)
    if window is not None:
        laid = c.b.map("mul", laid, c.b.reshape(window, (length, 1)))
    _transform(c, laid, 2, real, length, bool(c.attr("onesided", 1)))
    return c.b.collapse(out)


_WINDOWS = {"HannWindow": "hann_window", "HammingWindow": "hamming_window", "BlackmanWindow": "blackman_window"}


@register(*_WINDOWS)
def _window(c: Call) -> Result:
    return c.emit(_WINDOWS[c.op], c.out().shape[0])


_RANDOM = {"RandomNormal": "normal_functional", "RandomNormalLike": "normal_functional", "RandomUniform": "uniform",
           "RandomUniformLike": "uniform"}  # fmt: skip


@register(*_RANDOM)
def _random(c: Call) -> Result:
    shape = c.t(0) if c.has(0) else c.b.zeros(tuple(c.out().shape), c.out().dtype)
    return c.emit(_RANDOM[c.op], shape)


@register("Bernoulli")
def _bernoulli(c: Call) -> Result:
    return c.emit("bernoulli", c.t(0))


@register("Multinomial")
def _multinomial(c: Call) -> Result:
    """Draws with replacement from log-probabilities."""
    return c.emit("multinomial", c.b.map("exp", c.t(0)), c.attr("sample_size", 1), True)


def _nll(c: Call, x: fx.Node) -> fx.Node:
    target = meta_of(c.t(1))
    weight = optional(c, 2)
    reduction = {"none": _NONE, "sum": _SUM}.get(c.attr("reduction", "mean"), _MEAN)
    out = c.out()
    total = torch.empty((), dtype=out.dtype, device="meta")
    name = "nll_loss2d_forward" if target.dim() > 1 else "nll_loss_forward"
    both = c.b.emit(name, x, c.t(1), weight, reduction, c.attr("ignore_index", -100), out=(out, total))
    return c.b.parts(both)[0]


@register("NegativeLogLikelihoodLoss")
def _nll_loss(c: Call) -> Result:
    return _nll(c, c.t(0))


@register("SoftmaxCrossEntropyLoss")
def _cross_entropy(c: Call) -> Result:
    """log-softmax over the classes, then the negative log-likelihood; output 1 is the former."""
    logs = log_softmax(c, c.t(0), [1])
    loss = _nll(c, logs)
    return [loss, logs] if c.wants(1) else loss
