"""Python values that change from one call to the next: arguments, attributes, globals, closures, containers."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

X = torch.randn(4)
SCALE = 2.0
NAME = "relu"
FLAG = True
STEPS = 3
CONFIG = {"scale": 2, "name": "a"}
ACTIVATION = torch.relu
SETTINGS = types.SimpleNamespace(scale=2.0)
LIMITS = [1, 2]


class Mode(enum.Enum):
    FAST = "fast"
    EXACT = "exact"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Config:
    scale: float = 2.0
    layers: int = 2
    name: str = "a"
    flag: bool = False
    sizes: tuple[int, ...] = (1, 2)


class Pair(NamedTuple):
    x: Any
    factor: Any


class Holder:
    """A plain object that computes."""

    bias = 1

    def __init__(self) -> None:
        self.scale = 2.0
        self.sizes = [1, 2]

    def run(self, x: Any) -> Any:
        return x * self.scale + len(self.sizes) + self.bias


def change(function: Any, first: Any, second: Any, **options: Any) -> Any:
    def script(compiled: Any) -> None:
        run = compiled(function, **options)
        run(X, first)
        run(X, second)

    return script


def by_keyword(function: Any, **pairs: tuple[Any, Any]) -> Any:
    def script(compiled: Any) -> None:
        run = compiled(function)
        run(X, **{name: first for name, (first, _) in pairs.items()})
        run(X, **{name: second for name, (_, second) in pairs.items()})

    return script


def set_global(name: str, second: Any, function: Any) -> Any:
    def script(compiled: Any) -> None:
        run = compiled(function)
        first = globals()[name]
        run(X)
        try:
            globals()[name] = second
            run(X)
        finally:
            globals()[name] = first

    return script


def mutate(make: Any, function: Any, mutation: Any) -> Any:
    """A function of (x, thing) is called again behind `mutation(thing)`."""

    def script(compiled: Any) -> None:
        run = compiled(function)
        thing = make()
        run(X, thing)
        mutation(thing)
        run(X, thing)

    return script


def closure_number(compiled: Any) -> None:
    factor = 2.0

    def scale(x: Any) -> Any:
        return x * factor

    run = compiled(scale)
    run(X)
    factor = 3.0
    run(X)


def closure_flag(compiled: Any) -> None:
    double = True

    def scale(x: Any) -> Any:
        return x * 2 if double else x

    run = compiled(scale)
    run(X)
    double = False
    run(X)


def closure_of_a_called_function(compiled: Any) -> None:
    def make(factor: Any) -> Any:
        def scale(x: Any) -> Any:
            return x * factor

        def set_factor(value: Any) -> None:
            nonlocal factor
            factor = value

        return scale, set_factor

    scale, set_factor = make(2)
    run = compiled(lambda x: scale(x) + 1)
    run(X)
    set_factor(5)
    run(X)


def closure_function(compiled: Any) -> None:
    act = torch.relu

    def apply(x: Any) -> Any:
        return act(x)

    run = compiled(apply)
    run(X)
    act = torch.tanh
    run(X)


def closure_list(compiled: Any) -> None:
    scales = [1, 2]

    def total(x: Any) -> Any:
        for scale in scales:
            x = x * scale
        return x

    run = compiled(total)
    run(X)
    scales.append(3)
    run(X)


def closure_dict_value(compiled: Any) -> None:
    config = {"scale": 1}

    def total(x: Any) -> Any:
        return x * config["scale"]

    run = compiled(total)
    run(X)
    config["scale"] = 7
    run(X)


def other_module_constant(compiled: Any) -> None:
    import string

    run = compiled(lambda x: x * len(string.digits))
    first = string.digits
    run(X)
    try:
        string.digits = "01"
        run(X)
    finally:
        string.digits = first


def constant_of_math(compiled: Any) -> None:
    run = compiled(lambda x: x * math.optpass_test_constant)
    math.optpass_test_constant = 2
    try:
        run(X)
        math.optpass_test_constant = 3
        run(X)
    finally:
        del math.optpass_test_constant


def method_of_a_plain_object(compiled: Any) -> None:
    holder = Holder()
    run = compiled(holder.run)
    run(X)
    holder.scale = 5.0
    run(X)


def list_of_a_plain_object(compiled: Any) -> None:
    holder = Holder()
    run = compiled(holder.run)
    run(X)
    holder.sizes.append(4)
    run(X)


def default_argument(compiled: Any) -> None:
    def scale(x: Any, factor: Any = 2) -> Any:
        return x * factor

    run = compiled(scale)
    run(X)
    run(X, 5)


def deque_length(compiled: Any) -> None:
    run = compiled(lambda x, q: x + len(q))
    run(X, collections.deque([1, 2]))
    run(X, collections.deque([1, 2, 3]))


def variadic_count(compiled: Any) -> None:
    run = compiled(lambda *xs: sum(x.sum() for x in xs))
    run(X, X + 1)
    run(X, X + 1, X + 2)


def keyword_names(compiled: Any) -> None:
    def total(x: Any, **named: Any) -> Any:
        return x * named.get("a", 1) + named.get("b", 2)

    run = compiled(total)
    run(X, a=3)
    run(X, b=3)


def nested_tuple(compiled: Any) -> None:
    run = compiled(lambda x, p: x * p[1][0])
    run(X, (1, (2, 3)))
    run(X, (1, (5, 3)))


def same_tensor_twice(compiled: Any) -> None:
    run = compiled(lambda a, b: a + b)
    run(torch.randn(4), torch.randn(4))
    x = torch.randn(4)
    run(x, x)


def no_longer_the_same_tensor(compiled: Any) -> None:
    run = compiled(lambda a, b: a + b)
    x = torch.randn(4)
    run(x, x)
    run(torch.randn(4), torch.randn(4))


def global_object(compiled: Any) -> None:
    run = compiled(lambda x: x * SETTINGS.scale)
    run(X)
    try:
        SETTINGS.scale = 3.0
        run(X)
    finally:
        SETTINGS.scale = 2.0


def global_dict(compiled: Any) -> None:
    run = compiled(lambda x: x * CONFIG["scale"])
    run(X)
    try:
        CONFIG["scale"] = 9
        run(X)
    finally:
        CONFIG["scale"] = 2


def global_list(compiled: Any) -> None:
    run = compiled(lambda x: x * len(LIMITS))
    run(X)
    try:
        LIMITS.append(3)
        run(X)
    finally:
        LIMITS.pop()


def class_attribute(compiled: Any) -> None:
    holder = Holder()
    run = compiled(holder.run)
    run(X)
    try:
        Holder.bias = 2
        run(X)
    finally:
        Holder.bias = 1


def lambda_argument(compiled: Any) -> None:
    def first(x: Any) -> Any:
        return x + 1

    def second(x: Any) -> Any:
        return x + 2

    run = compiled(lambda x, f: f(x))
    run(X, first)
    run(X, second)


def module_argument(compiled: Any) -> None:
    run = compiled(lambda x, m: m(x))
    run(X, nn.ReLU())
    run(X, nn.Tanh())


CASES = [
    (change(lambda x, n: x * n, 3, 4), "int", "n", "3", "4"),
    (change(lambda x, n: x * n, 3, 4, dynamic=False), "int", "n", "3", "4"),
    (change(lambda x, n: x.reshape(n, -1), 2, 4), "int", "n", "2", "4"),
    (change(lambda x, n: x * n, 3, 1), "int", "n", "3", "1"),
    (change(lambda x, n: x * n, 3, -3), "int", "n", "3", "-3"),
    (change(lambda x, p: torch.dropout(x, p, False), 0.1, 0.2), "float", "p", "0.1", "0.2"),
    (change(lambda x, p: x * p, 0.5, float("nan")), "float", "p", "0.5", "nan"),
    (change(lambda x, p: x * p, 1.5, 2), "float", "p", "1.5", "2"),
    (change(lambda x, p: x * p, 2, 1.5), "int", "p", "2", "1.5"),
    (change(lambda x, s: x.sum() if s == "sum" else x, "sum", "none"), "str", "s", "'sum'", "'none'"),
    (change(lambda x, s: getattr(torch, s)(x), "relu", "tanh"), "str", "s", "'relu'", "'tanh'"),
    (change(lambda x, b: x * 2 if b else x, True, False), "bool", "b", "True", "False"),
    (change(lambda x, b: x * 2 if b else x * 3, False, True), "bool", "b", "False", "True"),
    (change(lambda x, n: x * 2 if n is None else x * n, None, 3), "int", "n", "None", "3"),
    (change(lambda x, s: x * 2 if s is None else x, None, "a"), "str", "s", "None", "'a'"),
    (change(lambda x, s: x * 2 if s is None else x * 3, "a", None), "str", "s", "'a'", "None"),
    (change(lambda x, d: x.to(d), torch.float16, torch.bfloat16), "dtype", "d", "torch.float16", "torch.bfloat16"),
    (change(lambda x, d: x.to(d), torch.device("cpu"), torch.device("meta")),
     "device", "d", "device(type='cpu')", "device(type='meta')"),
    (change(lambda x, m: x * 2 if m is Mode.FAST else x, Mode.FAST, Mode.EXACT),
     "object identity", "m", "Mode.FAST", "Mode.EXACT"),
    (change(lambda x, m: x * m, Level.LOW, Level.HIGH), "object identity", "m", "Level.LOW", "Level.HIGH"),
    (change(lambda x, s: x * s[0], (2, 3), (4, 3)), "int", "s[0]", "2", "4"),
    (change(lambda x, s: x * s[0], [2, 3], [2, 3, 4]), "list length", "len(s)", "2", "3"),
    (change(lambda x, s: x * sum(s), (2, 3), (2, 3, 4)), "list length", "len(s)", "2", "3"),
    (change(lambda x, s: x * len(s), [], [1]), "list length", "len(s)", "0", "1"),
    (change(lambda x, s: x * s[0], [2, 3], (2, 3)), "object identity", "s", "list", "tuple"),
    (change(lambda x, d: x * d["a"], {"a": 2}, {"a": 3}), "int", "d['a']", "2", "3"),
    (change(lambda x, d: x * len(d), {"a": 2}, {"a": 2, "b": 3}), "dict keys", "d", "['a']", "['a', 'b']"),
    (change(lambda x, d: x * sum(d.values()), {"a": 2}, {"b": 2}), "dict keys", "d", "['a']", "['b']"),
    (change(lambda x, d: x * 2 if "a" in d else x, {"a": 2}, {"b": 2}), "dict keys", "d['a']", "there", "missing"),
    (change(lambda x, d: x * d["a"]["b"], {"a": {"b": 2}}, {"a": {"b": 3}}), "int", "d['a']['b']", "2", "3"),
    (change(lambda x, c: x * c.scale, Config(), Config(scale=3.0)), "float", "c.scale", "2.0", "3.0"),
    (change(lambda x, c: x * c.layers, Config(), Config(layers=5)), "int", "c.layers", "2", "5"),
    (change(lambda x, c: x * 2 if c.name == "a" else x, Config(), Config(name="b")), "str", "c.name", "'a'", "'b'"),
    (change(lambda x, c: x * 2 if c.flag else x * 3, Config(), Config(flag=True)), "bool", "c.flag", "False", "True"),
    (change(lambda x, c: x * sum(c.sizes), Config(), Config(sizes=(1, 2, 3))), "list length", "len(c.sizes)", "2", "3"),
    (change(lambda x, p: p.x * p.factor, Pair(X, 2), Pair(X, 3)), "int", "p.factor", "2", "3"),
    (change(lambda x, s: x[s], slice(0, 2), slice(1, 2)), "int", "s.start", "0", "1"),
    (change(lambda x, s: x * 2 if 1 in s else x, {1, 2}, {2, 3}), "other", "s", "{1, 2}", "{2, 3}"),
    (change(lambda x, r: x * sum(r), range(3), range(4)), "int", "r.stop", "3", "4"),
    (change(lambda x, f: f(x), torch.relu, torch.tanh), "object identity", "f", "relu", "tanh"),
    (change(lambda x, c: x.new_zeros(1) + c().scale, Config, Holder), "object identity", "c", "Config", "Holder"),
    (by_keyword(lambda x, *, n=1: x * n, n=(2, 3)), "int", "n", "2", "3"),
    (by_keyword(lambda x, *, mode="a": x * 2 if mode == "a" else x, mode=("a", "b")), "str", "mode", "'a'", "'b'"),
    (by_keyword(lambda x, **kw: x * kw["n"], n=(2, 3)), "int", "kw['n']", "2", "3"),
    (set_global("SCALE", 3.0, lambda x: x * SCALE), "global", "SCALE", "2.0", "3.0"),
    (set_global("NAME", "tanh", lambda x: getattr(torch, NAME)(x)), "global", "NAME", "'relu'", "'tanh'"),
    (set_global("FLAG", False, lambda x: x * 2 if FLAG else x), "global", "FLAG", "True", "False"),
    (set_global("STEPS", 4, lambda x: x * STEPS), "global", "STEPS", "3", "4"),
    (set_global("ACTIVATION", torch.tanh, lambda x: ACTIVATION(x)), "global", "ACTIVATION", "relu", "tanh"),
    (mutate(lambda: [1, 2], lambda x, s: x * s[1], lambda s: s.__setitem__(1, 5)), "int", "s[1]", "2", "5"),
    (mutate(lambda: {"a": 1}, lambda x, d: x * len(d), lambda d: d.update(b=2)),
     "dict keys", "d", "['a']", "['a', 'b']"),
    (mutate(Config, lambda x, c: x * c.scale, lambda c: setattr(c, "scale", 4.0)), "float", "c.scale", "2.0", "4.0"),
    (mutate(Holder, lambda x, h: h.run(x), lambda h: h.sizes.pop()), "list length", "len(h.sizes)", "2", "1"),
    (closure_number, "closure", "factor", "2.0", "3.0"),
    (closure_flag, "closure", "double", "True", "False"),
    (closure_of_a_called_function, "closure", "factor", "2", "5"),
    (closure_function, "closure", "act", "relu", "tanh"),
    (closure_list, "list length", "len(scales)", "2", "3"),
    (closure_dict_value, "closure", "config['scale']", "1", "7"),
    (other_module_constant, "global", "string.digits", "'0123456789'", "'01'"),
    (constant_of_math, "global", "math.optpass_test_constant", "2", "3"),
    (method_of_a_plain_object, "float", "self.scale", "2.0", "5.0"),
    (list_of_a_plain_object, "list length", "len(self.sizes)", "2", "3"),
    (class_attribute, "int", "type(self).bias", "1", "2"),
    (default_argument, "int", "factor", "2", "5"),
    (deque_length, "list length", "len(q)", "2", "3"),
    (variadic_count, "list length", "len(xs)", "2", "3"),
    (keyword_names, "dict keys", "named['b']", "missing", "there"),
    (nested_tuple, "int", "p[1][0]", "2", "5"),
    (same_tensor_twice, "object identity", "b", "another object than a", "the same object as a"),
    (no_longer_the_same_tensor, "object identity", "a", "the same object as b", "another object than b"),
    (global_object, "global", "SETTINGS.scale", "2.0", "3.0"),
    (global_dict, "global", "CONFIG['scale']", "2", "9"),
    (global_list, "list length", "len(LIMITS)", "2", "3"),
    (lambda_argument, "object identity", "f", "lambda_argument.<locals>.first", "lambda_argument.<locals>.second"),
    (module_argument, "object identity", "m", "ReLU", "Tanh"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "cause", "source", "before", "after"), CASES)
def test_one_change(check: Any, script: Any, cause: str, source: str, before: str, after: str) -> None:
    check(script, cause, source, before, after)
