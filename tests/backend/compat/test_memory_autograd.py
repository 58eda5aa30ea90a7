"""What is asked of autograd's graph and of a backward's callers while a step runs."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from optpass.backend.compat.frames import globals_read
from optpass.backend.compat.memory_callers import tensors_of_callers


def backward_of(loss: torch.Tensor) -> list[bool]:
    """Whether the callers' tensors were found to hold the loss, as the backward began."""
    found: list[bool] = []
    assert loss.grad_fn is not None
    loss.grad_fn.register_prehook(lambda *_: found.append(any(t is loss for t in tensors_of_callers())))
    loss.backward()
    return found


def test_what_a_caller_held_goes_when_it_lets_go() -> None:
    """To ask a frame for its variables leaves a copy of them with it, up to Python 3.12."""
    outputs: Any = torch.ones(3, requires_grad=True) * 2
    held = weakref.ref(outputs)
    assert backward_of(outputs.sum()) == [True]
    outputs = None
    assert held() is None


def test_a_dictionary_that_a_caller_holds_is_left_to_it() -> None:
    outputs = torch.ones(3, requires_grad=True) * 2
    mine = locals()
    assert backward_of(outputs.sum()) == [True]
    assert mine["outputs"] is outputs


class Refusing(dict[str, Any]):
    """A dictionary that imports what is read of it, and fails, as transformers has them."""

    def values(self) -> Any:
        raise RuntimeError("nothing is to be read here")


class Counted(list[Any]):
    def __iter__(self) -> Any:
        raise RuntimeError("nothing is to be read here")


class Unbound:
    """A proxy of nothing."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("outside of a context")


@pytest.mark.parametrize("kind", [dict, Refusing, list, Counted, tuple])
def test_nothing_of_the_users_classes_runs(kind: Any) -> None:
    proxy, found = Unbound(), list[bool]()

    def step(held: Any, loss: torch.Tensor) -> None:
        assert loss.grad_fn is not None and type(proxy) is Unbound
        wanted = weakref.ref(held["outputs"] if isinstance(held, dict) else held[0])
        loss.grad_fn.register_prehook(lambda *_: found.append(any(t is wanted() for t in tensors_of_callers(1))))
        loss.backward()

    outputs = torch.ones(3, requires_grad=True) * 2
    step(kind(outputs=outputs) if issubclass(kind, dict) else kind((outputs,)), outputs.sum())
    assert found == [True]


class Closed:
    """Refuses to be asked for its attributes."""

    def __init__(self, batch: torch.Tensor) -> None:
        self.batch = batch

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("nothing is to be read here")


class Slotted:
    __slots__ = ("batch",)

    def __init__(self, batch: torch.Tensor) -> None:
        self.batch = batch


@pytest.mark.parametrize(("kind", "seen"), [(Closed, True), (Slotted, False)])
def test_what_the_object_of_a_method_holds_is_found(kind: Any, seen: bool) -> None:
    batch, found = torch.ones(3), list[bool]()
    wanted, owner = weakref.ref(batch), kind(batch)
    del batch

    def step(self: Any, loss: torch.Tensor) -> None:
        assert loss.grad_fn is not None and type(self) is kind
        loss.grad_fn.register_prehook(lambda *_: found.append(any(t is wanted() for t in tensors_of_callers(1))))
        loss.backward()

    step(owner, torch.ones(3, requires_grad=True).sum())
    assert found == [seen]


def test_attributes_are_not_taken_for_globals_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that reads `self.batch` while the script around it has another `batch`."""
    held, other, found = torch.ones(3), torch.ones(3), list[list[bool]]()
    either = [weakref.ref(held), weakref.ref(other)]
    monkeypatch.setitem(globals(), "batch", other)
    monkeypatch.setitem(globals(), "read", held)

    class Program:
        batch = torch.ones(3, requires_grad=True)

        def step(self) -> None:
            loss = (self.batch * read).sum()  # type: ignore[name-defined]  # noqa: F821
            loss.grad_fn.register_prehook(
                lambda *_: found.append([any(t is w() for t in tensors_of_callers(1)) for w in either])
            )
            loss.backward()

    Program().step()
    assert found == [[True, False]]


def test_code_without_a_hash_is_read() -> None:
    """Dynamo puts dictionaries among the constants of what it generates."""

    def step() -> torch.Tensor:
        return torch.ones(batch)  # type: ignore[name-defined]  # noqa: F821

    code = step.__code__.replace(co_consts=(*step.__code__.co_consts, {}))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        hash(code)
    assert globals_read(code) == globals_read(code) == ("torch", "batch")
