"""One compiled graph from capture to its last call: its record, its hooks, and what its passes found.

Sessions live as long as the process (or until `reset_report`), so that the roofline can be priced for any device when
somebody asks. They hold fake tensors and records only, never the user's data.
"""

from __future__ import annotations

import logging
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from optpass.backend import capture, compat, cudnn, pipeline, snapshot
from optpass.backend.hooks import Hooks
from optpass.options import Options
from optpass.passes.contract import AtenGraph, ContentGuard, Pass, PassContext, Stage, no_contents
from optpass.passes.devices import DeviceSpec
from optpass.reporting import store
from optpass.reporting.model import GraphRecord, PassRecord

log = logging.getLogger(__name__)

#: Calls timed for `t_steady_s`, after the first; then the timing steps aside.
STEADY_CALLS = 20


class Session:
    """Everything about one graph that Dynamo handed over.

    Args:
        gm: the Dynamo graph; transformed in place by the Dynamo-stage passes.
        options: resolved options.
        passes: passes to run, ordered.
        device: spec to decide for.
        uuid: cache identity.
        past_uuid: that of what follows the partitioning.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        options: Options,
        passes: Sequence[Pass],
        device: Callable[[], DeviceSpec],
        uuid: str,
        past_uuid: str | None = None,
    ) -> None:
        collected = store.current()
        self.passes, self.device = passes, device
        self.record = collected.add_graph(
            GraphRecord(id=collected.next_id(), function=_function_name(gm), nodes=len(gm.graph.nodes))
        )
        self.record.dynamic = _is_dynamic(gm.graph)
        self.products: dict[str, Any] = {}
        self.hooks = Hooks(uuid, self._on_joint, self._on_partitioned, self._on_inference, self._on_compiled, past_uuid)
        self._options = options
        self._aten: tuple[AtenGraph, ...] = ()
        self._source: capture.Source | None = None
        self._tracing = threading.Lock()

    @property
    def source(self) -> capture.Source | None:
        """The graph as it was captured; None after it was compiled before our eyes."""
        return self._source

    # ---- the stages -------------------------------------------------------------------------------------------

    def before_autograd(
        self, gm: fx.GraphModule, contents: Callable[[fx.Node], torch.Tensor | None] = no_contents
    ) -> list[ContentGuard]:
        """Run the Dynamo-stage passes, and keep what is needed to trace the graph again if the caches hit.

        Args:
            gm: the Dynamo graph.
            contents: as in `PassContext`.

        Returns:
            The contents that the passes' changes rest on.
        """
        guards: list[ContentGuard] = []
        self._run(Stage.DYNAMO, gm, contents, guards)
        self._source = capture.Source.of(gm)
        return guards

    def after_compile(self) -> None:
        """Run the compiled-stage passes, if the inner compiler showed us its graphs (not on a cache hit)."""
        if self._aten:
            # These passes look at `PassContext.aten`; the Dynamo graph is the inner compiler's by now.
            self._run(Stage.COMPILED, fx.GraphModule({}, fx.Graph()))
            self._aten, self._source = (), None

    def file(self, record: PassRecord | None) -> None:
        """Add what something beside the passes did to this graph's record."""
        if record is not None:
            with store.current().lock:
                self.record.passes.append(record)

    def changed(self) -> list[str]:
        """Passes that have changed the Dynamo graph."""
        return [item.name for item in self.record.passes if item.stage == Stage.DYNAMO and item.applied]

    def withdraw(self) -> None:
        """This graph is never run: nothing of it is to be reported."""
        SESSIONS.remove(self)
        store.current().remove_graph(self.record.id)

    def supersede(self, over: bool = True) -> None:
        """The memory plan of this graph is in force no more: another compile of the graph serves its calls. With
        `over` False it is again."""
        kinds = ("memory budget", "memory budget of the first step")
        before, after = kinds if over else reversed(kinds)
        with store.current().lock:
            for record in self.record.passes:
                for site in (*record.applied, *record.declined):
                    if site.kind == before:
                        site.kind = after

    def _run(
        self,
        stage: Stage,
        gm: fx.GraphModule,
        contents: Callable[[fx.Node], torch.Tensor | None] = no_contents,
        guards: list[ContentGuard] | None = None,
    ) -> None:
        context = PassContext(
            self._options, self.device, self.record.id, self.record.training, self._aten, contents=contents
        )
        start = time.perf_counter()
        with compat.without_saved_tensors_hooks():  # an activation checkpoint counts what is saved
            records = pipeline.run_stage(stage, self.passes, gm, context, self.products, guards)
        with store.current().lock:
            self.record.passes.extend(records)
            self.record.t_passes_s += time.perf_counter() - start

    def _on_joint(self, gm: fx.GraphModule) -> None:
        cudnn.protect(gm)
        self._run(Stage.JOINT, gm)

    def _on_partitioned(self, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        self.record.training = True
        self._aten = (
            AtenGraph("forward", snapshot.copy_graph(forward.graph)),
            AtenGraph("backward", snapshot.copy_graph(backward.graph)),
        )

    def _on_inference(self, graph: fx.Graph) -> None:
        self._aten = (AtenGraph("forward", snapshot.copy_graph(graph)),)

    def _on_compiled(self, is_backward: bool, seconds: float) -> None:
        if is_backward:  # lazily, at the first backward; the forward's is inside the compile that is being timed
            with store.current().lock:
                self.record.t_compile_s += seconds

    # ---- on demand --------------------------------------------------------------------------------------------

    def product(self, name: str) -> Any:
        """What the analysis pass `name` found; traced now if a cache hit kept the inner compiler from tracing.

        None where the pass is disabled, failed, or the graph cannot be traced (a warning says so).
        """
        with self._tracing:
            if name not in self.products and self._source is not None and any(p.name == name for p in self.passes):
                source, self._source = self._source, None
                try:
                    self._aten = source.trace()
                except Exception as error:  # noqa: BLE001  # a report must not die of one graph; it says which and why
                    text = " ".join(str(error).split())[:200]
                    store.current().warn(f"graph {self.record.id} could not be traced for the report: {text}")
                    return None
                self.record.training = self.record.training or len(self._aten) > 1
                self.after_compile()
            return self.products.get(name)


class Timed:
    """The compiled callable, timing its first calls for the report and then stepping aside.

    Host time of the forward: on a GPU, what the launch takes.
    """

    def __init__(self, function: Callable[..., Any], record: GraphRecord) -> None:
        self._function = function
        self._record = record
        self._left = STEADY_CALLS + 1
        self._steady: list[float] = []
        self.__name__ = getattr(function, "__name__", "optpass_compiled")

    def __call__(self, *args: Any) -> Any:
        if self._left <= 0:
            return self._function(*args)
        start = time.perf_counter()
        result = self._function(*args)
        self._file(time.perf_counter() - start)
        return result

    def _file(self, seconds: float) -> None:
        with store.current().lock:
            record, self._left = self._record, self._left - 1
            record.calls += 1
            if record.t_first_s is None:
                record.t_first_s = record.t_compile_s + seconds
            else:
                self._steady.append(seconds)
                record.t_steady_s = statistics.median(self._steady)


class Sessions:
    """The sessions of this process, for whoever prices them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: list[Session] = []

    def add(self, session: Session) -> None:
        """File a session."""
        with self._lock:
            self._items.append(session)

    def remove(self, session: Session) -> None:
        """Forget one, if it is here still."""
        with self._lock:
            self._items = [item for item in self._items if item is not session]

    def all(self) -> list[Session]:
        """A copy of the list."""
        with self._lock:
            return list(self._items)

    def clear(self) -> None:
        """Forget them all."""
        with self._lock:
            self._items.clear()

    def after_fork(self) -> None:
        """In a forked child: the graphs are the parent's to report, and its lock may be held by a thread not here."""
        self.__init__()  # type: ignore[misc]


SESSIONS = Sessions()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SESSIONS.after_fork)


def _function_name(gm: fx.GraphModule) -> str:
    """Dynamo's compile id, and the first line of the user's that the graph has."""
    from optpass.passes.source import locate

    identifier = compat.compile_id()
    place = next((str(locate(n)) for n in gm.graph.nodes if n.op != "placeholder" and n.meta.get("stack_trace")), "")
    return f"[{identifier}] {place}".strip() if identifier else place


def _is_dynamic(graph: fx.Graph) -> bool:
    return any(isinstance(n.meta.get("example_value"), torch.SymInt) for n in graph.nodes if n.op == "placeholder")
