"""What passes are told of a module's tensors: only what nothing in the graph, and no gradient, can change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from optpass.backend import held
from optpass.backend.reporting import build_report
from optpass.options import Options
from optpass.passes import registry
from optpass.passes.contract import ContentGuard, Pass, PassContext, PassResult, Stage


class Reads(Pass):
    """Notes what each input of the graph is known to hold, and guards what it is told to."""

    name, summary, stage = "reads", "made for a test", Stage.DYNAMO
    held: dict[str, torch.Tensor | None]
    guarded: tuple[str, str] | None

    @classmethod
    def from_options(cls, options: Options) -> Pass:
        return cls()

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        type(self).held = {n.name: ctx.contents(n) for n in gm.graph.nodes}
        text, reason = self.guarded or ("nothing", "")
        return PassResult(guards=[ContentGuard(n, reason) for n in gm.graph.nodes if text in n.name][:1])


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> type[Reads]:
    class Own(Reads):
        guarded = None

    Own.held = {}
    monkeypatch.setattr(registry, "PASSES", (Own,))
    return Own


def run(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    return torch.compile(function, backend="optpass", options={"inner": "eager", "strict": True, **options})(*inputs)


class Everything(nn.Module):
    """Each kind of tensor that a graph can take."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.ones(4))
        self.register_buffer("unsaved", torch.ones(4), persistent=False)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.trained = nn.Parameter(torch.ones(4))
        self.plain = torch.ones(4)
        self.listed = [torch.ones(4)]
        self.child = nn.ModuleList([nn.Module()])
        self.child[0].register_buffer("deep", torch.ones(4))
        with torch.inference_mode():
            self.inferred = torch.ones(4)

    def forward(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        if kind == "deep":
            return x * self.child[0].deep
        return x * (self.listed[0] if kind == "listed" else getattr(self, kind))


@pytest.mark.parametrize("kind", ["buffer", "unsaved", "frozen", "plain", "listed", "deep"])
def test_known(kind: str, reads: type[Reads]) -> None:
    x = torch.randn(4)
    torch.testing.assert_close(run(Everything(), x, kind), x)
    (held,) = (t for t in reads.held.values() if t is not None)
    assert torch.equal(held, torch.ones(4))


@pytest.mark.parametrize("kind", ["trained", "inferred"])
def test_unknown(kind: str, reads: type[Reads]) -> None:
    with torch.no_grad():
        run(Everything(), torch.randn(4), kind)
    assert len(reads.held) >= 3 and set(reads.held.values()) == {None}


class Writes(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mask", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "before":
            self.mask.add_(1)
        if self.how == "by a view":
            self.mask[1:][0] = 3.0
        y = x * self.mask
        if self.how == "after":
            self.mask.unsqueeze(0).copy_(y)
        if self.how == "out":
            torch.add(x, x, out=self.mask)
        if self.how == "not at all":
            y.add_(1)
        return y


@pytest.mark.parametrize("how", ["before", "by a view", "after", "out", "not at all"])
def test_what_the_graph_writes_is_unknown(how: str, reads: type[Reads]) -> None:
    model, same, x = Writes(how), Writes(how), torch.randn(8)
    torch.testing.assert_close(run(model, x), same(x))
    assert [name for name, held in reads.held.items() if held is not None] == (
        [name for name in reads.held if "mask" in name] if how == "not at all" else []
    )


@pytest.mark.parametrize("itself", [False, True])
def test_what_is_written_under_vmap_is_unknown(itself: bool, reads: type[Reads]) -> None:
    """There a tensor stands for a batch, and has no memory of its own."""

    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen = torch.vmap(lambda row: row.add_(1) if itself else row.ge(0).logical_and_(row < 1))
            return x * seen(self.mask) + self.mask

    model, same, x = Mapped(), Mapped(), torch.randn(8)
    torch.testing.assert_close(run(model, x), same(x))
    assert [name for name, held in reads.held.items() if held is not None] == (
        [] if itself else [name for name in reads.held if "mask" in name]
    )


def test_memory_written_under_another_name_is_unknown(reads: type[Reads]) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            memory = torch.ones(8)
            self.register_buffer("mask", memory[:4])
            self.register_buffer("count", memory[4:])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x * self.mask

    run(Shared(), torch.randn(4))
    assert len(reads.held) >= 3 and set(reads.held.values()) == {None}


def test_inputs_of_any_kind_are_unknown(reads: type[Reads]) -> None:
    outside = torch.ones(4)

    def function(x: torch.Tensor, given: dict[str, list[torch.Tensor]], frozen: nn.Parameter) -> torch.Tensor:
        return x * given["a"][0] * outside * frozen

    run(function, torch.randn(4), {"a": [torch.ones(4)]}, nn.Parameter(torch.ones(4), requires_grad=False))
    assert len(reads.held) >= 5 and set(reads.held.values()) == {None}


def test_large_tensors_are_unknown(reads: type[Reads], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_BYTES", "COPY_BYTES", "COPIED_BYTES"):
        monkeypatch.setattr(held, name, 15)
    run(Everything(), torch.randn(4), "buffer")
    assert set(reads.held.values()) == {None}


def test_equal_contents_are_kept_once(reads: type[Reads]) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for i in range(4):
                self.register_buffer(f"mask{i}", torch.ones(4) if i else torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.mask0 * self.mask1 * self.mask2 * self.mask3

    run(Layers(), torch.randn(4))
    held = [t for t in reads.held.values() if t is not None]
    assert len(held) == 4 and len({t.data_ptr() for t in held}) == 2


def test_contents_are_a_copy(reads: type[Reads]) -> None:
    model = Everything()
    run(model, torch.randn(4), "buffer")
    (held,) = (t for t in reads.held.values() if t is not None)
    held.fill_(7)
    assert torch.equal(model.buffer, torch.ones(4))


def test_later_stages_know_nothing(reads: type[Reads]) -> None:
    reads.stage = Stage.JOINT
    model = Everything()
    run(model, torch.randn(4), "buffer", inner="aot_eager")
    assert reads.held and set(reads.held.values()) == {None}


@pytest.mark.parametrize(
    ("name", "reason", "message"),
    [
        ("l_x_", "because", "guards 'l_x_', whose contents are not known"),
        ("buffer", " ", "has no reason"),
        ("buffer", "because", None),
    ],
)
def test_guards_that_rest_on_nothing_are_refused(
    name: str, reason: str, message: str | None, reads: type[Reads]
) -> None:
    reads.guarded = name, reason
    x = torch.randn(4)
    torch.testing.assert_close(run(Everything(), x, "buffer", strict=False), x)
    (record,) = build_report().graphs[0].passes
    assert record.error is None if message is None else message in (record.error or "")


@pytest.mark.parametrize("copied", (True, False))
def test_the_same_contents(copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not copied:
        monkeypatch.setattr(held, "COPY_BYTES", -1)
        monkeypatch.setattr(held, "PART_BYTES", 16)
        monkeypatch.setattr(held, "SAVING", 0.01)

    def keep(tensor: torch.Tensor) -> held.Held:
        kept = held.Held.of(tensor)
        assert kept is not None and (kept.copy is not None) is copied
        return kept

    strange = torch.tensor([float("nan"), 0.0, -0.0, 1.0, 2.0])
    kept = keep(strange)
    assert kept.same(strange.clone()) and not kept.same(strange.double()) and not kept.same(strange[:4])
    assert not keep(-torch.zeros(3)).same(torch.zeros(3)), "1 / x differs"
    for dtype in (torch.bool, torch.int8, torch.bfloat16, torch.float64, torch.complex64):
        for start in range(4):
            whole = torch.randint(0, 2, (7, 12)).to(dtype)
            part = whole[1:, start:].t()
            kept = keep(part)
            assert kept.same(part) and kept.same(part.clone())
            part[-1, -1] = not bool(part[-1, -1].real if dtype.is_complex else part[-1, -1])
            assert not kept.same(part)
    assert keep(torch.ones(())).same(torch.ones(())) and keep(torch.ones(0, 3)).same(torch.ones(0, 3))


def test_large_masks_are_kept_as_runs() -> None:
    mask = torch.ones(1, 1, 1024, 1024).tril()
    kept = held.Held.of(mask)
    assert kept is not None and kept.copy is None and kept.same(mask.clone())
    other = mask.clone()
    other[0, 0, 512, 513] = 1.0
    assert not kept.same(other) and not kept.same(mask.view(1, 1024, 1024)) and not kept.same(mask.to(torch.int32))
    noise = held.Held.of(torch.randn(1024, 512))
    assert noise is not None and noise.copy is not None


@pytest.mark.parametrize("large", (False, True))
def test_large_masks_are_given_while_passes_run(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal mask that is kept as runs is proved and watched like any other."""
    if large:
        monkeypatch.setattr(held, "COPY_BYTES", -1)

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bias", torch.ones(64, 64).tril())

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            scores = (q @ k.mT / 8**0.5).masked_fill(self.bias == 0, float("-inf"))
            return scores.softmax(-1) @ v

    model, operands = Causal(), [torch.randn(1, 2, 64, 8) for _ in range(3)]
    torch._dynamo.reset()
    call = torch.compile(model, backend="optpass", options={"inner": "aot_eager", "attention": "always"})
    torch.testing.assert_close(call(*operands), model(*operands))
    (site,) = build_report().sites("attention")
    assert "is_causal" in site.after
    model.bias[3, 5] = 1.0
    torch.testing.assert_close(call(*operands), model(*operands))
