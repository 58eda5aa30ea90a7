"""Replayed peaks against measured ones: equal to the byte, but for scalars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import optpass.models as models
from optpass.backend import compat, snapshot
from optpass.backend.compat import memory as inductor
from optpass.backend.compat import memory_known
from optpass.backend.compat import partition as parts
from optpass.backend.memory.measure import measure_peak
from optpass.backend.memory.replay.alone import replay_compiled, replay_inductor
from optpass.backend.memory.replay.replay import StepReplay, replay_step
from optpass.backend.memory.replay.tail import NO_TAIL, LossTail, Tail

#: Scalars that torch wraps into tensors, and the loss's own gradient.
SCALARS = 24


@dataclass
class Split(compat.CustomPartitionerFn):  # type: ignore[misc, unused-ignore]
    """PyTorch's own partitioner, which keeps what it made."""

    made: list[tuple[fx.GraphModule, fx.GraphModule, int]] = field(default_factory=list)

    def uuid(self) -> None:
        """No identity: no cache."""

    def __deepcopy__(self, memo: Any) -> Split:
        return self

    def __call__(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        both = compat.min_cut_partition(joint, inputs, **kwargs)
        forward, backward = (fx.GraphModule(gm, snapshot.copy_graph(gm.graph)) for gm in both)
        self.made.append((forward, backward, kwargs["num_fwd_outputs"]))
        return both

    def replay(self, executor: Any, tail: Tail = NO_TAIL) -> StepReplay:
        """The step of the one graph there is."""
        ((forward, backward, n_outputs),) = self.made
        mutated = parts.mutated_inputs(forward)
        return replay_step(forward, backward, n_outputs=n_outputs, executor=executor, tail=tail, mutated_inputs=mutated)


def aot_eager(split: Split) -> Callable[..., Any]:
    """A backend that runs the partitioner's graphs as they stand."""
    run = compat.boxed_nop
    return compat.aot_autograd(  # type: ignore[no-any-return, unused-ignore]
        fw_compiler=run, bw_compiler=run, partition_fn=split, keep_inference_input_mutations=True
    )


@dataclass
class Replayed(Split):
    """Replays what it splits while the compile is under way, as a partitioner under a budget does."""

    replays: list[StepReplay] = field(default_factory=list)

    def __call__(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        both = super().__call__(joint, inputs, **kwargs)
        n_outputs = kwargs["num_fwd_outputs"]
        self.replays.append(
            replay_step(*both, n_outputs=n_outputs, executor="inductor", config_patches=UNCACHED, keep_lowered=True)
        )
        return both

    def lowered(self, is_backward: bool) -> Any:
        """The lowering of the replay."""
        return self.replays[0].lowered[is_backward].work


#: Inductor's settings of the compiles here.
UNCACHED = {"force_disable_caches": True, "compile_threads": 1}


def by_inductor(split: Replayed, *, reuse: bool) -> Callable[..., Any]:
    """Inductor; with `reuse`, it goes on from the lowerings that were replayed."""
    settings = {**UNCACHED, "custom_partitioner_fn": split}
    lowered = split.lowered if reuse else None
    return lambda gm, inputs: compat.compile_fx(gm, inputs, settings, lambda *_: None, lowered)


def measured_step(model: nn.Module, step: Callable[[], Any]) -> int:
    """Peak of `step` above what it starts with, gradients dropped before, compiled before."""
    for _ in range(2):
        step()
        for parameter in model.parameters():
            parameter.grad = None
    return measure_peak(step).bytes_above_start


def first(out: Any) -> torch.Tensor:
    """The loss among outputs: the first of them."""
    result: torch.Tensor = out[0] if isinstance(out, (tuple, list)) else out
    return result


def check(model: nn.Module, inputs: Sequence[Any], loss: Callable[[Any], torch.Tensor]) -> StepReplay:
    """A step with the loss inside, on aot_eager: predicted is measured."""
    split = Split()
    compiled = torch.compile(lambda *args: loss(model(*args)), backend=aot_eager(split))

    def step() -> None:
        out = compiled(*inputs)  # held until the step ends
        first(out).backward()

    measured = measured_step(model, step)
    replayed = split.replay("graph")
    assert abs(replayed.peak_bytes - measured) <= SCALARS, (replayed.peak_bytes, measured, replayed.peak_label)
    return replayed


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.last = nn.Conv2d(16, 24, 3, stride=2), nn.Linear(24 * 49, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.second(F.relu(self.norm(self.first(x))))), 2)
        return self.last(x.flatten(1)).square().mean()


class InPlace(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(40, 40)
        self.register_buffer("seen", torch.zeros(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).clone()
        y.add_(1).mul_(2)
        y[:, :10] = 0
        self.seen.add_(y.detach().mean(0))
        z = y.view(-1, 20)
        z.relu_()
        return (z * z).sum() + self.seen.sum()


class Scattered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.weight = nn.Embedding(100, 32), nn.Parameter(torch.randn(32, 32))

    def forward(self, nodes: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        h = self.table(nodes) @ self.weight
        sums = torch.zeros(50, 32).index_add(0, to, h)
        sums = sums / sums.norm(dim=-1, keepdim=True).clamp(min=1e-3)
        back = torch.gather(sums, 0, to[:, None].expand(-1, 32))
        return torch.cumsum(back, 0).logsumexp(0).sum()


class Outputs(nn.Module):
    """Several outputs: a view of an input, integers, and a part of a saved tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c = self.linear(x).chunk(3, -1)
        values, order = a.topk(4, -1)
        return values.exp().sum() + b.sigmoid().prod(-1).mean() + c.softmax(0).var(0).sum(), a, x.t(), order


class Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 50), nn.LayerNorm(50)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        p = y.log_softmax(-1)
        some = F.nll_loss(p, t) + F.binary_cross_entropy_with_logits(y, torch.zeros_like(y)) + F.huber_loss(y, y * 2)
        return some + F.mse_loss(self.norm(y) * (y > 0), torch.ones_like(y)) + F.l1_loss(y, y.detach() * 3)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 4, 16).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c)).pow(2).mean()


def _labels(rows: int, classes: int) -> torch.Tensor:
    return torch.randint(0, classes, (rows,))


PROGRAMS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "convolutions": lambda: (Convolutions(), (torch.randn(4, 3, 30, 30),)),
    "in place": lambda: (InPlace(), (torch.randn(64, 40),)),
    "scattered": lambda: (Scattered(), (_labels(300, 100), _labels(300, 50))),
    "outputs": lambda: (Outputs(), (torch.randn(50, 32),)),
    "losses": lambda: (Losses(), (torch.randn(64, 16), _labels(64, 50))),
    "attention": lambda: (Attention(), (torch.randn(2, 256, 64),)),
    "half precision": lambda: (nn.Linear(200, 333).bfloat16(), (torch.randn(64, 200).bfloat16(),)),
    "encoder": lambda: (nn.TransformerEncoderLayer(48, 4, 96, batch_first=True), (torch.randn(3, 20, 48),)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_aot_eager_is_exact_on_programs(name: str) -> None:
    model, inputs = PROGRAMS[name]()
    own = name not in ("half precision", "encoder")
    check(model, inputs, (lambda out: out) if own else (lambda out: out.float().square().mean()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama", "mlp", "vit", "bert", "dlrm", "t5"])
def test_aot_eager_is_exact_on_models(name: str) -> None:
    model, inputs = models.build(name, "tiny")
    replayed = check(model, inputs, models.loss)
    assert replayed.peak_bytes == max(replayed.forward_peak, replayed.backward_peak)
    assert replayed.boundary_bytes >= sum(replayed.saved_bytes.values())


@pytest.mark.parametrize("holds", [True, False])
def test_a_loss_outside_of_the_graph(holds: bool) -> None:
    model, inputs = models.build("gpt", "tiny")
    split = Split()
    compiled = torch.compile(lambda *args: model(*args), backend=aot_eager(split))

    def step() -> None:
        if holds:
            out = compiled(*inputs)
            models.loss(out).backward()
        else:
            models.loss(compiled(*inputs)).backward()

    measured = measured_step(model, step)
    replayed = split.replay("graph", LossTail(holds_outputs=holds, loss=models.loss))
    assert abs(replayed.peak_bytes - measured) <= SCALARS
    assert split.replay("graph").peak_bytes < measured  # without the loss's own bytes


def _code(source: str) -> list[str]:
    """Lines without comments: one of them counts the graphs of the process."""
    return [line for line in source.splitlines() if not line.lstrip().startswith("#")]


def _trained(reuse: bool) -> tuple[list[torch.Tensor], int, list[tuple[bool, Any]], Replayed]:
    """Gradients, measured peak and what Inductor compiled, of one small step with dropout."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 40), nn.LayerNorm(40), nn.Dropout(0.2))
    x = torch.randn(16, 3, 8, 8)
    split = Replayed()
    compiled = torch.compile(lambda x: model(x).square().mean(), backend=by_inductor(split, reuse=reuse))
    with inductor.compiled_graphs() as graphs:
        torch.manual_seed(1)
        compiled(x).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for parameter in model.parameters():
        parameter.grad = None
    return gradients, measured_step(model, lambda: compiled(x).backward()), graphs, split


@pytest.mark.slow
def test_inductor_is_exact_and_its_lowering_is_used_again() -> None:
    """The peak before anything is compiled; then the kernels are compiled from the replay's own lowering."""
    plain, measured, graphs, split = _trained(reuse=False)
    peak = split.replays[0].peak_bytes
    assert abs(peak - measured) <= SCALARS
    ((forward, _, n_outputs),) = split.made
    static = range(len(forward.graph.find_nodes(op="placeholder")))
    planned = replay_inductor(
        forward, is_backward=False, static_inputs=static, user_outputs=range(n_outputs), config_patches=UNCACHED
    )
    compiled = dict(graphs)
    assert replay_compiled(compiled[False], forward, static_inputs=static) == planned
    for is_backward, lowered in zip((False, True), split.replays[0].lowered, strict=True):
        assert _code(lowered.source) == _code(compiled[is_backward].source_code)

    memory_known.forget()
    again, measured_again, _, split = _trained(reuse=True)
    assert all("compile_to_module" in vars(split.lowered(b).graph) for b in (False, True))  # both were finished
    assert measured_again == measured and split.replays[0].peak_bytes == peak
    assert len(plain) == len(again) == 6
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))

    # A lowering of another graph is not used: that graph is compiled as ever.
    torch._dynamo.reset()
    work = Replayed(replays=split.replays).lowered(False)
    del work.graph.compile_to_module
    model, x = nn.Linear(5, 3), torch.randn(4, 5)

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        return compat.compile_fx(gm, inputs, dict(UNCACHED), lambda *_: None, lambda _: work)

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert "compile_to_module" not in vars(work.graph)
