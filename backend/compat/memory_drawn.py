"""Random numbers as Inductor's generated C++ draws them, for its graphs where they run operation by operation.

Inductor draws seeds from the device's generator, and computes each number from a seed and from where it stands in its
tensor. What its operators do outside of generated code is drawn from the generator instead, and is another mask each
time that it is asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

_PRIMS = torch.ops.prims
#: Philox4x32-10 (J. Salmon et al., Parallel random numbers: as easy as 1, 2, 3; `ATen/core/PhiloxRNGEngine.h`).
_MULTIPLIERS, _STEPS, _ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10
_LOW = np.uint64(0xFFFFFFFF)
#: Of 31 bits to a number below 1 (`uint32_to_uniform_float` in Inductor's `cpp_prefix.h`).
_SCALE = np.float32(4.6566127342e-10)
#: Numbers that are computed at once: what that needs is no tensor, and small beside any that matters.
_AT_ONCE = 1 << 16


def is_drawn_alike(node: fx.Node) -> bool:
    """Whether `draw_as_generated` knows an operator that draws; so do those that it draws from."""
    value = node.meta.get("val")
    on_cpu = isinstance(value, torch.Tensor) and value.device.type == "cpu"
    if not on_cpu or not hasattr(_PRIMS, "inductor_random"):
        return False
    if node.target is _PRIMS.inductor_random.default:
        return node.args[2] == "rand" and not node.kwargs
    return node.target in (_PRIMS.inductor_seeds.default, _PRIMS.inductor_lookup_seed.default)


def draw_as_generated(gm: fx.GraphModule) -> fx.GraphModule:
    """`gm`, whose random operators are replaced by what draws as generated code does. In place."""
    targets = {getattr(_PRIMS, f"inductor_{name}").default: target for name, target in _DRAWN.items()
               if hasattr(_PRIMS, f"inductor_{name}")}  # fmt: skip
    found = [node for node in gm.graph.nodes if node.target in targets]
    for node in found:
        node.target = targets[node.target]
    if found:
        gm.recompile()
    return gm


def seeds(count: int, device: torch.device) -> torch.Tensor:
    """As `RandomSeeds` of Inductor's draws them."""
    limits = torch.iinfo(torch.int64)
    return torch.randint(limits.min, limits.max, [count], device=device)


def random(size: list[int], seed: torch.Tensor, mode: str) -> torch.Tensor:
    """Uniform in [0, 1), float32, of that shape: the number at position i is that of counter i under the key `seed`."""
    found = torch.empty(size, dtype=torch.float32)
    numbers, key = found.view(-1).numpy(), int(seed.item()) & int(_LOW)
    for start in range(0, len(numbers), _AT_ONCE):
        some = numbers[start : start + _AT_ONCE]
        counters = np.arange(start, start + len(some), dtype=np.uint64)
        some[:] = (_philox(counters, key) & np.uint64(0x7FFFFFFF)).astype(np.float32) * _SCALE
    return found


_DRAWN: dict[str, Any] = {"seeds": seeds, "random": random}


def _philox(counters: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """The first of the four words that each counter gives."""
    zero = np.zeros_like(counters)
    words, keys = [counters, zero, zero, zero], [key, 0]
    for _ in range(_ROUNDS):
        first, second = (words[i] * np.uint64(multiplier) for i, multiplier in zip((0, 2), _MULTIPLIERS, strict=True))
        words = [
            (second >> np.uint64(32)) ^ words[1] ^ np.uint64(keys[0]), second & _LOW,
            (first >> np.uint64(32)) ^ words[3] ^ np.uint64(keys[1]), first & _LOW,
        ]  # fmt: skip
        keys = [(key + step) & int(_LOW) for key, step in zip(keys, _STEPS, strict=True)]
    return words[0]
