"""Modules that change from one call to the next, and the process's own state."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

X = torch.randn(2, 4)


class Block(nn.Module):
    """A module with everything that guards can be put on."""

    power = 2

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.scale = 2.0
        self.steps = 3
        self.name = "a"
        self.flag = False
        self.config = {"alpha": 1, "beta": [1, 2]}
        self.sizes = [1, 2]
        self.act = torch.relu
        self.mode: str | None = None

    def forward(self, x: Any) -> Any:
        return self.drop(self.linear(x)) * 2


class Uses(Block):
    """Calls `function(self, x)`."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Any) -> Any:
        return self._function(self, x)


class Nested(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Uses(function), Uses(function)])
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 4)})

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        for head in self.heads.values():
            x = head(x)
        return x


def sets(part: str = "", **values: Any) -> Any:
    """Sets attributes of a module, or of a part of it."""

    def mutation(model: Any) -> None:
        for name, value in values.items():
            setattr(model.get_submodule(part), name, value)

    return mutation


def uses(function: Any, mutation: Any) -> Any:
    def script(compiled: Any) -> None:
        model = Uses(function)
        run = compiled(model)
        run(X)
        mutation(model)
        run(X)

    return script


def nested(function: Any, mutation: Any) -> Any:
    def script(compiled: Any) -> None:
        model = Nested(function)
        run = compiled(model)
        run(X)
        mutation(model)
        run(X)

    return script


def builtin(make: Any, mutation: Any) -> Any:
    def script(compiled: Any) -> None:
        model = make()
        run = compiled(model)
        run(X)
        mutation(model)
        run(X)

    return script


def state(enter: Any, function: Any = lambda x: x * 2) -> Any:
    """The same call again, under a context manager."""

    def script(compiled: Any) -> None:
        run = compiled(function)
        run(X)
        with enter():
            run(X)

    return script


def leave(enter: Any) -> Any:
    def script(compiled: Any) -> None:
        run = compiled(lambda x: x * 2)
        with enter():
            run(X)
        run(X)

    return script


def training_in_a_function(compiled: Any) -> None:
    model = nn.Dropout(0.5)
    run = compiled(lambda x: model(x) * 2)
    run(X)
    model.eval()
    run(X)


def attribute_in_a_function(compiled: Any) -> None:
    model = Block()
    run = compiled(lambda x, m: x * m.scale)
    run(X, model)
    model.scale = 7.0
    run(X, model)


def method(compiled: Any) -> None:
    model = Uses(lambda self, x: x * self.steps)
    run = compiled(model.forward)
    run(X)
    model.steps = 5
    run(X)


def compiled_in_place(compiled: Any) -> None:
    model = Uses(lambda self, x: x * self.steps)
    model.compile(backend="eager")
    model(X)
    model.steps = 5
    model(X)


def other_backend(compiled: Any) -> None:
    def double(x: Any) -> Any:
        return x * 2

    compiled(double)(X)
    compiled(double, backend="aot_eager")(X)


def other_options(compiled: Any) -> None:
    def double(x: Any) -> Any:
        return x * 2

    compiled(double)(X)
    compiled(double, dynamic=False)(X)


def new_backend_each_time(compiled: Any) -> None:
    def double(x: Any) -> Any:
        return x * 2

    compiled(double, backend=lambda gm, inputs: gm)(X)
    compiled(double, backend=lambda gm, inputs: gm.forward)(X)


def default_dtype(compiled: Any) -> None:
    run = compiled(lambda x: x * 2)
    run(X)
    torch.set_default_dtype(torch.float64)
    try:
        run(X)
    finally:
        torch.set_default_dtype(torch.float32)


def deterministic(compiled: Any) -> None:
    run = compiled(lambda x: x * 2)
    run(X)
    torch.use_deterministic_algorithms(True)
    try:
        run(X)
    finally:
        torch.use_deterministic_algorithms(False)


def threads(compiled: Any) -> None:
    run = compiled(lambda x: x * 2)
    before = torch.get_num_threads()
    run(X)
    torch.set_num_threads(before + 1)
    try:
        run(X)
    finally:
        torch.set_num_threads(before)


def object_that_dies(compiled: Any) -> None:
    class Local(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2

    def apply(x: Any, kind: Any) -> Any:
        return kind()(x)

    run = compiled(apply)
    run(X, Local)
    del Local
    gc.collect()
    run(X, nn.ReLU)


def resumed(compiled: Any) -> None:
    """The function goes on behind a graph break: what changes there is the function's own."""

    def broken(x: Any, n: Any) -> Any:
        x = x + 1
        torch._dynamo.graph_break()
        return x.reshape(n, -1)

    run = compiled(broken)
    run(X, 2)
    run(X, 4)


ATTRIBUTE, TRAINING = "module attribute", "training flag"
GRAD = "torch.is_grad_enabled()"
CASES = [
    (uses(lambda s, x: x * s.scale, sets(scale=5.0)), ATTRIBUTE, "self.scale", "2.0", "5.0"),
    (uses(lambda s, x: x * s.steps, sets(steps=4)), ATTRIBUTE, "self.steps", "3", "4"),
    (uses(lambda s, x: x * 2 if s.name == "a" else x, sets(name="b")), ATTRIBUTE, "self.name", "'a'", "'b'"),
    (uses(lambda s, x: x * 2 if s.flag else x * 3, sets(flag=True)), ATTRIBUTE, "self.flag", "False", "True"),
    (uses(lambda s, x: x * 2 if s.mode is None else x * 3, sets(mode="b")), ATTRIBUTE, "self.mode", "None", "'b'"),
    (uses(lambda s, x: x * s.config["alpha"], lambda m: m.config.update(alpha=4)),
     ATTRIBUTE, "self.config['alpha']", "1", "4"),
    (uses(lambda s, x: x * s.config["beta"][1], lambda m: m.config.update(beta=[1, 7])),
     ATTRIBUTE, "self.config['beta'][1]", "2", "7"),
    (uses(lambda s, x: x * len(s.config), lambda m: m.config.update(gamma=4)),
     "dict keys", "self.config", "['alpha', 'beta']", "['alpha', 'beta', 'gamma']"),
    (uses(lambda s, x: x * len(s.sizes), lambda m: m.sizes.append(4)), "list length", "len(self.sizes)", "2", "3"),
    (uses(lambda s, x: x * s.sizes[0], lambda m: m.sizes.__setitem__(0, 4)), ATTRIBUTE, "self.sizes[0]", "1", "4"),
    (uses(lambda s, x: s.act(x), sets(act=torch.tanh)), ATTRIBUTE, "self.act", "relu", "tanh"),
    (uses(lambda s, x: x * s.power, sets(power=3)), ATTRIBUTE, "self.power", "2", "3"),
    (uses(lambda s, x: s.linear(x), sets(linear=nn.Identity())), ATTRIBUTE, "self.linear", "Linear", "Identity"),
    (uses(lambda s, x: s.drop(x) * 2, lambda m: m.eval()), TRAINING, "self.drop.training", "True", "False"),
    (uses(lambda s, x: x * 2 if s.training else x * 3, lambda m: m.eval()), TRAINING, "self.training", "True", "False"),
    (uses(lambda s, x: s.drop(x) * 2, sets("drop", p=0.25)), ATTRIBUTE, "self.drop.p", "0.5", "0.25"),
    (uses(lambda s, x: s.linear(x), lambda m: m.linear.weight.requires_grad_(False)),
     "requires_grad", "self.linear.weight.requires_grad", "True", "False"),
    (uses(lambda s, x: s.linear(x), sets("linear", bias=None)), ATTRIBUTE, "self.linear.bias", "Parameter", "None"),
    (uses(lambda s, x: x @ s.linear.weight, sets("linear", weight=nn.Parameter(torch.randn(4, 6)))),
     "shape", "self.linear.weight.size(1)", "4", "6"),
    (nested(lambda s, x: x * s.scale, lambda m: sets(scale=5.0)(m.blocks[1])),
     ATTRIBUTE, "self.blocks[1].scale", "2.0", "5.0"),
    (nested(lambda s, x: s.drop(x), lambda m: m.blocks[0].eval()),
     TRAINING, "self.blocks[0].drop.training", "True", "False"),
    (nested(lambda s, x: s.drop(x), lambda m: m.blocks[1].drop.eval()),
     TRAINING, "self.blocks[1].drop.training", "True", "False"),
    (nested(lambda s, x: x * 2, lambda m: m.blocks.append(nn.Linear(4, 4))),
     "list length", "len(self.blocks)", "2", "3"),
    (nested(lambda s, x: x * 2, lambda m: m.heads.update({"b": nn.Linear(4, 4)})),
     "dict keys", "self.heads", "['a']", "['a', 'b']"),
    (nested(lambda s, x: x * s.config["alpha"], lambda m: m.blocks[0].config.update(alpha=9)),
     ATTRIBUTE, "self.blocks[0].config['alpha']", "1", "9"),
    (builtin(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), lambda m: m.eval()),
     TRAINING, "self[1].training", "True", "False"),
    (builtin(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), lambda m: m.append(nn.ReLU())),
     "list length", "len(self)", "2", "3"),
    (builtin(lambda: nn.Linear(4, 4), lambda m: m.requires_grad_(False)),
     "requires_grad", "self.bias.requires_grad", "True", "False"),
    (builtin(lambda: nn.Dropout(0.5), lambda m: m.eval()), TRAINING, "self.training", "True", "False"),
    (builtin(lambda: nn.LayerNorm(4), sets(eps=1e-3)), ATTRIBUTE, "self.eps", "1e-05", "0.001"),
    (builtin(lambda: nn.BatchNorm1d(4), lambda m: m.eval()), TRAINING, "self.training", "True", "False"),
    (attribute_in_a_function, ATTRIBUTE, "m.scale", "2.0", "7.0"),
    (training_in_a_function, TRAINING, "model.training", "True", "False"),
    (method, ATTRIBUTE, "self.steps", "3", "5"),
    (compiled_in_place, ATTRIBUTE, "self.steps", "3", "5"),
    (state(torch.no_grad), "grad mode", GRAD, "True", "False"),
    (leave(torch.no_grad), "grad mode", GRAD, "False", "True"),
    (state(torch.inference_mode), "grad mode", GRAD, "True", "False"),
    (state(lambda: torch.set_grad_enabled(False)), "grad mode", GRAD, "True", "False"),
    (state(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
     "autocast", "torch.autocast", "off", "on (cpu torch.bfloat16)"),
    (leave(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
     "autocast", "torch.autocast", "on (cpu torch.bfloat16)", "off"),
    (state(lambda: torch.device("meta")), "device", "torch.get_default_device()", "None", "meta"),
    (default_dtype, "dtype", "torch.get_default_dtype()", "torch.float32", "torch.float64"),
    (deterministic, "other", "torch.are_deterministic_algorithms_enabled()", "False", "True"),
    (threads, "other", "torch.get_num_threads()", str(torch.get_num_threads()), str(torch.get_num_threads() + 1)),
    (other_backend, "backend", "torch.compile's backend", "eager", "aot_eager"),
    (other_options, "backend", "torch.compile's backend", "eager", "eager(dynamic=False)"),
    (new_backend_each_time, "backend", "torch.compile's backend", "<lambda>", "another <lambda>"),
    (object_that_dies, "weak reference", "kind", "an object that is gone", "ReLU"),
    (resumed, "int", "n", "2", "4"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "cause", "source", "before", "after"), CASES)
def test_one_change(check: Any, script: Any, cause: str, source: str, before: str, after: str) -> None:
    check(script, cause, source, before, after)
