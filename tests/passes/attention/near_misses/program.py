"""What one program of the suite is: a function or module, its inputs, and what may become of it.

How programs are run and compared lives in `check`; the programs themselves in the modules named after their topic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

#: 'decline': no fused kernel computes this, so none may stand in the graph. 'equal': it may be swapped.
Expect = Literal["decline", "equal"]
INFERENCE, TRAINING = "inference", "training"


class Inputs:
    """Draws the inputs of one run. The same seed gives the same numbers, whether or not they are widened to float64.

    Args:
        seed: of the numbers.
        dtype: what floating inputs are rounded to.
        wide: keep those rounded values in float64, for the reference.
        grad: False in inference: no input needs a gradient.
    """

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32, wide: bool = False, grad: bool = True) -> None:
        self.generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
        self.dtype, self.wide, self.grad = dtype, wide, grad
        self.leaves: list[torch.Tensor] = []

    def leaf(self, value: torch.Tensor, grad: bool = True) -> torch.Tensor:
        """`value` in the dtype of this run, as an input whose gradient is compared."""
        value = value.to(self.dtype)
        value = value.double() if self.wide else value
        if grad and self.grad:
            self.leaves.append(value.requires_grad_())
        return value

    def randn(self, *shape: int, grad: bool = True, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        """Normal numbers."""
        return self.leaf(torch.randn(shape, generator=self.generator) * scale + shift, grad)

    def qkv(self, *shape: int, keys: int | None = None) -> list[torch.Tensor]:
        """q, k and v of one shape, by default (2, 3, 6, 8): batch, heads, sequence, head dim; `keys` for k and v."""
        shape = shape or (2, 3, 6, 8)
        other = (*shape[:-2], keys or shape[-2], shape[-1])
        return [self.randn(*shape), self.randn(*other), self.randn(*other)]

    def bools(self, *shape: int, chance: float = 0.6, full: str = "none") -> torch.Tensor:
        """True where a key may be seen. `full`: rows without any key: 'none', 'one', 'all'."""
        mask = torch.rand(shape, generator=self.generator) < chance
        mask[..., 0] = True
        if full == "one":
            mask[..., -1, :] = False
        return torch.zeros_like(mask) if full == "all" else mask

    def ints(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Integers in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator)

    def permutation(self, n: int) -> torch.Tensor:
        """A permutation of range(n) that is not the identity."""
        order = torch.randperm(n, generator=self.generator)
        return torch.arange(n).flip(0) if torch.equal(order, torch.arange(n)) else order


def square(r: Inputs) -> list[Any]:
    """q, k, v of (2, 3, 6, 8)."""
    return r.qkv()


def cross(r: Inputs) -> list[Any]:
    """Five queries on seven keys."""
    return r.qkv(2, 3, 5, 8, keys=7)


def flat(r: Inputs) -> list[Any]:
    """Three dimensions, all of one size but the last."""
    return r.qkv(6, 6, 8)


def plus(*shapes: tuple[int, ...]) -> Callable[[Inputs], list[Any]]:
    """q, k, v of (2, 3, 6, 8) and a normal tensor of each shape, all with gradients."""
    return lambda r: [*r.qkv(), *(r.randn(*shape) for shape in shapes)]


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        name: topic and name.
        make: gives the callable; a module class, or a function that returns the function.
        expect: see `Expect`.
        why: what makes it look like attention and what differs.
        inputs: draws the positional arguments.
        then: inputs of further calls of the same compiled object.
        between: done to the module (or function) before each further call.
        modes: inference, training or both.
        dtype: of floating inputs.
        dynamic: compile with dynamic shapes.
        random: draws random numbers, so eager in the same dtype from the same seed is the reference.
        through: the narrowest dtype that values pass through, where that is not `dtype`; sets what error is allowed.
        allow: relative error allowed besides, where scores are so large that a kernel's logsumexp is as coarse.
        quiet: nothing here has the shape of attention, so no declined site is due either.
    """

    name: str
    make: Callable[[], Callable[..., Any]]
    expect: Expect
    why: str
    inputs: Callable[[Inputs], list[Any]] = square
    then: tuple[Callable[[Inputs], list[Any]], ...] = ()
    between: Callable[[Any], None] | None = None
    modes: tuple[str, ...] = (INFERENCE, TRAINING)
    dtype: torch.dtype = torch.float32
    dynamic: bool | None = None
    random: bool = False
    through: torch.dtype | None = None
    allow: float = 0.0
    quiet: bool = False


@dataclass
class Suite:
    """The programs of one module. `decline` and `equal` decorate a function or an `nn.Module` class.

    They take the inputs and the attributes of `Program`, and `name`, which tells programs of one function apart.
    """

    topic: str
    programs: list[Program] = field(default_factory=list)

    def decline(self, inputs: Callable[[Inputs], list[Any]] = square, **more: Any) -> Callable[[Any], Any]:
        """Adds a program that must not be swapped."""
        return self._adder("decline", inputs, more)

    def equal(self, inputs: Callable[[Inputs], list[Any]] = square, **more: Any) -> Callable[[Any], Any]:
        """Adds a program that may be swapped if the result stays the same."""
        return self._adder("equal", inputs, more)

    def _adder(
        self, expect: Expect, inputs: Callable[[Inputs], list[Any]], more: dict[str, Any]
    ) -> Callable[[Any], Any]:
        suffix, why, given = more.pop("name", ""), more.pop("why", ""), more.pop("make", None)

        def add(target: Any) -> Any:
            is_module = isinstance(target, type) and issubclass(target, nn.Module)
            own = target.__name__.strip("_<>")
            if suffix:  # functions made in a loop are all called `program`
                own = suffix if own in ("program", "lambda") else f"{own}[{suffix}]"
            name = f"{self.topic}/{own}"
            text = " ".join((why or target.__doc__ or "").split())
            make = given or (target if is_module else (lambda: target))
            self.programs.append(Program(name, make, expect, text, inputs, **more))
            return target

        return add

    def __iter__(self) -> Iterator[Program]:
        return iter(self.programs)


def in_dtype(programs: list[Program], dtype: torch.dtype) -> list[Program]:
    """The same programs on inputs of another dtype."""
    return [replace(p, name=f"{p.name}-{str(dtype).removeprefix('torch.')}", dtype=dtype) for p in programs]


def attend(q: Any, k: Any, v: Any, change: Callable[[torch.Tensor], torch.Tensor] = lambda s: s) -> torch.Tensor:
    """softmax(change(q kᵀ / √d)) v, spelled plainly: where only the scores of a program differ."""
    return change(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ v
