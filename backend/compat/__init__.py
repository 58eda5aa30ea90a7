"""Every private torch import of optpass, in this one folder, each with what to do where it is missing.

`self_test()` names the hooks that this torch lacks; a missing one degrades its feature with a message instead of
failing the user's run. Nothing here holds logic of optpass.
"""

from __future__ import annotations

from optpass.backend.compat.attention_matcher import is_attention_pattern as is_attention_pattern
from optpass.backend.compat.attention_matcher import is_shielded as is_shielded
from optpass.backend.compat.attention_matcher import matcher_problem as matcher_problem
from optpass.backend.compat.attention_matcher import shielded as shielded
from optpass.backend.compat.audit import audit_problems as audit_problems
from optpass.backend.compat.caches import autograd_cache_keys as autograd_cache_keys
from optpass.backend.compat.caches import cache_counters as cache_counters
from optpass.backend.compat.caches import inductor_cache_dir as inductor_cache_dir
from optpass.backend.compat.caches import keeps_compiled_whole as keeps_compiled_whole
from optpass.backend.compat.dynamo import FakeCopyMode as FakeCopyMode
from optpass.backend.compat.dynamo import FakeTensor as FakeTensor
from optpass.backend.compat.dynamo import FakeTensorMode as FakeTensorMode
from optpass.backend.compat.dynamo import PlanningMode as PlanningMode
from optpass.backend.compat.dynamo import RestartAnalysis as RestartAnalysis
from optpass.backend.compat.dynamo import TracingContext as TracingContext
from optpass.backend.compat.dynamo import aot_autograd as aot_autograd
from optpass.backend.compat.dynamo import aot_for_analysis as aot_for_analysis
from optpass.backend.compat.dynamo import backends as backends
from optpass.backend.compat.dynamo import boxed_nop as boxed_nop
from optpass.backend.compat.dynamo import compile_id as compile_id
from optpass.backend.compat.dynamo import detect_fake_mode as detect_fake_mode
from optpass.backend.compat.dynamo import disable_dynamo as disable_dynamo
from optpass.backend.compat.dynamo import fake_mode_for_planning as fake_mode_for_planning
from optpass.backend.compat.dynamo import lookup_backend as lookup_backend
from optpass.backend.compat.dynamo import modules_of_call as modules_of_call
from optpass.backend.compat.dynamo import needs_values as needs_values
from optpass.backend.compat.dynamo import quiet_dynamo as quiet_dynamo
from optpass.backend.compat.dynamo import real_tensors as real_tensors
from optpass.backend.compat.dynamo import reset_dynamo as reset_dynamo
from optpass.backend.compat.dynamo import tensors_of_call as tensors_of_call
from optpass.backend.compat.dynamo import trace_artifact as trace_artifact
from optpass.backend.compat.dynamo import tracing as tracing
from optpass.backend.compat.dynamo import undisabled as undisabled
from optpass.backend.compat.dynamo import without_saved_tensors_hooks as without_saved_tensors_hooks
from optpass.backend.compat.inductor import HAS_PASS_HOOKS as HAS_PASS_HOOKS
from optpass.backend.compat.inductor import Compiled as Compiled
from optpass.backend.compat.inductor import CustomGraphPass as CustomGraphPass
from optpass.backend.compat.inductor import CustomPartitionerFn as CustomPartitionerFn
from optpass.backend.compat.inductor import compile_fx as compile_fx
from optpass.backend.compat.inductor import cpp_compiler_problem as cpp_compiler_problem
from optpass.backend.compat.inductor import default_partition as default_partition
from optpass.backend.compat.inductor import inductor_config as inductor_config
from optpass.backend.compat.inductor import inductor_config_keys as inductor_config_keys
from optpass.backend.compat.inductor import inductor_decompositions as inductor_decompositions
from optpass.backend.compat.inductor import joint_graph_passes as joint_graph_passes
from optpass.backend.compat.inductor import lays_out_convolutions as lays_out_convolutions
from optpass.backend.compat.inductor import min_cut_partition as min_cut_partition
from optpass.backend.compat.inductor import mode_patches as mode_patches
from optpass.backend.compat.inductor import modes as modes
from optpass.backend.compat.inductor import runs_beside as runs_beside
from optpass.backend.compat.inductor import triton_problem as triton_problem
from optpass.backend.compat.memory_names import budget_problem as budget_problem
from optpass.backend.compat.schedule import buffer_layout as buffer_layout
from optpass.backend.compat.schedule import current_graph_is_backward as current_graph_is_backward
from optpass.backend.compat.schedule import extern_inputs as extern_inputs
from optpass.backend.compat.schedule import scheduler_class as scheduler_class
from optpass.backend.compat.schedule import symbol_hint as symbol_hint
from optpass.backend.compat.sources import KNOWS_MODULES as KNOWS_MODULES
from optpass.backend.compat.sources import is_wrapped as is_wrapped
from optpass.backend.compat.sources import module_attribute as module_attribute
from optpass.backend.compat.sources import say_module_attributes as say_module_attributes
from optpass.backend.compat.sources import unwrapped as unwrapped


def self_test() -> list[str]:
    """Hooks that this torch lacks, each with the feature that is less precise for it; empty when all is well."""
    missing: list[str] = []
    if not HAS_PASS_HOOKS:
        missing.append("torch._inductor.custom_graph_pass: joint-graph passes do not run under Inductor")
    if joint_graph_passes() is None:
        missing.append("Inductor's joint-graph passes: bytes after fusion are predicted without them")
    for name in ("joint_custom_post_pass", "custom_partitioner_fn"):
        if not hasattr(inductor_config(), name):
            missing.append(f"torch._inductor.config.{name}: joint-graph passes do not run under Inductor")
    problem = matcher_problem()
    if problem is not None:
        missing.append(f"{problem}: Inductor's patterns are all left out, not only those of attention, which are wrong")
    if not KNOWS_MODULES:
        missing.append("torch._dynamo.source.NNModuleSource: nothing is proved from what buffers hold")
    problem = budget_problem(inductor=True)
    if problem is not None:
        missing.append(f"{problem}: the option 'memory_budget' has no effect")
    missing.extend(audit_problems())
    return missing
