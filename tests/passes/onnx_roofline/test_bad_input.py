"""Whatever a file holds: an analysis, or one line that names the file, the cause and the remedy."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto as T

from optpass.errors import ConfigError
from optpass.passes.onnx_roofline import program_of_onnx


@pytest.fixture
def good(analyse: Any, node: Any) -> Path:
    nodes = [node("MatMul", "x w", "a"), node("Relu", "a", "y")]
    path: Path = analyse.save(nodes, {"x": ["batch", 8]}, {"w": [8, 8]})
    return path


def _error(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        program_of_onnx(path)
    text = str(caught.value)
    assert "\n" not in text and str(path) in text
    return text


def test_missing_empty_and_folder(tmp_path: Path) -> None:
    assert "no such file" in _error(tmp_path / "absent.onnx")
    assert "is a directory" in _error(tmp_path)
    (tmp_path / "empty.onnx").write_bytes(b"")
    assert "is empty" in _error(tmp_path / "empty.onnx")


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"not a model, just text\n" * 20, "not an ONNX model"),
        (b"\x00" * 64, "not an ONNX model"),
        (b"\x80\x04\x95pickle", "not an ONNX model"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (b"\x08\x0a", "holds no ONNX graph"),
    ],
)
def test_what_is_no_model(tmp_path: Path, content: bytes, cause: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert cause in _error(path)


def test_truncated_anywhere(good: Path) -> None:
    """Every prefix is either an error or (a field boundary) a smaller model; never a traceback."""
    whole = good.read_bytes()
    refused = 0
    for length in range(1, len(whole)):
        good.write_bytes(whole[:length])
        try:
            program_of_onnx(good)
        except ConfigError:
            refused += 1
    assert refused > 0.9 * len(whole)


def test_random_corruption(good: Path) -> None:
    whole = bytearray(good.read_bytes())
    for seed in range(150):
        rng = random.Random(seed)
        broken = bytearray(whole)
        for _ in range(rng.randint(1, 6)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        good.write_bytes(broken)
        try:
            program_of_onnx(good)
        except ConfigError as error:
            assert "\n" not in str(error)


def test_extension_does_not_matter(good: Path) -> None:
    other = good.rename(good.with_suffix(".json"))
    program, _ = program_of_onnx(other)
    assert len(program.ops) == 2


def test_unreadable(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "cannot be read (Permission denied)" in _error(good)


def test_without_onnx_installed(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ConfigError, match=r"pip install 'optpass\[onnx\]'"):
        program_of_onnx(good)


@pytest.mark.parametrize(
    ("op", "names", "inputs", "attrs"),
    [
        ("MatMul", "x z", {"x": [4, 8], "z": [5, 6]}, {}),
        ("Conv", "x z", {"x": [1, 3, 8, 8], "z": [4, 5, 3, 3]}, {}),
        ("Reshape", "x z", {"x": [4, 8], "z": ([2], T.INT64)}, {}),
        ("Add", "x missing", {"x": [4]}, {}),
        ("Softmax", "x", {"x": [4]}, {"axis": 7}),
        ("LSTM", "x z z", {"x": [4], "z": [4]}, {}),
        ("Split", "x", {"x": [6]}, {"num_outputs": 5}),  # ONNX's own inference aborts the process on this one
        ("Gemm", "x z", {"x": [4, 8], "z": [5, 6]}, {}),
        ("Transpose", "x", {"x": [4, 8]}, {"perm": [0, 5]}),
        ("NoSuchOp", "x", {"x": [4]}, {}),
        ("Attention", "x x x", {"x": [1, 2, 3]}, {}),
    ],
)
def test_nodes_that_make_no_sense_are_unknown(
    analyse: Any, node: Any, op: str, names: str, inputs: dict[str, Any], attrs: dict[str, Any]
) -> None:
    found = analyse([node(op, names, "y", **attrs)], inputs, opset=23)
    assert found.program.unknown[f"onnx.{op}"] == 1
    assert f"onnx.{op}: " in found.notes and "not counted" in found.notes
    assert found.program.ops[0].cost is None
