"""Reading a `.onnx` file: protobuf to `ModelProto`, and one-line errors for what is no ONNX model.

Weights may be absent (external data is never opened) and are dropped where present: only shapes are analysed.
Not here: shapes, ops, costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpass.errors import ConfigError

if TYPE_CHECKING:
    import onnx
    from onnx import ModelProto

#: Elements above which the data of a tensor is dropped: more than a shape, a set of axes or a scale needs.
KEEP_ELEMENTS = 4096
_LFS = b"version https://git-lfs"


def require_onnx() -> Any:
    """The onnx module.

    Raises:
        ConfigError: the optional dependency is not installed.
    """
    try:
        import onnx
    except ImportError as error:
        raise ConfigError(
            f"reading .onnx files needs the onnx package ({error}): pip install 'optpass[onnx]'"
        ) from error
    return onnx


def load_model(path: Path) -> onnx.ModelProto:
    """The model in `path`, whatever the file's extension, large weights dropped.

    Raises:
        ConfigError: onnx is not installed, or the file cannot be read or holds no ONNX graph.
    """
    onnx = require_onnx()
    from google.protobuf.message import DecodeError

    data = _read(path)
    model: ModelProto = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise ConfigError(
            f"{path}: not an ONNX model, or a truncated one ({error}); export or download it again"
        ) from error
    del data
    graph = model.graph
    if not model.HasField("graph") or not (graph.node or graph.output or graph.initializer):
        raise ConfigError(f"{path}: holds no ONNX graph; give a model file as torch.onnx.export writes it")
    if not model.opset_import:
        raise ConfigError(f"{path}: names no opset version, so its ops have no meaning; export it again")
    for tensor in _initializers(graph):
        _drop_data(tensor)
    if _damaged(model):
        raise ConfigError(f"{path}: holds names that are not text, so it is damaged; export or download it again")
    return model


def _read(path: Path) -> bytes:
    if not path.exists():
        raise ConfigError(f"{path}: no such file; give the path of an .onnx model")
    if path.is_dir():
        raise ConfigError(f"{path}: is a directory; give the .onnx file inside it")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error}); check its permissions") from error
    if not data:
        raise ConfigError(f"{path}: is empty; export or download the model again")
    if data.startswith(_LFS):
        raise ConfigError(f"{path}: is a Git LFS pointer, not the model; run `git lfs pull`")
    return data


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and every graph inside its nodes, deeply."""
    yield graph
    yield from _graphs_in(graph.node)


def _graphs_in(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs_of(attribute.g)
            for graph in attribute.graphs:
                yield from graphs_of(graph)


def _initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    for each in graphs_of(graph):
        yield from each.initializer


def _drop_data(tensor: onnx.TensorProto) -> None:
    count = 1
    for size in tensor.dims:
        count *= size
    if count > KEEP_ELEMENTS:
        for field in (
            "raw_data",
            "float_data",
            "int32_data",
            "int64_data",
            "double_data",
            "uint64_data",
            "string_data",
        ):
            tensor.ClearField(field)


def _damaged(message: Any) -> bool:
    """Whether a text field holds bytes that are no UTF-8, which protobuf hands on as bytes."""
    for field, value in message.ListFields():
        single = isinstance(value, (str, bytes)) or hasattr(value, "ListFields")
        items = (value,) if single else value
        if field.type == field.TYPE_MESSAGE and any(_damaged(item) for item in items):
            return True
        if field.type == field.TYPE_STRING and any(isinstance(item, bytes) for item in items):
            return True
    return False
