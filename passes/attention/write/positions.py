"""A mask that is read from a buffer, computed from positions instead: for sites where no fused kernel pays.

Inner compilers fold a comparison of positions into the kernel that uses it; a buffer they must read for every score,
which only of floats and on a CPU takes less time.
Exact bit for bit wherever the prover has shown what the buffer holds, under the same run-time guard as any such proof.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from optpass.passes.attention.axes import atoms
from optpass.passes.attention.masks import MaskFacts
from optpass.passes.attention.plans.plan import Plan
from optpass.passes.attention.program.ir import Value
from optpass.passes.attention.site import Fill
from optpass.passes.attention.write.emit import Writer


@dataclass(frozen=True)
class Computed:
    """A mask that now comes from positions: the user's node, and what was proved of it."""

    node: fx.Node
    facts: MaskFacts


def compute_masks(writer: Writer, planned: Plan, nodes: dict[Value, fx.Node]) -> list[Computed]:
    """Replace each mask of the site that was proved causal from a buffer's contents, before `writer.at`."""
    done = []
    fills = planned.site.scores.fills
    for fill, facts in zip(fills, planned.mask.proofs, strict=False):  # the fills' come first
        node = nodes.get(fill.mask.value)
        if node is None or not node.users or facts.kind != "causal" or not facts.buffers or fill.mask.value.version:
            continue
        if _read_fast(facts):
            continue
        new = _causal(writer, planned, fill)
        if new is None:
            continue
        node.replace_all_uses_with(new)
        done.append(Computed(node, facts))
    return done


def _read_fast(facts: MaskFacts) -> bool:
    """Whether reading beats comparing: on a CPU all heads read what a cache holds, and floats a vector at a time.

    Of bools and bytes Inductor's kernel takes two to four times as long, of float32 0.8 times (lengths 256 to 1024).
    """
    tensors = [buffer.tensor for buffer in facts.buffers]
    return all(t.device.type == "cpu" and t.is_floating_point() for t in tensors)


def _causal(writer: Writer, planned: Plan, fill: Fill) -> fx.Node | None:
    """`key <= query` where the mask keeps by True, `key > query` where it hides by True; in the mask's own shape."""
    frame, dims = planned.frame, fill.mask.dims
    axes = {"q": frame.rows, "k": frame.keys}
    where = {name: [d for d, g in enumerate(dims) if atoms(g) == wanted] for name, wanted in axes.items()}
    if len(where["q"]) != 1 or len(where["k"]) != 1 or sum(bool(g) for g in dims) != 2:
        return None
    device = planned.site.output.tensor.device
    positions = {}
    for name, (dim,) in where.items():
        size = writer.size(fill.mask.value.shape[dim])
        shape = tuple(-1 if d == dim else 1 for d in range(len(dims)))
        positions[name] = writer.call(torch.reshape, writer.call(torch.arange, size, device=device), shape)
    compare = torch.le if fill.keep_when else torch.gt
    return writer.call(compare, positions["k"], positions["q"])
