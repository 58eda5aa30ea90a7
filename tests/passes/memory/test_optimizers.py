"""The optimizer ledger against torch itself: state by counting its tensors, temporaries by the profiler."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from optpass.backend.memory.measure import measure_peak
from optpass.backend.memory.probe import library_workspace
from optpass.errors import ConfigError
from optpass.options import Options
from optpass.passes.memory.optimizers import optimizers, rehearsal
from optpass.passes.memory.optimizers.rehearsal import ParameterSize, rehearse, sizes_of
from optpass.passes.memory.optimizers.search import cost_of, find_optimizer, trained_among

#: Classes that cannot be rehearsed: a closure, sparse gradients.
BY_FORMULA = {"LBFGS", "SparseAdam"}
CLASSES = [
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]
#: Settings beyond the defaults that change what is kept or made.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    "Adam": [{"amsgrad": True}, {"weight_decay": 0.1}],
    "AdamW": [{"amsgrad": True}, {"maximize": True}],
    "RMSprop": [{"momentum": 0.9, "centered": True}, {"weight_decay": 0.1}],
}
SHAPES = [(300, 400), (70, 90), (500,)]


def cases() -> list[Any]:
    found = []
    for name in CLASSES:
        known = inspect.signature(getattr(torch.optim, name)).parameters
        modes: list[dict[str, Any]] = [{}]
        modes = [{"foreach": False}, {"foreach": True}] if "foreach" in known else modes
        modes += [{"fused": True}] if "fused" in known else []
        for settings in [{}, *SETTINGS.get(name, [])]:
            found += [pytest.param(name, {**settings, **mode}, id=f"{name}-{settings}-{mode}") for mode in modes]
    return [case for case in found if case.values[0] not in BY_FORMULA]


def real(name: str, settings: dict[str, Any], shapes: list[tuple[int, ...]]) -> tuple[int, int]:
    """Bytes of the state that a real optimizer keeps, and the peak of its second step."""
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = getattr(torch.optim, name)(parameters, lr=1e-3, **settings)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    peak = measure_peak(optimizer.step, collect=False).bytes_above_start
    state = [v for p in parameters for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    return sum(v.numel() * v.element_size() for v in state), peak


@pytest.mark.parametrize(("name", "settings"), cases())
def test_every_optimizer_of_torch_is_rehearsed_exactly(name: str, settings: dict[str, Any]) -> None:
    shapes = SHAPES[:2] if name == "Muon" else SHAPES  # Muon takes matrices only
    sizes = [ParameterSize(shape, torch.float32) for shape in shapes]
    groups = [{**settings, "lr": 1e-3, "params": sizes}]
    state, step = rehearse(getattr(torch.optim, name), groups, gpu=False, library=library_workspace)
    kept, peak = real(name, settings, shapes)
    assert state == kept  # step counts included, which are on the same device
    assert abs(step - peak) <= 256


def test_equal_rehearsals_are_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each graph of a step asks for the optimizer of all: seconds, for many parameters."""
    monkeypatch.setattr(rehearsal, "_KNOWN", {})
    held = Mock(wraps=rehearsal._rehearsed)
    monkeypatch.setattr(rehearsal, "_rehearsed", held)
    groups = [{"lr": 1e-3, "params": [ParameterSize((64, 64), torch.float32)]}]
    found = rehearse(torch.optim.AdamW, groups, gpu=False)
    assert rehearse(torch.optim.AdamW, [dict(groups[0])], gpu=False) == found and held.call_count == 1
    fused = [{**groups[0], "fused": True}]
    assert rehearse(torch.optim.AdamW, fused, gpu=False) == (found[0], 0)
    amsgrad = rehearse(torch.optim.AdamW, [{**groups[0], "amsgrad": True}], gpu=False)
    assert amsgrad[0] > found[0] and held.call_count == 3
    assert rehearse(torch.optim.SGD, groups, gpu=False)[0] == 0
    assert held.call_count == 4


def test_what_the_library_takes_for_products_in_half_precision_counts() -> None:
    """Muon's: a step took 1.5 times what was said, and went over a budget that it decides."""
    sizes = [ParameterSize((64, 64), torch.float32)]
    step = optimizers.cost("muon", sizes, library=library_workspace, gpu=False).step_bytes
    assert abs(step - real("Muon", {}, [(64, 64)])[1]) <= 256
    assert optimizers.cost("muon", sizes, library=library_workspace, gpu=True).step_bytes <= step


def test_every_class_of_torch_is_in_the_table() -> None:
    kinds = {entry.kind for entry in optimizers.entries().values()}
    assert set(CLASSES) <= kinds | BY_FORMULA
    assert all(entry.source for entry in optimizers.entries().values())


def test_states_follow_the_dtype_of_the_parameter() -> None:
    wide, narrow = ([ParameterSize((64, 48), dtype)] for dtype in (torch.float32, torch.bfloat16))
    assert optimizers.state_bytes("adamw", wide, gpu=True) == 2 * wide[0].nbytes  # the step count is on the host
    assert optimizers.state_bytes("adamw", narrow, gpu=True) == wide[0].nbytes
    assert optimizers.state_bytes("adamw", wide) == 2 * wide[0].nbytes + torch.get_default_dtype().itemsize
    assert optimizers.state_bytes("adamw_8bit", wide) == optimizers.state_bytes("adamw_8bit", narrow)
    assert optimizers.state_bytes("lion", wide) == wide[0].nbytes
    assert optimizers.state_bytes("none", wide) == optimizers.step_bytes("none", wide) == 0


def test_a_gpu_takes_all_parameters_at_once() -> None:
    sizes = [ParameterSize((64, 48), torch.float32)] * 5
    assert optimizers.step_bytes("adamw", sizes, gpu=True) == 5 * sizes[0].nbytes
    assert optimizers.step_bytes("adamw", sizes) < 5 * sizes[0].nbytes
    assert optimizers.cost("adamw", sizes, gpu=True, settings={"fused": True}).step_bytes == 0


def test_muon_leaves_vectors_to_another() -> None:
    matrix, vector = ParameterSize((64, 48), torch.float32), ParameterSize((640,), torch.float32)
    assert optimizers.state_bytes("muon", [matrix, vector], gpu=True) == matrix.nbytes + 2 * vector.nbytes


@pytest.mark.parametrize("name", ["AdamW", "torch.optim.AdamW", "adam-w", " adamw "])
def test_spellings(name: str) -> None:
    assert optimizers.named(name).name == "adamw"


def test_an_unknown_name_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"options: optimizer='adamx': no such optimizer; did you mean .*'adamax'"):
        optimizers.check(Options(optimizer="adamx"))
    assert optimizers.check(Options()) is None


# ---- the optimizer of a program -------------------------------------------------------------------------------------


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, amsgrad=True, fused=True)


def scheduled(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    optimizer.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # type: ignore[attr-defined]
    return optimizer


class Renamed(torch.optim.Adam):
    """Inherits its step."""


@pytest.mark.parametrize(
    ("make", "name", "states", "step"),
    [(adamw, "adamw", 3, 0), (scheduled, "sgd", 1, 0), (Renamed, "renamed", 2, None)],
    ids=["fused", "wrapped by a scheduler", "subclass"],
)
def test_a_live_optimizer_is_found(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], name: str, states: int, step: int | None
) -> None:
    model = nn.Linear(30, 40)
    optimizer = make(list(model.parameters()))
    found = find_optimizer(model.parameters())
    assert found is not None and found.name == name and found.held == 2
    assert abs(found.state_bytes - states * 4 * (30 * 40 + 40)) <= 64
    assert step is None or found.step_bytes == step
    del optimizer


def test_none_is_found_where_none_holds_the_parameters() -> None:
    model = nn.Linear(3, 4)
    other = torch.optim.SGD(nn.Linear(3, 4).parameters(), lr=0.1)
    assert find_optimizer(model.parameters()) is None
    assert find_optimizer([]) is None
    del other


@pytest.mark.parametrize("requires_grad", [True, False])
def test_masters_of_weights_in_half_precision_are_found(requires_grad: bool) -> None:
    """Their optimizer holds none of the weights. Some require a gradient, others are only given one."""
    model = nn.Sequential(nn.Linear(31, 41), nn.Linear(41, 31)).bfloat16()
    norm = nn.LayerNorm(37)
    masters = [p.detach().float().requires_grad_(requires_grad) for p in model.parameters()]
    optimizer = torch.optim.Adam([*masters, *norm.parameters()])
    for asked in (list(model.parameters()), [*model.parameters(), *norm.parameters()]):
        found = find_optimizer(asked)
        assert found is not None and {id(p) for p in found.copies} == {id(p) for p in masters}
        assert abs(found.state_bytes - 2 * sum(p.nbytes for p in (*masters, *norm.parameters()))) <= 64
    assert find_optimizer([nn.Parameter(torch.zeros(31, 42, dtype=torch.bfloat16))]) is None  # no copy of that
    assert find_optimizer([p.detach() for p in model.parameters()]) is None  # not trained
    another = torch.optim.SGD([p.detach().clone().requires_grad_() for p in masters], lr=0.1)
    assert find_optimizer(model.parameters()) is None  # which of the two cannot be told
    del optimizer, another


def test_several_optimizers_step_one_after_another() -> None:
    model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 60))
    first = torch.optim.Adam(model[0].parameters())
    second = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    found = find_optimizer(model.parameters())
    assert found is not None and found.name == "adam + sgd" and found.held == 4
    each = [cost_of(optimizer, []) for optimizer in (first, second)]
    assert found.state_bytes == sum(c.state_bytes for c in each)
    assert found.step_bytes == max(c.step_bytes for c in each)


class Own(torch.optim.Optimizer):
    """An optimizer of the user's with a step of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["mean"] = torch.zeros_like(parameter)


def test_an_unknown_optimizer_is_counted_by_what_it_has_made() -> None:
    model = nn.Linear(30, 40, bias=False)
    optimizer = Own(model.parameters())
    before = find_optimizer(model.parameters())
    assert before is not None and before.state_bytes == 2 * 4 * 1200 and "assumed" in before.notes[0]
    optimizer.step()
    after = find_optimizer(model.parameters())
    assert after is not None and after.state_bytes == 4 * 1200 and not after.notes


@pytest.mark.parametrize(("search", "more"), [(None, 0), ("strong_wolfe", 6)])
def test_lbfgs_holds_as_many_vectors_as_it_is_told_to(search: str | None, more: int) -> None:
    """Those of its state, and what its frames hold while the closure runs backward in the middle of a step."""
    torch.manual_seed(0)
    model = nn.Linear(61, 43)
    size, most, flat = sum(p.nbytes for p in model.parameters()), 0, 43 * 61 + 43  # as nothing else here has
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=5.0 if search else 1.0, history_size=4, max_iter=8, line_search_fn=search
    )

    def closure() -> torch.Tensor:
        nonlocal most
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 30 * 61).view(30, 61)
        loss = (model(x).sin() + model(x).square()).mean()
        tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
        start = any(t.shape == (43, 61) for t in tensors)
        most = max(most, start + len({t.data_ptr() for t in tensors if t.numel() == flat}))
        loss.backward()
        return loss.detach()

    for _ in range(3):
        optimizer.step(closure)
    (state,) = (s for s in optimizer.state.values() if s)
    assert len(state["old_dirs"]) == len(state["old_stps"]) == 4  # the history is full
    found = find_optimizer(model.parameters())
    assert found is not None
    assert found.state_bytes == (2 * 4 + 5 + more) * size
    assert most == 2 * 4 + 5 + more


def test_frozen_parameters_have_no_state() -> None:
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 50)).requires_grad_(False)
    model[1].requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters())
    found = find_optimizer(model.parameters())
    expected = 2 * sum(p.nbytes for p in sizes_of(list(model[1].parameters())))
    assert found is not None and abs(found.state_bytes - expected) <= 64
    del optimizer


def test_state_of_parameters_that_were_frozen_later_is_kept() -> None:
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 50))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    before = find_optimizer(model.parameters())
    model[0].requires_grad_(False)
    after = find_optimizer(model.parameters())
    kept = [v for state in optimizer.state.values() for v in state.values()]
    assert before is not None and after is not None
    assert before.state_bytes == after.state_bytes == sum(v.nbytes for v in kept)


class Handing(torch.optim.Optimizer):
    """As accelerate's: another one steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()


class Looking(torch.optim.Optimizer):
    """Another one steps; weights of its own go beside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups[0]["params"], {})
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()


def test_one_that_hands_its_step_on_is_not_counted_beside_the_other() -> None:
    parameters = [nn.Parameter(torch.randn(30, 40))]
    inner = torch.optim.AdamW(parameters)
    alone = find_optimizer(parameters)
    outer = Handing(Handing(inner))
    assert find_optimizer(parameters) == alone and alone is not None and alone.name == "adamw"
    del outer
    looking = Looking(inner)
    found = find_optimizer(parameters)
    assert found is not None and found.state_bytes == alone.state_bytes + 2 * 4 * 1200 and "assumed" in found.notes[0]
    del looking


def test_parameters_that_nothing_uses_get_no_state() -> None:
    used, unused, asked = (nn.Parameter(torch.ones(n)) for n in (31, 1000, 57))
    optimizer = torch.optim.Adam([used, unused, asked])

    def state() -> int:
        found = find_optimizer([asked])
        assert found is not None
        return found.state_bytes

    before = state()
    assert before > 2 * unused.nbytes  # it has not stepped
    used.grad = torch.ones_like(used)
    optimizer.step()
    assert state() == before  # one that is asked about has none either, which tells nothing
    asked.grad = torch.ones_like(asked)
    optimizer.step()
    assert 2 * (used.nbytes + asked.nbytes) <= state() < before - unused.nbytes
    unused.grad = torch.ones_like(unused)
    assert state() == before


class Flat(torch.optim.SGD):
    """Keeps a tensor for a parameter, not a dictionary of tensors."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        for p in parameters:
            self.state[p] = torch.zeros_like(p)


def test_state_that_is_no_dictionary_is_state() -> None:
    trained, frozen = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(9), requires_grad=False)
    optimizer = Flat([trained, frozen])
    assert find_optimizer([trained]) is not None
    assert {id(p) for p in trained_among([trained, frozen])} == {id(p) for p in optimizer.state}
