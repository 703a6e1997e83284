"""All that a check imports of fp8doctor: ``from fp8doctor import kit``.

Records, cases and what most checks use are names of the kit: `kit.Finding`, `kit.plural`. The rest stands
behind the module that concludes it: `kit.memory.fit(facts)`. checks/README.md lists the modules by question.
"""

from typing import Any

from fp8doctor import cost, facts, known_errors, recipes
from fp8doctor.analysis import (
    arms,
    compile_coverage,
    conversion,
    fp8_request,
    layer_gain,
    layers,
    memory,
    modelled_fix,
    noise,
    own_step,
    padding,
    recipe_support,
    step_difference,
    training_bugs,
    treatment_table,
    trial_view,
    watched,
)
from fp8doctor.analysis.compile_coverage import needs_compile
from fp8doctor.analysis.conversion import keep_in_bf16
from fp8doctor.analysis.fp8_request import exported, fp8_was_asked_for
from fp8doctor.analysis.layers import flops_share_pct, in_python, named, stores_fp8
from fp8doctor.analysis.recipe_support import installed
from fp8doctor.analysis.significance import EVEN
from fp8doctor.areas import Severity
from fp8doctor.diagnosis import treatments
from fp8doctor.diagnosis.treatments import describe, stay_in_bf16
from fp8doctor.facts import (
    NOT_RECORDED,
    Arm,
    ArmName,
    Blocks,
    Checkpointing,
    CompileMark,
    Facts,
    Gpu,
    Linear,
    Unrecorded,
    arm_names,
    if_recorded,
    no_number,
    recorded,
)
from fp8doctor.facts.examples import example, float8, profiled, variant
from fp8doctor.finding import Breaks, Finding, NotApplicable, Saving, Treatment
from fp8doctor.recipes import stack_of
from fp8doctor.registry import check
from fp8doctor.wording import percent, plural, times

NO_FP8_STEP: dict[str, Any] = {"changes_fp8": True, "invalidates_model": True}
"""Properties of a rule whose job runs another step than the FP8 step that the cost model estimates."""

BROKEN_IN_BF16_TOO = NO_FP8_STEP | {"stays_in_bf16": True}
"""The same of a rule whose issue BF16 has too."""

WRONG_FP8_STEP = NO_FP8_STEP | {"needs_fp8": True}
"""The same of a rule about layers that are set up for FP8 training."""
