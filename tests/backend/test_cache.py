"""Cache identity: equal compiles hit across processes, everything that can change the output misses."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import optpass.backend
import optpass.passes
from optpass.backend import identity
from optpass.backend.hooks import Hooks
from optpass.options import Options
from optpass.passes.redundant import Redundant, RedundantConfig

SCRIPT = """
    import dataclasses, json, sys
    import torch
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from optpass.backend import device, identity
    from optpass.backend.reporting import build_report, reset_report
    from optpass.passes import registry
    from optpass.passes.contract import Pass, PassResult, Stage
    from optpass.reporting.model import Site

    FACTOR = int(sys.argv[2])
    torch._inductor.config.fallback_by_default = True  # no kernels: caches hold graphs that are quickly made

    @dataclasses.dataclass(frozen=True)
    class Config:
        factor: int

    class Scales(Pass):
        name, summary, stage = "scales", "multiplies every sine", Stage.JOINT
        config = property(lambda self: Config(FACTOR))

        @classmethod
        def from_options(cls, options):
            return cls()

        def run(self, gm, ctx):
            for node in [n for n in gm.graph.nodes if n.target is torch.ops.aten.sin.default]:
                with gm.graph.inserting_after(node):
                    new = gm.graph.call_function(torch.ops.aten.mul.Tensor, (node, FACTOR))
                node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
            site = Site(kind="scales", reason="for a test")
            return PassResult(applied=[site], changed=True)

    def plain(x):
        return torch.relu(x.t().t() * 2 + 1)

    def scaled(x):
        return torch.sin(x)

    def outcome(function, options=None, train=True):
        torch._dynamo.reset()
        reset_report()
        x = torch.linspace(0, 1, 12).view(3, 4).requires_grad_(train)
        out = torch.compile(function, backend="optpass", options=options)(x)
        if train:
            out.sum().backward()
        report = build_report()
        graph = report.graphs[0]
        assert graph.totals.flops > 0 and report.ops, "no roofline"
        assert graph.training is train, "the cached graph is taken for the other kind"
        return graph.cache, out

    def seen(x):
        ran.append(x)

    class Known(CustomGraphPass):
        def __call__(self, graph):
            ran.append(graph)

        def uuid(self):
            return "known"

    ran, result = [], {}
    passes = registry.PASSES
    if sys.argv[1] == "all":
        result["plain"] = outcome(plain)[0]
        result["inference"] = outcome(plain, train=False)[0]
        result["report"] = outcome(plain, {"report": "r.json"})[0]
    registry.PASSES = (*passes, Scales)
    kind, out = outcome(scaled)
    x = torch.linspace(0, 1, 12).view(3, 4)
    assert torch.allclose(out, torch.sin(x) * FACTOR), "stale result"
    result["scaled"] = kind
    registry.PASSES = passes
    if sys.argv[1] == "all" and sys.argv[3] == "second":
        result["strict"] = outcome(plain, {"strict": True})[0]
        result["disable_passes"] = outcome(plain, {"disable_passes": ["redundant"]})[0]
        result["device"] = outcome(plain, {"device": "h100"})[0]
        result["inductor"] = outcome(plain, {"inductor": {"max_fusion_size": 63}})[0]
        result["again"] = outcome(plain, {"inductor": {"max_fusion_size": 63}})[0]
        digest = identity.source_digest
        identity.source_digest = lambda: "edited"
        result["source"] = outcome(plain)[0]
        identity.source_digest = digest
        spec = device.named("cpu")
        device.named = lambda name: dataclasses.replace(spec, bandwidth=spec.bandwidth * 2)
        result["spec"] = outcome(plain)[0]
        device.named = lambda name: spec
        result["still"] = outcome(plain)[0]
        assert not ran
        torch._inductor.config.joint_custom_post_pass = seen
        result["user"] = outcome(plain)[0]
        result["user again"] = outcome(plain)[0]
        assert len(ran) >= 2, "the user's pass did not run"
        torch._inductor.config.joint_custom_post_pass = None
        ran.clear()
        result["known user"] = outcome(plain, {"inductor": {"joint_custom_post_pass": Known()}})[0]
        assert ran, "the user's pass did not run"
        ran.clear()
        result["known user again"] = outcome(plain, {"inductor": {"joint_custom_post_pass": Known()}})[0]
        assert not ran
    print(json.dumps(result))
"""


@pytest.mark.slow
def test_two_processes(python: Callable[..., Any]) -> None:
    first = python(SCRIPT, "all", "2", "first")
    assert first.json == {"plain": "miss", "inference": "miss", "report": "hit", "scaled": "miss"}
    second = python(SCRIPT, "all", "3", "second")
    assert second.json == {
        "plain": "hit", "inference": "hit", "report": "hit", "scaled": "miss",
        "strict": "miss", "disable_passes": "miss", "device": "miss", "inductor": "miss", "again": "hit",
        "source": "miss", "spec": "miss", "still": "hit",
        "user": "bypass", "user again": "bypass", "known user": "miss", "known user again": "hit",
    }  # fmt: skip
    for done in (first, second):
        noise = [line for line in done.stderr.splitlines() if "pickl" in line.lower() or "bypass" in line.lower()]
        assert noise == []


def copied(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """The digest of a copy of the packages in `root`, computed anew at every call."""
    for package, name in ((optpass.passes, "passes"), (optpass.backend, "backend")):
        shutil.copytree(package.__path__[0], root / name, ignore=shutil.ignore_patterns("__pycache__"))
        monkeypatch.setattr(package, "__path__", [str(root / name)])
    return identity.source_digest.__wrapped__


def test_the_digest_follows_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = copied(tmp_path, monkeypatch)
    before = digest()
    assert before == digest() == identity.source_digest()
    seen = {before}
    for path in ("passes/redundant.py", "passes/roofline/analysis.py", "backend/hooks.py", "passes/devices/cpu.toml"):
        file = tmp_path / path
        file.write_text(file.read_text() + "\n# edited\n")
        assert digest() not in seen
        seen.add(digest())
    (tmp_path / "passes" / "redundant.py").rename(tmp_path / "passes" / "renamed.py")
    assert digest() not in seen
    (tmp_path / "passes" / "note.txt").write_text("says nothing")
    assert digest() not in seen


def digest_of(options: Options | None = None, config: RedundantConfig | None = None, device: str = "d") -> str:
    return identity.identity(options or Options(), [Redundant(config)], device)


def test_what_the_identity_covers() -> None:
    base = digest_of()
    assert base == digest_of(Options(report="elsewhere.json"))
    other = [
        digest_of(Options(strict=True)), digest_of(Options(inner="eager")), digest_of(Options(device="h100")),
        digest_of(Options(disable_passes=("roofline",))), digest_of(Options(inductor={"max_autotune": True})),
        digest_of(config=RedundantConfig(cast=False)), digest_of(device="e"),
        identity.identity(Options(), [], "d"),
    ]  # fmt: skip
    assert len({base, *other}) == len(other) + 1


@pytest.mark.slow
def test_sets_have_one_text_in_every_process(python: Callable[..., Any]) -> None:
    text = """
        import dataclasses, json
        from optpass.backend.identity import _plain

        @dataclasses.dataclass(frozen=True)
        class Config:
            names: frozenset[str]

        print(json.dumps(_plain({"a": Config(frozenset("some words in no order".split()))})))
    """
    texts = {str(python(text, PYTHONHASHSEED=str(seed)).json) for seed in (1, 2, 3)}
    assert len(texts) == 1


def hooks(uuid: str = "ours", past_uuid: str | None = None) -> Hooks:
    return Hooks(uuid, lambda gm: None, lambda f, b: None, lambda g: None, lambda b, s: None, past_uuid)


def test_a_hook_is_its_identity() -> None:
    import copy
    import pickle

    for hook in (hooks().joint_pass(None), hooks().partitioner(None)):
        assert hook.uuid() == ("ours",)
        assert copy.deepcopy(hook) is hook and copy.copy(hook) is hook
        assert pickle.dumps(hook) == pickle.dumps(
            type(hook)(hooks(), *([()] if "Joint" in type(hook).__name__ else [None]))
        )
    assert pickle.dumps(hooks("a").joint_pass(None)) != pickle.dumps(hooks("b").joint_pass(None))


def test_the_users_hooks_count() -> None:
    @dataclasses.dataclass
    class Theirs:
        name: str | None

        def uuid(self) -> str | None:
            return self.name

        def __call__(self, graph: Any) -> None:
            raise AssertionError

    joint = hooks().joint_pass
    assert joint(Theirs("a")).uuid() == ("ours", "a")
    assert joint([Theirs("a"), Theirs("b")]).uuid() == ("ours", "a", "b")
    assert joint(lambda graph: None).uuid() is None
    assert joint([Theirs("a"), Theirs(None)]).uuid() is None
    assert hooks().partitioner(Theirs("p")).uuid() == ("ours", "p")
    assert joint(None, Theirs("p")).uuid() == ("ours", "p")
    assert joint(None, Theirs(None)).uuid() is None, "Inductor itself would hit on an unknown partitioner"


def test_what_a_graph_was_planned_beside_does_not_count_once_it_is_partitioned() -> None:
    class Theirs:
        def uuid(self) -> str:
            return "theirs"

    ours = [hooks(f"beside {other}", "options").joint_pass(Theirs()) for other in "ab"]
    assert ours[0].uuid() != ours[1].uuid()
    first, second = (hook.past(((0, 2), (), None)) for hook in ours)
    assert first.uuid() == second.uuid() == ("options", (0, 2), (), None, "theirs")
    assert first.uuid() != ours[1].past(((0,), (), None)).uuid(), "another input may be overwritten"
    assert ours[0].uuid() == ("beside a", "theirs"), "the hook itself stays as it is"
    assert hooks("u").partitioner(None).past(()).uuid() == ("u",)
    assert hooks("u").joint_pass(lambda graph: None).past(()).uuid() is None


def test_the_users_pass_runs_first() -> None:
    order: list[str] = []
    ours = Hooks("u", lambda gm: order.append("ours"), lambda f, b: None, lambda g: None, lambda b, s: None)
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    ours.joint_pass([lambda g: order.append("first"), lambda g: order.append("second")])(gm.graph)
    assert order == ["first", "second", "ours"]
