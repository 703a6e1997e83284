"""What checks import, as ``from fp8doctor import kit``: facts, layers, times, lines, the words of a finding.

Names that one check uses are imported from their module.
"""

from __future__ import annotations

from typing import Any

from packaging.version import Version

from fp8doctor import recipes
from fp8doctor.analysis import arms, compile_coverage, layer_gain
from fp8doctor.analysis.arms import arm, arm_if_any, base_of, ratio, uses_fp8
from fp8doctor.analysis.compile_coverage import compile_treatment, is_below, needs_compile
from fp8doctor.analysis.expected_fp8_gemms import all_fp8, counted_gemms, due_gemms, kept_in_bf16
from fp8doctor.analysis.fp8_request import (
    ALL_GATHER,
    asked_by_environment,
    converted_nothing,
    exported,
    fp8_was_asked_for,
    may_have_converted,
    precision_of,
    settings,
    under_unsloth,
    was_prepared,
)
from fp8doctor.analysis.layer_gain import APART, MANY_TOKENS, gains, is_given, would_lose
from fp8doctor.analysis.layers import (
    FP8_MULTIPLE,
    NO_LINEAR,
    computes_forward_in_fp8,
    fits_fp8,
    flops_share_pct,
    in_python,
    in_words,
    layer_label,
    makes_logits,
    may_be_taken,
    named,
    shares_are_known,
    stores_fp8,
    too_small,
    would_be_converted,
    wrapped_in_python,
)
from fp8doctor.analysis.modelled_speedup import HostBound, modelled_host_bound
from fp8doctor.analysis.noise import script_interval
from fp8doctor.analysis.own_step import finite_steps, ran_on_a_gpu
from fp8doctor.analysis.recipe_support import READS_BACKEND_SINCE, at_least, installed, unaligned
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.step_difference import SHOWN_MS, profiled_on_gpu, waits_for_the_host
from fp8doctor.analysis.training_bugs import region_of
from fp8doctor.analysis.trial_view import TrialView, is_faster
from fp8doctor.analysis.watched import counts, host_is_ahead
from fp8doctor.areas import Severity
from fp8doctor.cost import eager_balance, micro_batches, modelled_gpu, rows_seen
from fp8doctor.diagnosis.leaving_fp8 import stay_in_bf16
from fp8doctor.diagnosis.treatments import (
    CONV1D,
    ORDINARY_WEIGHTS,
    checkpointing_off,
    convert_again,
    convert_all_but,
    convert_model,
    describe,
    keep_in_bf16,
    larger_batch,
    more_tokens,
    mxfp8_without_biases,
    switched_on,
    with_recipe,
)
from fp8doctor.facts import (
    NOT_RECORDED,
    Accelerate,
    Arm,
    ArmCut,
    ArmName,
    Blocks,
    Breakdown,
    Checkpointing,
    CompileMark,
    Conversion,
    Distributed,
    Dynamo,
    Facts,
    Gpu,
    KernelGroup,
    Linear,
    Package,
    SavedWeight,
    Scaling,
    TrainerArguments,
    Trial,
    Unrecorded,
    Use,
    if_recorded,
    recorded,
)
from fp8doctor.facts.arm_names import BF16_BASELINES, Reason
from fp8doctor.facts.examples import example, float8, profiled, variant
from fp8doctor.facts.no_number import why_of
from fp8doctor.facts.training import UNNAMED
from fp8doctor.finding import Breaks, Finding, NotApplicable, Saving, Treatment
from fp8doctor.known_errors import recognise
from fp8doctor.recipes import recipe_of, stack_of
from fp8doctor.registry import check
from fp8doctor.wording import percent, plural, times

NO_FP8_STEP: dict[str, Any] = {"changes_fp8": True, "invalidates_model": True}
"""Properties of a rule whose job runs another step than the FP8 step that the cost model estimates."""

BROKEN_IN_BF16_TOO = NO_FP8_STEP | {"stays_in_bf16": True}
"""The same of a rule whose issue BF16 has too."""

WRONG_FP8_STEP = NO_FP8_STEP | {"needs_fp8": True}
"""The same of a rule about layers that are set up for FP8 training."""
