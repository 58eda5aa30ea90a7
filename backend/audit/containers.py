"""Findings about the form of containers: lengths, keys, attributes that are or are not there."""

from __future__ import annotations

import re
from typing import Any

import torch

from optpass.backend.audit.findings import GONE, Finding, Places
from optpass.backend.audit.guards import Failure
from optpass.backend.audit.sources_text import prefixes
from optpass.backend.audit.values import describe
from optpass.reporting.audit.model import Cause


class Containers(Places):
    """Names what a container's form was and is."""

    def container(self, failure: Failure) -> Finding:
        """A length, or a key that is or is not in it."""
        value = self.value(failure.source)
        if failure.kind in ("DICT_CONTAINS", "SET_CONTAINS"):
            return self.membership(failure)
        holder = self.held_by_module(failure.source)
        expected = failure.code.rpartition(" == ")[2] if " == " in failure.code else "0"
        now = str(len(value)) if value is not GONE and hasattr(value, "__len__") else "gone"
        if failure.kind == "TUPLE_ITERATOR_LEN":
            now = describe(self.value(failure.code.rpartition(" == ")[0]))
        if isinstance(value, dict) and not isinstance(holder, (torch.nn.ModuleList, torch.nn.Sequential)):
            text = self.text(failure.source)
            before = self.made_for.get(keys_of(failure.source), f"{expected} key{'s' * (expected != '1')}")
            return Finding("dict keys", text, before, describe(list(value)), text)
        source = failure.source.removesuffix("._modules") if holder is not None else failure.source
        text = f"len({self.text(source)})"
        return Finding("list length", text, expected, now, self.text(source))

    def held_by_module(self, source: str) -> Any:
        """The module whose `_modules` the source is."""
        return self.value(source.removesuffix("._modules")) if source.endswith("._modules") else None

    def membership(self, failure: Failure) -> Finding:
        absent = failure.code.startswith("not ")
        before, after = ("missing", "there") if absent else ("there", "missing")
        key = re.search(r"___dict_contains\((?P<key>'[^']*'|\d+)", failure.code)
        owner = failure.source.removesuffix(".__dict__")
        if owner != failure.source and key is not None:
            name = f"{self.text(owner)}.{key['key'].strip(chr(39))}"
            cause: Cause = "module attribute" if isinstance(self.value(owner), torch.nn.Module) else "other"
            return Finding(cause, name, before, after, name)
        text = self.text(failure.source)
        if failure.kind == "SET_CONTAINS":
            item = failure.code.rpartition(", ")[2].removesuffix(")")
            return Finding("other", f"{item} in {text}", str(not absent), str(absent), text)
        shown = f"{text}[{key['key']}]" if key is not None else text
        return Finding("dict keys", shown, before, after, text)

    def keys(self, failure: Failure) -> Finding:
        """The keys of a dict, or their order."""
        source, code = failure.source, failure.code
        if failure.kind == "KEY":
            *_, owner, _ = ["", *prefixes(source)]
            text = self.text(owner) if owner else self.text(source)
            value = self.value(owner) if owner else None
            after = describe(list(value)) if isinstance(value, dict) else "missing"
            return Finding(
                "dict keys", text, self.made_for.get(keys_of(owner), f"has {_last_key(source)}"), after, text
            )
        inner = re.search(r"dict\.keys\((?P<dict>.*)\)\)", source)
        owner = inner["dict"] if inner else source
        value = self.value(owner)
        after = describe(list(value)) if isinstance(value, dict) else describe(value)
        text = self.text(owner)
        expected = code.partition(" == ")[2]
        position = re.search(r"\)\[(\d+)\]$", source)
        before = self.made_for.get(keys_of(owner), f"key {position[1]} is {expected}" if position else expected)
        return Finding("dict keys", text, before, after, text)

    def presence(self, failure: Failure) -> Finding:
        text = self.text(failure.source)
        name = re.search(r"hasattr\(.*, '(?P<name>[^']+)'\)", failure.code)
        if failure.kind == "NO_HASATTR" and name is not None:
            text, owner = f"{text}.{name['name']}", failure.source
            before, after = "missing", "there"
        else:
            owner = next(iter(prefixes(failure.source)[-2:-1]), failure.source)
            before, after = "there", "missing"
        module = isinstance(self.value(owner), torch.nn.Module)
        cause: Cause = "module attribute" if module else self.home(failure.source) or "other"
        if failure.kind == "INDEX":
            cause, text = "list length", self.text(owner)
        return Finding(cause, text, before, after, text)


def keys_of(source: str) -> str:
    """Name under which the keys of a dict are remembered beside values of expressions."""
    return f"keys of {source}"


def is_key(source: str) -> bool:
    """Whether the source is a key of a dict, by its position."""
    return source.startswith("list(dict.keys(")


def _last_key(source: str) -> str:
    found = re.search(r"\[([^\[\]]*)\]$", source)
    return found[1] if found else source
