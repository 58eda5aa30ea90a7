"""What the hooks tell, as plain data: breaks, frames, graphs. Nothing here judges it."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optpass.backend.audit.halves import Half


@dataclass(frozen=True)
class Place:
    """One frame of a traced stack: where in the source, and in which function.

    Lines count from 1, columns from 0 in bytes of UTF-8, as Python's compiler counts them.
    """

    file: str
    line: int
    function: str
    column: int | None = None
    end_line: int | None = None
    end_column: int | None = None


@dataclass(frozen=True)
class RawBreak:
    """One report of a break by Dynamo, before folding.

    Attributes:
        kind: Dynamo's type of break, '' where the message alone tells.
        message: what Dynamo says, with the chain of breaks that followed from one another.
        stack: traced frames, outermost first, the break's own last; empty where Dynamo gave up on the frame as such.
        above: frames that called into the compiled one, innermost first.
        module: path of the module that was being traced.
        effect: 'split', 'rest eager', 'frame eager' or 'error'.
        enters: whether it is the entering of a `with` block that broke.
    """

    kind: str
    message: str
    stack: tuple[Place, ...]
    above: tuple[Place, ...]
    module: str | None
    effect: str
    enters: bool = False


@dataclass(frozen=True)
class GraphEvent:
    """One graph that the backend got; `half` where it is beside a break and somebody asks for the roofline of it."""

    ops: int
    output_bytes: float | None
    seconds: float
    half: Half | None = None


@dataclass
class FrameEvent:
    """One attempt of Dynamo's to compile a frame, from its first instruction to code or to an error.

    Attributes:
        code: what was compiled: the user's function, or one that Dynamo made to go on behind a break.
        origin: the user's function, also behind a break.
        wraps: what it hands its call on to, where it is the forward of a DistributedDataParallel.
        backend: name of the backend that it is compiled with.
        options: what the user gave that backend.
        resumes: code objects that Dynamo made in it, to go on behind the break that ended it.
        compiled_names: globals that hold its compiled graphs.
        guard_us: one check of its guards.
        left: Dynamo gave up on it for a reason that it does not raise: it runs in eager.
    """

    code: types.CodeType | None
    origin: types.CodeType | None
    resumed: bool = False
    backend: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    breaks: list[RawBreak] = field(default_factory=list)
    graphs: list[GraphEvent] = field(default_factory=list)
    resumes: tuple[types.CodeType, ...] = ()
    compiled_names: tuple[str, ...] = ()
    namespace: dict[str, Any] | None = None
    seconds: float = 0.0
    compiled: bool = False
    skip_reason: str | None = None
    error: str | None = None
    ops: int | None = None
    guard_us: float | None = None
    left: bool = False
    wraps: types.CodeType | None = None
