"""Building small ONNX models and analysing them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

onnx = pytest.importorskip("onnx")
np = pytest.importorskip("numpy")

from onnx import TensorProto, helper  # noqa: E402

from optpass.passes.onnx_roofline import OnnxFacts, program_of_onnx  # noqa: E402
from optpass.passes.roofline.program import OpInfo, Program  # noqa: E402

FLOAT = TensorProto.FLOAT


@dataclass
class Analysed:
    """A program with its facts, and shorthands for assertions."""

    program: Program
    facts: OnnxFacts

    def op(self, target: str) -> OpInfo:
        """The only op of that type."""
        (found,) = [o for o in self.program.ops if o.target.endswith(f".{target}")]
        return found

    def flops(self, target: str | None = None) -> float:
        """FLOPs of all known ops, or of those of one type."""
        ops = [o for o in self.program.ops if target is None or o.target.endswith(f".{target}")]
        return sum(o.cost.flops for o in ops if o.cost is not None)

    @property
    def notes(self) -> str:
        return "\n".join(self.facts.notes)


def stored(name: str, shape: Sequence[int], elem: int = FLOAT) -> Any:
    """A weight whose data lies elsewhere, in a file that does not exist."""
    tensor = TensorProto(name=name, data_type=elem, dims=shape, data_location=TensorProto.EXTERNAL)
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "absent.bin"
    return tensor


class Builder:
    """Makes one-graph models: inputs and weights are name -> shape or (shape, element type)."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "model.onnx"

    def save(
        self,
        nodes: Sequence[Any],
        inputs: Mapping[str, Any],
        weights: Mapping[str, Any] | None = None,
        outputs: Sequence[str] | None = None,
        consts: Mapping[str, Any] | None = None,
        opset: int = 21,
        functions: Sequence[Any] = (),
        extra_opsets: Mapping[str, int] | None = None,
    ) -> Path:
        def split(spec: Any) -> tuple[Any, int]:
            return spec if isinstance(spec, tuple) else (spec, FLOAT)

        given = [helper.make_tensor_value_info(n, split(s)[1], split(s)[0]) for n, s in inputs.items()]
        names = list(outputs if outputs is not None else nodes[-1].output)
        results = [onnx.ValueInfoProto(name=n) for n in names]
        tensors = [stored(n, *split(s)) for n, s in (weights or {}).items()]
        tensors += [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in (consts or {}).items()]
        graph = helper.make_graph(list(nodes), "g", given, results, tensors)
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
        opsets += [helper.make_opsetid(d, v) for d, v in (extra_opsets or {}).items()]
        model = helper.make_model(graph, opset_imports=opsets, functions=list(functions))
        self.path.write_bytes(model.SerializeToString())
        return self.path

    def __call__(self, *args: Any, dims: Mapping[str, int] | None = None, dtype: Any = None, **kwargs: Any) -> Analysed:
        return Analysed(*program_of_onnx(self.save(*args, **kwargs), dims=dims, dtype=dtype))


@pytest.fixture
def analyse(tmp_path: Path) -> Builder:
    """`analyse(nodes, inputs, weights, ...)`: saves a model and analyses it."""
    return Builder(tmp_path)


@pytest.fixture(scope="session")
def node() -> Callable[..., Any]:
    """`node(op, inputs, outputs, **attributes)`, names given as words of one string."""

    def make(op: str, inputs: str, outputs: str, domain: str = "", name: str = "", **attrs: Any) -> Any:
        split = [n if n != "-" else "" for n in inputs.split()]
        made = [n if n != "-" else "" for n in outputs.split()]
        return helper.make_node(op, split, made, name=name, domain=domain, **attrs)

    return make
