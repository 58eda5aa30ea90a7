"""Normalisations, expanded into a variance with a mean and elementwise steps, as Inductor decomposes them."""

from __future__ import annotations

import torch
from torch import fx

from optpass.passes.onnx_roofline.builder import meta_of, wrap
from optpass.passes.onnx_roofline.call import Call, Result
from optpass.passes.onnx_roofline.rules.registry import MICROSOFT, register


def _moments(c: Call, x: fx.Node, dims: list[int]) -> tuple[fx.Node, fx.Node]:
    """(variance, mean) over dims, kept as 1."""
    meta = meta_of(x)
    wrapped = sorted({wrap(d, meta.dim()) for d in dims})
    shape = [1 if d in wrapped else s for d, s in enumerate(meta.shape)]
    out = torch.empty(shape, dtype=meta.dtype, device="meta")
    both = c.b.emit("var_mean.correction", x, wrapped, out=(out, out), correction=0, keepdim=True)
    variance, mean = c.b.parts(both)
    return variance, mean


def standardise(c: Call, x: fx.Node, dims: list[int]) -> tuple[fx.Node, fx.Node, fx.Node]:
    """((x - mean) * rsqrt(var + eps), mean, inverse deviation) over dims."""
    variance, mean = _moments(c, x, dims)
    inverse = c.b.map("rsqrt", c.b.map("add", variance, 1e-5))
    return c.b.map("mul", c.b.map("sub", x, mean), inverse), mean, inverse


def root_mean_square(c: Call, x: fx.Node, dims: list[int]) -> tuple[fx.Node, fx.Node]:
    """(x * rsqrt(mean(x^2) + eps), the inverse) over dims."""
    square = c.b.reduce("mean.dim", c.b.map("mul", x, x), dims)
    inverse = c.b.map("rsqrt", c.b.map("add", square, 1e-5))
    return c.b.map("mul", x, inverse), inverse


def affine(c: Call, y: fx.Node, weight: fx.Node | None, bias: fx.Node | None) -> fx.Node:
    """y * weight + bias, either left out."""
    y = c.b.map("mul", y, weight) if weight is not None else y
    return c.b.map("add", y, bias) if bias is not None else y


def optional(c: Call, index: int) -> fx.Node | None:
    """Input `index` as a node, if it is given."""
    return c.t(index) if c.has(index) else None


def _pick(c: Call, *found: fx.Node | None) -> Result:
    """The results that the node names, in order."""
    return [node if c.wants(i) else None for i, node in enumerate(found[: len(c.specs)])]


def _trailing(c: Call) -> list[int]:
    rank = meta_of(c.t(0)).dim()
    return list(range(wrap(c.attr("axis", -1), rank), rank))


@register("LayerNormalization")
@register("LayerNormalization", domain=MICROSOFT)
def _layer_norm(c: Call) -> Result:
    y, mean, inverse = standardise(c, c.t(0), _trailing(c))
    return _pick(c, affine(c, y, optional(c, 1), optional(c, 2)), mean, inverse)


@register("RMSNormalization", "SimplifiedLayerNormalization")
@register("SimplifiedLayerNormalization", domain=MICROSOFT)
def _rms_norm(c: Call) -> Result:
    y, inverse = root_mean_square(c, c.t(0), _trailing(c))
    return _pick(c, affine(c, y, optional(c, 1), None), inverse)


@register("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def _skip_norm(c: Call) -> Result:
    """Norm of input + skip (+ bias); output 3 is the sum."""
    simplified = c.op.startswith("SkipSimplified")
    bias = optional(c, 3 if simplified else 4)
    total = c.b.map("add", c.t(0), c.t(1))
    total = c.b.map("add", total, bias) if bias is not None else total
    if simplified:
        y, inverse = root_mean_square(c, total, [-1])
        return _pick(c, affine(c, y, c.t(2), None), None, inverse, total)
    y, mean, inverse = standardise(c, total, [-1])
    return _pick(c, affine(c, y, c.t(2), optional(c, 3)), mean, inverse, total)


@register("EmbedLayerNormalization", domain=MICROSOFT)
def _embed_norm(c: Call) -> Result:
    """Norm of the sum of word, position and (with segment ids) segment embeddings; gathers are free."""
    out = c.out()
    total = c.b.emit("embedding", c.t(2), c.t(0), out=out)
    position = c.b.emit("embedding", c.t(3), c.t(8) if c.has(8) else c.t(0), out=out)
    total = c.b.map("add", total, position)
    if c.has(1) and c.has(4):
        total = c.b.map("add", total, c.b.emit("embedding", c.t(4), c.t(1), out=out))
    y, _, _ = standardise(c, total, [-1])
    mask = c.b.zeros(tuple(c.out(1).shape), c.out(1).dtype) if c.wants(1) else None
    return _pick(c, affine(c, y, c.t(5), c.t(6)), mask, total)


def _per_channel(c: Call, node: fx.Node | None, rank: int, axis: int = 1) -> fx.Node | None:
    """A vector over channels, shaped to broadcast against a tensor of that rank."""
    if node is None:
        return None
    channels = meta_of(node).numel()
    return c.b.reshape(node, tuple(channels if d == axis else 1 for d in range(rank)))


@register("GroupNormalization", "InstanceNormalization")
def _group_norm(c: Call) -> Result:
    x = c.t(0)
    n, channels, *space = meta_of(x).shape
    groups = int(c.attr("num_groups", channels))
    grouped = c.b.reshape(x, (n, groups, channels // groups, *space))
    y, _, _ = standardise(c, grouped, list(range(2, 3 + len(space))))
    y = c.b.reshape(y, (n, channels, *space))
    weight, bias = optional(c, 1), optional(c, 2)
    if weight is not None and meta_of(weight).numel() == groups != channels:  # before opset 21: one per group
        weight, bias = (_repeat(c, v, channels // groups) for v in (weight, bias))
    rank = 2 + len(space)
    return affine(c, y, _per_channel(c, weight, rank), _per_channel(c, bias, rank))


def _repeat(c: Call, node: fx.Node | None, times: int) -> fx.Node | None:
    if node is None:
        return None
    groups = meta_of(node).numel()
    return c.b.reshape(c.b.expand(c.b.reshape(node, (groups, 1)), (groups, times)), (groups * times,))


@register("GroupNorm", domain=MICROSOFT)
def _group_norm_contrib(c: Call) -> Result:
    """Channels last unless told otherwise; with an optional SiLU."""
    x, last = c.t(0), bool(c.attr("channels_last", 1))
    shape = meta_of(x).shape
    axis, groups = (len(shape) - 1 if last else 1), int(c.attr("groups", 32))
    split = [*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :]]
    dims = [d for d in range(1, len(split)) if d != axis]
    y, _, _ = standardise(c, c.b.reshape(x, tuple(split)), dims)
    y = c.b.reshape(y, tuple(shape))
    y = affine(c, y, _per_channel(c, c.t(1), len(shape), axis), _per_channel(c, c.t(2), len(shape), axis))
    return c.b.map("silu", y) if c.attr("activation", 0) else y


@register("BatchNormalization")
def _batch_norm(c: Call) -> Result:
    x = c.t(0)
    rank = meta_of(x).dim()
    if c.attr("training_mode", 0):
        return _batch_norm_training(c, x)
    weight, bias, mean, variance = (_per_channel(c, c.t(i), rank) for i in (1, 2, 3, 4))
    assert mean is not None and variance is not None
    inverse = c.b.map("rsqrt", c.b.map("add", variance, 1e-5))
    y = c.b.map("mul", c.b.map("sub", x, mean), inverse)
    return _pick(c, affine(c, y, weight, bias))


def _batch_norm_training(c: Call, x: fx.Node) -> Result:
    """Statistics of the batch; running ones r = momentum * r + (1 - momentum) * batch, 3 operations each."""
    rank = meta_of(x).dim()
    dims = [d for d in range(rank) if d != 1]
    variance, mean = _moments(c, x, dims)
    inverse = c.b.map("rsqrt", c.b.map("add", variance, 1e-5))
    y = c.b.map("mul", c.b.map("sub", x, mean), inverse)
    y = affine(c, y, _per_channel(c, c.t(1), rank), _per_channel(c, c.t(2), rank))
    running = []
    for index, batch in ((3, mean), (4, variance)):
        flat = c.b.reshape(batch, tuple(meta_of(c.t(index)).shape))
        running.append(c.b.map("add", c.b.map("mul", c.t(index), 0.9), c.b.map("mul", flat, 0.1)))
    return _pick(c, y, *running)


@register("MeanVarianceNormalization")
def _mvn(c: Call) -> Result:
    return standardise(c, c.t(0), c.attr("axes", [0, 2, 3]))[0]


@register("LpNormalization")
def _lp_norm(c: Call) -> Result:
    x = c.t(0)
    return c.b.map("div", x, c.b.reduce("linalg_vector_norm", x, [c.attr("axis", -1)], first=(c.attr("p", 2),)))


@register("LRN")
def _lrn(c: Call) -> Result:
    """x / (bias + alpha * mean over a window of channels (x^2)) ^ beta, as torch's local_response_norm."""
    x = c.t(0)
    window = c.emit("avg_pool3d", c.b.map("mul", x, x), [c.attr("size"), 1, 1])
    scale = c.b.map("pow.Tensor_Scalar", c.b.map("add", c.b.map("mul", window, 1e-4), 1.0), c.attr("beta", 0.75))
    return c.b.map("div", x, scale)
