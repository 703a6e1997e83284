"""What a check imports: facts, layers, times, lines to paste, and the words of a finding.

A check needs this module and the standard library. What only one check uses stands in its own file.
"""

from __future__ import annotations

from packaging.version import Version

from fp8doctor.analysis.arms import arm, arm_if_any, uses_fp8
from fp8doctor.analysis.by_accelerate import exported, settings
from fp8doctor.analysis.compile_coverage import (
    compile_all,
    compile_treatment,
    is_below,
    is_inside,
    needs_compile,
)
from fp8doctor.analysis.expected_fp8_gemms import all_fp8, counted_gemms, due_gemms, kept_in_bf16
from fp8doctor.analysis.fp8_request import (
    asked_by_argument,
    asked_by_environment,
    converted_a_copy,
    converted_nothing,
    fp8_was_asked_for,
    launched_with_fp8,
    may_have_converted,
    of_converter,
    precision_of,
    under_unsloth,
    was_prepared,
)
from fp8doctor.analysis.fp8_weights import is_grouped, is_mxfp8
from fp8doctor.analysis.layers import (
    FP8_MULTIPLE,
    NO_LINEAR,
    computes_forward_in_fp8,
    fits_fp8,
    flops_share_pct,
    in_python,
    layer_label,
    may_be_taken,
    named,
    shares_are_known,
    stores_fp8,
    too_small,
    would_be_converted,
)
from fp8doctor.analysis.losing_layers import APART, is_given, would_lose
from fp8doctor.analysis.memory import USABLE
from fp8doctor.analysis.memory_fit import fit
from fp8doctor.analysis.outcome import fp8_never_ran, never_ran_in_script, outside_autocast, watched_job
from fp8doctor.analysis.recipe_support import (
    READS_BACKEND_SINCE,
    at_least,
    capability,
    has_fp8,
    has_op_configs,
    installed,
    transformer_engine_line,
)
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.timed_step import ran_on_a_gpu
from fp8doctor.analysis.training_bugs import bugs_of
from fp8doctor.analysis.treatment_table import OPTIMIZER_LAST, STAY_IN_BF16, TE_AUTOCAST
from fp8doctor.cost import (
    amdahl,
    casts_ms,
    large_gemm_speedup,
    linear_cost,
    modelled_gpu,
    rows_of,
    rows_seen,
)
from fp8doctor.diagnosis.leaving_fp8 import stay_in_bf16
from fp8doctor.diagnosis.treatments import (
    CONV1D,
    NOT_THE_HEAD,
    ORDINARY_WEIGHTS,
    TAKES,
    convert_again,
    convert_all_but,
    convert_model,
    converting,
    describe,
    keep_in_bf16,
    mxfp8_without_biases,
    switched_on,
)
from fp8doctor.facts import (
    NOT_RECORDED,
    Accelerate,
    Arm,
    ArmName,
    Checkpointing,
    CompileMark,
    Conversion,
    Distributed,
    Dynamo,
    Facts,
    Gpu,
    Linear,
    SavedWeight,
    TrainerArguments,
    Training,
    Unrecorded,
    Use,
    Value,
    if_recorded,
    recorded,
)
from fp8doctor.facts.examples import example, float8, profiled, variant
from fp8doctor.finding import Breaks, Finding, NotApplicable, Saving, Severity, Treatment
from fp8doctor.known_errors import CUTEDSL, recognise
from fp8doctor.recipes import FIRST_WITH_FP8, recipe_of, stack_of
from fp8doctor.registry import check
from fp8doctor.wording import percent, plural
