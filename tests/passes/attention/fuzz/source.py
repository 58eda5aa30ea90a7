"""A random program as source text: what the generator writes into, how it becomes a `Program`, how it is printed."""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from attention_near_misses.program import Inputs, Program

HEADER = "import math\n\nimport torch\nimport torch.nn.functional as F\n\n"


@dataclass(frozen=True)
class Param:
    """One argument: a name, how it is drawn, and its shape in names of sizes or in numbers."""

    name: str
    kind: str  #: 'randn', 'bool', 'zeros and ones', 'ints', 'lengths', 'positive'
    shape: tuple[str | int, ...]
    grad: bool = False
    full: str = "none"  #: rows of a mask without any key: 'none', 'one', 'all'

    def draw(self, r: Inputs, sizes: dict[str, int]) -> Any:
        """The argument for these sizes."""
        shape = tuple(sizes[s] if isinstance(s, str) else s for s in self.shape)
        if self.kind == "randn":
            return r.randn(*shape, grad=self.grad)
        if self.kind == "positive":
            return r.leaf(torch.rand(shape, generator=r.generator) + 0.2, self.grad)
        if self.kind == "lengths":
            return r.ints(0 if self.full != "none" else 1, sizes["M"] + 1, *shape)
        if self.kind == "ints":
            return r.ints(0, 3, *shape)
        mask = torch.rand(shape, generator=r.generator) < 0.6
        if self.full == "all":
            mask[:] = False
        elif self.full == "one" and mask.numel():
            mask[(..., -1, slice(None)) if mask.dim() > 1 else ...] = False
        else:
            mask[..., 0] = True
        return mask if self.kind == "bool" else mask.long() if self.kind == "zeros and ones" else mask.to(r.dtype)


@dataclass
class Source:
    """A program being written.

    Attributes:
        choose: picks one of a sequence; the only source of chance.
        sizes: B, H, G (heads of k and v), N (queries), M (keys), D, E (head dims of q and k, and of v).
        params, lines: what was written so far.
        tags: what is in it, for the statistics.
    """

    choose: Callable[[Sequence[Any]], Any]
    sizes: dict[str, int] = field(default_factory=dict)
    others: list[dict[str, int]] = field(default_factory=list)  #: sizes of further calls
    params: list[Param] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    tags: set[str] = field(default_factory=set)
    extras: list[str] = field(default_factory=list)  #: returned beside the output
    mode: str = "training"
    dtype: str = "float32"
    dynamic: bool = False
    random: bool = False

    def often(self, percent: int) -> bool:
        """True in `percent` of cases; False is what a failing program is reduced to."""
        return bool(self.choose(range(100)) >= 100 - percent)

    def weighted(self, **weights: int) -> str:
        """One of the names, in proportion; the first is the plainest."""
        names = [n for n, w in weights.items() for _ in range(w)]
        return str(self.choose(names))

    def line(self, text: str) -> None:
        """Write one line of the body."""
        self.lines.append(text)

    def param(self, stem: str, kind: str, shape: Sequence[str | int], grad: bool = False, full: str = "none") -> str:
        """A new argument; returns its name."""
        name = stem if all(p.name != stem for p in self.params) else f"{stem}{len(self.params)}"
        self.params.append(Param(name, kind, tuple(shape), grad, full))
        return name

    def tag(self, name: str) -> None:
        """Note what the program contains."""
        self.tags.add(name)

    def text(self) -> str:
        """The program as a module."""
        body = "\n".join(f"    {line}" for line in self.lines)
        return f"{HEADER}\ndef program({', '.join(p.name for p in self.params)}):\n{body}\n"

    def program(self) -> Program:
        """The program to be judged."""
        text = self.text()
        narrow = [d for d in ("bfloat16", "half") if f".{d}()" in text]
        if not narrow and self.dtype == "float64" and (".float()" in text or "torch.float32" in text):
            narrow = ["float32"]
        # Scores of 1e4 (in float64 of 1e9) have large rounding errors themselves; a kernel's logsumexp has them too.
        allow = 5e-3 if "1e4" in text else 1e-6 if self.dtype == "float64" and "1e9" in text else 0.0
        if "tensor scale" in self.tags and self.dtype in ("bfloat16", "float16"):
            allow = 0.05  # the gradient of a learned scale is a sum over the gradient of q, which a kernel rounds
        name = f"<fuzz {abs(hash(text)):x}>"
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)  # so that reports can quote its lines
        scope: dict[str, Any] = {"math": math}
        exec(compile(text, name, "exec"), scope)
        draws = [lambda r, s=s: [p.draw(r, s) for p in self.params] for s in (self.sizes, *self.others)]
        return Program(
            name="fuzz", make=lambda: scope["program"], expect="equal", why="a random program", inputs=draws[0],
            then=tuple(draws[1:]), modes=(self.mode,), dtype=getattr(torch, self.dtype),
            dynamic=True if self.dynamic else None, random=self.random,
            through=getattr(torch, narrow[0]) if narrow else None, allow=allow,
        )  # fmt: skip

    def runnable(self, seed: int) -> str:
        """The program with inputs and a comparison, to be saved and run."""
        drawn = [f"        {_constructor(p, self.sizes, self.dtype)},  # {p.name}" for p in self.params]
        arguments = "\n".join(drawn)
        grad = self.mode == "training"
        return f"""{self.text()}

def inputs():
    torch.manual_seed({seed})
    return [
{arguments}
    ]


# {self.mode}, dynamic {self.dynamic}, further sizes {self.others}
with torch.set_grad_enabled({grad}):
    torch.manual_seed(0)
    eager = program(*inputs())
    torch.manual_seed(0)
    options = {{"inner": lambda gm, _: (gm.print_readable(), gm.forward)[1], "attention": "always", "strict": True}}
    compiled = torch.compile(program, backend="optpass", dynamic={True if self.dynamic else None}, options=options)
    ours = compiled(*inputs())
for a, b in zip(eager, ours):
    print((a - b).abs().max() if a.is_floating_point() else a.eq(b).all(), a.isnan().sum(), b.isnan().sum())
"""


def _constructor(p: Param, sizes: dict[str, int], dtype: str) -> str:
    shape = tuple(sizes[s] if isinstance(s, str) else s for s in p.shape)
    grad = ".requires_grad_()" if p.grad else ""
    mask = f"torch.rand({shape}) < {0.0 if p.full == 'all' else 0.6}"
    if p.full == "one" and len(shape) > 1:
        mask = f"({mask}) & (torch.arange({shape[-2]})[:, None] < {shape[-2] - 1})"
    return {
        "randn": f"torch.randn({shape}, dtype=torch.{dtype}){grad}",
        "positive": f"(torch.rand({shape}, dtype=torch.{dtype}) + 0.2){grad}",
        "lengths": f"torch.randint({0 if p.full != 'none' else 1}, {sizes['M'] + 1}, {shape})",
        "ints": f"torch.randint(0, 3, {shape})",
        "bool": mask,
        "zeros and ones": f"({mask}).long()",
        "float zeros and ones": f"({mask}).to(torch.{dtype})",
    }[p.kind]
