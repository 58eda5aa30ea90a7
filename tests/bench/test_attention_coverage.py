"""The coverage of attention in transformers: what counts as a site, small models of any type, and the verdict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from optpass.bench import attention_coverage, attention_measure
from optpass.bench.attention_judge import Case, compared
from optpass.bench.attention_sites import Sites, chains, counted
from optpass.bench.progress import NoProgress
from optpass.bench.registry import BenchConfig
from optpass.bench.result import BenchError, Result
from optpass.bench.tiny_configs import Level, changes
from optpass.bench.tiny_models import LEVELS, Tiny
from optpass.bench.worker import Worker
from optpass.errors import ConfigError

D = 8


class Projected(nn.Module):
    """Three projections in front of, and one behind, whatever `core` does with q, k and v of shape [2, 5, 8]."""

    def __init__(self, core: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.core = core
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.core(self.q(x), self.k(x), self.v(x)))
        return result


def sites_of(model: nn.Module, x: torch.Tensor | None = None) -> Sites:
    with torch.no_grad(), counted([*model.parameters(), *model.buffers()]) as sites:
        model(torch.randn(2, 5, D) if x is None else x)
    return sites


def sink(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.cat([q @ k.mT * 0.3, torch.zeros(2, 5, 1)], -1)
    return (scores - scores.amax(-1, True)).softmax(-1)[..., :-1] @ v


def in_place(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT
    scores /= 3.0
    scores[:, 0].masked_fill_(torch.ones(5).bool(), -1e9)
    return F.dropout(scores.softmax(-1), 0.5) @ v


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    e = (q @ k.mT).exp()
    return (e / e.sum(-1, True)) @ v


SITES: dict[str, tuple[int, Callable[..., torch.Tensor]]] = {
    "plain": (1, lambda q, k, v: (q @ k.mT).softmax(-1) @ v),
    "einsum": (1, lambda q, k, v: torch.einsum("bqk,bkd->bqd", torch.einsum("bqd,bkd->bqk", q, k).softmax(-1), v)),
    "values on the left": (1, lambda q, k, v: (v.mT @ (q @ k.mT).softmax(-1).mT).mT),
    "sink": (1, sink),
    "in place": (1, in_place),
    "softmax written out": (1, by_hand),
    "added products": (1, lambda q, k, v: (q @ k.mT + (q @ v.mT)).softmax(-1) @ v),
    "probabilities used twice": (1, lambda q, k, v: (p := (q @ k.mT).softmax(-1)) @ v + p @ k),
    "two in a row": (2, lambda q, k, v: (q @ k.mT).softmax(-1) @ ((k @ q.mT).softmax(-1) @ v)),
    "scores alone": (0, lambda q, k, v: (q @ k.mT).softmax(-1).sum(-1, True) * v),
    "a single key": (0, lambda q, k, v: (q @ k[:, :1].mT).softmax(-1) @ v[:, :1]),
    "no softmax": (0, lambda q, k, v: (q @ k.mT).sigmoid() @ v),
    "softmax of no product": (0, lambda q, k, v: q.softmax(-1).mT @ v @ k.mT @ q),
    "linear attention": (0, lambda q, k, v: q.softmax(-1) @ (k.softmax(1).mT @ v)),
}


@pytest.mark.parametrize("name", SITES)
def test_what_is_a_site(name: str) -> None:
    count, core = SITES[name]
    sites = sites_of(Projected(core))
    assert (sites.count, sites.fused) == (count, 0)
    assert all(one.file == __file__ and one.dim == -1 for one in sites.written)


def test_a_router_is_no_attention() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.expert = nn.Linear(D, 4), nn.Linear(D, 4 * D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = Projected(SITES["plain"][1])(x)
            return self.gate(x).softmax(-1).unsqueeze(-2) @ self.expert(x).view(2, 5, 4, D)

    router = Router()
    assert [one.before[0] for one in sites_of(router).written] == ["bmm"]  # only the attention in front of it


def test_calls_that_are_fused_count_apart() -> None:
    assert (one := sites_of(Projected(F.scaled_dot_product_attention))).fused == 1 and one.count == 0
    attention = nn.MultiheadAttention(D, 2, batch_first=True)
    for weights, expected in ((False, (0, 1)), (True, (1, 0))):
        sites = sites_of(Projected(lambda q, k, v, w=weights: attention.train()(q, k, v, need_weights=w)[0]))
        assert (sites.count, sites.fused) == expected


def test_the_chain_of_a_site_names_its_ops() -> None:
    model = Projected(
        lambda q, k, v: F.dropout(torch.tanh(q @ k.mT / 3) + 1, 0.0, False).softmax(-1)[..., 1:] @ v[:, 1:]
    )
    assert list(chains(sites_of(model).written)) == ["bmm div tanh add -> softmax(-1) -> slice bmm"]


# ---- small configurations -------------------------------------------------------------------------------------------

DEFAULT: dict[str, Any] = {
    "model_type": "some", "hidden_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 8, "vocab_size": 32000, "eos_token_id": 31999, "pad_token_id": 1, "attention_dropout": 0.0,
    "layerdrop": 0.1, "layer_types": ["full", "full", "full", "window", "full", "full"], "sliding_window": 4096,
    "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}, "intermediate_size": 11008,
    "vision_config": {"model_type": "seen", "hidden_size": 768, "num_heads": 16, "image_size": 224, "depths": [2, 18],
                      "layerdrop": 0.0, "scale": 3.5},
}  # fmt: skip


def test_a_configuration_becomes_small_and_keeps_each_kind_of_layer() -> None:
    small = changes(DEFAULT, Level(), 0.1)
    assert small["hidden_size"] == 64 and small["num_attention_heads"] == 4 and small["head_dim"] == 16
    assert small["num_key_value_heads"] == 2 and small["vocab_size"] == 256 and "pad_token_id" not in small
    assert 200 <= small["eos_token_id"] < 256
    assert small["num_hidden_layers"] == 2 and small["layer_types"] == ["full", "window"]
    assert sum(small["rope_parameters"]["mrope_section"]) == 8
    assert small["attention_dropout"] == 0.1 and small["layerdrop"] == 0.0
    assert small["vision_config"] == {
        "model_type": "seen", "hidden_size": 64, "num_heads": 4, "image_size": 128, "depths": [2, 2], "layerdrop": 0.0,
        "scale": 3.5,
    }  # fmt: skip
    assert "attention_dropout" not in changes(DEFAULT, Level(), None)


def test_levels_that_change_less() -> None:
    wide = changes(DEFAULT, Level(width=None, heads=None, layers=4), None)
    assert not {"hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"} & wide.keys()
    assert len(wide["layer_types"]) == wide["num_hidden_layers"] == 4
    assert changes({"head_dim": None, "n_group": None}, Level(fill=True), None) == {"head_dim": 16, "n_group": 1}


def test_models_run_with_padding() -> None:
    pytest.importorskip("transformers")
    from optpass.bench.tiny_models import build

    tiny = build("bert", dropout=0.1)
    assert tiny.padded is not None and tiny.padded["attention_mask"].sum(-1).tolist() == [11, 16]
    assert {m.p for m in tiny.model.modules() if isinstance(m, nn.Dropout)} == {0.1}
    assert build("vit").padded is None
    with pytest.raises(BenchError, match="timm_wrapper: no tiny model of it runs: ImportError"):
        build("timm_wrapper")


# ---- one model measured ---------------------------------------------------------------------------------------------


def test_a_model_is_measured_in_every_case() -> None:
    pytest.importorskip("transformers")
    from optpass.bench.attention_measure import measure

    found = measure("bert", cases=["inference", "training, padding"])
    assert set(found["cases"]) == {"inference", "training, padding"}
    for one in found["cases"].values():
        assert one["sites"] == 2 and one["graphs"] == 1 and not one["wrong"] and one["error"] < 1e-4
        assert one["fused"] == 2, one["declined"]


def test_a_graph_that_runs_twice_declines_twice() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Projected(self.attend)

        @staticmethod
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            weights = (q @ k.mT).softmax(-1)
            torch._dynamo.graph_break()
            return weights @ v

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(self.layer(x))
            return result

    with torch.no_grad():
        case, _ = attention_measure.coverage(Shared(), {"x": torch.randn(2, 5, D)})
    assert (case.sites, case.fused, len(case.declined)) == (2, 0, 2), case.declined


def test_wrong_results_are_told() -> None:
    x = torch.randn(64, dtype=torch.float64)
    exact, eager = {"output 0": x, "grad of w": x * 0}, {"output 0": x.float(), "grad of w": x.float() * 0}
    assert compared(Case(), exact, eager, eager).wrong == ""
    off = eager | {"output 0": eager["output 0"] * 1.001}
    assert "output 0: error" in compared(Case(), exact, eager, off).wrong
    lost = eager | {"output 0": torch.where(x > 0, x, torch.nan).float()}
    assert "error inf" in compared(Case(), exact, eager, lost).wrong
    assert "1 results instead of 2" in compared(Case(), exact, eager, {"output 0": x}).wrong
    same_loss = {"output 0": torch.where(x > 0, x, torch.nan)}
    assert compared(Case(), same_loss, {"output 0": lost["output 0"]}, {"output 0": lost["output 0"]}).wrong == ""


def test_a_model_that_only_ours_cannot_run_is_wrong_and_one_that_nobody_can_is_left_out() -> None:
    from optpass.bench.attention_measure import _guarded

    def raises() -> Case:
        raise ZeroDivisionError("of ours")

    model = Projected(SITES["plain"][1])
    case = _guarded(raises, model, {"x": torch.randn(2, 5, D)})
    assert (case.sites, case.fused, case.wrong) == (1, 0, "raises ZeroDivisionError: of ours")
    with pytest.raises(BenchError, match=r"torch.compile cannot take it: ZeroDivisionError"):
        _guarded(raises, model, {"x": torch.randn(2, 5, D + 1)})


def test_a_model_that_asks_for_more_in_training_is_left_out_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether nobody can run it is asked in the mode of the case."""
    from optpass.bench import attention_measure
    from optpass.bench.tiny_configs import Level
    from optpass.bench.tiny_models import Tiny

    class Labelled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                raise ValueError("labels are missing")
            return x * 2

    tiny = Tiny(Labelled(), {"x": torch.randn(2, 3, requires_grad=True)}, None, Level())
    monkeypatch.setattr(attention_measure, "build", lambda *_, **__: tiny)
    found = attention_measure.measure("labelled")
    assert found["cases"].keys() == {"inference"} and "labels are missing" in found["skipped"]["training"]


# ---- the sweep ------------------------------------------------------------------------------------------------------


class Sweep:
    """Stands for the worker: model types of two sites in each of two cases, of which `fused` are fused."""

    fused, wrong = 2, ""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Sweep:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def call(self, model_type: str, seed: int) -> Any:
        if model_type == "clip":
            raise BenchError("no tiny model of it runs")
        declined = ["a reason at x.py:1"] * (2 - self.fused)
        one = {"sites": 2, "fused": self.fused, "graphs": 1, "declined": declined, "error": 1e-7, "eager_error": 1e-7}
        cases = {case: one | {"wrong": self.wrong} for case in ("inference", "training")}
        return {"cases": cases, "skipped": {"training, padding": "no padding is taken"}}


def swept(monkeypatch: pytest.MonkeyPatch, *, fused: int = 2, wrong: str = "", full: bool = True) -> Result:
    pytest.importorskip("transformers")
    monkeypatch.setattr(Sweep, "fused", fused)
    monkeypatch.setattr(Sweep, "wrong", wrong)
    monkeypatch.setattr(attention_coverage, "Worker", Sweep)
    if full:
        monkeypatch.setattr("optpass.bench.tiny_models.model_types", lambda: ["bert", "clip", "gpt2"])
    return attention_coverage.run(BenchConfig(models=() if full else ("bert", "gpt2")), NoProgress())


@pytest.mark.parametrize(("fused", "wrong", "passed"), [(2, "", True), (1, "", False), (2, "output 0: error 1", False)])
def test_the_share_of_all_sites_decides(monkeypatch: pytest.MonkeyPatch, fused: int, wrong: str, passed: bool) -> None:
    result = swept(monkeypatch, fused=fused, wrong=wrong)
    assert result.passed is passed
    shown = [(row.group, row.case) for row in result.rows[: -len(("inference", "training", "all"))]]
    every = [("bert", "inference"), ("bert", "training"), ("gpt2", "inference"), ("gpt2", "training")]
    assert shown == (every if fused == 1 or wrong else [("bert", "all cases"), ("gpt2", "all cases")])
    total = result.rows[-1]
    assert (total.group, total.extra["sites"], total.extra["fused"]) == ("all", 8.0, 4.0 * fused)
    assert any(note.startswith("not measured: clip") for note in result.notes)
    assert "not measured: bert (training, padding): no padding is taken" in result.notes
    assert any(note == "declined 4x: a reason" for note in result.notes) is (fused == 1)


@pytest.mark.slow
def test_a_part_of_the_models_decides_only_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert swept(monkeypatch, full=False).passed is None
    assert swept(monkeypatch, full=False, wrong="output 0: error 1").passed is False


def test_a_run_that_is_cut_short_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(attention_coverage, "Worker", Sweep)
    monkeypatch.setattr("optpass.bench.tiny_models.model_types", lambda: ["bert", "gpt2"])
    result = attention_coverage.run(BenchConfig(budget_s=-1.0), NoProgress())
    assert result.passed is None and "not measured: bert: the time was over" in result.notes


def test_an_unknown_model_type_is_refused() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="no model type 'brt'; did you mean 'bert'"):
        attention_coverage.run(BenchConfig(models=("brt",)), NoProgress())


# ---- the worker -----------------------------------------------------------------------------------------------------


WORK = """
import os, time

def work(kind):
    if kind == "raise":
        raise ValueError("no\\nsuch thing")
    if kind == "die":
        os._exit(3)
    if kind == "hang":
        time.sleep(60)
    print("a library speaks")
    return os.getpid()
"""


def test_a_worker_answers_and_is_replaced() -> None:
    with Worker("os:getpid", calls=2) as worker:
        pids = [worker.call() for _ in range(3)]
    assert pids[0] == pids[1] != pids[2]


def test_a_worker_that_fails_costs_one_call(tmp_path: Path) -> None:
    (tmp_path / "worked.py").write_text(WORK)
    with Worker("worked:work", environ={"PYTHONPATH": str(tmp_path)}, timeout_s=30) as worker:
        first = worker.call(kind="")
        with pytest.raises(BenchError, match=r"^ValueError: no such thing$"):
            worker.call(kind="raise")
        assert worker.call(kind="") == first
        with pytest.raises(BenchError):
            worker.call(kind="die")
        second = worker.call(kind="")
        assert second != first
        worker.timeout_s = 0.5
        with pytest.raises(BenchError, match=r"longer than 0\.5 s"):
            worker.call(kind="hang")


class Recurrent(nn.Module):
    """Keeps what it made in the last call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        made = self.linear(x)
        self.last = made if self.last is None else made + 0.5 * self.last.detach()
        return (self.last * made,)


def test_a_state_that_a_model_keeps_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Tiny(Recurrent(), {"x": torch.randn(2, D)}, None, LEVELS[0])

    def without_dropout(*args: Any, **kwargs: Any) -> Any:
        raise BenchError("no dropout")

    monkeypatch.setattr(attention_measure, "build", without_dropout)
    case = attention_measure.training("recurrent", tiny, padded=False, seed=0)
    assert not case.wrong
    assert case.error is not None
