"""FLOPs of single ATen, prims and higher-order ops: one counting rule per op, one file per family.

Here: `op_cost(target, args, kwargs, out)`, `known(target)`, `OpCost`, and the conventions below. Not here:
walking graphs, bytes, time, devices. An op without a rule gives None, never 0.

Conventions (`conventions()` returns this list):

unit
    One addition, subtraction, multiplication, division, comparison, selection, rounding, absolute value,
    negation, minimum, maximum or clamp of one element is 1. A multiply-add is 2 (LAPACK Working Note 41;
    torch.utils.flop_counter; fvcore and calflops count it as 1). Integer and boolean elements count like
    floating ones.
library functions
    exp, log, tanh, erf, sin, sqrt, pow, lgamma and other functions of a mathematics library are 1 each and
    are reported apart as `transcendental`. sigmoid is not one of them: 1 / (1 + exp(-x)) is 4.
fused elementwise ops
    Sum of the operations of the formula that ATen's kernel evaluates, written beside each entry
    (pointwise_table.py). Per output element of the broadcast result.
zero
    Views, copies, casts, fills, concatenation and gathers are 0: they do no arithmetic. Address arithmetic is
    not counted. Work of the host (sizes, asserts) is 0.
unknown ops
    An op that no rule names but that torch tags pointwise counts 1 per output element. Any other is unknown:
    None.
matrix products
    2 M N K. Bias, alpha, beta, scales and activations fused into a product are its epilogue and not counted,
    as BLAS and cuBLAS report; a bias gradient is a sum and counts its inputs. torch.addr, a rank-1 update, is
    2 M N; an outer product M N.
einsum
    Pairwise contractions from left to right, or along the given path: 2 per point of the joint index space, 1
    where nothing is summed.
convolutions
    2 * outputs * (C_in / groups) * taps; transposed: 2 * inputs * (C_out / groups) * taps. Taps on padding
    are counted. Each of the gradients of input and weight equals the forward (torch.utils.flop_counter agrees
    but for groups).
attention
    The matrix products only, as FlashAttention counts (Dao et al. 2022; FlashAttention-2 section 4.1): 2 s_q
    s_k (d + d_v) per head; GQA counts query heads. Backward of a fused kernel: 2 s_q s_k (3 d + 2 d_v), 2.5
    times the forward, because the kernel recomputes QK^T; backward of the math form is 2 times, as its
    products appear in the graph.
causal attention
    The area of the scores kept, cut through the cells of the diagonal: s^2 / 2 if square. Aligned upper left
    (scaled_dot_product_*), bottom right for FlashAttention's own ops; windows cut likewise. A mask passed as
    a tensor skips nothing; the math form computes every score.
packed and block-sparse attention
    Exact where lengths or block counts are real CPU tensors; else every query against the longest key
    (packed), or every score (flex). score_mod and mask_mod are not counted.
reductions
    n inputs, o outputs: sum, prod, max, any: n; mean n + o; var 4n + 2o; std 4n + 3o; 2-norm 2n + o;
    logsumexp 4n + 2o. Scans n.
normalisation
    n elements in r groups. Layer, group, batch norm 6n + 4r, and n each for weight and bias; RMS norm 3n +
    3r. Backward: normalised input 2n, input gradient 7n + 2r (+ n with weight), weight gradient 2n, bias
    gradient n. Running statistics 7 per channel. Batch norm in inference 2n + 2r, and n each for weight and
    bias.
softmax
    5n; log-softmax 5n + r; their backwards 4n.
losses
    Sum of the formula's operations; a mean adds n + 1, a sum n.
recurrent layers
    Products 2 * rows * weight elements, twice that backward; per hidden unit and step LSTM 22, GRU 16, RNN 2
    (rnn.py).
Fourier transforms
    5 N log2 N for complex, 2.5 N log2 N for real transforms of N points (FFTW's benchmark convention,
    www.fftw.org/speed/method.html). May be fractional.
sorting
    n log2 n comparisons per row; top-k, k-th value, median, mode, unique the same. Searches log2 n per query.
scatters
    One operation per scattered element where it accumulates, else 0. Embedding backward: one add per gradient
    element.
pooling
    Average: taps + 1 per output; maximum: taps. Padding counted; adaptive windows exactly.
interpolation
    Linear in d dims 3 * (2^d - 1) per output, cubic 35; backward a multiply-add per tap. Weights per axis are
    not counted.
random numbers
    1 per uniform draw, 7 per normal draw (Box-Muller). native_dropout 4 per element, its backward 2.
factorisations
    Leading-order counts of LAPACK Working Note 41 and Golub and Van Loan, Matrix Computations (linalg.py).
optimisers
    Fused Adam 13 per parameter (+ 2 weight decay, + 1 amsgrad), SGD 2 (+ 2 weight decay, + 2 or 3 momentum, +
    2 Nesterov).
quantisation
    Quantise 4, dequantise 2, fake quantise 6 per element.
complex numbers
    In products a multiply-add is 8; elementwise a product is 6, a quotient 11, anything else 2 per real
    operation.
collectives
    The sum of a reduction counts its input once; transfers 0.
"""

from __future__ import annotations

from optpass.passes.roofline.flops import (
    attention,
    conv,
    einsum,
    fft,
    host,
    indexing,
    linalg,
    loss,
    matmul,
    movement,
    norm,
    optimizer,
    pointwise,
    pool,
    quant,
    random,
    reduction,
    resample,
    rnn,
    softmax,
    sort,
)
from optpass.passes.roofline.flops.cost import MNK, Kind, OpCost
from optpass.passes.roofline.flops.registry import known, op_cost

#: Importing a family registers its rules.
FAMILIES = (
    attention,
    conv,
    einsum,
    fft,
    host,
    indexing,
    linalg,
    loss,
    matmul,
    movement,
    norm,
    optimizer,
    pointwise,
    pool,
    quant,
    random,
    reduction,
    resample,
    rnn,
    softmax,
    sort,
)

__all__ = ["FAMILIES", "MNK", "Kind", "OpCost", "conventions", "known", "op_cost"]


def conventions() -> list[tuple[str, str]]:
    """(topic, text) of every convention, read from the package docstring so that the two cannot differ."""
    lines = (__doc__ or "").partition("(`conventions()` returns this list):")[2].splitlines()
    entries: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith("    ") and entries:
            entries[-1][1].append(line.strip())
        elif line.strip():
            entries.append((line.strip(), []))
    return [(topic, " ".join(text)) for topic, text in entries]
