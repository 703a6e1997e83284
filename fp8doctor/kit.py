"""All that a check imports of fp8doctor: ``from fp8doctor import kit``.

Records, cases and what most checks use are names of the kit: `kit.Finding`, `kit.plural`. The rest stands
behind the module that concludes it: `kit.memory.fit(facts)`. checks/README.md lists the modules by question.
"""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

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
    Breakdown,
    Checkpointing,
    CompileMark,
    Environment,
    Facts,
    Gpu,
    Linear,
    Network,
    Observation,
    Package,
    Software,
    Target,
    Training,
    Trial,
    Unrecorded,
    Workload,
    arm_names,
    if_recorded,
    no_number,
    recorded,
)
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

PARTS = {
    "network": Network,
    "training": Training,
    "trial": Trial,
    "workload": Workload,
    "environment": Environment,
    "software": Software,
    "observed": Observation,
    "target": Target,
}
"""Field of the facts -> its record. A name that several records have is the first one's."""

FLOAT8 = Linear(
    name="blocks.0.up",
    kind="torchao.float8.float8_linear.Float8Linear",
    stack="torchao",
    use="training",
    recipe="tensorwise",
    features={},
    in_features=1024,
    out_features=4096,
    gemms=1,
    dtype="bfloat16",
    weight_class=None,
    requires_grad=True,
    role="body",
    adapter=None,
    adapts=None,
    compiled=None,
    checkpointed=None,
    parameters=1024 * 4096,
    flops_share_pct=100.0,
)


def example(**fields: Any) -> Facts:
    """Build facts from any record's fields: ``example(linears=(), packages={"torchao": "0.18"})``."""
    owner = {field: part for part in reversed(PARTS) for field in PARTS[part].__struct_fields__}
    owner |= dict.fromkeys(Facts.__struct_fields__, "")
    if "packages" in fields:
        packages = fields["packages"].items()
        fields["packages"] = {name: Package(version=version, imported=True) for name, version in packages}
    given: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        given.setdefault(owner[name], {})[name] = value
    whole = given.pop("", {})
    return Facts(**whole, **{part: PARTS[part](**values) for part, values in given.items()})


def float8(name: str = FLOAT8.name, **changes: Any) -> Linear:
    """Build a compilable Float8Linear of torchao, with these changes."""
    return replace(FLOAT8, name=name, **changes)


def variant(name: str, step_ms: float, **fields: Any) -> Arm:
    """Build a variant that took this time in each of six rounds."""
    return Arm(name=name, tried=True, step_ms=step_ms, rounds_ms=(step_ms,) * 6, **fields)


def profiled(name: str, families_ms: Mapping[str, float], idle_ms: float = 0.0, **parts: Any) -> Arm:
    """Build a variant of these kernels, in ms; ``parts`` are fields of its breakdown."""
    busy = sum(families_ms.values())
    breakdown = Breakdown(
        families_ms=dict(families_ms), idle_ms=idle_ms, busy_ms=busy, reliable=True, kernels=2000, **parts
    )
    return variant(name, busy + idle_ms, breakdown=breakdown, treatments=())
