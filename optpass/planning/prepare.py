"""The backend's passes on a graph that is only planned, so that the plan is of the step that would run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import fx

from optpass.backend import pipeline
from optpass.backend.memory.partition.ready import Modules, made_ready
from optpass.options import Options
from optpass.passes.attention.elsewhere import as_on_a_gpu
from optpass.passes.contract import PassContext, Stage
from optpass.passes.devices import DeviceSpec
from optpass.passes.registry import selected


class Prepared:
    """Runs the passes of the Dynamo stage on each graph, and remembers what they did.

    What a module's tensors hold is not known ahead of time, so what rests on that is left as it is written.

    Args:
        options: which passes run.
        device: what they decide for.
    """

    def __init__(self, options: Options, device: DeviceSpec) -> None:
        self.options, self.device = _for_plan(options, device), device
        self.applied: Counter[str] = Counter()
        self.declined: Counter[str] = Counter()

    @property
    def as_inductor(self) -> bool:
        """Whether the graph is traced as Inductor would, rather than as 'aot_eager'."""
        return self.options.inner == "inductor"

    def __call__(self, gm: fx.GraphModule) -> None:
        """Run them on `gm`, in place."""
        context = PassContext(self.options, lambda: self.device, graph_id="plan", training=True, stand_in=True)
        products: dict[str, Any] = {}
        for record in pipeline.run_stage(Stage.DYNAMO, selected(self.options), gm, context, products):
            self.applied[record.name] += len(record.applied)
            self.declined[record.name] += len(record.declined)
        if self.device.kind != "cpu":
            as_on_a_gpu(gm)

    def ready(
        self, joint: fx.GraphModule, inputs: Any, split: Callable[..., Modules], given: dict[str, Any]
    ) -> Modules:
        """A joint graph split, and in the form that a compile of the step would plan it in."""
        here = self.device.kind == "cpu"
        return made_ready(joint, inputs, split, given, fused=self.as_inductor, redraws=here)

    def notes(self) -> list[str]:
        """What the passes did that changes how much memory a step needs."""
        notes = []
        if self.applied["attention"]:
            notes.append(f"attention: {self.applied['attention']} sites run on fused kernels, as they would compiled")
        if self.declined["attention"]:
            notes.append(
                f"attention: {self.declined['attention']} sites stay as they are written (optpass analyze or a run's "
                "report says why; what rests on the contents of a buffer is known only in a run)"
            )
        return notes


def _for_plan(options: Options, device: DeviceSpec) -> Options:
    """The options as they take effect on tensors that stand for those of a device that is not present.

    The cost gate weighs kernels by where the tensors are, which here is the host; on a GPU a fused kernel pays at all
    but the smallest sizes, and it is what decides a plan.
    """
    if device.kind == "cpu" or options.attention.mode != "auto":
        return options
    return options.model_copy(update={"attention": options.attention.model_copy(update={"mode": "always"})})
