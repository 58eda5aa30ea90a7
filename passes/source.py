"""From an FX node home to the user's program: file, line and module path.

Dynamo and AOTAutograd keep `stack_trace` (text) and `nn_module_stack` on nodes; this module only reads them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import fx

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+?)\s*$', re.MULTILINE)
_TORCH_DIR = str(Path(torch.__file__).parent) + os.sep
#: Our own code that calls the user's model, which is nobody's line either.
_CALLER_DIR = str(Path(__file__).parent.parent / "backend") + os.sep
_ATTRIBUTE = re.compile(r"_(?:modules|parameters|buffers)\['([^']*)'\]")
#: The root module, as a frame's local or a plain name; never the beginning of a longer name such as `self_attn`.
_ROOT = re.compile(r"^(?:L\[['\"](?:self|fn)['\"]\]|self)(?=$|[.\[])")
_INDEX = re.compile(r"\[['\"]?([^'\"\]]*)['\"]?\]")


@dataclass(frozen=True)
class Source:
    """Where a node comes from; every field is None where the graph does not say."""

    file: str | None = None
    line: int | None = None
    module: str | None = None

    def __str__(self) -> str:
        place = f"{Path(self.file).name}:{self.line}" if self.file else "unknown line"
        return f"{self.module} ({place})" if self.module else place


def locate(node: fx.Node) -> Source:
    """The innermost line of the user's own code, and the module path such as `blocks.3.attn`."""
    file, line = _innermost_user_frame(node.meta.get("stack_trace") or "")
    return Source(file, line, module_path(node))


def is_backward(node: fx.Node) -> bool:
    """True for a node that autograd made; False for a forward op, also one that the partitioner recomputes."""
    tag = node.meta.get("partitioner_tag")
    return tag == "is_backward" if tag is not None else bool(node.meta.get("autograd_backward"))


@lru_cache(maxsize=4096)
def _innermost_user_frame(stack: str) -> tuple[str | None, int | None]:
    frames = [(m["file"], int(m["line"])) for m in _FRAME.finditer(stack)]
    theirs = [frame for frame in frames if not frame[0].startswith(_CALLER_DIR)]
    for file, line in reversed(theirs):
        if not file.startswith(_TORCH_DIR):
            return file, line
    return theirs[-1] if theirs else (None, None)


def module_path(node: fx.Node) -> str | None:
    """Dotted path of the innermost module that the node ran in; None at the top."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    path = next(reversed(stack.values()))[0]
    return clean_path(path) or None


@lru_cache(maxsize=4096)
def clean_path(path: str) -> str:
    """`L['self']._modules['blocks']._modules['0']` as `blocks.0`; also the older `L__self___blocks_0` left as is."""
    path = _ROOT.sub("", path)
    path = _ATTRIBUTE.sub(r"\1", path)
    path = _INDEX.sub(r".\1", path)
    return path.replace("..", ".").strip(".")
