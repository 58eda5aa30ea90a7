"""Ops that rename data or copy it: reshapes, slices, concatenation, padding, fills. No arithmetic."""

from __future__ import annotations

from math import prod

from torch import fx

from optpass.passes.onnx_roofline.builder import meta_of, wrap
from optpass.passes.onnx_roofline.call import Call, NotKnown, Result, ShapeNotKnown
from optpass.passes.onnx_roofline.rules.registry import register


def nodes(c: Call) -> list[fx.Node]:
    """All given inputs as nodes."""
    return [c.t(i) for i in range(len(c.inputs)) if c.has(i)]


@register("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def _reshape(c: Call) -> Result:
    x, out = c.t(0), c.out()
    if prod(out.shape) != meta_of(x).numel():  # packed types, whose last dim is not theirs to reshape
        return c.emit("view", x, list(out.shape), out=out)
    return c.b.reshape(x, tuple(out.shape))


@register("Transpose")
def _transpose(c: Call) -> Result:
    x = c.t(0)
    rank = meta_of(x).dim()
    return c.b.permute(x, [wrap(d, rank) for d in c.attr("perm", list(reversed(range(rank))))])


@register("Expand")
def _expand(c: Call) -> Result:
    x, out = c.t(0), c.out()
    return c.b.expand(x, tuple(out.shape))


@register("Slice")
def _slice(c: Call) -> Result:
    x, out = c.t(0), c.out()
    starts, ends = c.ints(1, "starts"), c.ints(2, "ends")
    if starts is None or ends is None:
        return c.emit("slice.Tensor", x, out=out)
    axes, steps = c.ints(3, "axes"), c.ints(4, "steps")
    rank = meta_of(x).dim()
    for place, axis in enumerate(axes if axes is not None else range(len(starts))):
        step = steps[place] if steps else 1
        if step < 0:
            return c.emit("flip", x, [axis])
        x = c.b.slice(x, wrap(axis, rank), starts[place], ends[place], step)
    if meta_of(x).shape != out.shape:
        raise NotKnown("its starts and ends do not give the sizes that shape inference gives")
    return x


@register("Split")
def _split(c: Call) -> Result:
    x = c.t(0)
    axis = wrap(c.attr("axis", 0), meta_of(x).dim())
    sizes = [m.shape[axis] for m in c.outs() if m is not None]
    if sum(sizes) != meta_of(x).shape[axis]:
        return list(c.b.parts(c.emit("split_with_sizes", x, sizes, axis, out=c.outs())))
    parts = meta_of(x).split_with_sizes(sizes, axis)
    return list(c.b.parts(c.emit("split_with_sizes", x, sizes, axis, out=tuple(parts))))


@register("Concat")
def _concat(c: Call) -> Result:
    joined = nodes(c)
    if len(joined) == 1:
        return c.emit("alias", joined[0])
    return c.emit("cat", joined, c.attr("axis", 1))


@register("Tile")
def _tile(c: Call) -> Result:
    return c.emit("repeat", c.t(0), c.ints(1, "repeats") or [])


@register("Pad", "CenterCropPad")
def _pad(c: Call) -> Result:
    return c.emit("constant_pad_nd" if c.attr("mode", "constant") == "constant" else "pad", c.t(0), [])


@register("ConstantOfShape")
def _full(c: Call) -> Result:
    return c.emit("full", list(c.out().shape), 0)


@register("EyeLike")
def _eye(c: Call) -> Result:
    return c.emit("eye", *c.out().shape)


@register("Range")
def _range(c: Call) -> Result:
    return c.emit("arange", c.out().numel())


@register("DepthToSpace", "SpaceToDepth")
def _blocks(c: Call) -> Result:
    """A reshape, a permutation and a copy; which permutation is no matter of bytes."""
    x, out, block = c.t(0), c.out(), int(c.attr("blocksize"))
    n, channels, *space = meta_of(x).shape
    if c.op == "DepthToSpace":
        split = [n, block, block, channels // block**2, *space]
        order = [0, 3, 4, 1, 5, 2]
    else:
        split = [n, channels, space[0] // block, block, space[1] // block, block]
        order = [0, 3, 5, 1, 2, 4]
    moved = c.b.permute(c.b.reshape(x, tuple(split)), order)
    return c.b.reshape(moved, tuple(out.shape))


@register("ReverseSequence")
def _reverse(c: Call) -> Result:
    return c.emit("flip", c.t(0), [c.attr("time_axis", 0)])


@register("Col2Im")
def _col2im(c: Call) -> Result:
    return c.emit("col2im", c.t(0))


@register("Shape", "Size")
def _unknown_shape(c: Call) -> Result:
    """Folded where the shape is known; reached only where it is not."""
    raise ShapeNotKnown("the shape of an input is not known")
