"""What a check imports: facts, layers, times, lines to paste, and the words of a finding.

A check needs this module and the standard library. What only one check uses stands in its own file.
"""

from __future__ import annotations

from fp8doctor import recipes
from fp8doctor.analysis import arms, compile_coverage, losing_layers, module_names, padding
from fp8doctor.analysis.arms import arm, arm_if_any, savings, uses_fp8
from fp8doctor.analysis.compile_coverage import compile_treatment, is_below, is_inside, needs_compile
from fp8doctor.analysis.expected_fp8_gemms import kept_in_bf16, multiplied_in_fp8
from fp8doctor.analysis.finite_steps import finite_steps
from fp8doctor.analysis.fp8_request import asked_by_environment, fp8_was_asked_for, under_unsloth
from fp8doctor.analysis.layer_gain import gains
from fp8doctor.analysis.layers import (
    fits_fp8,
    flops_share_pct,
    in_python,
    in_words,
    makes_logits,
    named,
    would_be_converted,
)
from fp8doctor.analysis.noise import script_interval
from fp8doctor.analysis.recipe_support import (
    CUDNN_FLOOR,
    capability,
    has_fp8,
    installed,
    multiple_of,
    unaligned,
)
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.timed_step import ran_on_a_gpu
from fp8doctor.cost import (
    eager_balance,
    eager_cast_saving,
    micro_batches,
    modelled_gpu,
    mxfp8_experts,
    routed_rows,
    rows_seen,
    step_cost,
)
from fp8doctor.diagnosis.leaving_fp8 import stay_in_bf16
from fp8doctor.diagnosis.treatments import convert_again, describe, keep_in_bf16, with_recipe
from fp8doctor.facts import (
    NOT_RECORDED,
    Arm,
    ArmCut,
    ArmName,
    Blocks,
    CompileMark,
    Dynamo,
    Facts,
    Linear,
    Scaling,
    Trial,
    Unrecorded,
    if_recorded,
    recorded,
)
from fp8doctor.facts.arm_names import BF16_BASELINES, Reason
from fp8doctor.facts.examples import example, float8, profiled, variant
from fp8doctor.facts.no_number import sentence_of, why_of
from fp8doctor.facts.training import UNNAMED
from fp8doctor.finding import Finding, NotApplicable, Saving, Severity, Treatment
from fp8doctor.recipes import recipe_of, stack_of
from fp8doctor.registry import check
from fp8doctor.wording import percent, plural, times
