"""Inner compilers: who compiles the graph after our pre-autograd passes, and how our joint-graph hooks reach it.

Three kinds: Inductor (hooks through its configuration), the AOT family (hooks through `partition_fn`), and any other
registered backend or callable (no joint graph is visible to us).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from optpass.backend import compat
from optpass.backend.compat.stack import run_with_room
from optpass.backend.hooks import Hooks
from optpass.errors import ConfigError, did_you_mean
from optpass.options import Options
from optpass.passes.contract import Pass, Stage
from optpass.reporting.model import GraphRecord

log = logging.getLogger(__name__)

INDUCTOR, AOT_EAGER, EAGER = "inductor", "aot_eager", "eager"


def name_of(inner: str | Callable[..., Any]) -> str:
    """Name for the report."""
    return inner if isinstance(inner, str) else f"callable {getattr(inner, '__qualname__', type(inner).__name__)}"


def check(options: Options, mode: str | None) -> list[str]:
    """Validate `inner`, `inductor` and `mode` against this torch; returns what is valid but has no effect.

    Raises:
        ConfigError: no such backend, no such Inductor setting or mode.
    """
    inner = options.inner
    if isinstance(inner, str) and inner not in (INDUCTOR, AOT_EAGER, EAGER):
        known = [n for n in compat.backends() if n != "optpass"]
        if inner not in known:
            raise ConfigError(f"{options.where('inner')}={inner!r}: no such backend; {did_you_mean(inner, known)}")
    if options.inductor:
        known = list(compat.inductor_config_keys())
        for key in options.inductor:
            if _setting(key) not in known:
                value = options.inductor[key]
                raise ConfigError(
                    f"{options.where('inductor')}: no setting {key!r} (= {value!r}); {did_you_mean(key, known)}"
                )
    if mode and mode not in compat.modes():
        raise ConfigError(f"mode={mode!r}: no such mode; {did_you_mean(mode, compat.modes())}")
    if inner != INDUCTOR and (options.inductor or mode):
        # Not an error: OPTPASS_INNER=eager is how one debugs a program that sets them.
        what = f"mode={mode!r}" if mode else "the option 'inductor'"
        return [f"{what} has no effect with inner={name_of(inner)!r}: it configures Inductor"]
    return []


def _setting(key: str) -> str:
    """Inductor takes its settings with `-` for `_`, as on a command line."""
    return key.replace("-", "_")


def _patch(options: Options, setting: str) -> Any:
    return next((value for key, value in options.inductor.items() if _setting(key) == setting), None)


def serving(options: Options, inputs: Sequence[Any]) -> tuple[str | Callable[..., Any], str | None]:
    """The inner compiler that can serve here, and why it is not the one asked for (None if it is)."""
    if options.inner != INDUCTOR:
        return options.inner, None
    kinds = {v.device.type for v in inputs if isinstance(v, torch.Tensor)}
    problem = compat.triton_problem() if "cuda" in kinds else None
    if problem is None and ("cpu" in kinds or not kinds):
        problem = compat.cpp_compiler_problem(_patch(options, "cpp.cxx"))
    return (AOT_EAGER, problem) if problem else (INDUCTOR, None)


def may_go_without(serving: str | Callable[..., Any], passes: Sequence[Pass]) -> bool:
    """Whether a graph that this compiler fails on may be tried once more as it was before any pass.

    A callable of the user's is called once for each graph.
    """
    return serving in (INDUCTOR, AOT_EAGER) and any(item.stage is Stage.DYNAMO for item in passes)


@functools.cache
def log_once(text: str) -> None:
    """One line in the log a process, however many graphs it is true of."""
    log.warning("%s", text)


@functools.cache
def warn_once(problem: str) -> None:
    """One warning a process for each reason that Inductor cannot serve."""
    warnings.warn(
        f"optpass: Inductor cannot build here: {problem}. Using inner='aot_eager' instead: same results, no fused "
        "kernels. Install a C++ compiler (CPU) or Triton (GPU), or set inner='aot_eager' to silence this.",
        stacklevel=2,
    )


def compile_with(
    inner: str | Callable[..., Any],
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: Options,
    mode: str | None,
    hooks: Hooks,
) -> Callable[..., Any]:
    """Compile `gm` with `inner`. `hooks` sees the joint graph where the inner compiler has one."""
    if inner == INDUCTOR:
        patches = inductor_patches(options, mode, hooks)
        if _has_flex_on_cpu(gm):  # an element-wise operation fused behind its template raises NotImplementedError
            patches.setdefault("epilogue_fusion", False)
        # Under an audit there is room already; without one, how deep the caller stands must not slow the compile.
        return run_with_room(compat.compile_fx, gm, inputs, patches, hooks.on_compiled, hooks.lowered)
    if inner == AOT_EAGER:
        return _aot_eager(gm, inputs, hooks)
    if inner == EAGER:
        return gm.forward
    function = compat.lookup_backend(inner) if isinstance(inner, str) else inner
    compiled = function(gm, list(inputs))
    if not callable(compiled):
        raise ConfigError(
            f"inner={name_of(inner)!r} returned {type(compiled).__name__}; an inner compiler must return a callable"
        )
    return compiled  # type: ignore[no-any-return, unused-ignore]


def _has_flex_on_cpu(gm: fx.GraphModule) -> bool:
    for node in gm.graph.nodes:
        if str(node.target) == "flex_attention" and node.args:
            value = node.args[0].meta.get("example_value")
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                return True
    return False


def own_patches(options: Options, mode: str | None) -> dict[str, Any]:
    """Configuration for one Inductor compile without our hooks: the mode's, then the user's."""
    patches: dict[str, Any] = compat.mode_patches(mode) if mode else {}
    return patches | {_setting(key): value for key, value in options.inductor.items()}


def inductor_patches(options: Options, mode: str | None, hooks: Hooks) -> dict[str, Any]:
    """Configuration for one Inductor compile: the mode's, then the user's, then our hooks around theirs."""
    patches = own_patches(options, mode)
    config = compat.inductor_config()

    def present(key: str) -> Any:
        return patches.get(key, getattr(config, key, None))

    if compat.HAS_PASS_HOOKS:
        if hasattr(config, "joint_custom_post_pass"):
            patches["joint_custom_post_pass"] = hooks.joint_pass(
                present("joint_custom_post_pass"), present("custom_partitioner_fn")
            )
        if hasattr(config, "custom_partitioner_fn"):
            patches["custom_partitioner_fn"] = hooks.partitioner(present("custom_partitioner_fn"))
    if compat.matcher_problem() is not None:
        patches["pattern_matcher"] = False
    return patches


def matcher_warning() -> str | None:
    """What the user should know where Inductor's attention matcher cannot be taken out alone; None where it can."""
    problem = compat.matcher_problem()
    if problem is None:
        return None
    return (
        f"Inductor compiles with pattern_matcher=False: its attention patterns can change results, and in this torch "
        f"they cannot be left out alone ({problem})"
    )


def _aot_eager(gm: fx.GraphModule, inputs: Sequence[Any], hooks: Hooks) -> Callable[..., Any]:
    """AOTAutograd with nothing behind it, as the registered 'aot_eager', with our hooks in the partitioner."""

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        hooks.on_joint(joint)
        forward, backward = hooks.partition(joint, joint_inputs, **kwargs)
        hooks.on_partitioned(forward, backward)
        return forward, backward

    def inference(graph: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        hooks.on_joint(graph)
        hooks.on_inference(graph.graph)
        return compat.boxed_nop(graph, example_inputs)

    def forward(graph: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        return compat.boxed_nop(graph, example_inputs)

    return compat.aot_autograd(  # type: ignore[no-any-return, unused-ignore]
        fw_compiler=forward,
        bw_compiler=forward,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )(gm, list(inputs))


@contextlib.contextmanager
def cache_outcome(record: GraphRecord) -> Iterator[None]:
    """Note in `record.cache` whether the inner compiler's caches answered: 'hit', 'miss' or 'bypass'."""
    before = compat.cache_counters()
    yield
    after = compat.cache_counters()
    for outcome in ("bypass", "miss", "hit"):
        for cache in ("autograd_cache", "fxgraph_cache"):
            if after[f"{cache}_{outcome}"] > before[f"{cache}_{outcome}"]:
                record.cache = record.cache or outcome
