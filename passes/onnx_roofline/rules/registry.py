"""Which rule expands which ONNX op. Here: the registry alone; the rules register themselves on import."""

from __future__ import annotations

from collections.abc import Callable

from optpass.passes.onnx_roofline.call import Rule

_RULES: dict[tuple[str, str], Rule] = {}
MICROSOFT = "com.microsoft"


def register(*names: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Decorator: the rule of these ops of `domain` ("" is ai.onnx).

    Raises ValueError if a name has a rule already.
    """

    def wrap(rule: Rule) -> Rule:
        for name in names:
            if (domain, name) in _RULES:
                raise ValueError(f"ONNX op {domain}::{name} has two rules")
            _RULES[domain, name] = rule
        return rule

    return wrap


def rule_of(domain: str, op: str) -> Rule | None:
    """The rule of an op, or None."""
    return _RULES.get((domain, op))


def registered() -> set[tuple[str, str]]:
    """(domain, op) of every rule."""
    return set(_RULES)
