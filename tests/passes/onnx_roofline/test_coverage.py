"""Every standard op has a rule or a reason, and the rules agree with ONNX's own test models."""

from __future__ import annotations

import collections
import warnings
from pathlib import Path
from typing import Any

import onnx
import pytest

from optpass.passes.onnx_roofline import program_of_onnx, walk
from optpass.passes.onnx_roofline.handlers import handled
from optpass.passes.onnx_roofline.rules import UNSUPPORTED, registered
from optpass.passes.onnx_roofline.value import PACKED

STANDARD = {s.name for s in onnx.defs.get_all_schemas() if s.domain == ""}
#: Models taken per op; the rest differ in values, not in sizes.
PER_OP = 3
#: Neither a rule nor control flow: a stored tensor.
STORED = {"Constant"}


def test_every_standard_op_has_a_rule_or_a_reason() -> None:
    rules = {op for domain, op in registered() if domain == ""}
    assert rules | handled() | STORED | set(UNSUPPORTED) >= STANDARD
    assert not set(UNSUPPORTED) & (rules | handled()), "an op with a rule needs no excuse"
    assert set(UNSUPPORTED) <= STANDARD
    assert all(reason for reason in UNSUPPORTED.values())


def test_onnxruntime_ops_people_meet() -> None:
    wanted = """Attention MultiHeadAttention GroupQueryAttention SkipLayerNormalization SkipSimplifiedLayerNormalization
    FusedMatMul Gelu BiasGelu QuickGelu FastGelu RotaryEmbedding MatMulNBits EmbedLayerNormalization FusedConv
    DynamicQuantizeMatMul QLinearAdd""".split()
    assert {("com.microsoft", op) for op in wanted} <= registered()


@pytest.mark.slow
def test_rules_agree_with_the_models_that_define_the_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX's node tests: no op without a rule is met but the excused ones, and the result of every expansion has
    the sizes and the dtype that shape inference gives.
    """
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = collect_testcases(None)
    wrong: list[tuple[Any, ...]] = []
    expand = walk.Walker.expand

    def checked(self: walk.Walker, call: Any, *rest: Any) -> list[Any]:
        found = expand(self, call, *rest)
        for spec, item in zip(call.specs, found, strict=False):
            if spec is None or self.ops[-1].reason or spec.elem in PACKED:
                continue
            meta = item.node.meta["val"]
            if (tuple(meta.shape), meta.dtype) != (spec.known, self.b.dtypes.dtype(spec.elem)):
                wrong.append((name, call.op, meta.shape, spec))
        return found

    monkeypatch.setattr(walk.Walker, "expand", checked)
    unknown: collections.Counter[str] = collections.Counter()
    met: collections.Counter[str] = collections.Counter()
    path = tmp_path / "case.onnx"
    for case in cases:
        name = case.name
        nodes = case.model.graph.node
        if {n.domain for n in nodes} & {"ai.onnx.ml", "ai.onnx.preview.training"} or "_expanded" in name:
            continue
        met[nodes[-1].op_type] += 1
        if met[nodes[-1].op_type] > PER_OP:
            continue
        path.write_bytes(case.model.SerializeToString())
        program, facts = program_of_onnx(path)
        for info in program.ops:
            op = info.target.removeprefix("onnx.")
            if info.cost is None and "no rule counts this op" in "\n".join(facts.notes) and op not in UNSUPPORTED:
                unknown[op] += 1
    assert wrong == []
    # Ops behind one of unknown result, inside models about text or about opset 8.
    assert set(unknown) <= {"Scan", "Add", "Identity", "Equal", "Shape"}, unknown
    assert len(met) > 150
