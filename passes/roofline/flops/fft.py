"""Fourier transforms: 5 N log2 N per complex transform of N points, 2.5 N log2 N where one side is real.

The convention of the FFTW benchmark (M. Frigo, S. Johnson, www.fftw.org/speed/method.html): an upper bound of
the radix-2 Cooley-Tukey count, used for every N. N is the product of the transformed sizes. Scaling of the
result is not counted.
"""

from __future__ import annotations

from math import log2, prod
from typing import Any

from optpass.passes.roofline.flops.cost import OpCost
from optpass.passes.roofline.flops.registry import Call, register
from optpass.passes.roofline.flops.shapes import numel, shape


def _cost(elements: int, points: int, per: float) -> OpCost:
    """`elements` real or complex points in all, in transforms of `points` each."""
    flops = per * elements * log2(points) if points > 1 else 0.0
    return OpCost(int(flops) if flops == int(flops) else flops, "fft")


def _points(sizes: tuple[int, ...], dims: Any) -> int:
    return prod(sizes[d] for d in ([dims] if isinstance(dims, int) else dims))


@register("_fft_c2c", "prims::fft_c2c")
def _c2c(c: Call) -> OpCost:
    return _cost(numel(c.at(0)), _points(shape(c.at(0)), c.arg("dim")), 5)


@register("_fft_r2c", "prims::fft_r2c")
def _r2c(c: Call) -> OpCost:
    return _cost(numel(c.at(0)), _points(shape(c.at(0)), c.arg("dim")), 2.5)


@register("_fft_c2r", "prims::fft_c2r")
def _c2r(c: Call) -> OpCost:
    # The length is that of the real side; the input holds only half of the spectrum.
    return _cost(numel(c.out), _points(shape(c.out), c.arg("dim")), 2.5)


@register("fft_fft", "fft_ifft", "fft_fft2", "fft_ifft2", "fft_fftn", "fft_ifftn")
def _composite(c: Call) -> OpCost:
    """Pre-dispatch spellings. A real input of fft is promoted to complex by ATen, or done by r2c: counted as
    complex.
    """
    return _cost(numel(c.out), _points(shape(c.out), _dims(c)), 5)


@register("fft_rfft", "fft_rfft2", "fft_rfftn", "fft_ihfft", "fft_ihfft2", "fft_ihfftn")
def _composite_r2c(c: Call) -> OpCost:
    x = shape(c.at(0))
    return _cost(numel(c.at(0)), _points(x, _dims(c)), 2.5)


@register("fft_irfft", "fft_irfft2", "fft_irfftn", "fft_hfft", "fft_hfft2", "fft_hfftn")
def _composite_c2r(c: Call) -> OpCost:
    return _cost(numel(c.out), _points(shape(c.out), _dims(c)), 2.5)


def _dims(c: Call) -> Any:
    """Transformed dims: the argument, else (n-d forms) all, or as many last ones as sizes were given."""
    dims = c.arg("dim")
    if dims is not None:
        return dims
    sizes = c.arg("s")
    rank = len(shape(c.at(0)))
    return list(range(rank - len(sizes), rank)) if sizes is not None else list(range(rank))


@register("fft_fftshift", "fft_ifftshift")
def _shift(c: Call) -> OpCost:
    return OpCost(0, "copy")


@register("fft_fftfreq", "fft_rfftfreq")
def _freq(c: Call) -> OpCost:
    return OpCost(2 * numel(c.out), "pointwise")
