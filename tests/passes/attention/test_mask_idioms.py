"""What a mask is proved to be: `is_causal` where it is exactly that, an operand otherwise, and never a wrong proof."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_forms.base import Sizes
from torch import nn

import optpass

pytestmark = pytest.mark.usefixtures("clean", "seeded")

BY_SHAPES = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
#: Lengths of the calls; a graph with dynamic shapes must serve all of them.
LENGTHS = {False: (20,), True: (20, 27, 12)}


def assert_right(program: Any, call: Any, inputs: list[Any], exact: Any) -> None:
    """Within 1e-5 of the largest element of the float64 result.

    Scores in the tens of thousands carry an error that even eager's result shows; four times that is allowed then,
    because the largest of two independent errors varies. A wrong mask is wrong by the size of the values.
    """
    with torch.no_grad():
        (wanted,), ours, eager = exact(program, inputs).outputs, call(*inputs), program(*inputs)
    error, own = ((t.double() - wanted).abs().max().item() for t in (ours, eager))
    allowed = 1e-5 * wanted.abs().max().item()
    assert error <= (allowed if own <= allowed else 4 * own), f"error {error:.3g}, eager's own {own:.3g}"


def run(form: Any, dynamic: bool, compiled: Any, exact: Any, kernels: Any) -> None:
    program, _ = form.build(torch.float32, False)
    call = compiled(program, dynamic=dynamic)
    for length in LENGTHS[dynamic]:
        assert_right(program, call, form.build(torch.float32, False, Sizes(length=length))[1], exact)
    assert len(kernels.graphs) == 1


def kinds(kernels: Any) -> list[str]:
    """'causal', 'operand' or 'none' for each SDPA node, 'block mask' or 'none' for each FlexAttention node."""
    found = []
    for node in kernels.sdpa:
        causal = node.kwargs.get("is_causal") or (len(node.args) > 5 and node.args[5])
        mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
        assert not (causal and mask is not None)
        found.append("causal" if causal else "operand" if mask is not None else "none")
    for node in kernels.flex:
        found.append("none" if all(a is None for a in (*node.args[3:5], *node.kwargs.values())) else "operand")
    return found


@pytest.mark.by_turns
@BY_SHAPES
def test_idiom(mask_form: Any, dynamic: bool, kernels: Any, compiled: Any, exact: Any) -> None:
    run(mask_form, dynamic, compiled, exact, kernels)
    assert len(kinds(kernels)) == 1, [site.reason for site in optpass.report().declined("attention")]
    assert mask_form.mask == "free" or kinds(kernels) == [mask_form.mask]


@pytest.mark.by_turns
@BY_SHAPES
def test_almost_causal_is_not_causal(almost_form: Any, dynamic: bool, kernels: Any, compiled: Any, exact: Any) -> None:
    run(almost_form, dynamic, compiled, exact, kernels)
    assert "causal" not in kinds(kernels)


BUFFERS = ["SlicedAndComparedWithZero", "SlicedByKeysAndQueries", "SlicedBytes", "WindowBuffer"]
BUFFERS += ["NanoGPT", "NotABuffer"]


def _flip(tensor: torch.Tensor) -> None:
    """Make one masked place visible and one visible place masked, in place."""
    view = tensor.view(tensor.shape[-2:])
    for at in ((2, 9), (12, 4)):
        view[at] = 1 - view[at] if tensor.dtype != torch.bool else ~view[at]


def _buffer(program: nn.Module) -> torch.Tensor:
    return program.tril if hasattr(program, "tril") else program.bias


@pytest.mark.by_turns
@BY_SHAPES
@pytest.mark.parametrize("name", BUFFERS)
def test_a_mutated_buffer_is_followed(name: str, dynamic: bool, forms: Any, compiled: Any, exact: Any) -> None:
    """The proof holds for the contents at compile time; other contents must be noticed, at every later call."""
    form = forms[name]
    program, inputs = form.build(torch.float32, False)
    call = compiled(program, dynamic=dynamic)
    assert_right(program, call, inputs, exact)
    with torch.no_grad():
        before = program(*inputs)
        _flip(_buffer(program))
        assert not torch.equal(before, program(*inputs)), "the mutation must show"
    assert_right(program, call, inputs, exact)
    assert_right(program, call, form.build(torch.float32, False)[1], exact)
    with torch.no_grad():
        _flip(_buffer(program))  # and back
    assert_right(program, call, inputs, exact)


@pytest.mark.parametrize("how", ["load_state_dict", "replaced", "data", "out_of_the_loop"])
def test_other_ways_to_change_a_buffer(how: str, forms: Any, compiled: Any, exact: Any) -> None:
    program, inputs = forms["SlicedAndComparedWithZero"].build(torch.float32, False)
    call = compiled(program)
    assert_right(program, call, inputs, exact)
    other = program.bias.clone()
    _flip(other)
    if how == "load_state_dict":
        program.load_state_dict({"bias": other})
    elif how == "replaced":
        program.bias = other
    elif how == "data":
        program.bias.data = other
    else:
        program.bias.data.copy_(other)  # does not count as a modification for autograd
    assert_right(program, call, inputs, exact)


def test_a_buffer_that_changes_in_training(forms: Any, compiled: Any, harness: Any) -> None:
    """Forward, backward, then another mask: gradients follow too."""
    program, inputs = forms["SlicedBytes"].build(torch.float64, True)
    call = compiled(program)
    for _ in range(2):
        ours, eager = harness.run(program, inputs, call), harness.run(program, inputs)
        torch.testing.assert_close(ours.outputs, eager.outputs)
        torch.testing.assert_close(ours.grads, eager.grads)
        _flip(program.bias)


def test_positions_that_count_upwards_once(forms: Any, compiled: Any, exact: Any, kernels: Any) -> None:
    """Causal by luck on the first call."""
    form = forms["positions_from_the_caller"]
    program, (*qkv, positions) = form.build(torch.float32, False)
    call = compiled(program)
    assert_right(program, call, [*qkv, torch.arange(len(positions))], exact)
    assert_right(program, call, [*qkv, positions], exact)
    assert "causal" not in kinds(kernels)


@pytest.mark.parametrize("first", [20, 28])
def test_square_by_chance(first: int, compiled: Any, exact: Any) -> None:
    """`tril(keys - queries)` is causal where both are equal; with dynamic shapes they need not stay so."""

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        n, m = q.shape[-2], k.shape[-2]
        allowed = torch.ones(n, m, dtype=torch.bool).tril(m - n)
        return (q @ k.mT * 0.25).masked_fill(~allowed, float("-inf")).softmax(-1) @ v

    call = compiled(program, dynamic=True)
    for keys in (first, 20, 31):
        inputs = [torch.randn(2, 3, length, 16) for length in (20, keys, keys)]
        assert_right(program, call, inputs, exact)
