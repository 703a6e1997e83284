"""What a check imports: facts, layers, times, lines to paste, and the words of a finding.

A check needs this module and the standard library. What only one check uses stands in its own file.
"""

from __future__ import annotations

from fp8doctor.analysis.arms import arm, arm_if_any, uses_fp8
from fp8doctor.analysis.compile_coverage import compile_treatment, is_below, is_inside, needs_compile
from fp8doctor.analysis.fp8_request import asked_by_environment, fp8_was_asked_for
from fp8doctor.analysis.layers import fits_fp8, flops_share_pct, in_python, named
from fp8doctor.analysis.recipe_support import capability, has_fp8, installed
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.timed_step import ran_on_a_gpu
from fp8doctor.cost import modelled_gpu, rows_seen
from fp8doctor.diagnosis.leaving_fp8 import stay_in_bf16
from fp8doctor.diagnosis.treatments import convert_again, describe, keep_in_bf16
from fp8doctor.facts import NOT_RECORDED, Arm, ArmName, Facts, Linear, Unrecorded, if_recorded, recorded
from fp8doctor.facts.examples import example, float8, profiled, variant
from fp8doctor.finding import Finding, NotApplicable, Saving, Severity, Treatment
from fp8doctor.recipes import recipe_of, stack_of
from fp8doctor.registry import check
from fp8doctor.wording import percent, plural
