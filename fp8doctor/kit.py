"""What a check imports: facts, layers, times, lines to paste, and the words of a finding.

A check needs this module and the standard library. What only one check uses stands in its own file.
"""

from __future__ import annotations

from fp8doctor.analysis.arms import (
    all_too_large,
    arm,
    arm_if_any,
    arm_in_time,
    base_of,
    best_bf16,
    ratio,
    uses_fp8,
)
from fp8doctor.analysis.by_accelerate import ALL_GATHER
from fp8doctor.analysis.compile_coverage import compile_treatment, is_below, is_inside, needs_compile
from fp8doctor.analysis.expected_fp8_gemms import all_fp8, counted_gemms, due_gemms, ran_in_bf16_later
from fp8doctor.analysis.fp8_request import (
    accelerate_of_model,
    asked_by_environment,
    autocast_of,
    fp8_was_asked_for,
    may_have_converted,
    under_unsloth,
)
from fp8doctor.analysis.fp8_weights import (
    copies_gib,
    frozen_fp8_weights,
    holds_master_weights,
    keeps_copies,
    trained_fp8_weights,
)
from fp8doctor.analysis.layers import fits_fp8, flops_share_pct, in_python, in_words, named, wrapped_in_python
from fp8doctor.analysis.memory import STATES, estimated_peak, gpu_gib, memory_of, optimizer_states
from fp8doctor.analysis.modelled_host import modelled_host_bound
from fp8doctor.analysis.outcome import measured_speed
from fp8doctor.analysis.rank_comparison import (
    behind,
    exposed_ms,
    exposed_of_ranks,
    step_ms,
    timed_ranks,
    unlike_gpus,
)
from fp8doctor.analysis.recipe_support import (
    FIRST_WITH_BF16,
    assumed_gpus,
    capability,
    has_fp8,
    installed,
    needs,
    unmet,
    unmet_on_amd,
)
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.step_difference import (
    SHOWN_MS,
    breakdown_of,
    plain_attention,
    profiled_on_gpu,
    waits_for_the_host,
    watched_on_gpu,
)
from fp8doctor.analysis.timed_step import ran_on_a_gpu
from fp8doctor.analysis.training_bugs import region_of
from fp8doctor.analysis.treatment_table import AUTOCAST_BF16, CHECKPOINTING_OFF, FUSABLE, ON_THIS_GPU
from fp8doctor.analysis.waiting import counts, host_is_ahead
from fp8doctor.cost import modelled_gpu, rows_seen
from fp8doctor.diagnosis.leaving_fp8 import stay_in_bf16
from fp8doctor.diagnosis.treatments import (
    checkpointing_off,
    convert_again,
    describe,
    keep_in_bf16,
    larger_batch,
    with_recipe,
)
from fp8doctor.facts import (
    NOT_RECORDED,
    Arm,
    ArmCut,
    ArmName,
    Attention,
    Breakdown,
    Checkpointing,
    Distributed,
    Facts,
    Gpu,
    KernelGroup,
    Linear,
    Observation,
    Package,
    Rank,
    Ranks,
    Unrecorded,
    Value,
    if_recorded,
    recorded,
)
from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.examples import example, float8, profiled, variant
from fp8doctor.facts.no_number import why_of
from fp8doctor.finding import Finding, NotApplicable, Saving, Severity, Treatment
from fp8doctor.recipes import recipe_of, stack_of
from fp8doctor.registry import check
from fp8doctor.wording import percent, plural
