"""What the audit reads of Dynamo: its hook points, the registry of graph breaks, compile metrics.

Each reader gives None (or nothing) where this torch has no such thing; `audit_problems` says what is lost for it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from optpass.backend.compat.audit_trace import TraceListener as TraceListener
from optpass.backend.compat.audit_trace import frame_in_compile as frame_in_compile
from optpass.backend.compat.audit_trace import trace_log as trace_log
from optpass.backend.compat.hooks import HookPoint, Kwargs


def _one_more_frame(kwargs: Kwargs) -> Kwargs:
    """Dynamo skips so many of its own frames in stack traces: the patch adds one."""
    return kwargs | {"skip": kwargs.get("skip", 0) + 1}


LOG_GRAPH_BREAK = HookPoint(
    "torch._dynamo.symbolic_convert",
    "InstructionTranslatorBase.log_graph_break",
    ("self", "code_options", "reason", "exc"),
    "graph breaks are read from Dynamo's trace log: columns may be missing",
    "breaks",
)
UNSUPPORTED = HookPoint(
    "torch._dynamo.exc",
    "Unsupported.__init__",
    ("self", "msg"),
    "breaks have no module path and no end of expression",
    "module paths",
)
USER_ERROR = HookPoint(
    "torch._dynamo.exc",
    "UserError.__init__",
    ("self", "error_type", "msg"),
    "some breaks have no module path",
    "module paths of user errors",
)
CONVERT_FRAME = HookPoint(
    "torch._dynamo.convert_frame",
    "ConvertFrameAssert.__call__",
    ("self", "frame", "cache_entry", "hooks", "frame_state", "skip"),
    "no costs and no functions; breaks that raise (fullgraph=True) are not recorded",
    "frames",
    adjust=_one_more_frame,
)
CALL_COMPILER = HookPoint(
    "torch._dynamo.output_graph",
    "OutputGraph.call_user_compiler",
    ("self", "gm", "example_inputs"),
    "graphs are not counted, and what crosses a break is not known",
    "graphs",
)
ENTER_COMPILED = HookPoint(
    "torch._dynamo.eval_frame",
    "_maybe_set_eval_frame",
    (),
    "calls of compiled functions are not timed",
    "calls",
    caller="compile_wrapper",
    before_only=True,  # it switches Dynamo on: what runs afterwards would be traced
)

AUDIT_POINTS = (LOG_GRAPH_BREAK, UNSUPPORTED, USER_ERROR, CONVERT_FRAME, CALL_COMPILER, ENTER_COMPILED)


def audit_problems() -> list[str]:
    """Hook points that this torch lacks, each with what is less precise for it."""
    from optpass.backend.compat.audit_entry import ENTRY_POINTS
    from optpass.backend.compat.audit_frames import FRAME
    from optpass.backend.compat.audit_guards import guard_problems

    points = (*AUDIT_POINTS, FRAME, *ENTRY_POINTS)
    found = [f"{problem}: {p.loses}" for p in points if (problem := p.problem()) is not None]
    found += guard_problems()
    if not gb_ids():
        found.append("torch._dynamo's registry of graph breaks is missing: breaks have no GB id")
    return found


def gb_ids() -> dict[str, str]:
    """GB id by type of break, names of old included; empty where torch has no registry."""
    from torch._dynamo import exc

    load = getattr(exc, "_load_gb_type_to_gb_id_map", None)
    return dict(load()) if callable(load) else {}


def resumed_from(code: types.CodeType) -> types.CodeType | None:
    """The code of the function that a function made by Dynamo goes on with; None for one that Dynamo did not make."""
    from torch._dynamo import resume_execution

    cache = getattr(resume_execution, "ContinueExecutionCache", None)
    made = getattr(cache, "generated_code_metadata", None)
    seen = 0
    found: types.CodeType | None = None
    while made is not None and code in made and seen < 100:
        code = found = made[code].code
        seen += 1
    return found


def is_resume(code: types.CodeType) -> bool:
    """Whether Dynamo made this function to go on behind a break."""
    return code.co_name.startswith("torch_dynamo_resume_in")


def innermost_translator() -> Any:
    """The translator of the innermost frame that is being traced in this thread; None outside of a trace."""
    from torch._dynamo import symbolic_convert

    root = getattr(getattr(symbolic_convert, "tls", None), "current_tx", None)
    output = getattr(root, "output", None)
    return getattr(output, "current_tx", None) if output is not None else None


def inside_own_frame(function: Any) -> Any:
    """What a function of Dynamo's own calls, which stands in for one without a frame; None for any other function."""
    code = getattr(function, "__code__", None)
    if code is None or not code.co_filename.endswith("_dynamo/external_utils.py") or "fn" not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index("fn")].cell_contents


def callable_inside(frame: Any) -> Any:
    """What the user compiled, where the frame to be compiled is Dynamo's own around it; None for any other frame."""
    code = resumed_from(frame.f_code) or frame.f_code
    if code.co_name != "inner" or not code.co_filename.endswith("_dynamo/external_utils.py"):
        return None
    names, cells = frame.f_code.co_freevars, frame.closure or ()
    if "fn" in names and names.index("fn") < len(cells):
        return cells[names.index("fn")].cell_contents
    return frame.f_locals.get("fn")


def is_break(error: BaseException | None) -> bool:
    """Whether an error is Dynamo's word that it cannot go on, rather than a fault of the program or a restart."""
    from torch._dynamo import exc

    names = ("Unsupported", "UserError", "StepUnsupported", "UncapturedHigherOrderOpError")
    kinds = tuple(kind for name in names if isinstance(kind := getattr(exc, name, None), type))
    return isinstance(error, kinds)


def is_always_raised(error: BaseException) -> bool:
    """Whether Dynamo raises this break to the user also where graphs may break."""
    from torch._dynamo import exc

    kind = getattr(exc, "UncapturedHigherOrderOpError", None)
    return isinstance(kind, type) and isinstance(error, kind)


def backend_name(convert: Any) -> str:
    """Name of the backend that a `ConvertFrameAssert` compiles with, e.g. 'inductor'."""
    found = _backend(convert)
    name = getattr(found, "compiler_name", None) or getattr(found, "__name__", "")
    return name if isinstance(name, str) else ""


def backend_options(convert: Any) -> Mapping[str, Any]:
    """The `options` of the `torch.compile` that a `ConvertFrameAssert` compiles for."""
    settings = getattr(_backend(convert), "kwargs", None)
    found = settings.get("options") if isinstance(settings, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def raises(convert: Any, error: BaseException) -> bool:
    """Whether Dynamo raises to the user an error that ended the compile of a frame, rather than run it in eager.

    `convert`: the `ConvertFrameAssert` that compiled it.
    """
    from torch._dynamo import config

    box = getattr(convert, "_box", None)
    whole = getattr(convert, "_one_graph", False) or getattr(box, "error_on_graph_break", False)
    soft = config.suppress_errors or (is_break(error) and not is_always_raised(error))
    return bool(whole or not soft)


def _backend(convert: Any) -> Any:
    found, seen = convert, 0
    while (inner := getattr(found, "_torchdynamo_orig_backend", None)) is not None and seen < 10:
        found, seen = inner, seen + 1
    return found


def latest_metrics(code: types.CodeType) -> Any:
    """Dynamo's metrics of the compile of `code` that ended just now; None where it filed none."""
    from torch._dynamo import utils

    filed = getattr(utils, "_compilation_metrics", None)
    if not filed:
        return None
    last = filed[-1]
    same = getattr(last, "co_name", None) == code.co_name and (
        getattr(last, "co_firstlineno", None) == code.co_firstlineno
    )
    return last if same else None


def above_dynamo() -> Iterator[types.FrameType]:
    """The frames that called into what Dynamo is compiling, innermost first."""
    frame: types.FrameType | None = sys._getframe(1)
    below = True
    while frame is not None:
        name = frame.f_code.co_filename
        if below and name.endswith("convert_frame.py"):
            below = False
        elif not below and not name.endswith(("convert_frame.py", "eval_frame.py")):
            yield frame
        frame = frame.f_back


def traced_stack() -> Sequence[Any]:
    """The stack that this thread traces, the outermost first; empty outside of a trace."""
    context = getattr(torch._guards, "TracingContext", None)
    read = getattr(context, "extract_stack", None)
    return tuple(read()) if callable(read) else ()


def source_name(node: Any) -> str:
    """Dynamo's name of where a placeholder comes from, `L['x']`; '' where it does not say."""
    source = getattr(node, "_dynamo_source", None) or getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def carried_locals(output: Any) -> dict[str, str]:
    """Local variables of the frame whose graph ends, and the graph's node that each holds, if it holds one."""
    root = getattr(output, "root_tx", None)
    found: dict[str, str] = {}
    for name, variable in dict(getattr(root, "symbolic_locals", None) or {}).items():
        node = getattr(getattr(variable, "__dict__", {}).get("proxy"), "node", None)
        if node is not None:
            found[str(name)] = str(node.name)
    return found


def size_hint(size: Any) -> int | None:
    """An int for a size, without a guard on a symbolic one."""
    if isinstance(size, int):
        return size
    node = getattr(size, "node", None)
    hint = getattr(node, "hint", None)
    return int(hint) if isinstance(hint, (int, float)) else None
