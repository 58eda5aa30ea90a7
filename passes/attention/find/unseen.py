"""Softmaxes between two products, whatever stands in between: so that none of them is left alone without a word.

Nothing here is understood: values are followed through every operation but those after which they are another
quantity. What a product of such a value with another is, `core` says, or why it is not said.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import fx

from optpass.passes.attention.axes import is_one
from optpass.passes.attention.find import softmaxes
from optpass.passes.attention.find.operands import FLOATS, PRODUCTS
from optpass.passes.attention.program import nodes
from optpass.passes.attention.program.ir import LAYOUT, Program, Value, arg
from optpass.passes.attention.program.nodes import ACTIVATIONS

#: Products of one vector too, which are not looked into.
ONE_VECTOR = frozenset({"mv", "addmv", "dot", "vdot", "addbmm", "addr"})
#: Operations whose result is neither scores nor weights any more.
_ENDS = frozenset(
    "convolution native_layer_norm native_batch_norm native_group_norm _fused_rms_norm linalg_vector_norm var_mean sum "
    "mean logsumexp amax max amin min argmax sort argsort topk multinomial nonzero embedding grid_sampler_2d "
    "nll_loss_forward".split()
)
#: Functions that multiply matrices, by name.
_MULTIPLY = frozenset("matmul bmm baddbmm mm einsum".split())
#: Functions after which a value is another quantity, beside `_ENDS`.
_OTHER = frozenset("linear layer_norm rms_norm group_norm batch_norm cross_entropy _autograd_grad".split())
#: Where a transform of `torch.func` that differentiates begins and ends.
_ENTERS = frozenset({"_grad_increment_nesting", "_jvp_increment_nesting"})
_LEAVES = frozenset({"_grad_decrement_nesting", "_jvp_decrement_nesting"})
_TRANSFORMED = "it is differentiated by a transform of torch.func inside the graph, which is not looked into"
_WRAPPED = (
    "its tensors stand for others (a DTensor for its shards), which is not looked into; attention on what each process "
    "holds itself, as behind `to_local()`, is"
)


class Unseen:
    """What softmaxes of scores lead to, in one pass over a program.

    `sums`: matrix products that are written as sums of products of elements, and their factors.
    """

    def __init__(self, program: Program, sums: Mapping[Value, tuple[Value, Value]] | None = None) -> None:
        self.program = program
        self._sums = sums or {}
        self.scores: set[Value] = set()
        self.weights: dict[Value, Value] = {}  #: and the softmax behind each
        self.taken: set[Value] = set()  #: softmaxes that a product is made of
        for value in program.values:
            self._see(value)

    def _see(self, value: Value) -> None:
        product = value.name in PRODUCTS or value.name in ONE_VECTOR
        factors = tuple(value.inputs()) if product else of_single_numbers(value)
        if factors:
            self.taken.update(self.weights[factor] for factor in factors if factor in self.weights)
            if not any(is_parameter(factor) for factor in factors):
                self.scores.add(value)
            return
        factors = self._sums.get(value, ())
        if factors:
            if not any(factor in self.weights or is_parameter(factor) for factor in factors):
                self.scores.add(value)
            return
        if self._ends(value):
            return
        sources = list(sources_of(self.program, value))
        scores = any(source in self.scores for source in sources)
        behind = next((self.weights[source] for source in sources if source in self.weights), None)
        if behind is not None or (scores and self._normalises(value)):
            self.weights[value] = behind or value
        elif scores:
            self.scores.add(value)

    def leaving(self, roots: Collection[Value]) -> Iterator[Value]:
        """Softmaxes that leave the graph before they are multiplied with anything."""
        left = {softmax: None for value, softmax in self.weights.items() if value in roots}
        yield from (softmax for softmax in left if softmax not in self.taken)

    def _normalises(self, value: Value) -> bool:
        """Whether a softmax comes out, by hand too; exponentials alone make activations."""
        if value.name in ("_softmax", "_log_softmax") or made(self.program, value):
            return True
        if not softmaxes.exponential(value):
            return False
        users = self.program.users(value)
        near = [*users, *(u for user in users for u in self.program.users(user)), *value.args[0].inputs()]
        return any(v.name in ("sum", "logsumexp") for v in near)

    def _closed(self, value: Value) -> bool:
        """Whether a value comes out of a function that makes another quantity, and is not looked into."""
        name = getattr(value.node.target, "__name__", "") if value.node is not None else ""
        return value.node in self.program.closed and name not in ACTIVATIONS

    def _ends(self, value: Value) -> bool:
        """Whether a value is another quantity than what it is made of, or made of nothing that is known."""
        given = value.leaf != "" and (value.leaf != "opaque" or self._closed(value))
        other = value.dtype not in FLOATS and not value.dtype.is_complex
        return given or (value.name in _ENDS and not self._averaged(value)) or other

    def _averaged(self, value: Value) -> bool:
        """Weights of which a mean over heads is taken are weights of the same keys, and so are scores."""
        if value.name != "mean":
            return False
        source, dims = value.args[0], arg(value, "dim") or (-1,)
        rank = max(source.dim, 1)
        kept = 1 if source in self.weights else 2 if source in self.scores else rank
        return all(dim % rank < rank - kept for dim in dims)


def of_single_numbers(value: Value) -> tuple[Value, ...]:
    """The factors of a matrix product that sums over dims of size 1, of keys or of heads: elements are multiplied.

    PyTorch makes one of an einsum; of `(a * b).sum(dim)` any such dim. () of everything else.
    """
    if value.name in ("sum", "mean"):
        product = value.args[0]
        alone = [product.shape[d] for d in arg(value, "dim") or ()]
        factors = tuple(product.inputs()) if product.name == "mul" else ()
        return factors if len(factors) == 2 and alone and all(map(is_one, alone)) else ()
    node = value.node
    if value.name != "mul" or node is None or getattr(node.target, "__name__", "") != "einsum":
        return ()
    given, _, made = str(node.args[0]).replace(" ", "").partition("->")
    return tuple(value.inputs()) if set(given) - {",", "."} - set(made) else ()


def by_elements(value: Value, weights: Collection[Value]) -> bool:
    """Whether a sum `(a * b).sum(dim)` is the product of `weights` and values.

    One of them is repeated along what the other has, or there is one number for each key, which is not a mask's.
    """
    product = value.args[0] if value.name == "sum" and value.args[1] else None
    factors = tuple(a for a in product.inputs()) if product is not None and product.name == "mul" else ()
    if product is None or len(factors) != 2 or any(f.dim != product.dim for f in factors):
        return False
    dims = {d % product.dim for d in value.args[1]}
    if any(is_one(f.shape[d]) for f in factors for d in dims):
        return False
    repeated = [
        f for f in factors if any(is_one(f.shape[d]) and not is_one(product.shape[d]) for d in range(product.dim))
    ]
    if repeated:
        return any(f in weights for f in repeated)
    others = [f for f in factors if f not in weights]
    return len(others) == 1 and not _of_truths(others[0])


def _of_truths(value: Value) -> bool:
    """Whether a value is a mask that was cast to numbers, in some layout."""
    while value.name in LAYOUT or value.name == "_to_copy":
        value = value.args[0]
        if value.dtype == torch.bool:
            return True
    return False


def not_looked_into(graph: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
    """Products with v inside of `torch.func.grad` and its kin, and of tensors that stand for others: the nodes that
    make them, each with the reason."""
    inside, scores, weights = 0, set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        name = str(getattr(node.target, "__name__", node.target)) if node.op.startswith("call") else ""
        inside += name in _ENTERS
        inside -= name in _LEAVES
        sources = set(node.all_input_nodes)
        if not name or name in _ENDS or name in _OTHER or not (inside or nodes.is_wrapped(node)):
            continue
        if name in _MULTIPLY:
            if sources & weights:
                yield node, _TRANSFORMED if inside else _WRAPPED
            elif len(sources) > 1:
                scores.add(node)
        elif sources & weights or (sources & scores and "softmax" in name):
            weights.add(node)
        elif sources & scores:
            scores.add(node)


def is_parameter(value: Value) -> bool:
    """Whether a value is a parameter in some layout: what is multiplied with it is a linear layer's."""
    while value.name in LAYOUT:
        value = value.args[0]
    return value.leaf != "" and isinstance(value.tensor, torch.nn.Parameter)


def made(program: Program, value: Value) -> bool:
    """Whether an opaque value comes out of a softmax, or one was written to it (`softmax(s, -1, out=s)`)."""
    if value.leaf != "opaque":
        return False
    writers = [node for node in (value.node, *program.writes.get(value.storage, ())) if node is not None]
    return any(node in program.softmaxes or "softmax" in str(node.target) for node in writers)


def sources_of(program: Program, value: Value) -> list[Value]:
    """What a value is computed from; of an opaque one, what its node is given."""
    if value.leaf != "opaque" or value.node is None:
        return list(value.inputs())
    writers = {value.node, *program.writes.get(value.storage, ())}
    given = (program.of_node.get(source) for node in writers for source in node.all_input_nodes)
    return [v for v in given if isinstance(v, Value)]
