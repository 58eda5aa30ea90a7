"""The registry: from an op to its counting rule, and the two questions asked of it.

Here: `register`, `op_cost`, `known`, and `Call`, through which a rule reads its arguments by schema name.
Not here: the rules themselves, nor anything that walks a graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from optpass.passes.roofline.flops.cost import OpCost


@dataclass(frozen=True)
class Call:
    """One call of an op: what a rule may look at.

    `name` is "namespace::op" without the overload; `names` are the schema's argument names in order (empty
    for a higher-order op, whose rules read `args` directly).
    """

    name: str
    overload: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    names: tuple[str, ...] = ()
    defaults: dict[str, Any] = field(default_factory=dict)

    def arg(self, name: str, default: Any = None) -> Any:
        """The argument called `name` in the schema, else the schema's default, else `default`."""
        if name in self.kwargs:
            return self.kwargs[name]
        if name in self.names:
            index = self.names.index(name)
            if index < len(self.args):
                return self.args[index]
            return self.defaults.get(name, default)
        return default

    def at(self, index: int) -> Any:
        """The argument at position `index` of the schema, wherever it was passed; None if there is none."""
        if index < len(self.args):
            return self.args[index]
        return self.arg(self.names[index]) if index < len(self.names) else None

    @property
    def base(self) -> str:
        """The op's name without namespace and without the underscore of an in-place variant."""
        bare = self.name.partition("::")[2]
        return bare[:-1] if bare.endswith("_") and not bare.endswith("__") else bare


def words(text: str) -> list[str]:
    """The names in a table written as running text."""
    return text.split()


Rule = Callable[[Call], OpCost | None]
_RULES: dict[str, Rule] = {}


def register(*names: str) -> Callable[[Rule], Rule]:
    """Decorator: the rule for these ops. A bare name means aten; in-place and out variants need no entry of
    their own.

    Raises ValueError if a name has a rule already: two rules for one op would make the count depend on import
    order.
    """

    def wrap(rule: Rule) -> Rule:
        for name in names:
            key = name if "::" in name else f"aten::{name}"
            if key in _RULES:
                raise ValueError(f"op {key} has two FLOP rules")
            _RULES[key] = rule
        return rule

    return wrap


# The classes of targets, read off instances because their home, torch._ops, is private.
_OVERLOAD: Any = type(torch.ops.aten.mm.default)
_PACKET: Any = type(torch.ops.aten.mm)
_HIGHER_ORDER: Any = type(torch.ops.higher_order.flex_attention).__base__


def _overload_of(target: Any) -> Any:
    """The overload called; of a packet its default or else first one; None where the target is no ATen-style
    op.
    """
    if isinstance(target, _OVERLOAD):
        return target
    if isinstance(target, _PACKET):
        names = target.overloads()
        return getattr(target, "default" if "default" in names else names[0])
    return None


def _key(target: Any) -> str | None:
    overload = _overload_of(target)
    if overload is not None:
        return str(overload.name()).partition(".")[0]
    if target is torch.einsum:
        return "aten::einsum"
    if isinstance(target, _HIGHER_ORDER):
        return f"higher_order::{target.name()}"
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", None)
    if module in (operator.getitem.__module__, math.floor.__module__) or getattr(torch, str(name), None) is target:
        # Python-level targets of a graph: operator.* and math.* on sizes, torch.sym_max and its kin.
        return f"python::{name}"
    return None


def _rule(target: object) -> Rule | None:
    key = _key(target)
    if key is None:
        return None
    rule = _RULES.get(key)
    if rule is None and key.endswith("_") and not key.endswith("__"):
        rule = _RULES.get(key[:-1])
    if rule is None:
        overload = _overload_of(target)
        if overload is not None and torch.Tag.pointwise in overload.tags:
            return _RULES["rule::pointwise"]
    return rule


def _call(target: object, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> Call:
    key, overload = _key(target) or "", _overload_of(target)
    if overload is None:
        return Call(key, "", tuple(args), dict(kwargs), out)
    schema = overload._schema.arguments
    return Call(
        key,
        overload._overloadname,
        tuple(args),
        dict(kwargs),
        out,
        tuple(a.name for a in schema),
        {a.name: a.default_value for a in schema if a.has_default_value()},
    )


def known(target: object) -> bool:
    """Whether `op_cost` has a rule for this op (or the rule for ops tagged pointwise applies)."""
    return _rule(target) is not None


def op_cost(target: object, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> OpCost | None:
    """Cost of one call, or None where the op is unknown.

    `target`: OpOverload, OpOverloadPacket, HigherOrderOperator, or a Python function of FX graphs
    (operator.getitem). `args`, `kwargs`: as called, `out`: what it returned; tensors may be fake or anything
    with `.shape` and `.dtype`. Sizes must be plain ints. Conventions: the docstring of the package.
    """
    rule = _rule(target)
    return None if rule is None else rule(_call(target, args, kwargs, out))
