"""Running a program compiled and eagerly, and telling where the two differ; the yardstick is eager in float64.

Used by the near-miss suite and by the fuzzer. What the programs are lives elsewhere.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from attention_near_misses.program import TRAINING, Inputs, Program
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

#: Narrowest last.
WIDTHS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: Errors always allowed, relative to the largest element: what the issue allows in float32, else two roundings.
BASE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
#: Beyond this, eager itself is not computing what float64 computes (a sum that absorbs its terms, an overflow);
#: there the program means what eager makes of it.
LOOSE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.15}
#: A tensor whose true value is zero, or nearly cancels, has rounding errors of its siblings' size: this share of the
#: largest output or gradient counts as its size.
SIBLINGS = 0.5
SLACK = 2.0


class Widened(TorchFunctionMode):
    """Runs a program in float64 although it names a narrower dtype: a cast down becomes a cast to float64.

    What eager loses by a cast that the program wrote is then eager's own error, and a kernel need not lose it too.
    """

    NARROW = (torch.float32, torch.bfloat16, torch.float16)
    CASTS: Mapping[Any, torch.dtype] = {
        torch.Tensor.float: torch.float32, torch.Tensor.half: torch.float16, torch.Tensor.bfloat16: torch.bfloat16,
        torch.Tensor.double: torch.float64,
    }  # fmt: skip

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.CASTS:
            return self._apart(args[0].double(), args[0], self.CASTS[func])
        narrow = [a for a in (*args, *(kwargs or {}).values()) if a in self.NARROW]
        args = tuple(torch.float64 if a in self.NARROW else a for a in args)
        kwargs = {k: torch.float64 if a in self.NARROW else a for k, a in (kwargs or {}).items()}
        result = func(*args, **kwargs)
        return self._apart(result, args[0], narrow[0]) if func is torch.Tensor.to and narrow else result

    def _apart(self, result: torch.Tensor, source: torch.Tensor, named: torch.dtype) -> torch.Tensor:
        """A copy where the program makes one, for it may be written to."""
        return result.clone() if result is source and named != self.dtype else result


@contextlib.contextmanager
def widened(wide: bool, dtype: torch.dtype) -> Iterator[None]:
    """See `Widened`; tensors made without a dtype are float64 too."""
    if not wide:
        yield
        return
    torch.set_default_dtype(torch.float64)
    try:
        with Widened(dtype):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


class Counting:
    """An inner compiler that runs the graph as it is, and counts the fused attention calls it was handed."""

    def __init__(self) -> None:
        self.fused = 0
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(gm)
        self.fused += sum(is_fused(n) for m in gm.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes)
        return gm.forward


def is_fused(node: fx.Node) -> bool:
    """Whether `node` calls SDPA or FlexAttention, by whatever name."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = f"{getattr(node.target, '__name__', '')} {node.target}"
    return any(word in name for word in ("scaled_dot_product", "flex_attention", "_flash_attention", "in_blocks"))


@dataclass
class Outcome:
    """What one run left behind: outputs of all calls, inputs as they were left, gradients; None where there is none."""

    outputs: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    grads: dict[str, torch.Tensor | None] = field(default_factory=dict)


def execute(program: Program, mode: str, seed: int, *, wide: bool = False, compiler: Any = None) -> Outcome:
    """Run all calls of `program` on inputs drawn from `seed`, and go backward through every call in training.

    Args:
        program: what to run.
        mode: 'inference' (under no_grad) or 'training'.
        seed: of inputs, parameters and the weights of the loss.
        wide: everything in float64.
        compiler: what turns the callable into the compiled one; None for eager.
    """
    torch.manual_seed(seed)
    owner = program.make()
    if isinstance(owner, nn.Module):
        owner = copy.deepcopy(owner).train(mode == TRAINING)
        owner = owner.to(program.dtype)
        owner = owner.double() if wide else owner
    call = owner if compiler is None else compiler(owner)
    outcome = Outcome()
    for index, draw in enumerate((program.inputs, *program.then)):
        if index and program.between is not None:
            program.between(owner)
        source = Inputs(seed + index, program.dtype, wide, mode == TRAINING)
        arguments = draw(source)
        torch.manual_seed(seed)
        with torch.set_grad_enabled(mode == TRAINING), widened(wide, program.dtype):
            result = call(*arguments)
        outputs = [leaf for leaf in pytree.tree_leaves(result) if leaf is not None]
        if mode == TRAINING:
            _backward(outputs, seed)
        outcome.outputs += [o.detach().clone() if isinstance(o, torch.Tensor) else o for o in outputs]
        outcome.inputs += [a.detach().clone() for a in arguments if isinstance(a, torch.Tensor)]
        outcome.grads |= {f"call {index}, input leaf {i}": leaf.grad for i, leaf in enumerate(source.leaves)}
    if isinstance(owner, nn.Module):
        outcome.grads |= {f"parameter {name}": p.grad for name, p in owner.named_parameters()}
        outcome.inputs += [b.detach().clone() for b in owner.buffers()]
    return outcome


def _backward(outputs: list[Any], seed: int) -> None:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed + 1)
    terms = []
    for out in outputs:
        if not isinstance(out, torch.Tensor):
            continue
        weight = torch.randn(out.shape, generator=generator)  # drawn for every output, so that all runs draw the same
        if out.requires_grad and out.device.type != "meta":
            # float16 holds no more than 65504: a mean over few elements keeps losses small in every dtype.
            terms.append((out * weight.to(out.dtype)).sum())
    if terms:
        sum(t.to(terms[0].dtype) for t in terms).backward()


@dataclass(frozen=True)
class Yardstick:
    """What error counts.

    Attributes:
        through: the narrowest dtype that values pass through, if narrower than their own.
        allow: relative error allowed besides.
        floor: no tensor counts as smaller than this.
    """

    through: torch.dtype | None = None
    allow: float = 0.0
    floor: float = 0.0

    def widths(self, dtype: torch.dtype) -> tuple[float, float]:
        """(error always allowed, error beyond which eager means something else), both relative."""
        coarsest = max(dtype, self.through or dtype, key=WIDTHS.index)
        return BASE[coarsest] + self.allow, LOOSE[coarsest] + self.allow


def differences(exact: Outcome, ours: Outcome, eager: Outcome, yardstick: Yardstick | None = None) -> list[str]:
    """What `ours` has wrong, a line each: structure, NaN and infinity where eager has none, errors above eager's."""
    found: list[str] = []
    rows: dict[str, tuple[Any, Any, Any]] = {}
    for kind in ("outputs", "inputs"):
        lists = [getattr(o, kind) for o in (exact, ours, eager)]
        if len({len(x) for x in lists}) > 1:
            found.append(f"{kind}: {len(lists[1])} of them, eager has {len(lists[2])}")
            continue
        rows |= {f"{kind[:-1]} {i}": row for i, row in enumerate(zip(*lists, strict=True))}
    if ours.grads.keys() != eager.grads.keys():
        found.append(f"gradients of {sorted(ours.grads)}, eager has {sorted(eager.grads)}")
    else:
        rows |= {k: (exact.grads[k], ours.grads[k], eager.grads[k]) for k in eager.grads}
    largest = max((_size(e) for e, _, _ in rows.values() if isinstance(e, torch.Tensor)), default=0.0)
    measure = replace(yardstick or Yardstick(), floor=SIBLINGS * largest)
    problems = ((name, _one(*row, measure)) for name, row in rows.items())
    return found + [f"{name}: {problem}" for name, problem in problems if problem]


def _size(t: torch.Tensor) -> float:
    if not t.is_floating_point() or t.device.type == "meta":
        return 0.0
    finite = t[t.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _one(exact: Any, ours: Any, eager: Any, measure: Yardstick) -> str:
    if (ours is None) != (eager is None) and not (eager if ours is None else ours).any():
        return ""  # no gradient and a gradient of zeros: compilers do not tell these apart
    if not isinstance(eager, torch.Tensor) or not isinstance(ours, torch.Tensor):
        same = type(ours) is type(eager) and (ours == eager or ours is eager)
        return "" if same else f"{_kind(ours)}, eager has {_kind(eager)}"
    if (ours.dtype, ours.shape, ours.device) != (eager.dtype, eager.shape, eager.device):
        return f"{_kind(ours)}, eager has {_kind(eager)}"
    if eager.device.type == "meta" or not eager.numel():
        return ""
    if eager.is_complex():
        return _one(*(torch.view_as_real(t.resolve_conj()) for t in (exact, ours, eager)), measure)
    if not eager.is_floating_point():
        return "" if torch.equal(ours, eager) else "different integers"
    for what, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        mine, theirs = test(ours), test(eager)
        if not torch.equal(mine, theirs):
            apart = int((mine ^ theirs).sum())
            return f"{what} at {int(mine.sum())} places, eager has it at {int(theirs.sum())}: {apart} differ"
    return _numbers(exact.double(), ours.double(), eager.double(), eager.dtype, measure)


def _numbers(
    exact: torch.Tensor, ours: torch.Tensor, eager: torch.Tensor, dtype: torch.dtype, measure: Yardstick
) -> str:
    base, loose = measure.widths(dtype)
    scale = max(_size(exact), _size(eager), measure.floor, torch.finfo(dtype).tiny)
    finite = eager.isfinite()
    meant = finite & exact.isfinite() & ((eager - exact).abs() <= loose * scale)
    error, own = _worst(ours - exact, meant), _worst(eager - exact, meant)
    if error > SLACK * own + base * scale:
        return f"error {error:.3g} against float64, eager's own {own:.3g} (largest value {scale:.3g})"
    away = _worst(ours - eager, finite & ~meant)
    if away > loose * scale:
        return f"off by {away:.3g} from eager where float64 means something else (largest value {scale:.3g})"
    return ""


def _worst(difference: torch.Tensor, where: torch.Tensor) -> float:
    chosen = difference[where].abs()
    return float(chosen.max()) if chosen.numel() else 0.0


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} on {value.device}"
    return repr(value)


@dataclass
class Verdict:
    """What became of one program: how many fused calls it got, and what is wrong with it."""

    fused: int
    problems: list[str]


def judge(program: Program, mode: str, seed: int, compiler: Callable[[Any], Any], counting: Counting) -> Verdict:
    """Run `program` compiled by `compiler` (which reports to `counting`), and compare with eager."""
    eager = execute(program, mode, seed)
    exact = eager if program.random else execute(program, mode, seed, wide=True)
    torch._dynamo.reset()
    ours = execute(program, mode, seed, compiler=compiler)
    problems = differences(exact, ours, eager, Yardstick(program.through, program.allow))
    if program.expect == "decline" and counting.fused:
        problems.append(f"swapped {counting.fused} times: {program.why}")
    return Verdict(counting.fused, problems)
